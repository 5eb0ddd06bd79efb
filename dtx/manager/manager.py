"""The TransactionManager: one per resource manager, for all connections, vhosts and protocols.

Theory of operation. The core says what must happen (:func:`dtx.xa.branch.step`), this class makes it happen: effects
run in the order in which they come, each is awaited, and when one fails nothing after it runs. On one branch one
operation runs at a time; a second one waits, and finds what the first one left. An operation belongs to the manager
and not to the connection that asked for it: a client that dies while its commit is under way does not stop the commit.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dtx import failpoint
from dtx.failpoint import Point
from dtx.log.api import LogError, TransactionLog
from dtx.log.records import Redirect, Unit, UnitState
from dtx.manager.broker import BrokerEffects
from dtx.manager.cache import WorkCache
from dtx.manager.durable import DTX, BrokerDurable, Durable, log_failed
from dtx.manager.effects import Effects, Reply, release
from dtx.manager.entry import Decision, Entry
from dtx.manager.local import LocalDurable
from dtx.manager.quick import Quick
from dtx.store.api import BrokerStore, LocalStore
from dtx.store.work import Budget, HeldWork
from dtx.telemetry import Metrics, get_logger
from dtx.xa.branch import Branch, is_legal, step
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import (
    Answer,
    ChannelId,
    ChannelLost,
    Demarcation,
    Event,
    Happened,
    Operation,
    Release,
    Request,
    SetTimeout,
    State,
)
from dtx.xa.table import IN_DOUBT, LOGGED
from dtx.xa.xid import Xid

_log = get_logger(part="manager")

_TICK: Final = 0.25
"""Seconds between two looks at the timeouts; they are whole seconds, so this is precise enough."""
_REVIVE: Final = 5.0
"""Seconds after which a decided branch that nobody works on is taken up again."""


_TAKING: Final = (State.TAKING, State.TAKING_ONE_PHASE)
UNFINISHED: Final = {
    State.TAKING: Operation.PREPARE,
    State.TAKING_ONE_PHASE: Operation.ONE_PHASE,
    State.COMMITTING: Operation.COMMIT,
    State.ROLLING_BACK: Operation.ROLLBACK,
    State.HEURISTIC_COMMITTING: Operation.HEURISTIC_COMMIT,
    State.HEURISTIC_ROLLING_BACK: Operation.HEURISTIC_ROLLBACK,
}
"""States that go on by themselves, with the operation that takes them further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the manager allows.

    Args:
        default_timeout, max_timeout: seconds; a default of 0 is none.
        tombstone_ttl: seconds for which a branch that was rolled back by itself answers one rollback.
        branch_bytes, branch_messages: what one branch may hold.
        open_branches: branches that have not voted, of all clients.
        held_bytes: memory for their messages, and for deliveries of selected channels that are not settled.
        cache_bytes: memory for messages of prepared branches.
        patience: seconds after which a request whose phase two is still under way is answered 541.
        coordinators: users that may see and complete every branch.
    """

    default_timeout: int = 60
    max_timeout: int = 24 * 3600
    tombstone_ttl: float = 600.0
    branch_bytes: int = 64 << 20
    branch_messages: int = 10_000
    open_branches: int = 100_000
    held_bytes: int = 1 << 30
    cache_bytes: int = 64 << 20
    patience: float = 30.0
    coordinators: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Who:
    """Who asks, and in which vhost (a vhost is one resource manager).

    Args:
        user: name.
        vhost: name.
        operator: whether that is an operator, who may decide about every branch; roles are judged before.
    """

    user: str
    vhost: str
    operator: bool = False


class TransactionManager:
    """Drives every branch.

    Args:
        log: the transaction log, open.
        store: the message store, open.
        limits: what is allowed.
        metrics: numbers.
    """

    def __init__(self, log: TransactionLog, store: BrokerStore | LocalStore, limits: Limits, metrics: Metrics) -> None:
        self.log = log
        self.limits = limits
        self.metrics = metrics
        self.draining = False
        self.budget = Budget(limits.held_bytes)
        self._local = store if isinstance(store, LocalStore) else None
        self._broker: BrokerStore | None = None
        self._durable: Durable
        effects: BrokerEffects | None = None
        if isinstance(store, LocalStore):
            self._durable = LocalDurable(log, store)
        else:
            self._broker = store
            self._durable = durable = BrokerDurable(log, store)
            effects = BrokerEffects(log, durable, store, metrics)
        self._quick = Quick(log, self._durable, self._through)
        self._cache = WorkCache(limits.cache_bytes)
        self._branches: dict[tuple[str, Xid], Entry] = {}
        self._open: dict[Entry, float] = {}
        """Branches that have not voted, with the time at which a rollback-only one is dropped (0: not yet)."""
        self._tombstones: dict[tuple[str, Xid], tuple[XaFlag, float, str]] = {}
        """Flag, end and owner of what was rolled back without its transaction manager."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._clock = time.monotonic
        self._effects = Effects(self._durable, effects, limits.patience, self._remember)
        self._quiet_until = 0.0

    # -- life cycle

    async def start(self) -> None:
        """Load the log; take up every branch that was decided or half-way when the predecessor ended.

        Returns as soon as all branches are known: what needs the broker goes on in the background, and requests for
        such a branch wait for it.

        Raises:
            LogError: the log cannot be read, or has branches of the other mode.
        """
        pending = []
        strangers = 0
        async for record in self.log.load():
            entry = Entry.restored(record)
            if entry.local is not (self._local is not None):
                strangers += 1
                continue
            self._branches[record.vhost, record.xid] = entry
            failpoint.at(Point.RESTART_ROW)
            if self._local is not None:
                self._local.restore(record)
            if entry.branch.state in UNFINISHED:
                entry.busy = True  # nobody else may touch it until its fate is known
                taking = entry.branch.state in _TAKING
                for unit in record.units:
                    if unit.state is UnitState.PENDING and taking == bool(unit.number):
                        self._expect(record.vhost, unit)
                pending.append(entry)
        if strangers:
            mode, remedy = ("a broker", "with") if self._local is not None else ("dtx's own store", "without")
            raise LogError(
                f"{strangers} branches in the log have their messages in {mode}: start dtx {remedy} --broker and "
                "finish them, or give this dtx a resource manager name of its own (--rm)"
            )
        failpoint.at(Point.RESTART_LOADED)
        for entry in pending:
            self.spawn(self._take_up(entry))
        _log.info("branches loaded", in_doubt=len(self._branches) - len(pending), unfinished=len(pending))
        self._ticker = asyncio.create_task(self._tick(), name="dtx-timeouts")

    def _expect(self, vhost: str, unit: Unit) -> None:
        assert self._broker is not None
        self._broker.expect(vhost, unit)

    async def drain(self, seconds: float) -> bool:
        """Refuse new branches and wait for the operations that are under way.

        Returns:
            Whether all of them finished within *seconds*.
        """
        self.draining = True
        waits = {*self._tasks}
        if self._quick.under_way.count:
            waits.add(asyncio.create_task(self._quick.under_way.none()))
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late - self._tasks:
                task.cancel()
        return not self._tasks and not self._quick.under_way.count

    async def close(self) -> None:
        """Stop the timers and whatever still runs."""
        tasks = [*self._tasks, *([self._ticker] if self._ticker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._quick.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run *work* on behalf of the manager: it outlives the connection that asked for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("operation failed", exc_info=error)

    def __len__(self) -> int:
        return len(self._branches)

    # -- demarcation

    def may_control(self, entry: Entry, user: str) -> bool:
        """Whether *user* started the branch or is a coordinator."""
        return self._may(entry.branch.owner, user)

    def _may(self, owner: str, user: str) -> bool:
        return owner == user or user in self.limits.coordinators

    def demarcate(self, who: Who, xid: Xid, operation: Operation, channel: ChannelId) -> tuple[XaFlag, Entry] | None:
        """Start and end, in all their forms. They change memory alone, so nothing is waited for.

        Returns:
            The answer and the branch; ``None`` while another operation runs on it (wait with :meth:`settle`).

        Raises:
            XaError: as the table says; 403 for another user's branch; 506 for a new one during shutdown; 541 when
                this dtx is not known to be the active one.
        """
        entry = self._branches.get((who.vhost, xid))
        if entry is None:
            if operation is not Operation.START:
                if not self.log.lease_valid:  # what the log had was read at the start: it holds as long as the lease
                    raise XaError(ReplyCode.INTERNAL_ERROR, f"{operation}: this dtx is not the active one (xid {xid})")
                raise XaError(ReplyCode.NOT_FOUND, f"unknown xid {xid}")
            entry = self._begin(who, xid)
        elif operation is not Operation.START:  # a second start is refused as 530, whoever asks
            self._authorise(entry, who)
            if entry.busy or entry.doubt:
                return None
        elif entry.over and (entry.busy or entry.doubt):
            return None  # it is known no more, as soon as the log knows
        now = self._clock()
        branch, effects = step(entry.branch, Demarcation(operation=operation, channel=channel), now)
        self._branches[who.vhost, xid] = entry
        self._open.setdefault(entry, 0.0)
        entry.branch = branch
        flag = XaFlag.OK
        for effect in effects:
            if isinstance(effect, Release):
                release(entry)
            elif isinstance(effect, Answer):
                flag = effect.flag
        return flag, entry

    def _begin(self, who: Who, xid: Xid) -> Entry:
        if self.draining:
            raise XaError(ReplyCode.RESOURCE_ERROR, "dtx is shutting down and takes no new branches")
        if not self.log.lease_valid:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"start failed: this dtx is not the active one (xid {xid})")
        limits = self.limits
        branch = Branch(xid=xid, owner=who.user, timeout=limits.default_timeout)
        self._tombstones.pop((who.vhost, xid), None)  # a further rollback would be the new branch's
        if len(self._open) >= limits.open_branches:
            raise XaError(
                ReplyCode.RESOURCE_ERROR, f"{len(self._open)} branches are open, as many as dtx allows (xid {xid})"
            )
        work = HeldWork(limits.branch_bytes, limits.branch_messages, self.budget)
        entry = Entry(branch, who.vhost, now=time.time(), work=work)
        entry.local = self._local is not None
        return entry

    async def settle(self, who: Who, xid: Xid) -> None:
        """Wait until no operation runs on *xid* and nothing about it is in doubt.

        Raises:
            XaError: 541, that takes too long.
        """
        entry = self._branches.get((who.vhost, xid))
        if entry is None:
            return
        if entry.busy:
            await self._wait(entry)
        elif entry.doubt:
            await self._reread(entry)

    def channel_lost(self, channel: ChannelId, entries: Sequence[Entry]) -> None:
        """A channel died that was associated or suspended with *entries*."""
        for entry in entries:
            self._befall(entry, ChannelLost(channel=channel))

    def doom(self, entry: Entry, reason: str) -> None:
        """Part of the work is lost, or must not happen: the branch can only be rolled back. No effect after a vote."""
        self._befall(entry, Happened(operation=Operation.DOOM, reason=reason))

    def _befall(self, entry: Entry, event: Event) -> None:
        if entry.busy or entry.doubt:
            entry.befallen.append(event)
            return
        operation = Operation.CHANNEL_LOST if isinstance(event, ChannelLost) else Operation.DOOM
        if not is_legal(entry.branch, operation):
            return
        before = entry.branch.state
        entry.branch, effects = step(entry.branch, event, self._clock())
        if any(isinstance(effect, Release) for effect in effects):
            release(entry)
        if entry.branch.state is not before:
            reason = event.reason if isinstance(event, Happened) else "its channel is gone"
            _log.info("branch is rollback-only", xid=entry.xid, vhost=entry.vhost, reason=reason)

    # -- coordination

    async def request(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> None:
        """prepare, commit, rollback and forget.

        Args:
            who: who asks.
            xid: of which branch.
            operation: PREPARE, COMMIT, ONE_PHASE, ROLLBACK or FORGET.
            reply: gets the answer, which may come before this returns.

        Raises:
            XaError: as the table says.
        """
        entry = await self._find(who, xid, operation, reply)
        if entry is not None:
            # From here to busy nothing is awaited: the branch is as _find saw it.
            if entry.record is None:
                entry.one_phase = operation is Operation.ONE_PHASE
            entry.busy = True
            if entry.branch.state in _TAKING:
                await self._look_into(entry, reply)
            await self._run(entry, Request(operation=operation, vote=entry.vote), reply, who.user)

    def request_at_once(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> bool:
        """As :meth:`request`, for what needs no task: see :class:`~dtx.manager.quick.Quick`.

        Returns:
            Whether it is under way; otherwise nothing has happened.
        """
        entry = self._branches.get((who.vhost, xid))
        if entry is None or entry.busy or entry.doubt or not self.may_control(entry, who.user):
            return False
        if entry.record is None:
            entry.one_phase = operation is Operation.ONE_PHASE
        return self._quick.begin(entry, operation, reply, who.user)

    # -- operators

    async def find(self, who: Who, xid: Xid) -> Entry:
        """The branch, with nothing running on it and nothing about it in doubt.

        Raises:
            XaError: 404 for an unknown xid; 541 when it cannot be found out, or something runs for too long.
        """
        entry = await self._find(who, xid, Operation.GET_TIMEOUT, _nobody)
        assert entry is not None, "nobody but a completion is answered before it is found"
        return entry

    async def operate(self, entry: Entry, event: Event, reply: Reply, actor: str, decision: Decision | None) -> None:
        """Run what an operator has decided.

        Args:
            entry: as :meth:`find` found it; nothing has been awaited since.
            event: the decision.
            reply: gets the answer.
            actor: who decides.
            decision: what is written with it.
        """
        entry.decision = decision
        try:
            await self._run(entry, event, reply, actor)
        finally:
            entry.decision = None

    async def redirect(self, entry: Entry, to: Redirect, reason: str, actor: str) -> None:
        """Send a message that phase two is stuck with elsewhere; *entry* as for :meth:`operate`.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        assert isinstance(self._durable, BrokerDurable), "local work is never stuck"
        entry.busy = True
        try:
            await self._durable.redirect(entry, to, reason, time.time(), actor)
        finally:
            self._through(entry)

    def entries(self) -> Iterable[Entry]:
        """Every branch that is known."""
        return self._branches.values()

    def _through(self, entry: Entry) -> None:
        self._done(entry)
        self._happen(entry)

    async def _look_into(self, entry: Entry, reply: Reply) -> None:
        try:
            if entry.cached is None:  # what was not taken is not to be put back, so its positions are needed
                entry.cached = await self._effects.broker.read_work(entry)
            await self._effects.know_what_was_taken(entry, reply)
        except BaseException:
            self._done(entry)
            raise

    async def get_timeout(self, who: Who, xid: Xid) -> int:
        """The timeout of a branch, seconds.

        Raises:
            XaError: 404 for an unknown xid.
        """
        entry = await self._find(who, xid, Operation.GET_TIMEOUT, _nobody)
        assert entry is not None
        return entry.branch.timeout

    async def set_timeout(self, who: Who, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch, seconds from now; 0 is the default again, the ceiling is ``max_timeout``.

        Raises:
            XaError: 404 for an unknown xid.
        """
        entry = await self._find(who, xid, Operation.SET_TIMEOUT, _nobody)
        assert entry is not None
        wanted = min(seconds, self.limits.max_timeout) or self.limits.default_timeout
        entry.branch, _ = step(entry.branch, SetTimeout(seconds=wanted), self._clock())

    async def in_doubt(self, who: Who) -> list[Xid]:
        """What a recovery scan lists: the branches of the vhost, in doubt or heuristic, that *who* may control.

        Raises:
            XaError: 541 when the list could be wrong.
        """
        mine = [entry for entry in self._branches.values() if entry.vhost == who.vhost and not entry.over]
        for entry in mine:
            if entry.doubt and entry.busy:
                await self._wait(entry)
            if entry.doubt and not entry.busy:
                await self._reread(entry)
        if not self.log.lease_valid:
            raise XaError(ReplyCode.INTERNAL_ERROR, "recover failed: this dtx is not the active one")
        return [entry.xid for entry in mine if entry.branch.state in IN_DOUBT and self.may_control(entry, who.user)]

    def _authorise(self, entry: Entry, who: Who) -> None:
        if not who.operator and not self.may_control(entry, who.user):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"the branch is another user's, only a coordinator may touch it (xid {entry.xid})",
            )

    async def _find(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> Entry | None:
        """The branch, with nothing running on it; ``None`` when *reply* was called already."""
        key = (who.vhost, xid)
        while (entry := self._branches.get(key)) is not None:
            self._authorise(entry, who)
            if entry.busy:
                over = entry.over
                await self._wait(entry)
                flag = entry.ended.get(operation) if entry.ended is not None and not over else None
                if flag is not None:  # "a repeated commit waits for the first"
                    reply(flag)
                    return None
            elif entry.doubt:
                if not await self._reread(entry):
                    flag = entry.ended.get(operation) if entry.ended is not None else None
                    if flag is not None:
                        reply(flag)
                        return None
            else:
                return entry
        tombstone = self._tombstones.get(key)
        if tombstone is not None and operation is Operation.ROLLBACK and self._may(tombstone[2], who.user):
            del self._tombstones[key]
            reply(tombstone[0])
            return None
        try:
            found = await self.log.lookup(who.vhost, xid)
        except LogError as error:
            raise log_failed(error, operation, xid) from error
        if key in self._branches:
            return await self._find(who, xid, operation, reply)
        if found.branch is not None:
            _log.warning("branch found in the log only", xid=xid, vhost=who.vhost)
            self._branches[key] = Entry.restored(found.branch)
            return await self._find(who, xid, operation, reply)
        reason = f"unknown xid {xid}"
        if found.ending is not None and (who.operator or self._may(found.ending.owner, who.user)):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.ending.at))
            # What a reply text has no room for is cut off its end, and an xid may be longer than all of it.
            reason = f"unknown xid, completed: {found.ending.event} at {at} (xid {xid})"
        raise XaError(ReplyCode.NOT_FOUND, reason)

    async def _wait(self, entry: Entry) -> None:
        try:
            async with asyncio.timeout(self.limits.patience):
                await entry.idle()
        except TimeoutError:
            raise XaError(
                ReplyCode.INTERNAL_ERROR, f"another operation is still under way, try again (xid {entry.xid})"
            ) from None

    async def _reread(self, entry: Entry) -> bool:
        entry.busy = True
        try:
            there = await self._durable.reread(entry)
        finally:
            self._done(entry)
        if there:
            self._happen(entry)
        return there

    # -- effects

    async def _run(self, entry: Entry, event: Event, reply: Reply, actor: str) -> None:
        """Step the branch and run the effects, until nothing is left to do."""
        entry.busy = True
        try:
            await self._effects.run(entry, event, reply, actor)
        except XaError as error:
            reply(error)
        finally:
            self._done(entry)
        self._happen(entry)

    def _done(self, entry: Entry) -> None:
        """The running operation is through: file the branch under what it has become."""
        key = (entry.vhost, entry.xid)
        state = entry.branch.state
        gone = entry.ended is not None or (state is State.UNKNOWN and not entry.doubt)
        if gone:
            if self._branches.get(key) is entry:
                del self._branches[key]
            self._open.pop(entry, None)
            self._cache.drop(entry)
            self._let_work_go(entry)
        elif state in LOGGED and not entry.doubt:
            self._open.pop(entry, None)
            if state not in _TAKING:
                self._let_work_go(entry)
                self._cache.keep(entry)
        entry.done()

    def _remember(self, entry: Entry, flag: XaFlag) -> None:
        until = self._clock() + self.limits.tombstone_ttl
        self._tombstones[entry.vhost, entry.xid] = (flag, until, entry.branch.owner)

    def _let_work_go(self, entry: Entry) -> None:
        if entry.work is not None:
            entry.work.let_go()
            entry.work = None

    def _happen(self, entry: Entry) -> None:
        """What befell the branch while it was busy."""
        events, entry.befallen = entry.befallen, []
        if self._branches.get((entry.vhost, entry.xid)) is entry:
            for event in events:
                self._befall(entry, event)

    # -- time and restart

    async def _tick(self) -> None:
        revive_at = self._clock() + _REVIVE
        while True:
            await asyncio.sleep(_TICK)
            now = self._clock()
            for entry in list(self._open):
                if not entry.busy and not entry.doubt:
                    self._age(entry, now)
            if now >= revive_at:
                revive_at = now + _REVIVE
                self._revive()
                for key in [key for key, (_, until, _) in self._tombstones.items() if until <= now]:
                    del self._tombstones[key]

    def _age(self, entry: Entry, now: float) -> None:
        branch = entry.branch
        if branch.state in (State.ROLLBACK_ONLY, State.TIMED_OUT):
            since = self._open[entry]
            if not since:
                self._open[entry] = now
            elif now - since > self.limits.tombstone_ttl and not branch.associations:
                self._begin_alone(entry, Operation.EXPIRE)
        elif branch.deadline is not None and max(branch.deadline, self._quiet_until) <= now:
            _log.info("branch timed out", xid=entry.xid, vhost=entry.vhost, timeout=branch.timeout)
            self._begin_alone(entry, Operation.TIMEOUT)

    def _begin_alone(self, entry: Entry, operation: Operation) -> None:
        log_error = _log_error(entry)

        def reply(answer: XaFlag | XaError) -> None:
            self._quiet_until = self._clock() + _REVIVE  # a log that is away is not asked for each branch in each tick
            log_error(answer)

        entry.busy = True  # now, not when the task gets its turn
        self.spawn(self._run(entry, Happened(operation=operation, vote=entry.vote), reply, DTX))

    def _revive(self) -> None:
        """A decided branch whose operation ended in a failed log write is finished without being asked."""
        for entry in list(self._branches.values()):
            if entry.busy:
                continue
            if entry.doubt:
                self.spawn(self._recheck(entry))
            elif entry.branch.state in UNFINISHED and not (entry.record and entry.record.stuck):
                entry.busy = True
                self.spawn(self._take_up(entry))

    async def _recheck(self, entry: Entry) -> None:
        try:
            if not entry.busy and entry.doubt:
                await self._reread(entry)
        except XaError as error:
            _log.warning("branch is still in doubt", xid=entry.xid, vhost=entry.vhost, reason=error.reason)

    async def _take_up(self, entry: Entry) -> None:
        """Go on where the predecessor ended (the entry is busy already)."""
        failpoint.at(Point.RESTART_DECIDE_BEFORE)
        try:
            if entry.branch.state in _TAKING and entry.cached is None:
                entry.cached = await self._effects.broker.read_work(entry)
            operation = UNFINISHED[entry.branch.state]
            await self._effects.run(entry, Request(operation=operation, vote=entry.vote), _log_error(entry), DTX)
        except XaError as error:
            _log.warning("branch could not be taken up", xid=entry.xid, vhost=entry.vhost, reason=error.reason)
        else:
            failpoint.at(Point.RESTART_DECIDE_AFTER)
        finally:
            self._done(entry)
        self._happen(entry)


def _nobody(answer: XaFlag | XaError) -> None:
    """The reply of an operation that nobody asked for."""


def _log_error(entry: Entry) -> Reply:
    def reply(answer: XaFlag | XaError) -> None:
        if isinstance(answer, XaError):
            _log.warning("branch could not be finished", xid=entry.xid, vhost=entry.vhost, reason=answer.reason)

    return reply

"""The TransactionManager: one per resource manager, for all connections, vhosts and protocols.

Theory of operation. The core says what must happen (:func:`dtx.xa.branch.step`), this class makes it happen: effects
run in the order in which they come, each is awaited, and when one fails nothing after it runs. On one branch one
operation runs at a time; a second one waits, and finds what the first one left. An operation belongs to the manager
and not to the connection that asked for it: a client that dies while its commit is under way does not stop the commit.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final

from dtx.config.rules import QuotaResource
from dtx.log.api import TransactionLog
from dtx.log.records import Redirect
from dtx.manager.branch_persistence import BranchPersistence, BrokerPersistence
from dtx.manager.branch_runtime import TAKING, BranchDecision, BranchRuntime
from dtx.manager.branches import Branches, Who
from dtx.manager.broker import BrokerEffects
from dtx.manager.effects import Effects, Reply, release
from dtx.manager.limits import DiskAlarm, Limits, Quotas
from dtx.manager.local_persistence import LocalPersistence
from dtx.manager.maintenance import Maintenance
from dtx.store.api import BrokerStore, LocalStore
from dtx.store.slices import Slices, in_turns
from dtx.store.work import Budget, HeldWork
from dtx.telemetry import Metrics, get_logger
from dtx.xa.branch import Branch, step
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
    Vote,
)
from dtx.xa.table import IN_DOUBT
from dtx.xa.xid import Xid

_log = get_logger(part="manager")

_BRANCHES: Final = QuotaResource.BRANCHES
_IN_DOUBT: Final = QuotaResource.IN_DOUBT
_PREPARE: Final = Operation.PREPARE
_START: Final = Operation.START
_OK: Final = XaFlag.OK
_TOLD_AT_ONCE: Final = 25
"""Branches that hear of the end of their channel within a millisecond."""


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
        self.quotas = Quotas(limits.quotas, self.budget)
        self.disk = DiskAlarm(limits.disk, limits.disk_free, lambda: log.disk_full)
        self._durable: BranchPersistence
        broker: BrokerEffects | None = None
        if isinstance(store, LocalStore):
            self._durable = LocalPersistence(log, store)
        else:
            self._durable = durable = BrokerPersistence(log, store)
            broker = BrokerEffects(log, durable, store, metrics)
        self._branches = Branches(log, self._durable, limits, self.quotas)
        self._effects = Effects(
            log,
            self._durable,
            broker,
            limits.patience,
            remember=self._branches.leave_tombstone,
            answered=self._branches.answered,
            done=self._branches.through,
        )
        self._upkeep = Maintenance(
            log, self._durable, self._branches, self._effects, limits, metrics, self._run, self.spawn
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: list[asyncio.Task[None]] = []
        self._clock = time.monotonic

    # -- life cycle

    async def start(self) -> None:
        """Load the log, take up what the predecessor left half-way, and start to look after all branches.

        Raises:
            LogError: the log cannot be read, or has branches of the other mode.
        """
        await self._upkeep.load()
        self._watches = [
            asyncio.create_task(self._upkeep.watch(), name="dtx-timeouts"),
            asyncio.create_task(self.disk.watch(), name="dtx-disk"),
        ]

    @property
    def is_empty(self) -> bool:
        """Whether there is no branch, in the log or before its vote."""
        return not len(self._branches)

    async def drain(self, seconds: float) -> bool:
        """Refuse new branches and wait for the operations that are under way.

        Returns:
            Whether all of them finished within *seconds*.
        """
        self.draining = True
        waits = {*self._tasks}
        if self._effects.under_way.count:
            waits.add(asyncio.create_task(self._effects.under_way.none()))
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late - self._tasks:
                task.cancel()
        return not self._tasks and not self._effects.under_way.count

    async def close(self) -> None:
        """Stop the timers and whatever still runs."""
        tasks = [*self._tasks, *self._watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._effects.close()

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

    def may_control(self, entry: BranchRuntime, user: str) -> bool:
        """Whether *user* started the branch or is a coordinator."""
        return self._branches.may(entry.branch.owner, user)

    def demarcate(
        self, who: Who, xid: Xid, operation: Operation, channel: ChannelId
    ) -> tuple[XaFlag, BranchRuntime] | None:
        """Start and end, in all their forms. They change memory alone, so nothing is waited for.

        Returns:
            The answer and the branch; ``None`` while another operation runs on it (wait with :meth:`settle`).

        Raises:
            XaError: as the table says; 403 for another user's branch; 506 for a new one during shutdown; 541 when
                this dtx is not known to be the active one.
        """
        known = entry = self._branches.get(who.vhost, xid)
        if entry is None:
            if operation is not _START:
                if not self.log.lease_valid:  # what the log had was read at the start: it holds as long as the lease
                    raise XaError(ReplyCode.INTERNAL_ERROR, f"{operation}: this dtx is not the active one (xid {xid})")
                raise XaError(ReplyCode.NOT_FOUND, f"unknown xid {xid}")
            entry = self._begin(who, xid)
        elif operation is not _START:  # a second start is refused as 530, whoever asks
            self._branches.authorise(entry, who)
            if not entry.idle:
                return None
        elif entry.answered and not entry.idle:
            return None  # it is known no more, as soon as the log knows
        branch, effects = step(entry.branch, Demarcation(operation=operation, channel=channel), self._clock())
        if known is None:
            self._branches.add(entry)
            self._branches.open[entry] = 0.0
        entry.branch = branch
        flag = _OK
        for effect in effects:
            if isinstance(effect, Answer):
                flag = effect.flag
            elif isinstance(effect, Release):
                release(entry)
        return flag, entry

    def _begin(self, who: Who, xid: Xid) -> BranchRuntime:
        if self.draining:
            raise XaError(ReplyCode.RESOURCE_ERROR, "dtx is shutting down and takes no new branches")
        if not self.log.lease_valid:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"start failed: this dtx is not the active one (xid {xid})")
        limits = self.limits
        branch = Branch(xid=xid, owner=who.user, timeout=limits.default_timeout)
        self._branches.reuse(who.vhost, xid)
        holdings = self.quotas.of(who.user, who.vhost)
        reason = holdings.excess(_BRANCHES, _IN_DOUBT)
        if (count := self._branches.count) >= limits.branches:
            reason = f"{count} branches are open or in doubt, as many as dtx allows"
        if self.disk.raised and not self._durable.local:  # where dtx has the messages, their publishers wait
            reason = "the disk of the log is nearly full"
        if reason is not None:
            raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason} (xid {xid})")
        work = HeldWork(limits.branch_bytes, limits.branch_messages, holdings.budget)
        entry = BranchRuntime(branch, who.vhost, now=time.time(), work=work)
        entry.holdings = holdings
        return entry

    async def settle(self, who: Who, xid: Xid) -> None:
        """Wait until no operation runs on *xid* and nothing about it is in doubt.

        Raises:
            XaError: 541, that takes too long.
        """
        entry = self._branches.get(who.vhost, xid)
        if entry is None:
            return
        if entry.busy:
            await self._branches.wait(entry)
        elif entry.uncertain:
            await self._branches.reread(entry)

    def channel_lost(self, channel: ChannelId, entries: Sequence[BranchRuntime]) -> None:
        """A channel died that was associated or suspended with *entries*.

        What is associated can neither be prepared nor be rolled back, so those may wait that have not heard of it yet.
        """
        Slices(_not_told).run(self._tell(entries, ChannelLost(channel=channel)))

    def _tell(self, entries: Sequence[BranchRuntime], event: ChannelLost) -> Iterator[None]:
        for number, entry in enumerate(entries, 1):
            self._branches.apply_event(entry, event)
            if not number % _TOLD_AT_ONCE:
                yield

    def doom(self, entry: BranchRuntime, reason: str) -> None:
        """Part of the work is lost, or must not happen: the branch can only be rolled back. No effect after a vote."""
        self._branches.apply_event(entry, Happened(operation=Operation.DOOM, reason=reason))

    # -- coordination

    def ask(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> None:
        """prepare, commit, rollback and forget. Where nothing runs on a branch they begin in the order of these calls.

        Args:
            who: who asks.
            xid: of which branch.
            operation: PREPARE, COMMIT, ONE_PHASE, ROLLBACK or FORGET.
            reply: gets the answer, or why there is none as the table says; never before this returns.
        """
        entry = self._branches.get(who.vhost, xid)
        if entry is None or not entry.idle or not (entry.branch.owner == who.user or self.may_control(entry, who.user)):
            self._answer(self._find_and_request(who, xid, operation, reply), xid, operation, reply)
            return
        if not self._begun(entry, operation, reply, who.user):
            self._answer(self._request(entry, operation, reply, who.user), xid, operation, reply)

    def _begun(self, entry: BranchRuntime, operation: Operation, reply: Reply, actor: str) -> bool:
        """Begin a request that needs no task; another one has the branch from now on, not when its task gets a turn."""
        if entry.record is None:
            entry.asked = operation
        vote = self._durable.vote(entry)
        if operation is _PREPARE and entry.branch.state is State.IDLE and vote is not Vote.NOTHING:
            reason = entry.holdings.excess(_IN_DOUBT)
            if reason is None:
                self._branches.prepare(entry)
            else:  # one too many for its user or virtual host: it can only be rolled back
                self.doom(entry, reason)
                vote = self.vote(entry)
        if self._effects.begin(entry, Request(operation=operation, vote=vote), reply, actor):
            return True
        entry.claim()
        return False

    def _answer(self, work: Coroutine[Any, Any, None], xid: Xid, operation: Operation, reply: Reply) -> None:
        async def answer() -> None:
            try:
                await work
            except XaError as error:
                reply(error)
            except Exception:  # noqa: BLE001 - logged; the client is told no more than that
                _log.exception("request failed", operation=operation, xid=xid)
                reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))

        self.spawn(answer())

    async def _find_and_request(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> None:
        entry = await self._branches.find(who, xid, operation, reply)
        if entry is not None and not self._begun(entry, operation, reply, who.user):
            await self._request(entry, operation, reply, who.user)

    async def _request(self, entry: BranchRuntime, operation: Operation, reply: Reply, actor: str) -> None:
        if entry.branch.state in TAKING:
            if operation is Operation.ROLLBACK:
                self._effects.broker.leave_untaken(entry)
            await self._look_into(entry, reply)
        await self._run(entry, Request(operation=operation, vote=self.vote(entry)), reply, actor)

    async def _look_into(self, entry: BranchRuntime, reply: Reply) -> None:
        try:
            if entry.cached is None:  # what was not taken is not to be put back, so its positions are needed
                entry.cached = await self._effects.broker.read_work(entry)
            await self._effects.know_what_was_taken(entry, reply)
        except BaseException:
            self._branches.through(entry)
            raise

    async def _run(self, entry: BranchRuntime, event: Event, reply: Reply, actor: str) -> None:
        """Step the branch, which is claimed, and run the effects until nothing is left to do."""
        try:
            await self._effects.run(entry, event, reply, actor)
        except XaError as error:
            reply(error)
        finally:
            self._branches.through(entry)

    async def get_timeout(self, who: Who, xid: Xid) -> int:
        """The timeout of a branch, seconds.

        Raises:
            XaError: 404 for an unknown xid.
        """
        entry = await self._quiet(who, xid, Operation.GET_TIMEOUT)
        return entry.branch.timeout

    async def set_timeout(self, who: Who, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch, seconds from now; 0 is the default again, the ceiling is ``max_timeout``.

        Raises:
            XaError: 404 for an unknown xid.
        """
        entry = await self._quiet(who, xid, Operation.SET_TIMEOUT)
        wanted = min(seconds, self.limits.max_timeout) or self.limits.default_timeout
        entry.branch, _ = step(entry.branch, SetTimeout(seconds=wanted), self._clock())

    async def _quiet(self, who: Who, xid: Xid, operation: Operation) -> BranchRuntime:
        entry = await self._branches.find(who, xid, operation, _nobody)
        assert entry is not None, "nobody but a completion is answered before it is found"
        return entry

    async def in_doubt(self, who: Who, behind: Xid | None = None) -> list[Xid]:
        """What a recovery scan lists: the branches of the vhost, in doubt or heuristic, that *who* may control.

        Args:
            who: asks.
            behind: where this one is listed, the list begins behind it.

        Raises:
            XaError: 541 when the list could be wrong.
        """
        mine = [entry async for entry in in_turns(self._branches) if entry.vhost == who.vhost]
        for entry in [entry async for entry in in_turns(mine) if entry.uncertain and not entry.answered]:
            if entry.uncertain and entry.busy:
                await self._branches.wait(entry)
            if entry.uncertain and not entry.busy:
                await self._branches.reread(entry)
        found: list[Xid] = []
        split = 0
        async for entry in in_turns(mine):
            if entry.branch.state in IN_DOUBT and not entry.answered and self.may_control(entry, who.user):
                found.append(entry.xid)
                if entry.xid == behind:
                    split = len(found)
        if not self.log.lease_valid:
            raise XaError(ReplyCode.INTERNAL_ERROR, "recover failed: this dtx is not the active one")
        return found[split:] + found[:split]

    # -- operators

    def vote(self, entry: BranchRuntime) -> Vote:
        """What the branch holds."""
        return self._durable.vote(entry)

    async def find(self, who: Who, xid: Xid) -> BranchRuntime:
        """The branch, with nothing running on it and nothing about it in doubt.

        Raises:
            XaError: 404 for an unknown xid; 541 when it cannot be found out, or something runs for too long.
        """
        return await self._quiet(who, xid, Operation.GET_TIMEOUT)

    async def operate(
        self, entry: BranchRuntime, event: Event, reply: Reply, actor: str, decision: BranchDecision | None
    ) -> None:
        """Run what an operator has decided.

        Args:
            entry: claimed.
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

    async def redirect(self, entry: BranchRuntime, to: Redirect, reason: str, actor: str) -> None:
        """Send a message that phase two is stuck with elsewhere; *entry* as for :meth:`operate`.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        assert isinstance(self._durable, BrokerPersistence), "local work is never stuck"
        try:
            await self._durable.redirect(entry, to, reason, time.time(), actor)
        finally:
            self._branches.through(entry)

    def known(self, vhost: str, xid: Xid) -> BranchRuntime | None:
        """The branch as it is known at this moment, whatever runs on it."""
        return self._branches.get(vhost, xid)

    def entries(self) -> Iterable[BranchRuntime]:
        """Every branch that is known."""
        return self._branches


def _not_told(error: Exception) -> None:
    _log.error("branches were not told that their channel is gone", exc_info=error)


def _nobody(answer: XaFlag | XaError) -> None:
    """The reply of an operation that nobody asked for."""

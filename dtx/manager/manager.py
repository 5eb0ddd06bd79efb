"""The branch manager: one per resource manager, for all connections, vhosts and protocols.

Theory of operation. The core decides (:func:`dtx.xa.branch.step`), and this class executes: effects run in order, each
is awaited, and after a failed one no other runs. Only one operation at a time runs on a branch; a second one waits, and
finds the state that the first one left. An operation belongs to the manager, not to the connection that requested it.
The loss of a client while its commit is under way does not stop the commit.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol
from uuid import UUID

from dtx.config.rules import QuotaResource
from dtx.log.api import LogError, TransactionLog
from dtx.log.records import Redirect
from dtx.manager.branch_persistence import BranchPersistence, BrokerPersistence
from dtx.manager.branch_runtime import TAKING, BranchDecision, BranchRuntime
from dtx.manager.branches import OF_VOTED, Branches, Elsewhere, Requester
from dtx.manager.broker import BrokerEffects
from dtx.manager.effects import Effects, Reply, release
from dtx.manager.limits import DiskAlarm, Limits, Quotas
from dtx.manager.local_persistence import LocalPersistence
from dtx.manager.logged_xids import LoggedXids
from dtx.manager.maintenance import Maintenance
from dtx.manager.unvoted import UnvotedFilter, UnvotedPage
from dtx.store.api import BrokerStore, LocalStore
from dtx.store.slices import Slices, in_slices
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
_DOOMED: Final = (State.ROLLBACK_ONLY, State.TIMED_OUT)
_POLL: Final = 0.05
_NOTIFIED_AT_ONCE: Final = 25
"""Branches that process the loss of their channel within a millisecond."""


class OtherMembers(Protocol):
    """The other members of the resource manager."""

    @property
    def exist(self) -> bool:
        """Whether there were any at the last look."""

    async def unvoted(self, wanted: UnvotedFilter) -> tuple[list[UnvotedPage], list[str]]:
        """Pages of branches that have not voted, and the names of members that did not answer."""

    async def order(self, given: Mapping[str, Any], member: UUID) -> Mapping[str, Any] | None:
        """Let *member* carry out an operator's order.

        Args:
            given: the order.
            member: that has the branch.

        Returns:
            The result; ``None`` if *member* does not have the branch any more.

        Raises:
            XaError: the answer of the other member; 541, the outcome is not known.
        """

    async def ask(
        self, who: Requester, xid: Xid, operation: Operation, seconds: int, found: Elsewhere, until: float
    ) -> XaFlag | int | None:
        """Ask the member that has a branch to carry out an operation.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request; also of the class dtx-demarcation, which no other member carries out.
            seconds: the timeout to set.
            found: why the branch is not here.
            until: end of the attempts, by the clock of the event loop.

        Returns:
            The answer: a flag, or the timeout; ``None`` if the branch may be here now.

        Raises:
            XaError: the answer of the other member; 404, no member has the branch; 503, another member has it;
                541, the outcome is not known.
        """


class BranchManager:
    """Runs all operations on branches.

    Args:
        log: the transaction log, open.
        store: the message store, open.
        limits: of the manager.
        metrics: numbers.
    """

    def __init__(self, log: TransactionLog, store: BrokerStore | LocalStore, limits: Limits, metrics: Metrics) -> None:
        self.log = log
        self.limits = limits
        self.metrics = metrics
        self.draining = False
        self.others: OtherMembers | None = None
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
            done=self._branches.finish_operation,
        )
        self._upkeep = Maintenance(
            log, self._durable, self._branches, self._effects, limits, metrics, self._run, self.spawn
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._watches: list[asyncio.Task[None]] = []
        self._clock = time.monotonic
        self._xids = LoggedXids(log)

    # -- life cycle

    async def start(self) -> None:
        """Load the log, resume what the predecessor left unfinished, and start the timers.

        Raises:
            LogError: the log cannot be read, or has branches of the other mode.
        """
        await self._upkeep.load()
        self._watches = [
            asyncio.create_task(self._upkeep.watch(), name="dtx-timeouts"),
            asyncio.create_task(self.disk.watch(), name="dtx-disk"),
        ]

    async def takings_decided(self, seconds: float) -> None:
        """See :meth:`Maintenance.takings_decided`."""
        await self._upkeep.takings_decided(seconds)

    @property
    def is_decided(self) -> bool:
        """See :attr:`Maintenance.is_decided`."""
        return self._upkeep.is_decided

    async def take_over(self) -> None:
        """See :meth:`Maintenance.take_over`."""
        await self._upkeep.take_over()

    @property
    def is_empty(self) -> bool:
        """Whether there is no branch, neither in the log nor before its vote."""
        return not len(self._branches)

    async def drain(self, seconds: float) -> bool:
        """Refuse new branches and wait for the operations under way.

        If there are other members, also wait until all branches have voted or ended: others can continue them then.

        Returns:
            Whether all of them finished within *seconds*.
        """
        self.draining = True
        clock = asyncio.get_running_loop().time
        until = clock() + seconds
        while self.log.member is not None and self._may_vote() and clock() < until:  # noqa: ASYNC110 - seldom
            await asyncio.sleep(_POLL)
        seconds = max(0.0, until - clock())
        waits = {*self._tasks}
        if self._effects.under_way.count:
            waits.add(asyncio.create_task(self._effects.under_way.none()))
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late - self._tasks:
                task.cancel()
        return not self._tasks and not self._effects.under_way.count

    def _may_vote(self) -> bool:
        """Whether a branch here has not voted, and still can."""
        return any(entry.branch.state not in _DOOMED for entry in self._branches.open)

    async def close(self) -> None:
        """Stop the timers and all operations."""
        tasks = [*self._tasks, *self._watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._effects.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run *work* as a task of the manager: the end of a client's connection does not stop it."""
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
        self, who: Requester, xid: Xid, operation: Operation, channel: ChannelId, *, is_new: bool = False
    ) -> tuple[XaFlag, BranchRuntime] | None:
        """Start and end, in all their forms. They change only memory, so they await nothing.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request.
            channel: of the request.
            is_new: whether :meth:`settle` has just found that no other member has the branch.

        Returns:
            The answer and the branch; ``None`` while another operation runs on it, its state is uncertain, or another
            member may have it (wait with :meth:`settle`).

        Raises:
            XaError: as the table says. 403 for another user's branch. 404 for an unknown xid. 506 for a new branch
                during shutdown, above a limit or quota, or when the disk is nearly full. 541 when this dtx may not be
                active.
        """
        known = entry = self._branches.get(who.vhost, xid)
        if entry is None:
            if operation is not _START:
                if self.others is not None:
                    return None  # another member may have it
                if not self.log.lease_valid:  # all branches were loaded at startup, which is valid only with the lease
                    raise XaError(ReplyCode.INTERNAL_ERROR, f"{operation}: this dtx is not the active one (xid {xid})")
                raise XaError(ReplyCode.NOT_FOUND, f"unknown xid {xid}")
            if not is_new and self.others is not None and self.others.exist:
                return None  # another member may have it
            entry = self._begin(who, xid)
        elif operation is not _START:  # a second start is refused as 530, for any user
            self._branches.authorise(entry, who)
            if not entry.idle:
                return None
        elif entry.answered and not entry.idle:
            return None  # it ends as soon as the log has its end
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

    def _begin(self, who: Requester, xid: Xid) -> BranchRuntime:
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
        if self.disk.raised and not self._durable.local:  # in standalone mode, publishers wait instead
            reason = "the disk of the log is nearly full"
        if reason is not None:
            raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason} (xid {xid})")
        work = HeldWork(limits.branch_bytes, limits.branch_messages, holdings.budget)
        entry = BranchRuntime(branch, who.vhost, now=time.time(), work=work)
        entry.holdings = holdings
        entry.since = self.log.moment
        return entry

    async def settle(self, who: Requester, xid: Xid, operation: Operation) -> bool:
        """Wait until *operation* on *xid* is possible: no other runs, and its state is certain.

        Returns:
            Whether the branch is new: a start may begin it.

        Raises:
            XaError: 541, it takes too long, or the log cannot be read. If there are other members, also 404 for an
                unknown xid, 503: another member has the branch, and 530 for a start without join or resume.
        """
        entry = self._branches.get(who.vhost, xid)
        if entry is None:
            if self.others is None:
                return operation is _START
            if operation is _START:
                if await self._xids.is_logged(who.vhost, xid):
                    raise XaError(ReplyCode.NOT_ALLOWED, f"already known: another member has the branch (xid {xid})")
                return True
            await self._find_anywhere(who, xid, operation, _ignore_answer)
        elif entry.busy:
            await self._branches.wait(entry)
        elif entry.uncertain:
            await self._branches.reread(entry)
        return False

    def channel_lost(self, channel: ChannelId, entries: Sequence[BranchRuntime]) -> None:
        """Handle the loss of a channel that was associated or suspended with *entries*.

        An associated branch can be neither prepared nor rolled back, so the entries may be handled in slices.
        """
        Slices(_notify_failed).run(self._notify_lost(entries, ChannelLost(channel=channel)))

    def _notify_lost(self, entries: Sequence[BranchRuntime], event: ChannelLost) -> Iterator[None]:
        for number, entry in enumerate(entries, 1):
            self._branches.apply_event(entry, event)
            if not number % _NOTIFIED_AT_ONCE:
                yield

    def doom(self, entry: BranchRuntime, reason: str) -> None:
        """Make the branch rollback-only: part of its work is lost, or must not happen. No effect after a vote."""
        self._branches.apply_event(entry, Happened(operation=Operation.DOOM, reason=reason))

    # -- coordination

    def ask(self, who: Requester, xid: Xid, operation: Operation, reply: Reply) -> None:
        """prepare, commit, rollback and forget. On an idle branch they begin in the order of these calls.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: PREPARE, COMMIT, ONE_PHASE, ROLLBACK or FORGET.
            reply: called with the answer, or with an XaError; never before this method returns.
        """
        entry = self._branches.get(who.vhost, xid)
        if (
            entry is None
            or not entry.idle
            or not (entry.branch.owner == who.user or self.may_control(entry, who.user))
            or (operation in OF_VOTED and self._branches.may_be_another(entry))
        ):
            self._answer(self._find_and_request(who, xid, operation, reply), xid, operation, reply)
            return
        if not self._begun(entry, operation, reply, who.user):
            self._answer(self._request(entry, operation, reply, who.user), xid, operation, reply)

    def _begun(self, entry: BranchRuntime, operation: Operation, reply: Reply, actor: str) -> bool:
        """Begin a request; ``False`` if it needs a task. No other operation can begin after that."""
        if entry.record is None:
            entry.asked = operation
        vote = self._durable.vote(entry)
        if operation is _PREPARE and entry.branch.state is State.IDLE and vote is not Vote.NOTHING:
            reason = entry.holdings.excess(_IN_DOUBT)
            if reason is None:
                self._branches.prepare(entry)
            else:  # above a quota: it can only be rolled back
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
            except Exception:  # noqa: BLE001 - logged; the client gets no details
                _log.exception("request failed", operation=operation, xid=xid)
                reply(XaError(ReplyCode.INTERNAL_ERROR, "internal error"))

        self.spawn(answer())

    async def _find_and_request(self, who: Requester, xid: Xid, operation: Operation, reply: Reply) -> None:
        found = await self._find_anywhere(who, xid, operation, reply)
        if isinstance(found, XaFlag):
            reply(found)
        elif isinstance(found, BranchRuntime) and not self._begun(found, operation, reply, who.user):
            await self._request(found, operation, reply, who.user)

    async def _find_anywhere(
        self, who: Requester, xid: Xid, operation: Operation, reply: Reply, seconds: int = 0
    ) -> BranchRuntime | XaFlag | int | None:
        """The branch, if it is here; else the answer of the member that has it. ``None`` when *reply* was called.

        Raises:
            XaError: see :meth:`find`.
        """
        until = asyncio.get_running_loop().time() + self.limits.forward_timeout
        while True:
            try:
                return await self._branches.find(who, xid, operation, reply)
            except Elsewhere as found:
                if self.others is None:
                    raise
                answer = await self.others.ask(who, xid, operation, seconds, found, until)
                if answer is not None:
                    return answer

    async def answer_of_log(self, who: Requester, xid: Xid, operation: Operation, found: Elsewhere) -> XaFlag | None:
        """See :meth:`Branches.answer_of_log`."""
        return await self._branches.answer_of_log(who, xid, operation, found)

    async def ask_here(
        self, who: Requester, xid: Xid, operation: Operation, seconds: int, *, unvoted: bool
    ) -> XaFlag | int | None:
        """Carry out a request that another member has received.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request.
            seconds: the timeout to set.
            unvoted: whether the log did not have the branch.

        Returns:
            The answer: a flag, or the timeout; ``None`` if the branch is not here.

        Raises:
            XaError: see :meth:`find`.
        """
        answer: asyncio.Future[XaFlag | XaError] = asyncio.get_running_loop().create_future()

        def reply(found: XaFlag | XaError) -> None:
            if not answer.done():
                answer.set_result(found)

        async def request() -> None:
            entry = await self._branches.find(who, xid, operation, reply)
            if operation is Operation.SET_TIMEOUT and entry is not None:
                self._set_timeout(entry, seconds)
            if operation in (Operation.GET_TIMEOUT, Operation.SET_TIMEOUT):
                reply(_OK)
            elif entry is not None and not self._begun(entry, operation, reply, who.user):
                await self._request(entry, operation, reply, who.user)

        if unvoted and not self._branches.may_have(who.vhost, xid):
            return None
        self._answer(request(), xid, operation, reply)
        match await answer:
            case Elsewhere():
                return None
            case XaError() as error:
                raise error
            case flag if operation is Operation.GET_TIMEOUT:
                entry = self._branches.get(who.vhost, xid)
                return None if entry is None else entry.branch.timeout
            case flag:
                return flag

    async def _request(self, entry: BranchRuntime, operation: Operation, reply: Reply, actor: str) -> None:
        if entry.branch.state in TAKING:
            if operation is Operation.ROLLBACK:
                self._effects.broker.leave_untaken(entry)
            await self._resolve_take(entry, reply)
        await self._run(entry, Request(operation=operation, vote=self.vote(entry)), reply, actor)

    async def _resolve_take(self, entry: BranchRuntime, reply: Reply) -> None:
        try:
            if entry.cached is None:  # untaken messages must not be put back, so their positions are needed
                entry.cached = await self._effects.broker.read_work(entry)
            await self._effects.resolve_take(entry, reply)
        except BaseException:
            self._branches.finish_operation(entry)
            raise

    async def _run(self, entry: BranchRuntime, event: Event, reply: Reply, actor: str) -> None:
        """Step the claimed branch, and run the effects until there are no more."""
        try:
            await self._effects.run(entry, event, reply, actor)
        except XaError as error:
            reply(error)
        finally:
            self._branches.finish_operation(entry)

    async def get_timeout(self, who: Requester, xid: Xid) -> int:
        """The timeout of a branch, seconds.

        Raises:
            XaError: see :meth:`find`.
        """
        found = await self._find_anywhere(who, xid, Operation.GET_TIMEOUT, _ignore_answer)
        assert found is not None, "only a completion is answered before it is found"
        return found.branch.timeout if isinstance(found, BranchRuntime) else found

    async def set_timeout(self, who: Requester, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch, seconds from now, at most ``max_timeout``; 0 sets the default again.

        Raises:
            XaError: see :meth:`find`.
        """
        found = await self._find_anywhere(who, xid, Operation.SET_TIMEOUT, _ignore_answer, seconds)
        if isinstance(found, BranchRuntime):
            self._set_timeout(found, seconds)

    def _set_timeout(self, entry: BranchRuntime, seconds: int) -> None:
        wanted = min(seconds, self.limits.max_timeout) or self.limits.default_timeout
        entry.branch, _ = step(entry.branch, SetTimeout(seconds=wanted), self._clock())

    async def _find_idle(self, who: Requester, xid: Xid, operation: Operation) -> BranchRuntime:
        entry = await self._branches.find(who, xid, operation, _ignore_answer)
        assert entry is not None, "only a completion is answered before it is found"
        return entry

    async def in_doubt(self, who: Requester, behind: Xid | None = None) -> list[Xid]:
        """The branches of the vhost, in doubt or heuristic, that *who* may control: the list of a recovery scan.

        Args:
            who: the user of the request.
            behind: the list begins after this xid and wraps around, if it contains it.

        Raises:
            XaError: 541 when the list could be wrong.
        """
        listed = await self._listed_elsewhere(who)
        mine = [entry async for entry in in_slices(self._branches) if entry.vhost == who.vhost]
        for entry in [entry async for entry in in_slices(mine) if entry.uncertain and not entry.answered]:
            if entry.uncertain and entry.busy:
                await self._branches.wait(entry)
            if entry.uncertain and not entry.busy:
                await self._branches.reread(entry)
        async for entry in in_slices(mine):
            if _is_listed(entry) and not entry.answered and self.may_control(entry, who.user):
                listed[entry.xid] = entry.id
            elif listed.get(entry.xid) == entry.id:
                del listed[entry.xid]
        if not self.log.lease_valid:
            raise XaError(ReplyCode.INTERNAL_ERROR, "recover failed: this dtx is not the active one")
        found = list(listed)
        split = found.index(behind) + 1 if behind in listed else 0
        return found[split:] + found[:split]

    async def _listed_elsewhere(self, who: Requester) -> dict[Xid, UUID]:
        """The ids of branches of other members that a recovery scan lists, and of some that are here.

        The log is read before the memory: a branch that is taken over meanwhile is found at least once. A decided
        branch is not listed, unless it is stuck: its member finishes it, and has perhaps done so.

        Raises:
            XaError: 541, the log cannot be read.
        """
        listed: dict[Xid, UUID] = {}
        if self.log.member is None:
            return listed
        try:
            async for record in self.log.load_listed(who.vhost):
                if self._branches.may(record.owner, who.user):
                    listed[record.xid] = record.id
        except LogError as error:
            raise XaError(ReplyCode.INTERNAL_ERROR, f"recover failed: {error}") from error
        return listed

    # -- operators

    def vote(self, entry: BranchRuntime) -> Vote:
        """The kind of work in the branch that its vote is about."""
        return self._durable.vote(entry)

    async def find(self, who: Requester, xid: Xid) -> BranchRuntime:
        """The branch, with no operation under way and with a certain state.

        Raises:
            XaError: 403; 404 for an unknown xid; 541 when the log cannot be read, or another operation takes too long.
        """
        return await self._find_idle(who, xid, Operation.GET_TIMEOUT)

    async def operate(
        self, entry: BranchRuntime, event: Event, reply: Reply, actor: str, decision: BranchDecision | None
    ) -> None:
        """Carry out an operator's decision.

        Args:
            entry: claimed.
            event: the decision for the core.
            reply: called with the answer.
            actor: the operator.
            decision: is written with it.
        """
        entry.decision = decision
        try:
            await self._run(entry, event, reply, actor)
        finally:
            entry.decision = None

    async def redirect(self, entry: BranchRuntime, to: Redirect, reason: str, actor: str) -> None:
        """Change the destination of a message that phase two cannot finish; *entry* as for :meth:`operate`.

        Raises:
            XaError: 541; the write may or may not have happened.
        """
        assert isinstance(self._durable, BrokerPersistence), "local work is never stuck"
        try:
            await self._durable.redirect(entry, to, reason, time.time(), actor)
        finally:
            self._branches.finish_operation(entry)

    def known(self, vhost: str, xid: Xid) -> BranchRuntime | None:
        """The branch, also while an operation runs on it; ``None`` when it is not known here."""
        return self._branches.get(vhost, xid)

    def entries(self) -> Iterable[BranchRuntime]:
        """Every known branch."""
        return self._branches


def _is_listed(entry: BranchRuntime) -> bool:
    """Whether a recovery scan lists a branch: "currently in a prepared state or heuristically completed" (xa_recover).

    It lists no branch that is rolled back without a vote, because its transaction manager may commit what it finds. If
    that rollback is stuck, it lists the branch: a repeated rollback tries again.
    """
    state, record = entry.branch.state, entry.record
    if state is State.ROLLING_BACK and record is not None and record.prepared_at is None:
        return record.stuck is not None
    return state in IN_DOUBT


def _notify_failed(error: Exception) -> None:
    _log.error("branches were not notified of the loss of their channel", exc_info=error)


def _ignore_answer(answer: XaFlag | XaError) -> None:
    """The reply of operations without a client."""

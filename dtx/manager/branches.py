"""The known branches, and the order of operations on each.

Only one operation at a time runs on a branch. A second one waits, and finds the state that the first one left. Events
during an operation are applied after it. A branch whose last write has an unknown outcome is read from the log before
any other operation. An xid that is not known here is looked up in the log before any client gets 404.

:func:`branch_stats` counts branches for metrics and operators' pages.
"""

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from dtx.config.rules import QuotaResource
from dtx.log.api import LogError, TransactionLog
from dtx.log.records import BranchRecord, JournalEnding, JournalEvent, LogState
from dtx.manager.branch_persistence import BranchPersistence, log_failed
from dtx.manager.branch_runtime import TAKING, BranchEnd, BranchRuntime
from dtx.manager.effects import Reply, release
from dtx.manager.limits import Limits, Quotas
from dtx.store.api import UnitProgress
from dtx.store.slices import in_slices
from dtx.telemetry import get_logger
from dtx.xa.branch import is_legal, step
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import ChannelLost, Happened, Operation, Release, State
from dtx.xa.table import LOGGED
from dtx.xa.xid import Xid

_log = get_logger(part="manager")
# Reading a member of an enum costs as much as a call in Python 3.11, and each branch reads these.
_ANSWERED: Final = UnitProgress.ANSWERED
_BRANCHES: Final = QuotaResource.BRANCHES
_IN_DOUBT: Final = QuotaResource.IN_DOUBT
_HEURISTIC: Final = State.HEURISTIC
_UNKNOWN: Final = State.UNKNOWN

OF_VOTED: Final = (Operation.COMMIT, Operation.ROLLBACK, Operation.FORGET)
"""Requests that a transaction manager sends to branches that have voted; for others, they concern the branch here."""
MOST_TOMBSTONES: Final = 100_000
"""About 40 MB. A client may start branches, and have them rolled back, at any rate; the oldest are dropped."""
_ANSWERS: Final = {
    (Operation.PREPARE, JournalEvent.READ_ONLY): XaFlag.RDONLY,
    (Operation.PREPARE, JournalEvent.ROLLED_BACK): XaFlag.RBROLLBACK,
    (Operation.COMMIT, JournalEvent.COMMITTED): XaFlag.OK,
    (Operation.ONE_PHASE, JournalEvent.COMMITTED): XaFlag.OK,
    (Operation.ONE_PHASE, JournalEvent.ROLLED_BACK): XaFlag.RBROLLBACK,
    (Operation.ROLLBACK, JournalEvent.ROLLED_BACK): XaFlag.OK,
    (Operation.FORGET, JournalEvent.FORGOTTEN): XaFlag.OK,
}
"""The answers to requests after which a branch ended like that."""
AGES: Final = (60, 600, 3600, 86_400)
"""Limits of the ages by which branches are counted, seconds since their start: minutes, an hour, a day."""


@dataclass(frozen=True, slots=True)
class Requester:
    """The user of a request, and its vhost (a vhost is one resource manager).

    Args:
        user: name.
        vhost: name.
        operator: whether the user is an operator, who may decide every branch; the caller has checked the role.
    """

    user: str
    vhost: str
    operator: bool = False


class Elsewhere(XaError):
    """The branch is not here; another member of the resource manager may have it.

    It is also the answer for a caller that cannot ask other members: 541, or 404 if the log does not have the branch.

    Args:
        branch: the row in the log, which names the member; ``None`` if the log does not have the branch.
        arguments: of the answer.
        ending: that the log has for an earlier branch of the xid.
    """

    def __init__(self, branch: BranchRecord | None, *arguments: Any, ending: JournalEnding | None = None) -> None:
        super().__init__(*arguments)
        self.branch = branch
        self.member = None if branch is None else branch.member
        self.ending = ending


class WorkCache:
    """Messages of prepared branches, kept in memory so that a commit soon afterwards need not read them.

    The cache is bounded by bytes; the oldest branches are dropped first. Their messages are read from the log.

    Args:
        limit: bytes of properties and bodies.
    """

    __slots__ = ("_entries", "_limit", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[BranchRuntime, int] = OrderedDict()

    def keep(self, entry: BranchRuntime) -> None:
        """Keep the messages of a prepared branch."""
        rows = entry.cached
        if rows is None or entry in self._entries:
            return
        size = sum(len(work.body) + len(work.properties) + 256 for work in rows)
        self._entries[entry] = size
        self._used += size
        while self._used > self._limit:
            oldest, freed = self._entries.popitem(last=False)
            oldest.cached = None
            self._used -= freed

    def drop(self, entry: BranchRuntime) -> None:
        """Drop the messages of a branch that has ended."""
        self._used -= self._entries.pop(entry, 0)
        entry.cached = None


class Branches:
    """Every branch that is open, in doubt or heuristic, and the tombstones of branches that dtx itself rolled back.

    Args:
        log: is searched for unknown xids.
        durable: reads branches again.
        limits: of the manager.
        quotas: count every known branch.
    """

    def __init__(self, log: TransactionLog, durable: BranchPersistence, limits: Limits, quotas: Quotas) -> None:
        self._log = log
        self._durable = durable
        self._limits = limits
        self._quotas = quotas
        self._answered = 0
        """Number of branches that no longer count: their ends are answered and are being written."""
        self._known: dict[tuple[str, Xid], BranchRuntime] = {}
        self.open: Final[dict[BranchRuntime, float]] = {}
        """Branches that have not voted, with the time since which each is known to be rollback-only (0: not yet)."""
        self._tombstones: OrderedDict[tuple[str, Xid], tuple[XaFlag, float, str]] = OrderedDict()
        """Flag, end and owner of each rolled back branch; the first tombstone ends first."""
        self._cache = WorkCache(limits.cache_bytes)
        self._ended: set[UUID] | None = None
        self._clock = time.monotonic

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[BranchRuntime]:
        return iter(self._known.values())

    def get(self, vhost: str, xid: Xid) -> BranchRuntime | None:
        """The branch, also while an operation runs on it; ``None`` when it is not known here."""
        return self._known.get((vhost, xid))

    def has(self, entry: BranchRuntime) -> bool:
        """Whether *entry* is still the branch of its xid: it has not ended."""
        return self._known.get((entry.vhost, entry.xid)) is entry

    def add(self, entry: BranchRuntime) -> None:
        """Add a branch that the log has, or a new one. An xid is free again when its last branch has left the log."""
        known = self._known.setdefault((entry.vhost, entry.xid), entry)
        assert known is entry
        if entry.record is not None:
            entry.holdings = self._quotas.of(entry.branch.owner, entry.vhost)
            self._count_doubt(entry)
        entry.holdings.add(_BRANCHES)

    @property
    def count(self) -> int:
        """The number of branches, without those whose ends are answered."""
        return len(self._known) - self._answered

    def answered(self, entry: BranchRuntime) -> None:
        """Its end is about to be answered: it no longer counts against the limits."""
        if entry.progress is not _ANSWERED:
            entry.move_units(_ANSWERED)
            self._answered += 1
            self._discount(entry)

    def _discount(self, entry: BranchRuntime) -> None:
        self._settle(entry)
        entry.holdings.remove(_BRANCHES)

    def _settle(self, entry: BranchRuntime) -> None:
        if entry.doubt is not None:
            entry.holdings.charge(-entry.doubt)
            entry.holdings.remove(_IN_DOUBT)
            entry.doubt = None

    def _count_doubt(self, entry: BranchRuntime) -> None:
        """Count it as in doubt while the log may have it; count its messages when they are no longer in memory."""
        if entry.progress is _ANSWERED or (entry.record is None and not entry.uncertain):
            self._settle(entry)
            return
        self.prepare(entry)
        size = 0 if entry.record is None or entry.work is not None else entry.record.bytes
        entry.holdings.charge(size - (entry.doubt or 0))
        entry.doubt = size

    def prepare(self, entry: BranchRuntime) -> None:
        """Count it as in doubt before it is written, so that concurrent prepares cannot exceed the quota."""
        if entry.doubt is None:
            entry.doubt = 0
            entry.holdings.add(_IN_DOUBT)

    # -- authorisation

    def may(self, owner: str, user: str) -> bool:
        """Whether *user* may control branches of *owner*: the same user, or a coordinator."""
        return owner == user or user in self._limits.coordinators

    def authorise(self, entry: BranchRuntime, who: Requester) -> None:
        """Refuse access to another user's branch.

        Raises:
            XaError: 403, *who* is neither its owner, a coordinator nor an operator.
        """
        if not who.operator and not self.may(entry.branch.owner, who.user):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"the branch is another user's, only a coordinator may control it (xid {entry.xid})",
            )

    # -- order of operations

    async def find(self, who: Requester, xid: Xid, operation: Operation, reply: Reply) -> BranchRuntime | None:
        """The branch, with no operation under way and with a certain state.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request.
            reply: called with the answer when the operation it waited for, or a tombstone, provides it.

        Returns:
            The branch; ``None`` when *reply* was called.

        Raises:
            Elsewhere: another member may have the branch.
            XaError: 403; 404 for an unknown xid; 541 when the log cannot be read, or another operation takes too long.
        """
        while True:
            while (entry := self.get(who.vhost, xid)) is not None:
                self.authorise(entry, who)
                if entry.idle:
                    if operation not in OF_VOTED or not self.may_be_another(entry):
                        return entry
                    await self._look_up(who, xid, operation, entry.id)
                    if self.has(entry) and entry.idle:
                        return entry
                    if entry.end is None:
                        continue
                over = entry.busy and entry.answered  # a request after the answer finds the branch ended
                if entry.busy:
                    await self.wait(entry)
                elif not entry.idle:
                    await self.reread(entry)
                flag = entry.end.answer(operation) if entry.end is not None and not over else None
                if flag is not None:  # "a repeated commit waits for the first"
                    reply(flag)
                    return None
            missing: Elsewhere | None = None
            if self._log.member is not None:  # the log may have a branch of another member with this xid
                try:
                    await self._look_up(who, xid, operation)
                    continue
                except Elsewhere as found:
                    if found.member is not None:
                        raise
                    missing = found
            flag = self._take_tombstone(who, xid) if operation is Operation.ROLLBACK else None
            if flag is None and missing is not None:
                raise missing
            if flag is not None:
                reply(flag)
                return None
            await self._look_up(who, xid, operation)

    def may_have(self, vhost: str, xid: Xid) -> bool:
        """Whether a branch is here, or a tombstone of one."""
        return (vhost, xid) in self._known or (vhost, xid) in self._tombstones

    def may_be_another(self, entry: BranchRuntime) -> bool:
        """Whether the log may have a branch with the xid of *entry* that is another one, of another member."""
        return entry.record is None and self._log.member is not None

    async def _look_up(self, who: Requester, xid: Xid, operation: Operation, unlogged: UUID | None = None) -> None:
        """Add a branch that only the log has. 404 is answered only when the log does not have it either.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request.
            unlogged: the branch that is here, and not in the log: it is the requested one, unless the log has another.
        """
        try:
            found = await self._log.lookup(who.vhost, xid)
        except LogError as error:
            raise log_failed(error, operation, xid) from error
        member = self._log.member
        if found.branch is not None:
            if found.branch.member != member and member is not None:
                raise Elsewhere(
                    found.branch,
                    ReplyCode.INTERNAL_ERROR,
                    f"another member has the branch, try again there (xid {xid})",
                )
            if self.get(who.vhost, xid) is None:  # else another look-up has added it
                _log.warning("branch found in the log only", xid=xid, vhost=who.vhost)
                entry = BranchRuntime.restored(found.branch)
                self.add(entry)
                if member is not None:  # it has come from another member; else all were told at the start
                    self._durable.restore(entry, found.branch)
            return
        if unlogged is not None:
            return
        # A branch that was started meanwhile is not the requested one.
        reason, facts = f"unknown xid {xid}", {}
        if found.ending is not None and (who.operator or self.may(found.ending.owner, who.user)):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.ending.at))
            # A reply text that is too long is cut at its end, and an xid may fill all of it.
            reason = f"unknown xid, completed: {found.ending.event} at {at} (xid {xid})"
            facts = {"ended": found.ending.event, "at": at}
        if member is not None:
            raise Elsewhere(None, ReplyCode.NOT_FOUND, reason, facts, ending=found.ending)
        raise XaError(ReplyCode.NOT_FOUND, reason, facts)

    async def answer_of_log(self, who: Requester, xid: Xid, operation: Operation, found: Elsewhere) -> XaFlag | None:
        """The answer to a request whose answer by another member was lost.

        Args:
            who: the user of the request.
            xid: of the branch.
            operation: the request.
            found: what the log had before the request.

        Returns:
            The answer of the member; ``None`` as long as the log does not prove it.

        Raises:
            XaError: 541 when the log cannot be read.
        """
        before = found.branch
        try:
            lookup = await self._log.lookup(who.vhost, xid, None if before is None else before.id)
        except LogError as error:
            raise log_failed(error, operation, xid) from error
        branch, ending = lookup.branch, lookup.ending
        flag: XaFlag | None = None
        owner = ""
        if branch is not None and (before is None or before.id == branch.id):
            owner = branch.owner
            if branch.outcome is not None and branch.state is LogState.HEURISTIC and operation in OF_VOTED[:2]:
                flag = branch.outcome.flag
            elif before is None and operation is Operation.PREPARE and branch.state is LogState.PREPARED:
                flag = XaFlag.OK
        elif branch is None and ending is not None and ending != found.ending:
            owner = ending.owner
            flag = _ANSWERS.get((operation, ending.event))
        return flag if who.operator or self.may(owner, who.user) else None

    async def wait(self, entry: BranchRuntime) -> None:
        """Wait until the operation on *entry* has finished.

        Raises:
            XaError: 541, it takes too long.
        """
        try:
            async with asyncio.timeout(self._limits.patience):
                await entry.wait_for_operation()
        except TimeoutError:
            raise XaError(
                ReplyCode.INTERNAL_ERROR, f"another operation is still under way, try again (xid {entry.xid})"
            ) from None

    async def reread(self, entry: BranchRuntime) -> None:
        """Read *entry*, whose state is uncertain, from the log.

        Raises:
            XaError: 541, the log cannot be read.
        """
        entry.reread()
        try:
            await self._durable.reread(entry)
        finally:
            self.finish_operation(entry)

    def finish_operation(self, entry: BranchRuntime) -> None:
        """Finish the operation on *entry*: file it by its new state, then apply the events that came meanwhile."""
        state, certain = entry.branch.state, not entry.uncertain
        over = entry.end is not None or (state is _UNKNOWN and certain)
        if over:
            self._forget(entry)
        else:
            if state in LOGGED and certain:
                self.open.pop(entry, None)
                if state not in TAKING:
                    _release_work(entry)
                    self._cache.keep(entry)
            self._count_doubt(entry)
        entry.done()
        if entry.outcomes and (over or (state is _HEURISTIC and certain)):  # no decision can follow
            outcome = entry.branch.outcome
            entry.conclude(
                committed=entry.end is BranchEnd.COMMITTED if outcome is None else outcome is Heuristic.COMMITTED
            )
        if entry.deferred:
            events, entry.deferred = entry.deferred, []
            for event in events if self.has(entry) else ():
                self.apply_event(entry, event)

    async def give_way(self, entry: BranchRuntime) -> None:
        """Forget *entry*: the log has another branch with its xid, which has voted, so this one cannot.

        Raises:
            XaError: 541, an operation on it takes too long.
        """
        _log.warning("two members had a branch with one xid", xid=entry.xid, vhost=entry.vhost)
        self.apply_event(entry, Happened(operation=Operation.DOOM, reason="another member has a branch with its xid"))
        while entry.busy:
            await self.wait(entry)
        if self.has(entry) and entry.record is None:
            self._forget(entry)

    @contextmanager
    def noting_ends(self) -> Iterator[Collection[UUID]]:
        """The ids of all branches that end in this context: rows of them that were read before are outdated."""
        self._ended = ended = set[UUID]()
        try:
            yield ended
        finally:
            self._ended = None

    def _forget(self, entry: BranchRuntime) -> None:
        if self._ended is not None:
            self._ended.add(entry.id)
        key = entry.vhost, entry.xid
        if self._known.get(key) is entry:
            del self._known[key]
            if entry.progress is _ANSWERED:
                self._answered -= 1
            else:
                self._discount(entry)
        self.open.pop(entry, None)
        self._cache.drop(entry)
        _release_work(entry)

    def apply_event(self, entry: BranchRuntime, event: ChannelLost | Happened) -> None:
        """Apply an event that no client requested; no effect where the branch's state does not allow it."""
        if not entry.idle:
            entry.deferred.append(event)
            return
        operation = Operation.CHANNEL_LOST if isinstance(event, ChannelLost) else event.operation
        if not is_legal(entry.branch, operation):
            return
        before = entry.branch.state
        entry.branch, effects = step(entry.branch, event, self._clock())
        if any(isinstance(effect, Release) for effect in effects):
            release(entry)
        if entry.branch.state is not before:
            reason = event.reason if isinstance(event, Happened) else "its channel was lost"
            _log.info("branch is rollback-only", xid=entry.xid, vhost=entry.vhost, reason=reason)

    # -- tombstones

    def leave_tombstone(self, entry: BranchRuntime, flag: XaFlag) -> None:
        """Leave a tombstone: dtx rolled *entry* back, and *flag* answers the next rollback."""
        until = self._clock() + self._limits.tombstone_ttl
        key = entry.vhost, entry.xid
        self._tombstones.pop(key, None)
        if len(self._tombstones) >= MOST_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._tombstones[key] = (flag, until, entry.branch.owner)

    def reuse(self, vhost: str, xid: Xid) -> None:
        """Drop the tombstone of an xid that starts again: a later rollback concerns the new branch."""
        if self._tombstones:
            self._tombstones.pop((vhost, xid), None)

    def _take_tombstone(self, who: Requester, xid: Xid) -> XaFlag | None:
        tombstone = self._tombstones.get((who.vhost, xid))
        if tombstone is None:
            return None
        flag, until, owner = tombstone
        if not self.may(owner, who.user):
            return None
        del self._tombstones[who.vhost, xid]
        return flag if self._clock() < until else None

    async def clear_tombstones(self) -> None:
        """Drop the tombstones that have expired."""
        now = self._clock()
        dropped = 0
        while self._tombstones and next(iter(self._tombstones.values()))[1] <= now:
            self._tombstones.popitem(last=False)
            dropped += 1
            if not dropped % 1000:
                await asyncio.sleep(0)


def _release_work(entry: BranchRuntime) -> None:
    if entry.work is not None:
        entry.work.shut_down()
        entry.work = None


@dataclass(slots=True, kw_only=True)
class BranchStats:
    """Numbers of branches by state and age.

    Args:
        ages: for each state, the number of branches younger than each of :data:`AGES`, but not than the one before;
            the last number counts the oldest. Times are those that dtx has written, by its own clock.
        stuck: number of branches with a stuck phase two.
        oldest_prepared: the earliest vote of a prepared branch, seconds since the epoch.
        in_doubt_bytes: bytes of messages of branches that have voted.
    """

    ages: dict[State, list[int]] = field(default_factory=dict)
    stuck: int = 0
    oldest_prepared: float | None = None
    in_doubt_bytes: int = 0

    @property
    def states(self) -> dict[State, int]:
        """The number of branches in each state."""
        return {state: sum(ages) for state, ages in self.ages.items()}


async def branch_stats(entries: Iterable[BranchRuntime]) -> BranchStats:
    """Count a snapshot of *entries*.

    Counting yields to the event loop at intervals. Each branch counts in the state that it has then. Branches that
    start meanwhile are not counted.
    """
    stats = BranchStats()
    now = time.time()
    async for entry in in_slices(entries):
        if entry.branch.state is State.UNKNOWN:
            continue  # it has ended since the snapshot
        ages = stats.ages.get(entry.branch.state)
        if ages is None:
            ages = stats.ages[entry.branch.state] = [0] * (len(AGES) + 1)
        ages[bisect_right(AGES, now - entry.started_at)] += 1
        record = entry.record
        if record is not None:
            stats.stuck += record.stuck is not None
            stats.in_doubt_bytes += record.bytes
            if entry.branch.state is State.PREPARED and record.prepared_at is not None:
                oldest = stats.oldest_prepared
                stats.oldest_prepared = record.prepared_at if oldest is None else min(oldest, record.prepared_at)
    return stats

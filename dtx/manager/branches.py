"""The branches that are known, and whose turn it is.

On one branch one operation runs at a time. Whoever comes second waits, and finds what the first one left. What happens
to a branch meanwhile is applied afterwards. A branch whose last write may or may not have happened is read from the log
before anything else is done with it, and one that is not known here is looked for there before anybody is told so.

:func:`branch_stats` counts branches for metrics and operators' pages.
"""

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from dtx.config.rules import QuotaResource
from dtx.log.api import LogError, TransactionLog
from dtx.manager.branch_persistence import BranchPersistence, log_failed
from dtx.manager.branch_runtime import TAKING, BranchEnd, BranchRuntime
from dtx.manager.effects import Reply, release
from dtx.manager.limits import Limits, Quotas
from dtx.store.api import UnitProgress
from dtx.store.slices import in_turns
from dtx.telemetry import get_logger
from dtx.xa.branch import is_legal, step
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import ChannelLost, Happened, Operation, Release, State
from dtx.xa.table import LOGGED
from dtx.xa.xid import Xid

_log = get_logger(part="manager")
# Reading a member of an enum costs as much as a call in Python 3.11, and these are read for each branch.
_ANSWERED: Final = UnitProgress.ANSWERED
_BRANCHES: Final = QuotaResource.BRANCHES
_IN_DOUBT: Final = QuotaResource.IN_DOUBT
_HEURISTIC: Final = State.HEURISTIC
_UNKNOWN: Final = State.UNKNOWN

MOST_TOMBSTONES: Final = 100_000
"""Some 40 MB. A client may start branches and have them rolled back as fast as it can; the oldest give way."""
AGES: Final = (60, 600, 3600, 86_400)
"""Seconds since the start between which branches are counted: minutes, an hour, a day."""


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


class WorkCache:
    """Messages of prepared branches, kept in memory so that a commit soon after need not read them back.

    Bounded by octets; the oldest leave first. What has left is read from the log.

    Args:
        limit: octets of properties and bodies.
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
        """The branch has ended."""
        self._used -= self._entries.pop(entry, 0)
        entry.cached = None


class Branches:
    """Every branch that is open, in doubt or heuristic, and the tombstones of those that ended by themselves.

    Args:
        log: is asked for what is not known here.
        durable: reads branches again.
        limits: of the manager.
        quotas: count every branch that is known.
    """

    def __init__(self, log: TransactionLog, durable: BranchPersistence, limits: Limits, quotas: Quotas) -> None:
        self._log = log
        self._durable = durable
        self._limits = limits
        self._quotas = quotas
        self._answered = 0
        """How many branches count no more: their ends are answered, and the log is about to have them."""
        self._known: dict[tuple[str, Xid], BranchRuntime] = {}
        self.open: Final[dict[BranchRuntime, float]] = {}
        """Branches that have not voted, with the time at which a rollback-only one is dropped (0: not yet)."""
        self._tombstones: OrderedDict[tuple[str, Xid], tuple[XaFlag, float, str]] = OrderedDict()
        """Flag, end and owner of what was rolled back without its transaction manager; the first one ends first."""
        self._cache = WorkCache(limits.cache_bytes)
        self._clock = time.monotonic

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[BranchRuntime]:
        return iter(self._known.values())

    def get(self, vhost: str, xid: Xid) -> BranchRuntime | None:
        """The branch, whatever runs on it; ``None`` when none is known here."""
        return self._known.get((vhost, xid))

    def has(self, entry: BranchRuntime) -> bool:
        """Whether *entry* is still what its xid stands for: it has not ended."""
        return self._known.get((entry.vhost, entry.xid)) is entry

    def add(self, entry: BranchRuntime) -> None:
        """A branch that the log had, or that begins: an xid begins again when its last branch has left the log."""
        known = self._known.setdefault((entry.vhost, entry.xid), entry)
        assert known is entry
        if entry.record is not None:
            entry.holdings = self._quotas.of(entry.branch.owner, entry.vhost)
            self._count_doubt(entry)
        entry.holdings.add(_BRANCHES)

    @property
    def count(self) -> int:
        """How many there are, without those whose ends are answered."""
        return len(self._known) - self._answered

    def answered(self, entry: BranchRuntime) -> None:
        """Its end is about to be answered: it makes room for another one."""
        if entry.progress is not _ANSWERED:
            entry.move_units(_ANSWERED)
            self._answered += 1
            self._discount(entry)

    def _discount(self, entry: BranchRuntime) -> None:
        """It counts no more."""
        self._settle(entry)
        entry.holdings.remove(_BRANCHES)

    def _settle(self, entry: BranchRuntime) -> None:
        if entry.doubt is not None:
            entry.holdings.charge(-entry.doubt)
            entry.holdings.remove(_IN_DOUBT)
            entry.doubt = None

    def _count_doubt(self, entry: BranchRuntime) -> None:
        """It counts as in doubt while the log may have it, with its messages when they are in memory no more."""
        if entry.progress is _ANSWERED or (entry.record is None and not entry.uncertain):
            self._settle(entry)
            return
        self.prepare(entry)
        size = 0 if entry.record is None or entry.work is not None else entry.record.bytes
        entry.holdings.charge(size - (entry.doubt or 0))
        entry.doubt = size

    def prepare(self, entry: BranchRuntime) -> None:
        """It is about to be written: it counts as in doubt already, so that prepares at once find no more room."""
        if entry.doubt is None:
            entry.doubt = 0
            entry.holdings.add(_IN_DOUBT)

    # -- who may

    def may(self, owner: str, user: str) -> bool:
        """Whether *user* may control what *owner* started: it is the same one, or a coordinator."""
        return owner == user or user in self._limits.coordinators

    def authorise(self, entry: BranchRuntime, who: Who) -> None:
        """Let nobody touch a branch that is not theirs.

        Raises:
            XaError: 403.
        """
        if not who.operator and not self.may(entry.branch.owner, who.user):
            raise XaError(
                ReplyCode.ACCESS_REFUSED,
                f"the branch is another user's, only a coordinator may touch it (xid {entry.xid})",
            )

    # -- whose turn

    async def find(self, who: Who, xid: Xid, operation: Operation, reply: Reply) -> BranchRuntime | None:
        """The branch, with nothing running on it and nothing about it in doubt.

        Args:
            who: asks.
            xid: of which branch.
            operation: for what.
            reply: gets the answer where waiting, or a tombstone, has given it.

        Returns:
            The branch; ``None`` when *reply* was called.

        Raises:
            XaError: 403; 404 for an unknown xid; 541 when it cannot be found out, or something runs for too long.
        """
        while True:
            while (entry := self.get(who.vhost, xid)) is not None:
                self.authorise(entry, who)
                if entry.idle:
                    return entry
                over = entry.busy and entry.answered  # whoever comes behind the answer finds the branch gone
                if entry.busy:
                    await self.wait(entry)
                else:
                    await self.reread(entry)
                flag = entry.end.answer(operation) if entry.end is not None and not over else None
                if flag is not None:  # "a repeated commit waits for the first"
                    reply(flag)
                    return None
            flag = self._take_tombstone(who, xid) if operation is Operation.ROLLBACK else None
            if flag is not None:
                reply(flag)
                return None
            await self._look_up(who, xid, operation)

    async def _look_up(self, who: Who, xid: Xid, operation: Operation) -> None:
        """Make known what the log alone knows; "unknown xid" is said only when the log does not have it either."""
        try:
            found = await self._log.lookup(who.vhost, xid)
        except LogError as error:
            raise log_failed(error, operation, xid) from error
        if found.branch is not None:
            if self.get(who.vhost, xid) is None:  # else another look has made it known
                _log.warning("branch found in the log only", xid=xid, vhost=who.vhost)
                self.add(BranchRuntime.restored(found.branch))
            return
        # A branch that has begun meanwhile is not the one that was asked for.
        reason, facts = f"unknown xid {xid}", {}
        if found.ending is not None and (who.operator or self.may(found.ending.owner, who.user)):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.ending.at))
            # What a reply text has no room for is cut off its end, and an xid may be longer than all of it.
            reason = f"unknown xid, completed: {found.ending.event} at {at} (xid {xid})"
            facts = {"ended": found.ending.event, "at": at}
        raise XaError(ReplyCode.NOT_FOUND, reason, facts)

    async def wait(self, entry: BranchRuntime) -> None:
        """Wait until the operation that runs on *entry* is through.

        Raises:
            XaError: 541, that takes too long.
        """
        try:
            async with asyncio.timeout(self._limits.patience):
                await entry.through()
        except TimeoutError:
            raise XaError(
                ReplyCode.INTERNAL_ERROR, f"another operation is still under way, try again (xid {entry.xid})"
            ) from None

    async def reread(self, entry: BranchRuntime) -> None:
        """Read *entry*, which is in doubt, from the log.

        Raises:
            XaError: 541, the log cannot be read.
        """
        entry.reread()
        try:
            await self._durable.reread(entry)
        finally:
            self.through(entry)

    def through(self, entry: BranchRuntime) -> None:
        """The operation on *entry* is through: file it under what it has become; then what befell it meanwhile."""
        state, certain = entry.branch.state, not entry.uncertain
        over = entry.end is not None or (state is _UNKNOWN and certain)
        if over:
            self._forget(entry)
        else:
            if state in LOGGED and certain:
                self.open.pop(entry, None)
                if state not in TAKING:
                    _let_work_go(entry)
                    self._cache.keep(entry)
            self._count_doubt(entry)
        entry.done()
        if entry.outcomes and (over or (state is _HEURISTIC and certain)):  # nothing will be decided about it any more
            outcome = entry.branch.outcome
            entry.conclude(
                committed=entry.end is BranchEnd.COMMITTED if outcome is None else outcome is Heuristic.COMMITTED
            )
        if entry.deferred:
            events, entry.deferred = entry.deferred, []
            for event in events if self.has(entry) else ():
                self.apply_event(entry, event)

    def _forget(self, entry: BranchRuntime) -> None:
        key = entry.vhost, entry.xid
        if self._known.get(key) is entry:
            del self._known[key]
            if entry.progress is _ANSWERED:
                self._answered -= 1
            else:
                self._discount(entry)
        self.open.pop(entry, None)
        self._cache.drop(entry)
        _let_work_go(entry)

    def apply_event(self, entry: BranchRuntime, event: ChannelLost | Happened) -> None:
        """Something happens to a branch that nobody asked for; where it is too late for that, nothing does."""
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
            reason = event.reason if isinstance(event, Happened) else "its channel is gone"
            _log.info("branch is rollback-only", xid=entry.xid, vhost=entry.vhost, reason=reason)

    # -- tombstones

    def leave_tombstone(self, entry: BranchRuntime, flag: XaFlag) -> None:
        """Leave a tombstone: *entry* was rolled back by itself, and the next rollback is answered with *flag*."""
        until = self._clock() + self._limits.tombstone_ttl
        key = entry.vhost, entry.xid
        self._tombstones.pop(key, None)
        if len(self._tombstones) >= MOST_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._tombstones[key] = (flag, until, entry.branch.owner)

    def reuse(self, vhost: str, xid: Xid) -> None:
        """The xid begins anew: a further rollback would be the new branch's."""
        if self._tombstones:
            self._tombstones.pop((vhost, xid), None)

    def _take_tombstone(self, who: Who, xid: Xid) -> XaFlag | None:
        tombstone = self._tombstones.get((who.vhost, xid))
        if tombstone is None:
            return None
        flag, until, owner = tombstone
        if not self.may(owner, who.user):
            return None
        del self._tombstones[who.vhost, xid]
        return flag if self._clock() < until else None

    async def clear_tombstones(self) -> None:
        """Drop those whose time has come."""
        now = self._clock()
        dropped = 0
        while self._tombstones and next(iter(self._tombstones.values()))[1] <= now:
            self._tombstones.popitem(last=False)
            dropped += 1
            if not dropped % 1000:
                await asyncio.sleep(0)


def _let_work_go(entry: BranchRuntime) -> None:
    if entry.work is not None:
        entry.work.let_go()
        entry.work = None


@dataclass(slots=True, kw_only=True)
class BranchStats:
    """How many branches there are, in which states and of which ages.

    Args:
        ages: for each state, how many branches are younger than each of :data:`AGES`, but not than the one before; the
            last number is that of the oldest ones. Times are those that dtx has written, by its own clock.
        stuck: those that phase two is stuck with.
        oldest_prepared: when the one that has been prepared for the longest time was, seconds since the epoch.
        in_doubt_bytes: of messages of branches that have voted.
    """

    ages: dict[State, list[int]] = field(default_factory=dict)
    stuck: int = 0
    oldest_prepared: float | None = None
    in_doubt_bytes: int = 0

    @property
    def states(self) -> dict[State, int]:
        """How many branches each state has."""
        return {state: sum(ages) for state, ages in self.ages.items()}


async def branch_stats(entries: Iterable[BranchRuntime]) -> BranchStats:
    """Count *entries*: a snapshot of them is taken at once.

    Counting goes through all branches, so the event loop gets its turn now and then. Who comes or goes meanwhile is
    counted as they were when it began, or not at all.
    """
    stats = BranchStats()
    now = time.time()
    async for entry in in_turns(entries):
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

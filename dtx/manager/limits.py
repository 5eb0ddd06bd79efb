"""Limits for clients: limits of the manager, quotas of users and virtual hosts, and the disk alarm.

Quotas (``--quota``) limit what each user and each virtual host holds. A branch counts for its owner and for its virtual
host from its start until its end, while it is open, prepared or heuristic. From the prepare on it also counts as in
doubt. Its messages stay counted as bytes when they move from the memory of dtx to the log. A start, connection or
channel above a quota is refused; a prepare above it is answered with a rollback. After a restart, branches in the log
are counted, never refused.

The disk alarm: while the log's disk is nearly full, clients that publish wait, as in RabbitMQ. The remaining space is
for operations that free space or finish branches: acknowledgements, commits and rollbacks go on. Free space is measured
where PostgreSQL is on this machine and dtx knows its directory. The space of any other PostgreSQL is unknown. There the
alarm is raised for some seconds each time that it refuses a write for lack of space.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dtx.config.rules import Quota, QuotaResource
from dtx.store.work import Budget
from dtx.telemetry import get_logger

_log = get_logger(part="disk")
NO_LIMIT: Final = 1 << 62
POLL_SECONDS: Final = 1.0
"""Interval of measuring the disk."""
_SCOPES: Final = ("user", "vhost")
_MOST_EMPTY: Final = 1_000
"""Pairs of user and virtual host that are kept though they hold nothing: one or two megabytes."""
_COUNTED: Final[tuple[QuotaResource, ...]] = tuple(each for each in QuotaResource if each is not QuotaResource.BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the manager.

    Args:
        default_timeout, max_timeout: seconds; a default of 0 is none.
        tombstone_ttl: seconds for which a branch that dtx rolled back answers one rollback.
        branch_bytes, branch_messages: limits of one branch.
        branches: of all clients, those in doubt or heuristic included.
        held_bytes: memory for their messages, and for unsettled deliveries of selected channels.
        cache_bytes: memory for messages of prepared branches.
        patience: seconds after which a request whose phase two is still under way is answered with 541.
        forward_timeout: seconds for which a request is sent to the member that has its branch.
        coordinators: users that may see and complete every branch.
        quotas: of users and virtual hosts.
        disk: a directory on the log's disk; ``None`` where that is on another machine.
        disk_free: bytes that must be free there.
    """

    default_timeout: int = 60
    max_timeout: int = 24 * 3600
    tombstone_ttl: float = 600.0
    branch_bytes: int = 64 << 20
    branch_messages: int = 10_000
    branches: int = 100_000
    held_bytes: int = 1 << 30
    cache_bytes: int = 64 << 20
    patience: float = 30.0
    forward_timeout: float = 5.0
    coordinators: frozenset[str] = frozenset()
    quotas: tuple[Quota, ...] = ()
    disk: Path | None = None
    disk_free: int = 0


class Usage:
    """The holdings of one user or one virtual host.

    Args:
        scope: ``user`` or ``vhost``.
        name: of the user or virtual host.
        limits: by name; without those that are not limited.
    """

    __slots__ = ("budget", "counts", "limits", "name", "scope")

    def __init__(self, scope: str, name: str, limits: dict[str, int]) -> None:
        self.scope = scope
        self.name = name
        self.limits: Final = limits
        most = limits.get(QuotaResource.BYTES, NO_LIMIT)
        self.budget: Final = Budget(most, f"{scope} '{name}' may hold {most} bytes (--quota)")
        self.counts: Final = dict.fromkeys(_COUNTED, 0)

    @property
    def used(self) -> dict[str, int]:
        """The amount of each resource, by name."""
        counts = self.counts | {QuotaResource.BYTES: self.budget.used}
        return {str(resource): count for resource, count in counts.items()}

    def take_in(self, holdings: "Holdings") -> None:
        """Add *holdings* to the counts."""
        self.budget.used += holdings.budget.used
        for resource, count in holdings.counts.items():
            self.counts[resource] += count

    def excess(self, resource: QuotaResource) -> str | None:
        """The reason why one more exceeds the quota, for people; ``None`` where it does not."""
        limit = self.limits.get(resource, NO_LIMIT)
        if self.counts[resource] < limit:
            return None
        kind = "branches in doubt" if resource is QuotaResource.IN_DOUBT else resource
        return f"{self.scope} '{self.name}' has {self.counts[resource]} {kind}, its quota is {limit}"


class Holdings:
    """The holdings of one user in one virtual host.

    Args:
        total: the memory that all share.
        limited: the usage of the user and of the virtual host, if they have a quota: these count them, too.

    Attributes:
        budget: for messages in memory; also charges the total.
    """

    __slots__ = ("_budgets", "_counted", "_limited", "budget", "counts")

    def __init__(self, total: Budget, limited: Sequence[Usage]) -> None:
        self._limited = limited
        self.counts: Final = dict.fromkeys(_COUNTED, 0)
        self._counted = (self.counts, *(usage.counts for usage in limited))
        self.budget: Final = Budget(NO_LIMIT, "", total, *(usage.budget for usage in limited))
        self._budgets = (self.budget, *(usage.budget for usage in limited))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self.budget.used and not any(self.counts.values())

    def charge(self, size: int) -> None:
        """Add *size* bytes, which may be negative, outside the memory that all share."""
        for budget in self._budgets if size else ():
            budget.used += size

    def add(self, resource: QuotaResource) -> None:
        """Count one more, regardless of quotas."""
        for counts in self._counted:
            counts[resource] += 1

    def remove(self, resource: QuotaResource) -> None:
        """Count one less."""
        for counts in self._counted:
            counts[resource] -= 1

    def excess(self, *resources: QuotaResource) -> str | None:
        """The reason why one more of each of *resources* exceeds a quota, for people; ``None`` where it does not."""
        for usage in self._limited:
            for resource in resources:
                reason = usage.excess(resource)
                if reason is not None:
                    return reason
        return None


class Quotas:
    """The holdings of all users in all virtual hosts that they have used, and their quotas.

    Args:
        quotas: the settings; a name's own quota overrides that of ``*``.
        total: the memory that all share.
    """

    def __init__(self, quotas: Iterable[Quota], total: Budget) -> None:
        self.limits: Final = {(quota.scope, quota.name): dict(quota.limits) for quota in quotas}
        """The settings, by scope and name."""
        self._total = total
        self._usages: dict[tuple[str, str], Usage] = {}
        """The usage of users and virtual hosts; it is kept current only for those that have a quota."""
        self._holdings: dict[tuple[str, str], Holdings] = {}
        self._most = _MOST_EMPTY
        """At this number of holdings, the empty ones are dropped."""

    def __iter__(self) -> Iterator[Usage]:
        """The present usage of every user and every virtual host that holds anything."""
        found: dict[tuple[str, str], Usage] = {}
        for names, holdings in self._holdings.items():
            for key in () if holdings.is_empty else zip(_SCOPES, names, strict=True):
                found.setdefault(key, self._usage(*key)).take_in(holdings)
        return iter(found.values())

    @property
    def in_doubt(self) -> int:
        """The number of branches in doubt of all users."""
        return sum(holdings.counts[QuotaResource.IN_DOUBT] for holdings in self._holdings.values())

    def of(self, user: str, vhost: str) -> Holdings:
        """The holdings of *user* in *vhost*. Count in them at once; later the object may have been replaced."""
        found = self._holdings.get((user, vhost))
        if found is None:
            if len(self._holdings) >= self._most:
                self._leave_out_empty()
            keys = zip(_SCOPES, (user, vhost), strict=True)
            usages = [self._usages.setdefault(key, self._usage(*key)) for key in keys]
            found = self._holdings[user, vhost] = Holdings(self._total, [usage for usage in usages if usage.limits])
        return found

    def _leave_out_empty(self) -> None:
        self._holdings = {names: held for names, held in self._holdings.items() if not held.is_empty}
        self._most = max(_MOST_EMPTY, 2 * len(self._holdings))
        known = {key for names in self._holdings for key in zip(_SCOPES, names, strict=True)}
        self._usages = {key: usage for key, usage in self._usages.items() if key in known}

    def _usage(self, scope: str, name: str) -> Usage:
        return Usage(scope, name, self.limits.get((scope, "*"), {}) | self.limits.get((scope, name), {}))


def _free(place: Path) -> int:
    return shutil.disk_usage(place).free


class DiskAlarm:
    """Watches the free space of the disk, and resumes clients that wait for it.

    Args:
        place: a directory on the disk; ``None`` where it is on another machine.
        limit: free bytes below which the alarm is raised; 0 for never.
        is_full: whether the database has just refused a write for lack of space.
        free: measures the free bytes.
    """

    def __init__(
        self,
        place: Path | None,
        limit: int,
        is_full: Callable[[], bool] = lambda: False,
        free: Callable[[Path], int] = _free,
    ) -> None:
        self.limit: Final = limit if place is not None else 0
        self.free: int | None = None
        """Bytes in the last measurement; ``None`` where unknown."""
        self.raised = False
        self._place = place
        self._is_full = is_full
        self._ask = free
        self._waiting: dict[Callable[[], None], None] = {}

    async def watch(self) -> None:
        """Measure the disk at intervals until cancelled."""
        while True:
            if self._place is not None and self.limit:
                with suppress(OSError):  # other checks report it
                    self.free = await asyncio.to_thread(self._ask, self._place)
            self.check()
            await asyncio.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Raise the alarm, or end it and resume the clients."""
        low = self._is_full() or (self.free is not None and self.free < self.limit)
        if low and not self.raised:
            _log.warning("low on disk, clients that publish wait", free=self.free, limit=self.limit)
        elif self.raised and not low:
            _log.info("there is room on the disk again", free=self.free, limit=self.limit)
        self.raised = low
        if not low:
            waiting, self._waiting = self._waiting, {}
            for resume in waiting:
                try:
                    resume()
                except Exception:  # noqa: BLE001 - logged; the others must be resumed, too
                    _log.exception("a client could not be resumed")

    def wait(self, resume: Callable[[], None]) -> None:
        """Call *resume* when there is room again. Only while the alarm is raised."""
        self._waiting[resume] = None

    def leave(self, resume: Callable[[], None]) -> None:
        """Stop waiting with *resume*. Idempotent."""
        self._waiting.pop(resume, None)

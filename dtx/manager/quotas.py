"""What each user and each virtual host holds, and the most that it may hold (``--quota``).

A branch counts for its owner, and for its virtual host, from its start until nobody has to ask about it any more: while
it is open, prepared and heuristic. From the prepare on it counts as in doubt, too, and its messages stay counted as
bytes when they leave the memory of dtx for the log. A start, connection or channel that would be too much is refused;
a prepare that would be too much is answered with a rollback. What a restart finds in the log is counted, never refused.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

from dtx.config.quotas import Quota
from dtx.store.work import Budget

NO_LIMIT: Final = 1 << 62


class Resource(StrEnum):
    """What is counted, apart from bytes."""

    BRANCHES = "branches"
    IN_DOUBT = "in-doubt"
    CONNECTIONS = "connections"
    CHANNELS = "channels"


BYTES: Final = "bytes"


class Usage:
    """What one user or one virtual host holds.

    Args:
        scope: ``user`` or ``vhost``.
        name: of it.
        limits: by name, those that there are.
    """

    __slots__ = ("_counts", "budget", "limits", "name", "scope")

    def __init__(self, scope: str, name: str, limits: dict[str, int]) -> None:
        self.scope = scope
        self.name = name
        self.limits: Final = limits
        most = limits.get(BYTES, NO_LIMIT)
        self.budget: Final = Budget(most, f"{scope} '{name}' may hold {most} octets (--quota)")
        self._counts = dict.fromkeys(Resource, 0)

    @property
    def used(self) -> dict[str, int]:
        """By name, how much of what."""
        return {str(resource): count for resource, count in self._counts.items()} | {BYTES: self.budget.used}

    def add(self, resource: Resource, count: int) -> None:
        """So many more, or fewer."""
        self._counts[resource] += count

    def excess(self, resource: Resource) -> str | None:
        """Why one more is too much; ``None`` where it is not."""
        limit = self.limits.get(resource, NO_LIMIT)
        if self._counts[resource] < limit:
            return None
        kind = "branches in doubt" if resource is Resource.IN_DOUBT else resource
        return f"{self.scope} '{self.name}' has {self._counts[resource]} {kind}, its quota is {limit}"


class Quotas:
    """The usage of all users and virtual hosts that hold anything.

    Args:
        quotas: what was set; that of a name goes before that of ``*``.
        total: the memory that all share.
    """

    def __init__(self, quotas: Iterable[Quota], total: Budget) -> None:
        self._quotas = {(quota.scope, quota.name): dict(quota.limits) for quota in quotas}
        self._total = total
        self._usage: dict[tuple[str, str], Usage] = {}

    def __iter__(self) -> Iterator[Usage]:
        return iter(self._usage.values())

    def _of(self, user: str, vhost: str) -> tuple[Usage, Usage]:
        return self._find("user", user), self._find("vhost", vhost)

    def _find(self, scope: str, name: str) -> Usage:
        found = self._usage.get((scope, name))
        if found is None:
            limits = self._quotas.get((scope, "*"), {}) | self._quotas.get((scope, name), {})
            found = self._usage[scope, name] = Usage(scope, name, limits)
        return found

    def budget(self, user: str, vhost: str) -> Budget:
        """What *user* may hold in memory in *vhost*: it is charged to both, and to the total."""
        return Budget(NO_LIMIT, "", self._total, *(usage.budget for usage in self._of(user, vhost)))

    def charge(self, user: str, vhost: str, octets: int) -> None:
        """So much more is held, or less, outside of the memory that :meth:`budget` counts."""
        for usage in self._of(user, vhost) if octets else ():
            usage.budget.charge(octets)

    def add(self, user: str, vhost: str, resource: Resource) -> None:
        """One more, whether that is too much or not."""
        for usage in self._of(user, vhost):
            usage.add(resource, 1)

    def remove(self, user: str, vhost: str, resource: Resource) -> None:
        """One less."""
        for usage in self._of(user, vhost):
            usage.add(resource, -1)
            if not any(usage.used.values()):
                del self._usage[usage.scope, usage.name]

    def excess(self, user: str, vhost: str, *resources: Resource) -> str | None:
        """Why one more of each of *resources* is too much, for people; ``None`` where it is not."""
        for usage in self._of(user, vhost) if self._quotas else ():
            for resource in resources:
                reason = usage.excess(resource)
                if reason is not None:
                    return reason
        return None

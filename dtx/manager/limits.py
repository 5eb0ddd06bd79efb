"""What a transaction manager allows its clients."""

from dataclasses import dataclass
from pathlib import Path

from dtx.config.quotas import Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the manager allows.

    Args:
        default_timeout, max_timeout: seconds; a default of 0 is none.
        tombstone_ttl: seconds for which a branch that was rolled back by itself answers one rollback.
        branch_bytes, branch_messages: what one branch may hold.
        branches: of all clients, those that are in doubt or heuristic included.
        held_bytes: memory for their messages, and for deliveries of selected channels that are not settled.
        cache_bytes: memory for messages of prepared branches.
        patience: seconds after which a request whose phase two is still under way is answered 541.
        coordinators: users that may see and complete every branch.
        quotas: of users and virtual hosts.
        disk: a directory on the log's disk; ``None`` where that is another machine's.
        disk_free: octets that shall be free there.
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
    coordinators: frozenset[str] = frozenset()
    quotas: tuple[Quota, ...] = ()
    disk: Path | None = None
    disk_free: int = 0

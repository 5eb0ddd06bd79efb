"""The members in the simulated database, by the rules of their SQL: leases, fencing, and the move of branches.

A takeover is one transaction. From its statements to its commit it locks the rows of members that it removes: writes
and renewals of these members wait. If its session ends before the commit, nothing has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final
from uuid import UUID

from dtx.log import membership
from tests.evidence.sim.scheduler import SimLoop
from tests.support.memory_log import MemoryDatabase

FIRST_EPOCH: Final = 1 << 32
"""The epochs of members differ from those of a dtx that is alone."""
Rows = list[tuple[Any, ...]]


class Blocked(Exception):
    """A transaction that has not ended has a lock on the row: the statement waits."""


@dataclass(slots=True)
class MemberRow:
    """A row of ``dtx.member``."""

    instance: UUID
    holder: str
    process: str
    address: str
    epoch: int
    expires_at: float


@dataclass(slots=True, eq=False)
class Takeover:
    """A transaction of a member that takes branches.

    Args:
        removed: members whose rows it deletes.
        heir: gets the branches that belong to no member.
        committing: its commit was sent.
    """

    removed: list[UUID] = field(default_factory=list)
    heir: UUID | None = None
    committing: bool = False
    has_ended: bool = False


@dataclass(slots=True)
class LeaseRow:
    """The row of ``dtx.lease``."""

    instance: UUID
    process: str
    holder: str
    epoch: int
    expires_at: float


class MemberTable:
    """The rows of members, their secrets, and the takeover under way.

    Args:
        loop: the clock.
        database: has the branches.
    """

    def __init__(self, loop: SimLoop, database: MemoryDatabase) -> None:
        self.rows: dict[UUID, MemberRow] = {}
        self.violations: list[str] = []
        self.former: dict[int, UUID] = {}
        """The members of all epochs."""
        self.takeovers = 0
        """Number of members whose branches others have taken."""
        self._loop = loop
        self._database = database
        self._epochs = count(FIRST_EPOCH)
        self._secrets: list[bytes] = []
        self._under_way: Takeover | None = None

    def writer(self, epoch: int) -> UUID | None:
        """The member that proves *epoch*; ``None``: there is none.

        Raises:
            Blocked: a takeover is about to remove it.
        """
        row = next((row for row in self.rows.values() if row.epoch == epoch), None)
        if row is None:
            return None
        self._wait_for(row.instance)
        return row.instance

    def raise_epoch(self, instance: UUID) -> int | None:
        """A new epoch of the member; ``None``: it has been removed.

        Raises:
            Blocked: a takeover is about to remove it.
        """
        self._wait_for(instance)
        row = self.rows.get(instance)
        if row is None:
            return None
        row.epoch = self._new_epoch(instance)
        return row.epoch

    def _new_epoch(self, instance: UUID) -> int:
        epoch = next(self._epochs)
        self.former[epoch] = instance
        return epoch

    def _wait_for(self, instance: UUID) -> None:
        if self._under_way is not None and instance in self._under_way.removed:
            raise Blocked

    # -- the statements

    def join(self, lease: LeaseRow | None, values: dict[str, Any]) -> LeaseRow | None:
        """Add a member; return the new lease, or ``None`` if another dtx has it."""
        now = self._loop.now
        is_ours = lease is not None and lease.instance == values["all"]
        if lease is not None and not is_ours and not lease.expires_at < now:
            return None
        epoch, end = (1, now) if lease is None else (lease.epoch + (not is_ours), lease.expires_at)
        until = now + values["ttl"]
        self.rows[values["instance"]] = MemberRow(
            values["instance"], values["holder"], values["process"], values["address"],
            self._new_epoch(values["instance"]), until,
        )  # fmt: skip
        return LeaseRow(values["all"], "", "members", epoch, max(end, until))

    def renew(self, lease: LeaseRow | None, values: dict[str, Any]) -> Rows:
        """Extend the lease of a member."""
        self._wait_for(values["instance"])
        if lease is None or lease.instance != values["all"]:
            return []
        until = self._loop.now + values["ttl"]
        lease.expires_at = max(lease.expires_at, until)
        row = self.rows.get(values["instance"])
        if row is None:
            return []
        row.expires_at = until
        return [(row.epoch,)]

    def leave(self, lease: LeaseRow | None, values: dict[str, Any]) -> Rows:
        """Remove a member in order."""
        self._wait_for(values["instance"])
        if lease is not None and lease.instance == values["all"]:
            self.rows.pop(values["instance"], None)
            lease.expires_at = max((row.expires_at for row in self.rows.values()), default=float("-inf"))
        return []

    def execute(self, statement: str, values: dict[str, Any], takeover: Takeover | None) -> Rows:
        """Run another statement of :mod:`dtx.log.membership`."""
        if takeover is not None and takeover.has_ended:
            return []
        match statement:
            case membership._MAKE_PROOF:
                self._secrets = self._secrets or [values["secret"]]
                return []
            case membership._PROOFS:
                return [(secret,) for secret in self._secrets]
            case membership._MEMBERS:
                return [
                    (row.instance, row.holder, row.process, row.address, row.expires_at < self._loop.now, self._moment)
                    for row in self.rows.values()
                ]
            case membership._IS_MEMBER:
                return [(True,)] if values["instance"] in self.rows else []
            case membership._ONE_AT_A_TIME:
                self._under_way = self._under_way or takeover
                return [(self._under_way is takeover,)]
            case membership._REMOVE:
                assert takeover is not None
                takeover.removed = self._gone(values["gone"], values["dead"])
                for instance in takeover.removed:
                    if self.rows[instance].expires_at >= self._loop.now:
                        self.violations.append(f"the branches of {instance} are taken, and its lease is valid")
                return [(instance,) for instance in takeover.removed]
            case membership._ADOPT:
                assert takeover is not None
                takeover.heir = values["instance"]
                return [()] * len(self._orphans(takeover))
            case _:
                raise AssertionError(f"not a statement of members: {statement}")

    @property
    def _moment(self) -> str:
        """The snapshot of a statement: what was committed before it."""
        return str(len(self._database.journal))

    def _gone(self, gone: Sequence[UUID], dead: Sequence[UUID]) -> list[UUID]:
        found = [self.rows[instance] for instance in gone if instance in self.rows]
        return [row.instance for row in found if row.expires_at < self._loop.now or row.instance in dead]

    def _orphans(self, takeover: Takeover) -> list[UUID]:
        """The ids of branches of no member, for the transaction, which does not see the rows that it has removed."""
        there = self.rows.keys() - set(takeover.removed)
        rows = self._database.rows
        return [key for key, row in rows.items() if row.branch.member not in there]

    def commit(self, takeover: Takeover) -> None:
        """Make its changes visible, unless it was rolled back."""
        if self._under_way is not takeover:
            return
        if takeover.heir is not None:
            for key in self._orphans(takeover):
                row = self._database.rows[key]
                row.branch = row.branch._replace(member=takeover.heir)
        for instance in takeover.removed:
            self.rows.pop(instance, None)
        self.takeovers += len(takeover.removed)
        self._under_way = None

    def end(self, takeover: Takeover) -> None:
        """Its session has ended: a commit under way happens or not, and without one it is rolled back."""
        takeover.has_ended = True
        if takeover.committing and self._loop.random.random() < 0.5:
            self.commit(takeover)
        if self._under_way is takeover:
            self._under_way = None

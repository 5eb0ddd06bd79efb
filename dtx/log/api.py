"""The interface of the transaction log for the manager. PostgreSQL and in-memory logs implement one contract."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol
from uuid import UUID

from dtx.db.connections import LogError, LogUnavailable
from dtx.log.changes import Definitions, QueueContents, Slot, StoredMessage
from dtx.log.records import (
    ArchivedMessage,
    BranchRecord,
    Duplicate,
    JournalEntry,
    LoggedCopies,
    LogWrite,
    Lookup,
    WorkRow,
)
from dtx.xa.xid import Xid

__all__ = [
    "DuplicateXid",
    "InFlight",
    "LeaseHeld",
    "LeaseLost",
    "LogConflict",
    "LogError",
    "LogUnavailable",
    "MessageLog",
    "OnWritten",
    "TransactionLog",
]


class LogConflict(LogError):
    """The row was not in the expected state and version, or the xid is already there. Nothing was written."""


class DuplicateXid(LogConflict):
    """Another branch has the xid of this one, or has ended since this one began. Nothing was written."""


class LeaseHeld(LogError):
    """Another dtx has the lease, and the caller does not wait. Nothing was written.

    Args:
        holder: the dtx that has it, for people.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"{holder} has the lease")
        self.holder = holder


class LeaseLost(LogError):
    """Another dtx has the lease, or the lease of this one ran out. Nothing was written, with one exception.

    After the loss of a connection the outcome is *not known*, and the message says so. The dtx that holds the lease has
    read the present log.
    """


OnWritten = Callable[[LogError | None], None]
"""Called with the outcome of a write: ``None`` when it is durable."""


class TransactionLog(Protocol):
    """The durable state of every branch that has voted.

    Every method raises LogUnavailable when the database is away, and no exceptions other than LogError.
    """

    async def open(self) -> None:
        """Take the lease of this resource manager and raise its epoch. Waits while another dtx holds it."""

    async def close(self) -> None:
        """Finish pending writes, release the lease, close connections."""

    @property
    def lease_valid(self) -> bool:
        """Whether this dtx certainly holds the lease now (by the monotonic clock, with a margin)."""

    @property
    def member(self) -> UUID | None:
        """This dtx in the rows of branches; ``None`` if it is alone."""

    @property
    def moment(self) -> str | None:
        """A moment before now, for :attr:`~dtx.log.records.Insert.since`; ``None`` if this dtx is alone."""

    @property
    def disk_full(self) -> bool:
        """Whether the database has refused a write for lack of space within the last seconds."""

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        """Make *record* durable; returns after the commit that contains it.

        Args:
            record: what to write.
            urgent: ``False`` when no client waits for it. It may wait some milliseconds for others; a record of a
                branch lets later records pass.

        Raises:
            LogConflict, LogUnavailable, LeaseLost.
        """

    @property
    def congested(self) -> bool:
        """Whether so many records wait that callers of :meth:`post` should pause."""

    def post(self, record: LogWrite, written: OnWritten, *, urgent: bool = True) -> None:
        """As ``write``, without waiting; regardless of :attr:`congested`.

        Args:
            record: what to write.
            written: called with the outcome once, after this method has returned.
            urgent: as for ``write``.
        """

    def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        """Every logged branch of this resource manager, without work; only those of *member*, if it is given."""

    def load_listed(self, vhost: str) -> AsyncIterator[BranchRecord]:
        """The branches of other members that wait for their transaction managers, without units; for recovery scans.

        While this member takes branches from others, they are among them.
        """

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """The work of a branch, in order of position, bodies included."""

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """As :meth:`read_work`, and also messages that are stored in standalone mode."""

    async def read_archive(self, xid: Xid) -> list[ArchivedMessage]:
        """The undelivered messages of forgotten branches with *xid*, in order."""

    async def load_copies(
        self, branch_ids: Collection[UUID] | None = None, position: int | None = None
    ) -> LoggedCopies:
        """The replays, settlements and duplicates of this resource manager, without contents.

        Args:
            branch_ids: only these branches.
            position: only this message of each of them.
        """

    async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
        """Those of the branches that the log has now, whichever member they belong to."""

    async def read_duplicates(self, branch_ids: Collection[UUID]) -> list[Duplicate]:
        """The duplicates of messages of these branches with their contents, in order of branch id and position."""

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """What the log has about *xid* now.

        Args:
            vhost: the virtual host.
            xid: of the branch.
            branch_id: only the ending of this branch counts; without it, the latest of all with this xid, by timestamp.

        Raises:
            LeaseLost: the lease is not valid: an unknown xid (404) could be wrong then.
        """

    async def which_logged(self, keys: Sequence[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        """Those of *keys*, pairs of virtual host and xid, that branches in the log have."""

    async def history(self, vhost: str | None, xid: Xid) -> list[JournalEntry]:
        """The journal of *xid*, oldest first; all vhosts where *vhost* is ``None``."""


class MessageLog(TransactionLog, Protocol):
    """The log of standalone mode: messages and topology are in the same database and the same groups."""

    async def settled(self) -> None:
        """Return when the outcome of every write so far is known; LogUnavailable when that takes too long."""

    async def load_definitions(self) -> Definitions:
        """All durable topology of this resource manager."""

    def load_queues(self, queues: Sequence[int], *, detailed: Collection[int] = ()) -> AsyncIterator[QueueContents]:
        """The contents of *queues*, in their order; of those in *detailed* with flags and sizes. Reads no bodies."""

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """The messages in *slots*, bodies included, in order; empty slots are left out.

        Args:
            slots: the slots to read; without *octets*, all of them.
            octets: bytes of bodies after which the answer ends; it has at least one message.
        """

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """Those of *slots* that hold a message. After a write of unknown outcome, await :meth:`settled` before."""

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """The queues of this resource manager that have stored messages and are not among *known*."""


class InFlight:
    """Counts the writes under way, and waits until there are none."""

    __slots__ = ("_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """Count a write that starts."""
        self.count += 1

    def end(self) -> None:
        """Count a write that has ended. The last one wakes all waiters."""
        self.count -= 1
        if not self.count and self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def none(self) -> None:
        """Return when no write is under way."""
        while self.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

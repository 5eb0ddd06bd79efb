"""The transaction log as the manager sees it. Two implementations obey one contract: PostgreSQL and in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Protocol
from uuid import UUID

from dtx.db.connections import LogError, LogUnavailable
from dtx.log.changes import Definitions, QueueContents, Slot, StoredMessage
from dtx.log.records import ArchivedMessage, BranchRecord, JournalEntry, LogWrite, Lookup, WorkRow
from dtx.xa.xid import Xid

__all__ = [
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
    """The row was not in the expected state and version, or the xid is there already. Nothing was written."""


class LeaseHeld(LogError):
    """Another dtx has the lease, and it was not to be waited for. Nothing was written.

    Args:
        holder: who has it, for people.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(f"{holder} has the lease")
        self.holder = holder


class LeaseLost(LogError):
    """Another dtx holds the lease (or ours ran out). Nothing was written, unless the connection was lost before.

    Then that is *not known*, and the message says so; the dtx that holds the lease has read what there is.
    """


OnWritten = Callable[[LogError | None], None]
"""Hears of the outcome of a write: ``None`` when it is durable."""


class TransactionLog(Protocol):
    """The truth about every branch that has voted.

    Every method raises LogUnavailable when the database is away; nothing else than a LogError escapes.
    """

    async def open(self) -> None:
        """Take the lease of this resource manager, bumping its epoch. Waits while another dtx holds it."""

    async def close(self) -> None:
        """Finish pending writes, release the lease, close connections."""

    @property
    def lease_valid(self) -> bool:
        """Whether the lease is known to be ours at this moment (by the monotonic clock, with a margin)."""

    @property
    def disk_full(self) -> bool:
        """Whether the database has just refused a write for want of space."""

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        """Make *record* durable; returns after the commit that contains it.

        Args:
            record: what to write.
            urgent: ``False`` where nobody waits for it: it may wait some milliseconds for company, and what is written
                of a branch lets others pass meanwhile.

        Raises:
            LogConflict, LogUnavailable, LeaseLost.
        """

    @property
    def congested(self) -> bool:
        """Whether so many records wait that those who :meth:`post` should pause."""

    def post(self, record: LogWrite, told: OnWritten, *, urgent: bool = True) -> None:
        """As ``write``, without waiting.

        Args:
            record: what to write.
            told: hears of the outcome once, after this returned.
            urgent: as for ``write``.
        """

    def load(self) -> AsyncIterator[BranchRecord]:
        """Every logged branch of this resource manager, without work; for the start."""

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """The work of a branch, in order of position, bodies included."""

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """As :meth:`read_work`, wherever the messages are: those of standalone mode included."""

    async def read_archive(self, xid: Xid) -> list[ArchivedMessage]:
        """Undelivered messages of forgotten branches with *xid*, in their order."""

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """What the log says about *xid* now.

        Args:
            vhost: where.
            xid: of the branch.
            branch_id: the ending of this one alone counts; else the last of all that ever had this xid, as clocks say.

        Raises:
            LeaseLost: the lease is not valid: see "never 404 in doubt".
        """

    async def history(self, vhost: str | None, xid: Xid) -> list[JournalEntry]:
        """The journal of *xid*, oldest first; all vhosts where *vhost* is ``None``."""


class MessageLog(TransactionLog, Protocol):
    """The log of standalone mode: messages and topology are in the same database, written in the same groups."""

    async def settled(self) -> None:
        """Return when the outcome of every write that was ever sent is known; LogUnavailable when that takes long."""

    async def load_definitions(self) -> Definitions:
        """All durable topology of this resource manager."""

    def load_queues(self, queues: Sequence[int], *, detailed: Collection[int] = ()) -> AsyncIterator[QueueContents]:
        """What is stored in *queues*, in their order; those in *detailed* with flags and sizes. Reads no body."""

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """The messages in *slots*, bodies included, in their order; what is not there is left out.

        Args:
            slots: which; those that hold a message are all read where *octets* is not given.
            octets: of bodies: with so many, and one message at least, the answer ends.
        """

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """Those of *slots* that hold a message; after a write of unknown outcome ask when the log is ``settled``."""

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """Queues of this resource manager that have messages stored and are not among *known*."""


class InFlight:
    """How many writes are on their way, for those who wait until none is."""

    __slots__ = ("_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """One more."""
        self.count += 1

    def end(self) -> None:
        """One less."""
        self.count -= 1
        if not self.count and self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def none(self) -> None:
        """Return when none is under way."""
        while self.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

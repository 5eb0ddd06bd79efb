"""The real log, with the real lease or membership and the real writer, on the database of the simulation."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self
from uuid import UUID

import psycopg

from dtx.db.pipeline import SessionLost
from dtx.log.api import LogUnavailable
from dtx.log.changes import Definitions, QueueContents, Slot, StoredMessage
from dtx.log.lease import Lease
from dtx.log.membership import Membership
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.queries import _WAITING, Fetch, LogQueries
from dtx.log.records import BranchRecord, Duplicate, LoggedCopies, Lookup, WorkRow
from dtx.log.writer import Writer
from dtx.xa.xid import Xid
from tests.evidence.sim.database import ANSWER_TIMEOUT, RETRY_WINDOW, RM, SimDatabase, SimSession
from tests.evidence.sim.members import Rows, Takeover
from tests.evidence.sim.scheduler import current


class _Connection:
    """A connection of the lease, or of a member: it runs their statements, as one of psycopg does."""

    closed = False

    def __init__(self, database: SimDatabase) -> None:
        self._session = SimSession(database)
        self._database = database
        self._takeover: Takeover | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def cursor(self) -> Self:
        """Return a cursor, which is the connection."""
        return self

    async def execute(self, statement: str, values: dict[str, Any]) -> "_Cursor":
        """Run a statement.

        Raises:
            psycopg.OperationalError: the connection is gone, and the outcome is not known.
        """
        takeover = self._takeover
        return _Cursor(await self._run(lambda: self._database.execute(statement, values, takeover)))

    async def _run(self, work: Callable[[], Any]) -> Any:
        try:
            return await self._session.over(work)
        except SessionLost as lost:
            self.closed = True
            raise psycopg.OperationalError(str(lost)) from None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Run statements in one transaction."""
        takeover, members = Takeover(), self._database.members
        self._takeover = takeover
        self._session.on_end = lambda: members.end(takeover)
        current().on_exit.append(self._session.on_end)
        try:
            yield
        except BaseException:
            members.end(takeover)
            raise
        else:
            takeover.committing = True
            await self._run(lambda: members.commit(takeover))
        finally:
            self._takeover = None

    async def close(self) -> None:
        """Disconnect."""
        self.closed = True
        self._session.end()


class _Cursor:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.rowcount = len(rows)

    async def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row."""
        return self._rows.pop(0) if self._rows else None

    async def fetchall(self) -> Rows:
        """Return all rows."""
        return self._rows


class _Connecting:
    """Connections of a lease to the simulated database."""

    database: SimDatabase
    _connection: Any

    async def _connect(self, seconds: float) -> Any:
        if self._connection is None or self._connection.closed:
            self._connection = await self._session()
        return self._connection

    async def _session(self) -> Any:
        try:
            await self.database.connect()
        except OSError as error:
            raise LogUnavailable(f"cannot connect: {error}") from None
        return _Connection(self.database)


class _SimLease(_Connecting, Lease):
    """The real lease, on a connection of the simulation."""


class _SimMembership(_Connecting, Membership):
    """The real membership, on connections of the simulation."""


class _SimQueries(LogQueries):
    """The queries of the log, on the tables of the twin."""

    database: SimDatabase

    @property
    def fetch(self) -> Fetch:
        """There is no SQL."""
        raise NotImplementedError

    async def _go(self) -> None:
        await self.database.pause()
        if not self.database.is_reachable:
            raise LogUnavailable("the database is away")

    async def load(self, member: UUID | None = None) -> AsyncIterator[BranchRecord]:
        """Yield every branch, or those of *member*."""
        await self._go()
        for record in [record async for record in self.database.tables.load(member)]:
            yield record

    async def load_prepared(self, vhost: str, mine: UUID | None) -> AsyncIterator[BranchRecord]:
        """Yield the branches that wait for their transaction managers, without those of *mine*."""
        await self._go()
        for record in [record async for record in self.database.tables.load()]:
            is_waiting = record.state in _WAITING or record.stuck is not None
            if record.vhost == vhost and is_waiting and (mine is None or record.member != mine):
                yield record
        await self.database.pause()

    async def read_work(self, branch_id: UUID) -> list[WorkRow]:
        """Return the work of a branch."""
        await self._go()
        found = await self.database.tables.read_work(branch_id)
        await self.database.pause()
        return found

    async def read_messages_of(self, branch_id: UUID) -> list[WorkRow]:
        """Return the work of a branch, with messages from the log or from queues."""
        await self._go()
        found = await self.database.tables.read_messages_of(branch_id)
        await self.database.pause()
        return found

    async def load_copies(
        self, branch_ids: Collection[UUID] | None = None, position: int | None = None
    ) -> LoggedCopies:
        """Return replays, settlements and duplicates."""
        await self._go()
        found = await self.database.tables.load_copies(branch_ids, position)
        await self.database.pause()
        return found

    async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
        """Return those of the branches that the tables have."""
        await self._go()
        return await self.database.tables.unended(branch_ids)

    async def read_duplicates(self, branch_ids: Collection[UUID]) -> list[Duplicate]:
        """Return the duplicates of messages of these branches."""
        await self._go()
        return await self.database.tables.read_duplicates(branch_ids)

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """Return the result of the tables."""
        await self._go()
        found = await self.database.tables.lookup(vhost, xid, branch_id)
        await self.database.pause()
        return found

    async def which_logged(self, keys: Sequence[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        """Return those of *keys* that branches have."""
        await self._go()
        return await self.database.tables.which_logged(keys)

    async def load_definitions(self) -> Definitions:
        """Return all definitions."""
        await self._go()
        return await self.database.tables.load_definitions()

    async def load_queues(
        self, queues: Sequence[int], *, detailed: Collection[int] = ()
    ) -> AsyncIterator[QueueContents]:
        """Yield the contents of queues."""
        await self._go()
        async for contents in self.database.tables.load_queues(queues, detailed=detailed):
            yield contents

    async def read_messages(self, slots: Sequence[Slot], octets: int | None = None) -> dict[Slot, StoredMessage]:
        """Return messages by slot."""
        await self._go()
        found = await self.database.tables.read_messages(slots, octets)
        await self.database.pause()
        return found

    async def which_exist(self, slots: Sequence[Slot]) -> set[Slot]:
        """Return the slots with a message."""
        await self._go()
        return await self.database.tables.which_exist(slots)

    async def stray_queues(self, known: Collection[int]) -> list[int]:
        """Return queues that are not in *known*."""
        await self._go()
        return await self.database.tables.stray_queues(known)


class SimLog(PostgresTransactionLog, _SimQueries):
    """The real log with the real lease, the real writer, and the database of the simulation.

    Args:
        database: of the simulation.
        address: for other members; ``None``: this dtx is alone.
        lease_ttl: seconds.
        on_lost: called once when the lease is lost.
    """

    def __init__(
        self, database: SimDatabase, *, address: str | None, lease_ttl: float, on_lost: Callable[[], None]
    ) -> None:
        self.database = database
        self._lost = on_lost
        self._ttl = lease_ttl
        self._address = address
        self._name = current().name
        super().__init__("postgresql://sim@nowhere/sim", RM)

    async def open(self, *, wait: bool = True, on_standby: Callable[[str], None] = lambda _: None) -> None:
        """Take the lease, and start the writer; wait while another dtx has the lease."""
        assert wait, "the simulation runs no commands"
        given: dict[str, Any] = {"ttl": self._ttl, "on_lost": self._lost}
        lease: _SimLease | _SimMembership
        if self._address is None:
            lease = _SimLease(self._dsn, RM, self._name, **given)
        else:
            lease = _SimMembership(self._dsn, RM, self._name, address=self._address, **given)
        self._lease = lease
        lease.database = self.database
        await lease.take(on_standby=on_standby)
        if isinstance(lease, Membership):
            await lease.begin()
        self._writer = Writer(
            self._dsn, RM, lease, durable=True, retry_window=RETRY_WINDOW, answer_timeout=ANSWER_TIMEOUT,
            on_failed=self._lost,
        )  # fmt: skip
        await self._writer.start()

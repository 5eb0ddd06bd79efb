"""The transaction log in PostgreSQL: lease, writer and readers together."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final
from uuid import UUID

from dtx import failpoint
from dtx.db import migrate
from dtx.db.connections import Dsn, require_safe
from dtx.failpoint import Point
from dtx.log.api import LeaseLost, LogUnavailable, OnWritten
from dtx.log.lease import Keep, Lease
from dtx.log.membership import Membership
from dtx.log.queries import Fetch, LogQueries, Readers
from dtx.log.records import BranchRecord, JournalEntry, Line, LogWrite, Lookup
from dtx.log.writer import Writer
from dtx.telemetry import get_logger
from dtx.xa.xid import Xid

MAINTENANCE_SECONDS: Final = 3600.0
"""Interval of the maintenance of the journal's partitions, which are made days ahead."""

log = get_logger()


class PostgresTransactionLog(LogQueries):
    """The durable state of every branch that has voted, in PostgreSQL (see :class:`dtx.log.api.TransactionLog`).

    The tables must exist: see :func:`dtx.db.migrate.upgrade`.

    Args:
        url: ``postgresql://user:password@host:port/name``.
        rm: name of the resource manager; every row carries it, and one dtx at a time writes for it.
        holder: this dtx, for people; default ``host:pid``.
        address: for other members: ``amqp://host:port``. Without one this dtx is alone.
        on_adopted: see :class:`~dtx.log.membership.Membership`.
        lease_ttl: seconds after which a standby takes over from a failed dtx.
        keep: retention periods of journal, archive, audit log and copies.
        retry_window: seconds for which a write waits for a database that is away.
        answer_timeout: seconds after which a database that does not answer counts as away.
        unsafe: accept a server that loses commits in a crash.
        observe: called after each commit with the number of records and the seconds it took.
        on_lines: called with the journal entries that each commit has made durable.
        on_lease_lost: called once when another dtx has taken the lease; the service must stop.
        on_failed: called once when the log cannot write any more, after an unexpected error; the service must stop, so
            that another one can take over.
    """

    def __init__(
        self,
        url: str,
        rm: str,
        *,
        holder: str | None = None,
        address: str | None = None,
        on_adopted: Callable[[int, int], None] | None = None,
        lease_ttl: float = 15.0,
        keep: Keep = Keep(),
        retry_window: float = 10.0,
        answer_timeout: float = 30.0,
        unsafe: bool = False,
        observe: Callable[[int, float], None] | None = None,
        on_lines: Callable[[Sequence[JournalEntry | Line]], None] | None = None,
        on_lease_lost: Callable[[], None] | None = None,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        self._dsn = Dsn(url)
        self._unsafe = unsafe
        holder = holder or f"{socket.gethostname()}:{os.getpid()}"
        lease = Lease if address is None else partial(Membership, address=address, on_adopted=on_adopted)
        self._new_lease = partial(lease, self._dsn, rm, holder, ttl=lease_ttl, keep=keep, on_lost=on_lease_lost)
        self._new_writer = partial(
            Writer,
            self._dsn,
            rm,
            durable=not unsafe,
            retry_window=retry_window,
            answer_timeout=answer_timeout,
            observe=observe,
            on_lines=on_lines,
            on_failed=on_failed,
        )
        self._new_readers = partial(Readers, self._dsn, rm, timeout=answer_timeout)
        self._lease: Lease | None = None
        self._writer: Writer | None = None
        self._readers: Readers | None = None
        self._maintenance: asyncio.Task[None] | None = None

    async def open(self, *, wait: bool = True, on_standby: Callable[[str], None] = lambda _: None) -> None:
        """Check the server, take the lease, connect.

        Args:
            wait: until no other dtx holds the lease.
            on_standby: called with each dtx that it waits for.

        Raises:
            LeaseHeld: another dtx holds the lease, and *wait* is ``False``.
            LogError: the server could lose commits in a crash, or its tables are missing.
            LogUnavailable: the database cannot be reached.
        """
        await asyncio.to_thread(require_safe, self._dsn, unsafe=self._unsafe)
        self._lease = self._new_lease()
        try:
            await self._lease.take(wait=wait, on_standby=on_standby)
            if isinstance(self._lease, Membership):
                await self._lease.begin()
            self._writer = self._new_writer(lease=self._lease)
            await self._writer.start()
            self._readers = self._new_readers(instance=self._lease.instance)
            self._maintenance = asyncio.create_task(self._maintain(), name="journal maintenance")
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Write all queued records, end the lease so that a standby takes over at once, and disconnect."""
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
            self._maintenance = None
        if self._writer is not None:
            await self._writer.close()
        if self._readers is not None:
            await self._readers.close()
        if self._lease is not None:
            await self._lease.release()

    @property
    def lease_valid(self) -> bool:
        """Whether this dtx certainly holds the lease now."""
        return self._lease is not None and self._lease.valid

    @property
    def disk_full(self) -> bool:
        """Whether the database has refused a write for lack of space within the last seconds."""
        return self._writer is not None and self._writer.disk_full

    @property
    def epoch(self) -> int:
        """The epoch of the lease, as the writer proves it; 0 without a writer."""
        return 0 if self._writer is None else self._writer.epoch

    @property
    def id(self) -> UUID:
        """The id of this log, unique among all logs, also those of one name. The log must be open."""
        assert self._lease is not None
        assert self._lease.log_id is not None
        return self._lease.log_id

    @property
    def instance(self) -> UUID:
        """The id of this opening of the log, new for each."""
        assert self._lease is not None
        return self._lease.instance

    @property
    def membership(self) -> Membership | None:
        """The lease, if there may be other members."""
        return self._lease if isinstance(self._lease, Membership) else None

    @property
    def member(self) -> UUID | None:
        """See :class:`dtx.log.api.TransactionLog`."""
        return None if self.membership is None else self.instance

    @property
    def moment(self) -> str | None:
        """See :class:`dtx.log.api.TransactionLog`."""
        return None if self.membership is None else self.membership.moment

    async def load_listed(self, vhost: str) -> AsyncIterator[BranchRecord]:
        """See :class:`dtx.log.api.TransactionLog`."""
        member = self.membership
        mine = None if member is None or member.is_adopting else self.member
        async for record in self.load_prepared(vhost, mine):
            yield record

    @property
    def queued(self) -> int:
        """The number of records that wait for the database."""
        return 0 if self._writer is None else self._writer.queued

    async def write(self, record: LogWrite, *, urgent: bool = True) -> None:
        """Make *record* durable; returns after the commit that contains it (see :class:`dtx.log.api.TransactionLog`).

        Raises:
            LogConflict, LogUnavailable, LeaseLost.
        """
        await self._open_writer().write(record, urgent=urgent)

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        """What the log has about *xid* now; see :meth:`dtx.log.api.TransactionLog.lookup`.

        Raises:
            LeaseLost: the lease is not valid: a successor may have changed the answer.
            LogUnavailable: the database is away, or an earlier write's outcome is not known yet.
        """
        await self._open_writer().settled()
        found = await super().lookup(vhost, xid, branch_id)
        # checked after reading: the lease was valid all the time
        if not self.lease_valid:
            raise LeaseLost("the lease has run out, or another dtx has it")
        return found

    @property
    def congested(self) -> bool:
        """See :class:`dtx.log.api.TransactionLog`."""
        return self._writer is not None and self._writer.congested

    def post(self, record: LogWrite, written: OnWritten, *, urgent: bool = True) -> None:
        """As :meth:`write`, without waiting."""
        self._open_writer().post(record, written, urgent=urgent)

    async def settled(self) -> None:
        """Return when the outcome of every write is known."""
        await self._open_writer().settled()

    @property
    def fetch(self) -> Fetch:
        """See :class:`~dtx.log.queries.LogQueries`."""
        if self._readers is None:
            raise LogUnavailable("the log is not open")
        return self._readers.fetch

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise LogUnavailable("the log is not open")
        return self._writer

    async def _maintain(self) -> None:
        while True:
            try:
                failpoint.at(Point.PARTITIONS_BEFORE)
                await asyncio.to_thread(migrate.maintain, self._dsn)
                failpoint.at(Point.PARTITIONS_AFTER)
            except LogUnavailable as error:
                log.warning("the journal's partitions could not be maintained", error=str(error))
            except Exception:
                log.exception("the maintenance of the journal failed")
            await asyncio.sleep(MAINTENANCE_SECONDS)

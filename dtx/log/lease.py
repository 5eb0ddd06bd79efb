"""One active dtx for each resource manager.

The row ``dtx.lease`` names the holder, an *epoch* that only grows, and the end of the lease by the database's clock. A
standby waits for that end (a clean close sets it at once), takes the lease and raises the epoch before it reads the
log. Every write proves its epoch under a lock on that row. A holder that was paused and replaced cannot write, not even
with a transaction that it began before.

A lease that has run out is not lost: as long as no other dtx takes it, its holder may renew it late. While it has run
out, the holder answers nothing about unknown xids (:attr:`Lease.valid`): a successor may know them. The holder measures
the time from *before* the renewal was sent, less a margin, with a clock that includes suspension of the machine.

The row also identifies the holder's process: a successor on the same machine that finds it dead need not wait for the
end of the lease. A process id alone is reused. With the machine's boot, the namespace of process ids and its start
time, it identifies one process for ever. A process on another machine, in another container or on a system without
``/proc`` counts as alive.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID, uuid4

import psycopg

from dtx import failpoint
from dtx.db.connections import Dsn, application_name, cancel_attempt, connect, session_settings
from dtx.failpoint import Point
from dtx.log.api import LeaseHeld, LeaseLost, LogError, LogUnavailable
from dtx.telemetry import get_logger

POLL_SECONDS: Final = 0.25
"""Interval at which a standby tries: the delay of a handover after a clean close."""
_RETRY_SECONDS: Final = 0.5
_FAREWELL: Final = 5.0
"""Limit for the release of the lease, seconds; without a release, a standby waits for the end of the lease."""

_PATIENCE: Final = 1.0
"""Seconds for which a standby waits for the lock on the lease; at most a quarter of the lease's."""

# A lease that has not run out is only read: a lock on it would delay its holder's writes.
_TAKE: Final = """
INSERT INTO dtx.lease AS l (rm, epoch, holder, process, instance, taken_at, expires_at, retention_days, archive_days,
    audit_days, duplicate_days)
SELECT %(rm)s, 1, %(holder)s, %(process)s, %(instance)s, clock_timestamp(),
    clock_timestamp() + %(ttl)s * interval '1 second', %(journal)s, %(archive)s::integer, %(audit)s::integer,
    %(duplicates)s::integer
FROM set_config('lock_timeout', %(patience)s, true)
WHERE NOT EXISTS (SELECT FROM dtx.lease h WHERE h.rm = %(rm)s AND h.expires_at >= clock_timestamp()
    AND h.instance IS DISTINCT FROM %(dead)s)
ON CONFLICT (rm) DO UPDATE SET epoch = l.epoch + 1, holder = excluded.holder, process = excluded.process,
    instance = excluded.instance, taken_at = excluded.taken_at,
    expires_at = clock_timestamp() + %(ttl)s * interval '1 second', retention_days = excluded.retention_days,
    archive_days = excluded.archive_days, audit_days = excluded.audit_days, duplicate_days = excluded.duplicate_days
WHERE l.expires_at < clock_timestamp() OR l.instance = %(dead)s
RETURNING epoch, log
"""
_END_WRITER: Final = """
SELECT count(pg_terminate_backend(a.pid)) FROM dtx.lease l JOIN pg_stat_activity a ON a.application_name = %(writer)s
WHERE l.rm = %(rm)s AND l.instance = %(theirs)s AND l.expires_at < clock_timestamp()
    AND a.usename = current_user AND a.state <> 'idle' AND a.wait_event_type = 'Client'
"""
_HOLDER: Final = "SELECT holder, process, instance FROM dtx.lease WHERE rm = %(rm)s"
_RENEW: Final = """
UPDATE dtx.lease SET expires_at = clock_timestamp() + %(ttl)s * interval '1 second'
WHERE rm = %(rm)s AND instance = %(instance)s RETURNING epoch
"""
_RELEASE: Final = "UPDATE dtx.lease SET expires_at = '-infinity' WHERE rm = %(rm)s AND instance = %(instance)s"

_PROC: Final = Path("/proc")
_DEAD: Final = frozenset("ZXx")  # a zombie has no threads: it writes nothing
_T = TypeVar("_T")

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention periods of a resource manager in days; ``None`` is for ever.

    Args:
        journal: entries of the journal, and with them the outcome memory; at least 1.
        archive: undelivered messages of forgotten branches.
        audit: entries of the operators' audit log.
        duplicates: replays, and with them the settlements of these messages; and suppressed duplicates.
    """

    journal: int = 30
    archive: int | None = None
    audit: int | None = None
    duplicates: int | None = None


def clock() -> float:
    """Seconds of a steady clock, which includes suspension of the machine where the system measures that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease:
    """The right to be the only active dtx of *rm*.

    Args:
        dsn: the database.
        rm: name of the resource manager.
        holder: this dtx, for people: ``host:pid``.
        ttl: seconds until the lease ends without renewal; it is renewed three times in that time.
        keep: the retention periods of this resource manager.
        on_lost: called once when another dtx has taken the lease.
    """

    is_member: ClassVar[bool] = False
    """Whether other dtx may be active as well."""
    _taking_sql: ClassVar[str] = _TAKE
    _renewal_sql: ClassVar[str] = _RENEW
    _release_sql: ClassVar[str] = _RELEASE

    def __init__(
        self,
        dsn: Dsn,
        rm: str,
        holder: str,
        *,
        ttl: float = 15.0,
        keep: Keep = Keep(),
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._dsn = dsn
        self._rm = rm
        self.holder = holder
        self._ttl = ttl
        self._farewell = min(ttl, _FAREWELL)
        self._on_lost = on_lost
        self.instance: UUID = uuid4()
        self.log_id: UUID | None = None
        """Id of this resource manager's log; another database may have a log of the same name."""
        self._parameters: dict[str, Any] = {
            "rm": rm, "holder": holder, "process": this_process(), "instance": self.instance, "ttl": ttl,
            "journal": keep.journal, "archive": keep.archive, "audit": keep.audit,
            "duplicates": keep.duplicates,
            "patience": f"{round(min(_PATIENCE, ttl / 4) * 1000)}ms",
        }  # fmt: skip
        self._connection: psycopg.AsyncConnection | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._given_up: set[asyncio.Task[None]] = set()
        self._valid_until = float("-inf")
        self.lost = asyncio.Event()
        """Set when another dtx has taken the lease: this one must stop."""

    @property
    def valid(self) -> bool:
        """Whether no other dtx can have the lease now."""
        return clock() < self._valid_until and not self.lost.is_set()

    async def take(self, *, wait: bool = True, on_standby: Callable[[str], None] = lambda _: None) -> int:
        """Wait until no other dtx holds the lease, take it, and keep it renewed.

        Args:
            wait: ``False`` to give up when another dtx holds it.
            on_standby: called with each holder that it waits for.

        Returns:
            The new epoch.

        Raises:
            LeaseHeld: another dtx holds it, and *wait* is ``False``.
            LogUnavailable: the database cannot be reached at first; later a standby waits for it.
            LogError: the tables are missing, or the user may not use them.
        """
        await self._connect(self._ttl)
        failpoint.at(Point.LEASE_TAKE_BEFORE)
        reported = ""
        while True:
            try:
                epoch, holder = await self._within(self._ttl, self._try())
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                raise LogError(f"there are no tables of dtx in {self._dsn.shown}: run dtx migrate") from None
            except psycopg.errors.InsufficientPrivilege as error:
                raise LogError(f"the database user may not use the log: {self._dsn.explain(error)}") from None
            except (psycopg.Error, OSError, LogUnavailable) as error:
                log.warning("the database is away, waiting for it", error=self._dsn.explain(error))
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if epoch is not None:
                break
            if not wait:
                raise LeaseHeld(holder)
            if holder != reported:
                log.info("another dtx is active, standing by", holder=holder, rm=self._rm)
                on_standby(holder)
                reported = holder
            await asyncio.sleep(POLL_SECONDS)
        failpoint.at(Point.LEASE_TAKE_AFTER)
        self._renewal = asyncio.create_task(self._keep(), name="lease renewal")
        log.info("lease taken", rm=self._rm, epoch=epoch)
        return epoch

    async def _try(self) -> tuple[int | None, str]:
        """The new epoch, or ``None`` and the name of the holder."""
        connection = await self._connect(self._ttl)
        row = await (await connection.execute(_HOLDER, self._parameters)).fetchone()
        holder, instance, dead = "", None, None
        if row is not None:
            holder, process, instance = row
            dead = instance if is_dead(process) else None
        asked = clock()
        try:
            row = await (await connection.execute(self._taking_sql, self._parameters | {"dead": dead})).fetchone()
        except psycopg.errors.LockNotAvailable:
            # The holder stopped in the middle of a group, or its machine failed. PostgreSQL would wait for the other
            # half of the group, and keep the lock, for hours.
            if instance is not None:
                theirs = {"theirs": instance, "writer": application_name("writer", instance)}
                await connection.execute(_END_WRITER, self._parameters | theirs)
            return None, holder
        if row is None:
            return None, holder
        self._extend(asked)
        epoch, self.log_id = row
        return int(epoch), holder

    def _extend(self, asked: float) -> None:
        # The margin covers clocks of different speeds, and what happens after this check of the clock.
        self._valid_until = asked + self._ttl * 0.9

    async def _connect(self, seconds: float) -> psycopg.AsyncConnection:
        """The connection, made within *seconds* when there is none."""
        if self._connection is None or self._connection.closed:
            try:
                self._connection = await connect(
                    self._dsn, session_settings("lease", self.instance, statement_timeout=self._ttl), timeout=seconds
                )
            except (psycopg.Error, OSError) as error:
                raise LogUnavailable(f"cannot connect to {self._dsn.shown}: {self._dsn.explain(error)}") from None
        return self._connection

    async def _keep(self) -> None:
        pause = self._ttl / 3
        while not self.lost.is_set():
            await asyncio.sleep(pause)
            try:
                await self._within(self._ttl / 3, self.renew())  # leaves time for another attempt if this one hangs
            except (psycopg.Error, OSError, LogUnavailable, TimeoutError) as error:
                pause = min(_RETRY_SECONDS, self._ttl / 10)
                log.warning("the lease could not be renewed", rm=self._rm, error=self._dsn.explain(error))
                await self._disconnect()
            except LeaseLost:
                return
            except Exception:
                log.exception("the renewal of the lease failed", rm=self._rm)
            else:
                pause = self._ttl / 3

    async def renew(self) -> None:
        """Extend the lease to *ttl* seconds from now.

        Raises:
            LeaseLost: another dtx has the lease.
            LogUnavailable, psycopg.Error: the outcome is not known.
        """
        connection = await self._connect(self._ttl / 3)
        failpoint.at(Point.LEASE_RENEW_BEFORE)
        asked = clock()
        row = await (await connection.execute(self._renewal_sql, self._parameters)).fetchone()
        if row is None:
            self.lose()
            raise LeaseLost("another dtx has taken the lease")
        failpoint.at(Point.LEASE_RENEW_AFTER)
        self._extend(asked)

    def lose(self) -> None:
        """Note that another dtx holds the lease; set :attr:`lost` and call *on_lost*, once."""
        if not self.lost.is_set():
            self.lost.set()
            failpoint.at(Point.LEASE_LOST)
            log.error("another dtx has taken the lease", rm=self._rm)
            if self._on_lost is not None:
                self._on_lost()

    async def release(self) -> None:
        """End the lease at once, so that a standby takes over; no error when it is lost or the database is away."""
        if self._renewal is not None:
            self._renewal.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal
            self._renewal = None
        held = self._valid_until > float("-inf") and not self.lost.is_set()
        self._valid_until = float("-inf")
        if held:
            failpoint.at(Point.LEASE_RELEASE_BEFORE)
            with suppress(psycopg.Error, OSError, LogUnavailable, TimeoutError):
                await self._within(self._farewell, self._end())
            failpoint.at(Point.LEASE_RELEASE_AFTER)
        await self._disconnect()
        await asyncio.gather(*self._given_up)

    async def _end(self) -> None:
        await (await self._connect(self._farewell)).execute(self._release_sql, self._parameters)

    async def _within(self, seconds: float, attempt: Coroutine[None, None, _T]) -> _T:
        """The result of *attempt*, which uses the connection.

        Raises:
            TimeoutError: it takes longer than *seconds*; the next attempt makes a new connection.
        """
        task = asyncio.ensure_future(attempt)
        try:
            await asyncio.wait((task,), timeout=seconds)
        finally:
            if not task.done():
                connection, self._connection = self._connection, None
                cleanup = asyncio.ensure_future(_cancel_and_close(task, connection))
                self._given_up.add(cleanup)
                cleanup.add_done_callback(self._given_up.discard)
        if not task.done():
            raise TimeoutError("the database does not answer")
        return task.result()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _cancel_and_close(attempt: "asyncio.Task[_T]", connection: psycopg.AsyncConnection | None) -> None:
    """Cancel an attempt whose result is no longer needed, and close its connection."""
    await cancel_attempt(attempt)
    if connection is not None:
        await connection.close()


def this_process() -> str | None:
    """The identity of this process; ``None`` where the system does not provide it."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        state, started = _state(os.getpid())
    except (OSError, ValueError):
        return None
    assert state not in _DEAD
    return f"{boot}/{namespace}/{os.getpid()}/{started}"


def is_dead(process: str | None) -> bool:
    """Whether the process that had this identity has certainly ended."""
    mine = this_process()
    if process is None or mine is None:
        return False
    boot, namespace, pid, started = process.split("/")
    if mine.split("/")[:2] != [boot, namespace]:
        return False
    try:
        state, found = _state(int(pid))
    except FileNotFoundError:
        return not _process_exists(int(pid))
    except (OSError, ValueError):
        return False
    return state in _DEAD or found != started


def _process_exists(pid: int) -> bool:
    """Whether a process without an entry in ``/proc`` exists: ``hidepid`` hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _state(pid: int) -> tuple[str, str]:
    """State and start time (clock ticks since boot) of a process; the name before them may have any characters."""
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]

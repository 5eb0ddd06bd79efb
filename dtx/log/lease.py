"""One active dtx for each resource manager.

The row ``dtx.lease`` names the holder, an *epoch* that only grows, and when the lease runs out by the database's
clock. A standby waits until it has run out (a clean close ends it at once), takes it and bumps the epoch before it
reads anything. Every write proves its epoch under a lock on that row: a holder that was paused and replaced cannot
write, not even with a transaction that it began before.

Running out is not losing: as long as nobody else took the lease, its holder may renew it late. But while it has run
out nothing is said about unknown xids (:attr:`Lease.valid`): a successor might know better. Our side measures with a
clock that goes on while the machine is suspended, from *before* the renewal was asked for, and gives up a margin
early.

The row also names the holder's process, so that its successor on the same machine knows that it is dead without waiting
for its lease. A process id alone is reused. With the machine's boot, the namespace of process ids and the time of its
start it names one process for ever. What cannot be told (another machine, another container, a system without
``/proc``) counts as alive.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID, uuid4

import psycopg

from dtx import failpoint
from dtx.db.connections import Dsn, application_name, bury, connect, session_settings
from dtx.failpoint import Point
from dtx.log.api import LeaseHeld, LeaseLost, LogError, LogUnavailable
from dtx.telemetry import get_logger

POLL_SECONDS: Final = 0.25
"""How often a standby asks: the delay of a handover after a clean close."""
_RETRY_SECONDS: Final = 0.5
_FAREWELL: Final = 5.0
"""Seconds for giving the lease back: without it a standby waits for its end."""

_PATIENCE: Final = 1.0
"""Seconds that a standby waits for the lock on the lease before it looks who has it; a quarter of a shorter lease."""

# Where the lease has not run out it is only looked at: a lock on it would hold up its holder's writes.
_TAKE: Final = """
INSERT INTO dtx.lease AS l (rm, epoch, holder, process, instance, taken_at, expires_at, retention_days, archive_days,
    audit_days)
SELECT %(rm)s, 1, %(holder)s, %(process)s, %(instance)s, clock_timestamp(),
    clock_timestamp() + %(ttl)s * interval '1 second', %(journal)s, %(archive)s::integer, %(audit)s::integer
FROM set_config('lock_timeout', %(patience)s, true)
WHERE NOT EXISTS (SELECT FROM dtx.lease h WHERE h.rm = %(rm)s AND h.expires_at >= clock_timestamp()
    AND h.instance IS DISTINCT FROM %(dead)s)
ON CONFLICT (rm) DO UPDATE SET epoch = l.epoch + 1, holder = excluded.holder, process = excluded.process,
    instance = excluded.instance, taken_at = excluded.taken_at,
    expires_at = clock_timestamp() + %(ttl)s * interval '1 second', retention_days = excluded.retention_days,
    archive_days = excluded.archive_days, audit_days = excluded.audit_days
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
_DEAD: Final = frozenset("ZXx")  # a zombie has no threads any more: it writes nothing
_T = TypeVar("_T")

log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long a resource manager keeps what is over, days; ``None`` is for ever.

    Args:
        journal: lines of the journal, and with them the outcome memory; at least 1.
        archive: undelivered messages of forgotten branches.
        audit: lines of the trail of operators.
    """

    journal: int = 30
    archive: int | None = None
    audit: int | None = None


def clock() -> float:
    """Seconds that only grow, suspension of the machine included where the system tells it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease:
    """The right to be the active dtx of *rm*.

    Args:
        dsn: the database.
        rm: name of the resource manager.
        holder: who we are, for people: ``host:pid``.
        ttl: seconds that the lease lives without renewal; it is renewed three times in that time.
        keep: how long this resource manager wants its past kept.
        on_lost: called once when another dtx has taken the lease.
    """

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
        self._ttl = ttl
        self._farewell = min(ttl, _FAREWELL)
        self._on_lost = on_lost
        self.instance: UUID = uuid4()
        self.log_id: UUID | None = None
        """Of this resource manager's log; it tells this log from one of the same name in another database."""
        self._parameters = {
            "rm": rm, "holder": holder, "process": this_process(), "instance": self.instance, "ttl": ttl,
            "journal": keep.journal, "archive": keep.archive, "audit": keep.audit,
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
        """Whether nobody else can have the lease at this moment."""
        return clock() < self._valid_until and not self.lost.is_set()

    async def take(self, *, wait: bool = True, on_standby: Callable[[str], None] = lambda _: None) -> int:
        """Wait until nobody else holds the lease, take it, and keep it renewed.

        Args:
            wait: ``False`` to give up where somebody else holds it.
            on_standby: told of each holder that is waited for.

        Returns:
            The new epoch.

        Raises:
            LeaseHeld: somebody else holds it, and it is not waited for.
            LogUnavailable: the database cannot be reached (at first; later a standby outlives that).
            LogError: the tables are missing, or not for us.
        """
        await self._connect(self._ttl)
        failpoint.at(Point.LEASE_TAKE_BEFORE)
        told = ""
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
            if holder != told:
                log.info("another dtx is active, standing by", holder=holder, rm=self._rm)
                on_standby(holder)
                told = holder
            await asyncio.sleep(POLL_SECONDS)
        failpoint.at(Point.LEASE_TAKE_AFTER)
        self._renewal = asyncio.create_task(self._keep(), name="lease renewal")
        log.info("lease taken", rm=self._rm, epoch=epoch)
        return epoch

    async def _try(self) -> tuple[int | None, str]:
        """The new epoch, or ``None`` and who has the lease."""
        connection = await self._connect(self._ttl)
        row = await (await connection.execute(_HOLDER, self._parameters)).fetchone()
        holder, instance, dead = "", None, None
        if row is not None:
            holder, process, instance = row
            dead = instance if is_dead(process) else None
        asked = clock()
        try:
            row = await (await connection.execute(_TAKE, self._parameters | {"dead": dead})).fetchone()
        except psycopg.errors.LockNotAvailable:
            # Its holder stands still in the middle of a group, or its machine is gone: PostgreSQL would wait for the
            # other half, and keep the lock, for hours.
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
        # The margin covers two clocks that run at different speeds, and what follows the look at this one.
        self._valid_until = asked + self._ttl * 0.9

    async def _connect(self, seconds: float) -> psycopg.AsyncConnection:
        """The connection; *seconds* are what the caller has."""
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
                await self._within(self._ttl / 3, self.renew())  # in time for another one, should this one hang
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
        """Ask for another *ttl* seconds.

        Raises:
            LeaseLost: another dtx has it.
            LogUnavailable, psycopg.Error: not known.
        """
        connection = await self._connect(self._ttl / 3)
        failpoint.at(Point.LEASE_RENEW_BEFORE)
        asked = clock()
        row = await (await connection.execute(_RENEW, self._parameters)).fetchone()
        if row is None:
            self.lose()
            raise LeaseLost("another dtx has taken the lease")
        failpoint.at(Point.LEASE_RENEW_AFTER)
        self._extend(asked)

    def lose(self) -> None:
        """Another dtx holds the lease: tell everybody, once."""
        if not self.lost.is_set():
            self.lost.set()
            failpoint.at(Point.LEASE_LOST)
            log.error("another dtx has taken the lease", rm=self._rm)
            if self._on_lost is not None:
                self._on_lost()

    async def release(self) -> None:
        """End the lease at once, so that a standby takes over; harmless when it is lost or the database away."""
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
        await (await self._connect(self._farewell)).execute(_RELEASE, self._parameters)

    async def _within(self, seconds: float, attempt: Coroutine[None, None, _T]) -> _T:
        """What *attempt* returns, which uses the connection.

        Raises:
            TimeoutError: it takes longer; its connection hangs, and the next attempt makes a new one.
        """
        task = asyncio.ensure_future(attempt)
        try:
            await asyncio.wait((task,), timeout=seconds)
        finally:
            if not task.done():
                connection, self._connection = self._connection, None
                burial = asyncio.ensure_future(_bury(task, connection))
                self._given_up.add(burial)
                burial.add_done_callback(self._given_up.discard)
        if not task.done():
            raise TimeoutError("the database does not answer")
        return task.result()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _bury(attempt: "asyncio.Task[_T]", connection: psycopg.AsyncConnection | None) -> None:
    """End an attempt that nobody waits for, and its connection."""
    await bury(attempt)
    if connection is not None:
        await connection.close()


def this_process() -> str | None:
    """The identity of this process, ``None`` where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        state, started = _state(os.getpid())
    except (OSError, ValueError):
        return None
    assert state not in _DEAD
    return f"{boot}/{namespace}/{os.getpid()}/{started}"


def is_dead(process: str | None) -> bool:
    """Whether the process that had this identity is certainly gone."""
    mine = this_process()
    if process is None or mine is None:
        return False
    boot, namespace, pid, started = process.split("/")
    if mine.split("/")[:2] != [boot, namespace]:
        return False
    try:
        state, found = _state(int(pid))
    except FileNotFoundError:
        return not _there(int(pid))
    except (OSError, ValueError):
        return False
    return state in _DEAD or found != started


def _there(pid: int) -> bool:
    """Whether a process of which ``/proc`` says nothing exists: it may hide those of other users (``hidepid``)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _state(pid: int) -> tuple[str, str]:
    """State and start time (clock ticks since boot) of a process; the name before them may hold anything."""
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]

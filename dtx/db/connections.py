"""The database: its URL, connections to it, the settings of a session, and the requirements on the server.

The URL may name several hosts. libpq tries them one after another, from the first on, each with the whole time-out. If
the first host does not answer, a caller with less time never reaches the second one. Here each host gets a part of the
time-out. The next caller begins with the host that answered last, or after one that did not answer.
"""

import asyncio
import math
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg.abc import AdaptContext, Buffer, ConnDict
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_attempts, conninfo_attempts_async, conninfo_to_dict, make_conninfo
from psycopg.pq import Format
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from dtx.db.columns import seconds_of
from dtx.telemetry import get_logger

_log = get_logger(part="database")
SCHEMES = ("postgresql://", "postgres://", "postgresql+psycopg://")
_LEAST: Final = 1.0
"""Seconds for one host at least, whatever the number of hosts."""
_AGAIN: Final = 1.0
_NOW: Final = 10.0
"""Seconds for :func:`connect_now`."""
_TIMELINE: Final = """
SELECT system_identifier::text, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
FROM pg_control_system() WHERE NOT pg_is_in_recovery()
"""
_STANDBYS: Final = """
SELECT count(*) FROM pg_stat_replication r
WHERE coalesce(r.application_name, '') NOT IN ('pg_basebackup', 'pg_receivewal')
    AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')
"""
MINIMUM_VERSION: Final = 130_000
"""13: it has the type xid8."""


class LogError(Exception):
    """The database could not do the request. The message has no secrets."""


class LogUnavailable(LogError):
    """The database could not be reached, or refused. Whether a write happened is *not known*."""


class Dsn:
    """The URL of the database, checked, and never shown with its password.

    Args:
        url: ``postgresql://user:password@host:port/name?options``, as libpq reads it.

    Raises:
        LogError: it is not a URL that libpq understands; the message does not repeat it.
    """

    __slots__ = ("_secrets", "_timelines", "conninfo", "first", "shown")

    def __init__(self, url: str) -> None:
        if not url.startswith(SCHEMES):
            raise LogError("the database url does not start with postgresql://")
        self.conninfo = url.replace("postgresql+psycopg://", "postgresql://", 1)
        try:
            parts = conninfo_to_dict(self.conninfo)
        except psycopg.Error:
            raise LogError("the database url is not one that PostgreSQL's client library understands") from None
        self._secrets = [str(parts[key]) for key in ("password", "sslpassword") if parts.get(key)]
        where = str(parts.get("host") or parts.get("hostaddr") or "localhost")
        if parts.get("port"):
            where = f"{where}:{parts['port']}"
        user = f"{parts['user']}@" if parts.get("user") else ""
        self.shown = f"postgresql://{user}{where}/{parts.get('dbname') or ''}"
        """The URL for people and logs."""
        self.first = 0
        """Index of the host to try first."""
        self._timelines: dict[str, int] = {}
        """The newest timeline that was seen of each cluster; in use there is one cluster."""

    def require_newest(self, cluster: str, timeline: int) -> None:
        """Note the timeline of a server, which grows with each promotion of a standby.

        Args:
            cluster: the system identifier, which a primary and its standbys share.
            timeline: of the server.

        Raises:
            psycopg.OperationalError: it is an older one. So it was the primary before, and may lack the latest writes.
        """
        newest = self._timelines.setdefault(cluster, timeline)
        if timeline < newest:
            raise psycopg.OperationalError(
                f"this server is on timeline {timeline}, and another one was promoted to timeline {newest}: "
                "it is not the primary any more, so shut it down"
            )
        self._timelines[cluster] = timeline

    def __repr__(self) -> str:
        return f"Dsn({self.shown!r})"

    def explain(self, error: BaseException) -> str:
        """The first line of a driver's error, without passwords and full stop."""
        lines = str(error).strip().splitlines()
        text = lines[0].strip().rstrip(".") if lines else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


async def connect(dsn: Dsn, settings: dict[str, str], *, timeout: float) -> psycopg.AsyncConnection:
    """A connection in autocommit with *settings*.

    Args:
        dsn: the database; it keeps the host that answered.
        settings: of PostgreSQL, by name.
        timeout: seconds for all hosts together.

    Raises:
        psycopg.Error, OSError: no connection, or only one to a standby or to a former primary, which may lack the
            latest writes.
    """
    places = await conninfo_attempts_async(conninfo_to_dict(dsn.conninfo))
    seconds = _part(timeout, len(places))
    failures: list[str] = []
    for at in _attempt_order(dsn, len(places)):
        try:
            connection = await _within(seconds, _one(dsn, places[at], settings, seconds), places[at])
        except (psycopg.Error, OSError) as error:
            if len(places) == 1:
                raise
            failures.append(dsn.explain(error))
        else:
            dsn.first = at
            return connection
    raise psycopg.OperationalError("; ".join(dict.fromkeys(failures)))


def connect_now(dsn: Dsn, *, timeout: float = _NOW, **options: Any) -> psycopg.Connection[Any]:
    """As :func:`connect`, but blocking, and also to a standby.

    Args:
        dsn: the database.
        timeout: seconds for all hosts together.
        options: of :func:`psycopg.connect`.

    Raises:
        psycopg.Error, OSError: no connection.
    """
    places = conninfo_attempts(conninfo_to_dict(dsn.conninfo))
    seconds = max(2, math.ceil(_part(timeout, len(places))))
    failures: list[str] = []
    for at in _attempt_order(dsn, len(places)):
        try:
            connection = psycopg.connect(make_conninfo("", **places[at]), connect_timeout=seconds, **options)
        except (psycopg.Error, OSError) as error:
            if len(places) == 1:
                raise
            failures.append(dsn.explain(error))
        else:
            dsn.first = at
            return connection
    raise psycopg.OperationalError("; ".join(dict.fromkeys(failures)))


def _part(timeout: float, places: int) -> float:
    """Seconds for one host. Of several hosts one part more is left for the caller's work."""
    return timeout if places == 1 else max(_LEAST, timeout / (places + 1))


def _attempt_order(dsn: Dsn, count: int) -> Iterator[int]:
    """Indexes of hosts in the order of attempts. A caller that comes during an attempt begins with the next host."""
    begin = dsn.first
    for number in range(begin, begin + count):
        dsn.first = number + 1
        yield number % count


async def _one(dsn: Dsn, place: ConnDict, settings: dict[str, str], seconds: float) -> psycopg.AsyncConnection:
    connection = await psycopg.AsyncConnection.connect(
        make_conninfo("", **place), autocommit=True, connect_timeout=max(2, math.ceil(seconds))
    )
    try:
        if connection.info.parameter_status("in_hot_standby") == "on":  # sent by PostgreSQL 14 and later
            raise psycopg.OperationalError("this server is a read-only standby")
        await connection.execute(*_setting(settings))
        with suppress(psycopg.NotSupportedError, psycopg.ProgrammingError):  # a service that is no plain PostgreSQL
            found = await (await connection.execute(_TIMELINE)).fetchone()
            if found is not None:
                dsn.require_newest(*found)
    except BaseException:
        await connection.close()
        raise
    return connection


def _setting(settings: dict[str, str]) -> tuple[bytes, list[str]]:
    calls = ", ".join(["set_config(%s, %s, false)"] * len(settings))
    return f"SELECT {calls}".encode(), [part for pair in settings.items() for part in pair]


async def _within(
    seconds: float, attempt: Coroutine[None, None, psycopg.AsyncConnection], place: ConnDict
) -> psycopg.AsyncConnection:
    task = asyncio.ensure_future(attempt)
    try:
        await asyncio.wait((task,), timeout=seconds)
    except BaseException:
        _cancel_in_background(task)  # it may have a connection by now
        raise
    if not task.done():
        _cancel_in_background(task)
        where = place.get("hostaddr") or place.get("host") or "the database"
        raise TimeoutError(f"{where}: no answer within {seconds:.3g} seconds")
    return task.result()


def _cancel_in_background(attempt: "asyncio.Task[psycopg.AsyncConnection]") -> None:
    burial = asyncio.ensure_future(cancel_attempt(attempt))
    _cancelling.add(burial)
    burial.add_done_callback(_cancelling.discard)


_cancelling: Final[set["asyncio.Task[None]"]] = set()


async def cancel_attempt(attempt: "asyncio.Task[Any]") -> None:
    """Cancel an attempt that no caller waits for, and close a connection that it may have made.

    After a first cancellation, psycopg asks the server to cancel the statement and waits for its answer. It waits for
    ever where the server does not respond. A second cancellation ends this wait as well.
    """
    while not attempt.done():
        attempt.cancel()
        await asyncio.wait((attempt,), timeout=_AGAIN)
    if not attempt.cancelled() and attempt.exception() is None:  # an error is ignored: the caller has a time-out
        made = attempt.result()
        if isinstance(made, psycopg.AsyncConnection):
            await made.close()


def engine(dsn: Dsn) -> Engine:
    """A SQLAlchemy engine for rare requests. It keeps no connection open.

    It accepts every URL that libpq accepts, including sockets.
    """
    return create_engine(
        "postgresql+psycopg://",
        creator=lambda: connected(dsn),
        poolclass=NullPool,
        hide_parameters=True,
    )


def timed_engine(dsn: Dsn, *, patience: float | None = None) -> Engine:
    """An engine whose connections give times as seconds since 1970.

    Args:
        dsn: the database.
        patience: seconds that a statement may take, 0 for no limit; ``None`` for the server's setting.
    """
    made = engine(dsn)

    def prepare(driver: psycopg.Connection, _: object) -> None:
        as_floats(driver)
        settings = {"TimeZone": "UTC"}
        if patience is not None:
            settings["statement_timeout"] = str(round(patience * 1000))
        driver.execute(*_setting(settings))
        driver.commit()

    event.listen(made, "connect", prepare)
    return made


def connected(dsn: Dsn, *, autocommit: bool = False) -> psycopg.Connection[Any]:
    """A connection with the date style that psycopg reads, whatever the server's default is.

    Raises:
        psycopg.Error, OSError: no connection.
    """
    connection = connect_now(dsn, autocommit=True)
    try:
        connection.execute("SET DateStyle = 'ISO'")
        connection.autocommit = autocommit
    except BaseException:
        connection.close()
        raise
    return connection


class _TimeLoader(Loader):
    """Loads a binary ``timestamptz`` as seconds since 1970."""

    format = Format.BINARY

    def load(self, data: Buffer) -> float:
        return seconds_of(bytes(data))


class _TextTimeLoader(Loader):
    """Loads a ``timestamptz`` in text form as seconds since 1970; the session must use UTC."""

    format = Format.TEXT

    def load(self, data: Buffer) -> float:
        return datetime.fromisoformat(bytes(data).decode()).timestamp()


def as_floats(connection: AdaptContext) -> None:
    """Make *connection* load times as seconds since 1970."""
    adapters = connection.adapters
    adapters.register_loader("timestamptz", _TimeLoader)
    adapters.register_loader("timestamptz", _TextTimeLoader)


@contextmanager
def explained(dsn: Dsn, *, doing: str = "", tables: str = "tables of dtx") -> Iterator[None]:
    """Convert errors of SQLAlchemy and psycopg.

    Args:
        dsn: the database.
        doing: text for the operation, before the name of the database.
        tables: text for the tables, if they are missing.

    Raises:
        LogError: tables are missing.
        LogUnavailable: any other error.
    """
    try:
        yield
    except (SQLAlchemyError, psycopg.Error, OSError) as error:
        cause = getattr(error, "orig", None) or error
        if isinstance(cause, psycopg.errors.UndefinedTable):
            raise LogError(f"there are no {tables} in {dsn.shown}: run dtx migrate") from None
        raise LogUnavailable(f"{doing}{dsn.shown}: {dsn.explain(cause)}") from None


def session_settings(role: str, instance: UUID, *, statement_timeout: float) -> dict[str, str]:
    """The settings of every session of the log, which override defaults of server, database and role.

    Args:
        role: of the session, for ``pg_stat_activity``.
        instance: of this process; with *role* it names the session's ``application_name``.
        statement_timeout: seconds.
    """
    return {
        "application_name": application_name(role, instance),
        "client_encoding": "UTF8",
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "statement_timeout": f"{round(statement_timeout * 1000)}ms",
        "idle_in_transaction_session_timeout": f"{round(statement_timeout * 1000)}ms",
        "lock_timeout": f"{round(statement_timeout * 1000)}ms",
        "TimeZone": "UTC",
        "DateStyle": "ISO",
    }


def application_name(role: str, instance: UUID) -> str:
    """The name of a session in ``pg_stat_activity``; PostgreSQL keeps 63 bytes."""
    return f"dtx {role} {instance}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check of the server.

    Args:
        name: of the setting or fact.
        found: its value.
        fault: lower case, with the remedy; ``None`` if there is none.
        unsafe_only: whether ``--unsafe`` accepts the fault.
        advice: as *fault*, but dtx serves nevertheless.
    """

    name: str
    found: str
    fault: str | None = None
    unsafe_only: bool = False
    advice: str | None = None


def examine(dsn: Dsn) -> list[Check]:
    """Check the requirements on the server.

    Raises:
        LogUnavailable: no connection.
    """
    try:
        # no prepared statements: there may be a pooler, which loses them
        with connect_now(dsn, autocommit=True, prepare_threshold=None) as connection:
            return [*_examine(connection), _pooling(connection, dsn)]
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(f"cannot connect to {dsn.shown}: {dsn.explain(error)}") from None


def _examine(connection: psycopg.Connection) -> Iterator[Check]:
    def ask(question: str, *values: str) -> Any:
        row = connection.execute(question, values).fetchone()
        assert row is not None
        return row[0]

    def show(setting: str) -> str:
        return str(ask("SELECT current_setting(%s)", setting))

    old = connection.info.server_version < MINIMUM_VERSION
    fault: str | None = "dtx needs PostgreSQL 13 or later" if old else None
    yield Check(name="server_version", found=show("server_version"), fault=fault)
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        value = show(setting)
        fault = f"{setting} = off loses prepared branches when the machine fails: turn it on"
        yield Check(name=setting, found=value, fault=fault if value == "off" else None, unsafe_only=True)
    encoding = show("server_encoding")
    fault = "vhosts and user names are UTF-8: make a database with encoding UTF8"
    yield Check(name="server_encoding", found=encoding, fault=None if encoding == "UTF8" else fault)
    if ask("SELECT pg_is_in_recovery()"):
        fault = "this server is a read-only standby: connect to the primary"
        yield Check(name="role", found="standby", fault=fault)
    else:
        yield Check(name="role", found="primary")
        yield _replication(ask(_STANDBYS), show("synchronous_standby_names"), show("synchronous_commit"))


def _replication(standbys: int, names: str, commit: str) -> Check:
    """Check that a commit waits for a standby: a promoted one must have every branch that has voted."""
    if not standbys:
        return Check(name="replication", found="none")
    if names and commit != "local":
        return Check(name="replication", found="synchronous")
    setting = "synchronous_standby_names is empty" if not names else "synchronous_commit = local"
    advice = (
        f"commits do not wait for a standby ({setting}): prepared branches are lost if one is promoted; set "
        "synchronous_standby_names"
    )
    return Check(name="replication", found="asynchronous", advice=advice)


def _pooling(connection: psycopg.Connection, dsn: Dsn) -> Check:
    """Check that a session of PostgreSQL stays ours between transactions: the writer needs settings and statements."""
    question = "SELECT pg_backend_pid()"
    before = connection.execute(question).fetchone()
    if before == (connection.info.backend_pid,):
        return Check(name="pooling", found="none")
    with connect_now(dsn, autocommit=True, prepare_threshold=None) as other:
        theirs = other.execute(question).fetchone()
        after = connection.execute(question).fetchone()
    if before == after != theirs:
        return Check(name="pooling", found="by session")
    return Check(
        name="pooling",
        found="by transaction",
        fault="a pooler gives PostgreSQL's sessions to others between two transactions: connect past it, "
        "or let it pool by session",
    )


def require_safe(dsn: Dsn, *, unsafe: bool = False) -> None:
    """Refuse a server that does not meet the requirements.

    Args:
        dsn: the database.
        unsafe: accept settings that lose commits in a crash.

    Raises:
        LogError: one sentence with the first fault.
        LogUnavailable: no connection.
    """
    for check in examine(dsn):
        if check.advice is not None:
            _log.warning("the database may lose branches", check=check.name, found=check.found, reason=check.advice)
        if check.fault is not None and not (unsafe and check.unsafe_only):
            hint = ", or give --unsafe" if check.unsafe_only else ""
            raise LogError(f"{check.fault}{hint} ({check.name} is {check.found})")

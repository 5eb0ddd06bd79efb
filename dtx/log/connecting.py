"""The URL of the database, and connections to it: it may name several hosts, which share the time-out.

libpq tries the hosts of a URL one after another, from the first on, and gives each of them the whole time-out. Who has
less time than that would never reach the second one where the first is silent (a machine that is gone refuses nothing).
Here each gets its part, and whoever comes next begins with the host that answered last, or behind one that did not.
"""

import asyncio
import math
from collections.abc import Coroutine, Iterator
from typing import Any, Final

import psycopg
from psycopg.abc import ConnDict
from psycopg.conninfo import conninfo_attempts, conninfo_attempts_async, conninfo_to_dict, make_conninfo

from dtx.log.api import LogError

SCHEMES = ("postgresql://", "postgres://", "postgresql+psycopg://")
_LEAST: Final = 1.0
"""Seconds for one host, however many there are."""
_AGAIN: Final = 1.0
_NOW: Final = 10.0
"""Seconds for whoever is asked by somebody who waits."""


class Dsn:
    """Where the database is: checked once, never shown with its password.

    Args:
        url: ``postgresql://user:password@host:port/name?options``, as libpq reads it.

    Raises:
        LogError: it is not a URL that libpq understands; the message does not repeat it.
    """

    __slots__ = ("_secrets", "conninfo", "first", "shown")

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
        """Of its hosts: the one to be tried first."""

    def __repr__(self) -> str:
        return f"Dsn({self.shown!r})"

    def explain(self, error: BaseException) -> str:
        """The first line of a driver's error, without passwords, in the form of our own messages."""
        lines = str(error).strip().splitlines()
        text = lines[0].strip().rstrip(".") if lines else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


async def connect(dsn: Dsn, settings: dict[str, str], *, timeout: float) -> psycopg.AsyncConnection:
    """A connection in autocommit with *settings* made.

    Args:
        dsn: the database; it remembers which of its hosts answers.
        settings: of PostgreSQL, by name.
        timeout: seconds for all hosts together.

    Raises:
        psycopg.Error, OSError: no connection, or only one to a standby, which may not have all that was written.
    """
    places = await conninfo_attempts_async(conninfo_to_dict(dsn.conninfo))
    seconds = _part(timeout, len(places))
    failures: list[str] = []
    for at in _turns(dsn, len(places)):
        try:
            connection = await _within(seconds, _one(places[at], settings, seconds), places[at])
        except (psycopg.Error, OSError) as error:
            if len(places) == 1:
                raise
            failures.append(dsn.explain(error))
        else:
            dsn.first = at
            return connection
    raise psycopg.OperationalError("; ".join(dict.fromkeys(failures)))


def connect_now(dsn: Dsn, *, timeout: float = _NOW, **options: Any) -> psycopg.Connection[Any]:
    """As :func:`connect`, in a thread that waits, also to a standby.

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
    for at in _turns(dsn, len(places)):
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
    """Seconds for one of them; one part more is for what the caller does then."""
    return timeout if places == 1 else max(_LEAST, timeout / (places + 1))


def _turns(dsn: Dsn, count: int) -> Iterator[int]:
    """Places in the order of the tries. Who gives up at one, or comes meanwhile, does not wait there, too."""
    begin = dsn.first
    for number in range(begin, begin + count):
        dsn.first = number + 1
        yield number % count


async def _one(place: ConnDict, settings: dict[str, str], seconds: float) -> psycopg.AsyncConnection:
    connection = await psycopg.AsyncConnection.connect(
        make_conninfo("", **place), autocommit=True, connect_timeout=max(2, math.ceil(seconds))
    )
    try:
        if connection.info.parameter_status("in_hot_standby") == "on":  # said by PostgreSQL 14 and later
            raise psycopg.OperationalError("this server is a read-only standby")
        pairs = [part for pair in settings.items() for part in pair]
        calls = ", ".join(["set_config(%s, %s, false)"] * len(settings))
        await connection.execute(f"SELECT {calls}", pairs)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _within(
    seconds: float, attempt: Coroutine[None, None, psycopg.AsyncConnection], place: ConnDict
) -> psycopg.AsyncConnection:
    task = asyncio.ensure_future(attempt)
    try:
        await asyncio.wait((task,), timeout=seconds)
    except BaseException:
        _have_buried(task)  # it may have a connection by now
        raise
    if not task.done():
        _have_buried(task)
        where = place.get("hostaddr") or place.get("host") or "the database"
        raise TimeoutError(f"{where}: no answer within {seconds:.3g} seconds")
    return task.result()


def _have_buried(attempt: "asyncio.Task[psycopg.AsyncConnection]") -> None:
    burial = asyncio.ensure_future(bury(attempt))
    _burials.add(burial)
    burial.add_done_callback(_burials.discard)


_burials: Final[set["asyncio.Task[None]"]] = set()


async def bury(attempt: "asyncio.Task[Any]") -> None:
    """End an attempt that nobody waits for, with a connection that it may have made meanwhile.

    Cancelled, psycopg asks the server to cancel the statement and waits for its answer, for ever where the server
    stands still; cancelled once more it gives that up too.
    """
    while not attempt.done():
        attempt.cancel()
        await asyncio.wait((attempt,), timeout=_AGAIN)
    if not attempt.cancelled() and attempt.exception() is None:  # an error: somebody was told of the time-out
        made = attempt.result()
        if isinstance(made, psycopg.AsyncConnection):
            await made.close()

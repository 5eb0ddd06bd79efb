"""Can PostgreSQL be reached, does it keep what it says it keeps, do its clock and its tables agree with this dtx."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

import psycopg

from dtx.admin.safe_text import human_duration, safe
from dtx.cli.connect import database_url
from dtx.cli.doctor.model import Check, failed, ok, warning
from dtx.cli.revisions import known_revisions
from dtx.config import Settings
from dtx.log import checks, migrate
from dtx.log.api import LogError
from dtx.log.connecting import Dsn, connect_now
from dtx.log.reading import Filter, LogReader

_TIMEOUT_SECONDS: Final = 5
_CLOCK_WARNING_SECONDS: Final = 1.0
_SPARE_CONNECTIONS: Final = 10

_Connection = psycopg.Connection[Any]
_Question = Callable[[_Connection, Settings], Iterator[Check]]


def check_database(settings: Settings) -> Iterator[Check]:
    """Everything that can be seen as the user of the database URL. Writes nothing."""
    if settings.database is None:
        from dtx.embedded.cluster import find_programs
        from dtx.embedded.postgres import EmbeddedPostgresError

        try:
            find_programs()
        except EmbeddedPostgresError as error:
            yield failed("database.embedded", str(error))
            return
        try:
            url = database_url(settings)
        except EmbeddedPostgresError as error:
            yield warning("database.embedded", f"the database was not checked: {error}")
            return
    else:
        url = settings.database.get_secret_value()
    dsn = Dsn(url)
    try:
        connection = connect_now(dsn, timeout=_TIMEOUT_SECONDS, autocommit=True)
    except (psycopg.Error, OSError) as error:
        yield failed(
            "database.reachable",
            f"{dsn.shown} cannot be used ({dsn.explain(error)}): start PostgreSQL, or correct the database URL",
        )
        return
    yield ok("database.reachable", f"{dsn.shown} accepts connections")
    with closing(connection):
        yield from _server(dsn, settings)
        for check in _QUESTIONS:
            try:
                yield from check(connection, settings)
            except psycopg.Error as error:
                yield failed(f"database.{check.__name__.removeprefix('_')}", f"a question failed: {dsn.explain(error)}")
    yield from _log(url, settings)


def _server(dsn: Dsn, settings: Settings) -> Iterator[Check]:
    """What the service itself demands at its start."""
    for check in checks.examine(dsn):
        name, found = f"database.{check.name}", f"{check.name} is {check.found}"
        if check.fault is None:
            yield ok(name, found)
        elif check.unsafe_only and settings.unsafe:
            yield warning(name, f"{check.fault} ({found})")
        else:
            yield failed(name, f"{check.fault} ({found})")


def _capacity(connection: _Connection, _: Settings) -> Iterator[Check]:
    limit, used, autovacuum = _row(
        connection,
        "SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,"
        " (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), current_setting('autovacuum')",
    )
    if limit - used < _SPARE_CONNECTIONS:
        yield warning(
            "database.connections",
            f"{used} of {limit} connections are in use, dtx needs about ten: raise max_connections",
        )
    if autovacuum == "off":
        yield warning("database.autovacuum", "autovacuum is off, so the log's tables will grow without end: turn it on")


def _clock(connection: _Connection, _: Settings) -> Iterator[Check]:
    before = time.time()
    (theirs,) = _row(connection, "SELECT extract(epoch FROM clock_timestamp())::float8")
    after = time.time()
    # Half the round trip is the error of this measurement.
    difference = max(0.0, abs(theirs - (before + after) / 2) - (after - before) / 2)
    if difference > _CLOCK_WARNING_SECONDS:
        yield warning(
            "clock",
            f"the clocks of this machine and of the database differ by {human_duration(difference)}, so times in the "
            "journal mislead: synchronise both with NTP",
        )
    else:
        yield ok("clock", f"the clocks of this machine and of the database agree within {max(difference, 0.001):.3f} s")


def _migrations(connection: _Connection, settings: Settings) -> Iterator[Check]:
    here, known = migrate.current(database_url(settings)), known_revisions()
    newest = known[0]
    if here == newest:
        yield ok("database.migrations", f"the tables are at version {here}, as this dtx wants them")
    elif here is None:
        (may,) = _row(connection, "SELECT has_database_privilege(current_database(), 'CREATE')")
        if may:
            yield warning(
                "database.migrations", "the tables are not there yet: 'dtx migrate' or the first start makes them"
            )
        else:
            yield failed(
                "database.migrations",
                "the tables are not there, and this user may not make them: grant CREATE on the database",
            )
    elif here in known:
        yield warning(
            "database.migrations",
            f"the tables are at version {here}, this dtx wants {newest}: 'dtx migrate' or a start",
        )
    else:
        yield failed(
            "database.migrations", f"the tables are at version {safe(here)}, made by a newer dtx: upgrade this one"
        )


def _log(url: str, settings: Settings) -> Iterator[Check]:
    """What waits."""
    try:
        with LogReader(url) as log:
            totals = log.totals(Filter(rm=settings.rm))
    except LogError:
        # No tables: that has been said.
        return
    count, stuck = sum(total.branches for total in totals), sum(total.stuck for total in totals)
    if stuck:
        yield warning("in-doubt", f"{stuck} of {count} in doubt are stuck: 'dtx branches' shows what the broker says")
    elif count:
        oldest = human_duration(max(total.oldest for total in totals))
        yield ok("in-doubt", f"{count} in doubt, the oldest was started {oldest} ago")
    else:
        yield ok("in-doubt", "no branch is in doubt")


_QUESTIONS: Final[tuple[_Question, ...]] = (_capacity, _clock, _migrations)


def _row(connection: _Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row

"""What the database tells: whether it can be used, whether another dtx would take over, and what a dtx keeps in it.

Can PostgreSQL be reached, does it keep what it says it keeps, do its clock and its tables agree with this dtx? Who has
the lease, who stands by, and how long would a failover take? Without a broker: who can log in from where, and are the
tables of messages kept in shape?
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

import psycopg

from dtx.admin.safe_text import human_duration, human_size, safe
from dtx.auth.passwords import is_password
from dtx.auth.permissions import BadPattern, check_pattern
from dtx.auth.users import DEFAULT_PASSWORD, DEFAULT_USER, LOOPBACK_USERS, AccountEditor, Snapshot
from dtx.cli.database import database_url, known_revisions
from dtx.cli.doctor import DoctorCheck, failed, ok, warning
from dtx.config import Settings
from dtx.db import connections, migrate
from dtx.db.connections import Dsn, connect_now
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LogError
from dtx.log.pages import BranchFilter, totals
from dtx.log.reader import LeaseHolder, LogReader, Stored

_TIMEOUT_SECONDS: Final = 5
_CLOCK_WARNING_SECONDS: Final = 1.0
_SPARE_CONNECTIONS: Final = 10
_HEARTBEATS: Final = 3
"""Without that many, RabbitMQ has closed a connection: until then what was sent on it may still happen."""
_SHORT_LEASE: Final = 5.0
"""Seconds: a third of it is what a renewal gets, and a failover of PostgreSQL or a paused machine takes longer."""
_LONG_TAKEOVER: Final = 120.0
_RENEWALS: Final = 3
_NAMES_SHOWN: Final = 5
_MANY_DEAD_ROWS: Final = 1_000_000
_MOSTLY_DEAD: Final = 4
"""Dead rows for each that is alive: tables of queues turn over quickly, and vacuum needs its time."""

_Connection = psycopg.Connection[Any]
_Question = Callable[[_Connection, Settings], Iterator[DoctorCheck]]


def check_database(settings: Settings) -> Iterator[DoctorCheck]:
    """Everything that can be seen as the user of the database URL. Writes nothing."""
    if settings.database is None:
        from dtx.embedded.cluster import find_programs

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


def _server(dsn: Dsn, settings: Settings) -> Iterator[DoctorCheck]:
    """What the service itself demands at its start."""
    for check in connections.examine(dsn):
        name, found = f"database.{check.name}", f"{check.name} is {check.found}"
        if check.fault is None:
            yield ok(name, found)
        elif check.unsafe_only and settings.unsafe:
            yield warning(name, f"{check.fault} ({found})")
        else:
            yield failed(name, f"{check.fault} ({found})")


def _capacity(connection: _Connection, _: Settings) -> Iterator[DoctorCheck]:
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


def _clock(connection: _Connection, _: Settings) -> Iterator[DoctorCheck]:
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


def _migrations(connection: _Connection, settings: Settings) -> Iterator[DoctorCheck]:
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


def _log(url: str, settings: Settings) -> Iterator[DoctorCheck]:
    """What waits."""
    try:
        with LogReader(url) as log:
            sums = totals(log, BranchFilter(rm=settings.rm))
    except LogError:
        # No tables: that has been said.
        return
    count, stuck = sum(total.branches for total in sums), sum(total.stuck for total in sums)
    if stuck:
        yield warning("in-doubt", f"{stuck} of {count} in doubt are stuck: 'dtx branches' shows what the broker says")
    elif count:
        oldest = human_duration(max(total.oldest for total in sums))
        yield ok("in-doubt", f"{count} in doubt, the oldest was started {oldest} ago")
    else:
        yield ok("in-doubt", "no branch is in doubt")


_QUESTIONS: Final[tuple[_Question, ...]] = (_capacity, _clock, _migrations)


def _row(connection: _Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row


def check_ha(settings: Settings) -> Iterator[DoctorCheck]:
    """Everything that can be seen in the settings and in the database. Writes nothing."""
    if settings.database is None:
        yield ok(
            "ha",
            "the embedded PostgreSQL is this machine's: for a standby on another one, give both the same --database",
        )
    try:
        with LogReader(database_url(settings)) as log:
            leases = log.leases()
            waiting = log.standbys()
    except (LogError, EmbeddedPostgresError):
        return  # what is wrong with the database has been said
    yield from _holder(settings, [lease for lease in leases if lease.rm == settings.rm], waiting, len(leases))
    yield from _times(settings)


def _holder(settings: Settings, mine: list[LeaseHolder], waiting: int, managers: int) -> Iterator[DoctorCheck]:
    active = [lease for lease in mine if lease.remaining > 0]
    others = "" if managers == 1 else f" (for one of the {managers} resource managers of this database)"
    if not active:
        yield ok("lease", _nobody(settings, mine))
        return
    (lease,) = active
    yield ok("lease", f"{safe(lease.holder)} (epoch {lease.epoch}) is the active dtx of {lease.rm}")
    if waiting:
        yield ok("ha.standby", f"{waiting} dtx stand{'s' if waiting == 1 else ''} by{others}")
    elif settings.database is not None:
        yield ok(
            "ha.standby",
            "no other dtx stands by: when this one dies, branches wait until it is started again; start a second one "
            f"with the same --database and --rm {settings.rm}",
        )


def _nobody(settings: Settings, mine: list[LeaseHolder]) -> str:
    if not mine:
        return f"no dtx has ever served as {settings.rm} on this database"
    (lease,) = mine
    return f"no dtx is active as {lease.rm}; the last one was {safe(lease.holder)} (epoch {lease.epoch})"


def _times(settings: Settings) -> Iterator[DoctorCheck]:
    """How long a failover takes, and whether the lease outlives what is shorter than one."""
    lease = settings.lease_ttl
    words = f"a standby serves within {human_duration(lease + 2)} of a kill"
    open_units = _HEARTBEATS * settings.upstream_heartbeat if settings.broker is not None else 0.0
    if open_units:
        words += f", and decides what was on its way to the broker within {human_duration(open_units)} more"
    if lease < _SHORT_LEASE:
        yield warning(
            "ha.lease",
            f"--lease-ttl {human_duration(lease)} leaves a renewal {human_duration(lease / _RENEWALS)}: a pause of "
            "PostgreSQL or of this machine hands over to the standby; 10s to 30s is usual",
        )
    elif lease + open_units > _LONG_TAKEOVER:
        yield warning(
            "ha.lease", f"{words}: that is long; shorten --lease-ttl{' or --upstream-heartbeat' if open_units else ''}"
        )
    else:
        yield ok("ha.lease", words)


def check_standalone(settings: Settings) -> Iterator[DoctorCheck]:
    """Everything that can be seen in the settings and in the database. Writes nothing."""
    yield ok(
        "mode",
        "no broker is given, so dtx is the broker and keeps the messages itself; in front of one, give "
        "--broker amqp://user:password@host/",
    )
    remote = [str(address) for address in settings.listen if not address.is_loopback]
    try:
        url = database_url(settings)
        users = AccountEditor(url, settings.rm).read()
        with LogReader(url) as log:
            stored = log.stored(settings.rm)
    except (LogError, EmbeddedPostgresError):
        return  # what is wrong with the database has been said
    yield from _users(users, remote, settings)
    yield from _messages(stored)
    # what was begun in the seconds before everybody was disconnected
    lost = sorted(stored.vhosts - users.vhosts) if users.version else []
    if lost:
        yield warning(
            "vhosts",
            f"queues or branches are kept in {_names(lost)}, and there is no such virtual host, so nobody gets them: "
            "run 'dtx vhost add' and 'dtx user grant'",
        )


def check_left_behind(settings: Settings) -> Iterator[DoctorCheck]:
    """In front of a broker: what a dtx without one has left in the database, and nobody gets."""
    try:
        with LogReader(database_url(settings)) as log:
            stored = log.stored(settings.rm)
    except (LogError, EmbeddedPostgresError):
        return
    if stored.local:
        yield warning(
            "in-doubt.mode",
            f"{stored.local} in doubt have their messages in the database, so dtx will not start with --broker: leave "
            "it out and have them finished, or name another --rm",
        )
    elif stored.queues:
        yield warning(
            "messages",
            f"{stored.queues} durable queues of a dtx without a broker are in the database; with --broker nobody gets "
            "their messages",
        )


def _users(found: Snapshot, remote: list[str], settings: Settings) -> Iterator[DoctorCheck]:
    if not found.version:
        yield ok("users", "the first start makes user guest with password guest, who can connect from this machine")
        return
    if not found.users:
        yield failed("users", "there is no user, so nobody can log in: run 'dtx user add' and 'dtx user grant'")
    elif remote and not found.users.keys() - LOOPBACK_USERS:
        yield warning(
            "users",
            f"dtx listens on {', '.join(remote)}, and guest, who can connect from this machine alone, is the only "
            "user: run 'dtx user add' and 'dtx user grant'",
        )
    else:
        yield ok("users", f"users: {len(found.users)}; virtual hosts: {len(found.vhosts)}")
    guest = found.users.get(DEFAULT_USER)
    if guest is not None and is_password(DEFAULT_PASSWORD, guest.password_hash):
        what = "user guest still has password guest, and everybody on this machine may be guest"
        if remote:
            what += f"; what passes connections on to {', '.join(remote)} from this machine lets others be guest, too"
        note = f"{what}: run 'dtx user passwd guest', or 'dtx user rm guest'"
        yield warning("users.guest", note) if remote else ok("users.guest", note)
    homeless = [name for name, user in found.users.items() if not user.grants]
    if homeless:
        yield warning("users.grants", f"{_names(homeless)} may enter no virtual host: run 'dtx user grant'")
    yield from _patterns(found)
    unknown = [name for name in settings.coordinator if name not in found.users]
    if unknown:
        yield warning(
            "users.coordinator", f"--coordinator names {_names(unknown)}, and there is no such user: run 'dtx user add'"
        )


def _patterns(found: Snapshot) -> Iterator[DoctorCheck]:
    """Granting refuses a bad pattern; what was written into the table by hand has not been looked at."""
    for name, user in found.users.items():
        for vhost, patterns in user.grants.items():
            for word, pattern in patterns._asdict().items():
                try:
                    check_pattern(pattern)
                except BadPattern as error:
                    yield failed(
                        "users.patterns",
                        f"the pattern {pattern!r} of {name} in {vhost} matches nothing, since {error}: run "
                        f"'dtx user grant' with another --{word}",
                    )


def _messages(stored: Stored) -> Iterator[DoctorCheck]:
    if stored.brokered:
        yield warning(
            "in-doubt.mode",
            f"{stored.brokered} in doubt have their messages in a broker, so dtx will not start without: give --broker "
            "and have them finished, or name another --rm",
        )
    size = human_size(stored.table_bytes)
    yield ok("messages", f"durable queues: {stored.queues}; messages: about {stored.live_rows}, {size} on disk")
    if stored.dead_rows > max(_MANY_DEAD_ROWS, _MOSTLY_DEAD * stored.live_rows):
        yield warning(
            "messages.vacuum",
            f"the table of messages has {stored.dead_rows} dead rows: autovacuum does not keep up; see whether a long "
            "transaction or a replication slot holds it back (pg_stat_activity, pg_replication_slots)",
        )


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(safe, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")

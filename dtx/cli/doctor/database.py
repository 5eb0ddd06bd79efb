"""Checks of the database: PostgreSQL and its tables, the lease and standbys, and the contents.

They cover access, durability, clock and version, the holder of the lease, standbys and the time of a failover. Without
a broker, they also cover users, virtual hosts and dead rows in the tables of messages.
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
from dtx.cli.database import database_url
from dtx.cli.doctor import DoctorCheck, failed, ok, warning
from dtx.config import Settings
from dtx.db import connections, migrate
from dtx.db.connections import Dsn, connect_now
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LogError
from dtx.log.pages import BranchFilter, totals
from dtx.log.reader import LeaseHolder, LogReader, MemberRow, Stored

_TIMEOUT_SECONDS: Final = 5
_CLOCK_WARNING_SECONDS: Final = 1.0
_SPARE_CONNECTIONS: Final = 10
_HEARTBEATS: Final = 3
"""RabbitMQ closes a connection after this many missed heartbeats; until then it may still execute what was sent."""
_SHORT_LEASE: Final = 5.0
"""Seconds. A renewal has a third of the lease; a failover of PostgreSQL or a pause of the machine takes longer."""
_LONG_TAKEOVER: Final = 120.0
_RENEWALS: Final = 3
_NAMES_SHOWN: Final = 5
_MANY_DEAD_ROWS: Final = 1_000_000
_MOSTLY_DEAD: Final = 4
"""Dead rows for each live row: rows of queues are replaced quickly, and vacuum runs only from time to time."""

_Connection = psycopg.Connection[Any]
_Question = Callable[[_Connection, Settings], Iterator[DoctorCheck]]


def check_database(settings: Settings) -> Iterator[DoctorCheck]:
    """The checks as the user of the database URL. They write nothing."""
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
                yield failed(f"database.{check.__name__.removeprefix('_')}", f"the check failed: {dsn.explain(error)}")
    yield from _log(url, settings)


def _server(dsn: Dsn, settings: Settings) -> Iterator[DoctorCheck]:
    """The requirements that the service checks at its start."""
    for check in connections.examine(dsn):
        name, found = f"database.{check.name}", f"{check.name} is {check.found}"
        if check.advice is not None:
            yield warning(name, f"{check.advice} ({found})")
        elif check.fault is None:
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
            f"{used} of {limit} connections are in use, and dtx needs about ten: raise max_connections",
        )
    if autovacuum == "off":
        yield warning(
            "database.autovacuum", "autovacuum is off, so the tables of the log grow without limit: turn it on"
        )


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
            "journal are wrong: synchronise both with NTP",
        )
    else:
        yield ok("clock", f"the clocks of this machine and of the database agree within {max(difference, 0.001):.3f} s")


def _migrations(connection: _Connection, settings: Settings) -> Iterator[DoctorCheck]:
    here, known = migrate.current(database_url(settings)), migrate.known_revisions()
    newest = known[0]
    if here == newest:
        yield ok("database.migrations", f"the tables are at version {here}, which this dtx needs")
    elif here is None:
        (may,) = _row(connection, "SELECT has_database_privilege(current_database(), 'CREATE')")
        if may:
            yield warning(
                "database.migrations", "there are no tables yet: 'dtx migrate' or the first start creates them"
            )
        else:
            yield failed(
                "database.migrations",
                "there are no tables, and this user may not create them: grant CREATE on the database",
            )
    elif here in known:
        yield warning(
            "database.migrations",
            f"the tables are at version {here}, this dtx needs {newest}: run 'dtx migrate', or start dtx",
        )
    else:
        yield failed("database.migrations", f"the tables are at version {safe(here)} of a newer dtx: upgrade this one")


def _log(url: str, settings: Settings) -> Iterator[DoctorCheck]:
    """Branches in doubt."""
    try:
        with LogReader(url) as log:
            sums = totals(log, BranchFilter(rm=settings.rm))
    except LogError:
        # There are no tables: another check has reported it.
        return
    count, stuck = sum(total.branches for total in sums), sum(total.stuck for total in sums)
    if stuck:
        yield warning("in-doubt", f"{stuck} of {count} branches in doubt are stuck: 'dtx branches' shows the cause")
    elif count:
        oldest = human_duration(max(total.oldest for total in sums))
        yield ok("in-doubt", f"branches in doubt: {count}; the oldest was started {oldest} ago")
    else:
        yield ok("in-doubt", "no branch is in doubt")


_QUESTIONS: Final[tuple[_Question, ...]] = (_capacity, _clock, _migrations)


def _row(connection: _Connection, query: str, *parameters: object) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = connection.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row


def check_ha(settings: Settings) -> Iterator[DoctorCheck]:
    """The checks of lease, standbys and failover time. They write nothing."""
    if settings.database is None:
        yield ok(
            "ha",
            "only this machine can use the embedded PostgreSQL: for a standby on another one, use the same --database",
        )
    try:
        with LogReader(database_url(settings)) as log:
            leases = log.leases()
            waiting = log.standbys()
            members = log.members(settings.rm)
    except (LogError, EmbeddedPostgresError):
        return  # the checks of the database have reported it
    yield from _holder(settings, [lease for lease in leases if lease.rm == settings.rm], waiting, len(leases))
    yield from _members(members)
    yield from _times(settings)


def _members(found: list[MemberRow]) -> Iterator[DoctorCheck]:
    for each in found:
        words = (
            f"{safe(each.holder)} at {safe(each.address)} has {each.branches} branches in the log (epoch {each.epoch})"
        )
        if each.remaining < 0:
            late = human_duration(-each.remaining)
            yield warning("member", f"{words}: its lease ended {late} ago, and the others take its branches")
        else:
            yield ok("member", f"{words}; its lease ends in {human_duration(each.remaining)}")


def _holder(settings: Settings, mine: list[LeaseHolder], waiting: int, managers: int) -> Iterator[DoctorCheck]:
    active = [lease for lease in mine if lease.remaining > 0]
    others = "" if managers == 1 else f" (for one of the {managers} resource managers of this database)"
    if not active:
        yield ok("lease", _no_active_text(settings, mine))
        return
    (lease,) = active
    yield ok("lease", f"{safe(lease.holder)} (epoch {lease.epoch}): active as {lease.rm}")
    if waiting:
        yield ok("ha.standby", f"{waiting} dtx stand{'s' if waiting == 1 else ''} by{others}")
    elif settings.database is not None:
        yield ok(
            "ha.standby",
            "there is no standby: if this dtx dies, branches wait until it is started again; start a second one "
            f"with the same --database and --rm {settings.rm}",
        )


def _no_active_text(settings: Settings, mine: list[LeaseHolder]) -> str:
    if not mine:
        return f"no dtx has ever served as {settings.rm} on this database"
    (lease,) = mine
    return f"no dtx is active as {lease.rm}; the last one was {safe(lease.holder)} (epoch {lease.epoch})"


def _times(settings: Settings) -> Iterator[DoctorCheck]:
    """The time of a failover, and whether the lease is long enough for a short pause of PostgreSQL or the machine."""
    lease = settings.lease_ttl
    words = f"a standby serves within {human_duration(lease + 2)} after a kill"
    open_units = _HEARTBEATS * settings.upstream_heartbeat if settings.broker is not None else 0.0
    if open_units:
        words += f", and completes units that were open in the broker within another {human_duration(open_units)}"
    if lease < _SHORT_LEASE:
        yield warning(
            "ha.lease",
            f"--lease-ttl {human_duration(lease)} leaves {human_duration(lease / _RENEWALS)} for a renewal: a pause of "
            "PostgreSQL or of this machine makes the standby take over; 10s to 30s is usual",
        )
    elif lease + open_units > _LONG_TAKEOVER:
        yield warning(
            "ha.lease", f"{words}: that is long; shorten --lease-ttl{' or --upstream-heartbeat' if open_units else ''}"
        )
    else:
        yield ok("ha.lease", words)


def check_standalone(settings: Settings) -> Iterator[DoctorCheck]:
    """The checks of a dtx without a broker: users, virtual hosts and messages. They write nothing."""
    yield ok(
        "mode",
        "there is no --broker, so dtx is the broker and keeps the messages itself; to use a broker, give "
        "--broker amqp://user:password@host/",
    )
    remote = [str(address) for address in settings.listen if not address.is_loopback]
    try:
        url = database_url(settings)
        users = AccountEditor(url, settings.rm).read()
        with LogReader(url) as log:
            stored = log.stored(settings.rm)
    except (LogError, EmbeddedPostgresError):
        return  # the checks of the database have reported it
    yield from _users(users, remote, settings)
    yield from _messages(stored)
    # Clients can start branches in the seconds between the removal of a virtual host and their disconnection.
    lost = sorted(stored.vhosts - users.vhosts) if users.version else []
    if lost:
        yield warning(
            "vhosts",
            f"there are queues or branches in {_names(lost)}, but no such virtual host, so clients cannot use them: "
            "run 'dtx vhost add' and 'dtx user grant'",
        )


def check_left_behind(settings: Settings) -> Iterator[DoctorCheck]:
    """With a broker: branches and queues that a dtx without a broker left in the database. Clients cannot use them."""
    try:
        with LogReader(database_url(settings)) as log:
            stored = log.stored(settings.rm)
    except (LogError, EmbeddedPostgresError):
        return
    if stored.local:
        yield warning(
            "in-doubt.mode",
            f"the messages of {stored.local} branches in doubt are in the database, so dtx does not start with "
            "--broker: complete them without --broker, or name another --rm",
        )
    elif stored.queues:
        yield warning(
            "messages",
            f"{stored.queues} durable queues of a dtx without a broker are in the database; with --broker, clients "
            "cannot consume their messages",
        )


def _users(found: Snapshot, remote: list[str], settings: Settings) -> Iterator[DoctorCheck]:
    if not found.version:
        yield ok(
            "users", "the first start creates user guest with password guest, which can connect only from this machine"
        )
        return
    if not found.users:
        yield failed("users", "there is no user, so no client can log in: run 'dtx user add' and 'dtx user grant'")
    elif remote and not found.users.keys() - LOOPBACK_USERS:
        yield warning(
            "users",
            f"dtx listens on {', '.join(remote)}, but the only user is guest, which can connect only from this "
            "machine: run 'dtx user add' and 'dtx user grant'",
        )
    else:
        yield ok("users", f"users: {len(found.users)}; virtual hosts: {len(found.vhosts)}")
    guest = found.users.get(DEFAULT_USER)
    if guest is not None and is_password(DEFAULT_PASSWORD, guest.password_hash):
        what = "user guest still has password guest, so every program on this machine can log in"
        if remote:
            what += f", and so can clients of a proxy on this machine that connects to {', '.join(remote)}"
        note = f"{what}: run 'dtx user passwd guest', or 'dtx user remove guest'"
        yield warning("users.guest", note) if remote else ok("users.guest", note)
    homeless = [name for name, user in found.users.items() if not user.grants]
    if homeless:
        yield warning("users.grants", f"{_names(homeless)} may not connect to any virtual host: run 'dtx user grant'")
    yield from _patterns(found)
    unknown = [name for name in settings.coordinator if name not in found.users]
    if unknown:
        yield warning(
            "users.coordinator", f"--coordinator names {_names(unknown)}, but there is no such user: run 'dtx user add'"
        )


def _patterns(found: Snapshot) -> Iterator[DoctorCheck]:
    """Patterns that cannot be used. Granting refuses them; they are there if the table was changed by hand."""
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
            f"the messages of {stored.brokered} branches in doubt are in a broker, so dtx does not start without "
            "--broker: complete them with --broker, or name another --rm",
        )
    size = human_size(stored.table_bytes)
    yield ok("messages", f"durable queues: {stored.queues}; messages: about {stored.live_rows}, {size} on disk")
    if stored.dead_rows > max(_MANY_DEAD_ROWS, _MOSTLY_DEAD * stored.live_rows):
        yield warning(
            "messages.vacuum",
            f"the table of messages has {stored.dead_rows} dead rows: autovacuum is too slow; check whether a long "
            "transaction or a replication slot blocks it (pg_stat_activity, pg_replication_slots)",
        )


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(map(safe, names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")

"""Without a broker: who can log in from where, and whether the tables of messages are kept in shape."""

from collections.abc import Iterator
from typing import Final

from dtx.admin.safe_text import human_size, safe
from dtx.auth.editing import AccountEditor
from dtx.auth.passwords import is_password
from dtx.auth.permissions import BadPattern, check_pattern
from dtx.auth.users import DEFAULT_PASSWORD, DEFAULT_USER, LOOPBACK_USERS, Snapshot
from dtx.cli.connect import database_url
from dtx.cli.doctor.model import Check, failed, ok, warning
from dtx.config import Settings
from dtx.embedded.postgres import EmbeddedPostgresError
from dtx.log.api import LogError
from dtx.log.reading import LogReader, Stored

_NAMES_SHOWN: Final = 5
_MANY_DEAD_ROWS: Final = 1_000_000
_MOSTLY_DEAD: Final = 4
"""Dead rows for each that is alive: tables of queues turn over quickly, and vacuum needs its time."""


def check_standalone(settings: Settings) -> Iterator[Check]:
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


def check_left_behind(settings: Settings) -> Iterator[Check]:
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


def _users(found: Snapshot, remote: list[str], settings: Settings) -> Iterator[Check]:
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


def _patterns(found: Snapshot) -> Iterator[Check]:
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


def _messages(stored: Stored) -> Iterator[Check]:
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

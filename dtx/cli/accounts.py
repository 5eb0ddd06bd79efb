"""``dtx user``, ``dtx vhost`` and ``dtx token``: users, permissions and virtual hosts of a dtx without a broker, and
tokens for the operators' API.
"""

import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final
from urllib.parse import quote

import click

from dtx.admin.safe_text import safe
from dtx.auth.roles import TAGS, OperatorRole, Tag
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.api_client import Api
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import (
    ADMIN_SETTINGS,
    DATABASE_SETTINGS,
    SettingsCommand,
    Subcommands,
    duration,
    with_options,
    with_settings,
)
from dtx.cli.output import Column, Listing, Row, table_lines, with_listing
from dtx.config import Settings

_MAX_LINE: Final = 64 * 1024
"""Bytes read from stdin at most for the line with the password."""
_TAG: Final = click.Choice([*map(str, Tag)])
_WORDS: Final = ("configure", "write", "read")

_ABOUT: Final = """\b
These are the users of a dtx without a broker. With a broker, clients log in with the broker's users, and these users
are operators. A running dtx needs no restart: changes count for new logins at once, for open connections within a few
seconds.

"""
_USER_EPILOG: Final = (
    """\b
Examples:
  dtx user add alice                            asks for the password
  dtx user add tm --password-stdin < secret     reads it from a file, without the end of line
  dtx user grant alice --all                    everything in the virtual host /
  dtx user grant alice --vhost shop --write '^orders$' --read '^orders\\.' --configure ''
  dtx user list --sort name
  dtx user passwd alice
  dtx user revoke alice --vhost shop
  dtx user revoke-topic alice amq.topic
  dtx user remove alice --reason 'left the company'

A password is never an argument, because other users of this machine can read arguments.

"""
    + _ABOUT
    + """
\b
The first start creates user guest with password guest and all permissions in /; it can connect only from this machine.

"""
    + HOW
)
_PERMISSIONS: Final = """\b
A pattern is a regular expression that is searched in names of exchanges and queues: 'orders' matches 'my.orders.1',
'^orders$' only that name, '.*' every name, '' no name. The name of the default exchange is 'amq.default' here.
  configure  declare and delete
  write      publish to an exchange; bind a queue, or an exchange to another as destination
  read       consume from, get from and purge a queue; bind to an exchange as source
Options that are not given change nothing; at first nothing is permitted. Any permission, even '', lets the user open
connections to the virtual host.

\b
Examples:
  dtx user grant alice --all
  dtx user grant alice --vhost shop --read '^(orders|invoices)$'
"""

_TOPICS: Final = """\b
A user that may use a topic exchange (dtx user grant) may use every routing key, unless it has topic permissions for
this exchange. A pattern is a regular expression that is searched in the routing key; {username} and {vhost} in it are
replaced by the names.
  write      publish with such routing keys
  read       bind and unbind with such routing keys
Options that are not given change nothing; at first nothing is permitted.

\b
Examples:
  dtx user grant-topic alice amq.topic --write '^{username}\\.' --read '^(news|{username})\\.'
"""
_TAG_LINES: Final = "\n".join(f"{tag:16}{sentence}" for tag, (_, sentence) in TAGS.items())
_TAGS_HELP: Final = f"""\b
{_TAG_LINES}

\b
Examples:
  dtx user tag relay impersonator
  dtx user tag relay
"""
_VHOST_EPILOG: Final = (
    """\b
Examples:
  dtx vhost add shop
  dtx user grant alice --vhost shop --all
  dtx vhost list
  dtx vhost remove shop

\b
A virtual host has its own exchanges, queues and branches; a client names it when it opens its connection.

"""
    + _ABOUT
    + HOW
)
_TOKEN_EPILOG: Final = (
    """\b
Examples:
  dtx token add prometheus --role viewer
  dtx token add olga --role operator --expires 30d > olga.token
  dtx token list
  dtx token remove olga

Access to the database is enough to create the first token. Commands read tokens from --token-file or DTX_TOKEN; other
HTTP clients send 'Authorization: Bearer TOKEN'.

"""
    + HOW
)

_name = click.argument("name")
_vhost = click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="In this virtual host.")
_password_stdin = click.option("--password-stdin", is_flag=True, help="Read the password from stdin; do not ask.")
_reason = click.option("--reason", default="", metavar="TEXT", help="Reason, for the audit log.")
_api = with_options(with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS), with_access)
"""Options that tell which API a command asks; the command is called with ``settings`` first, and ``access``."""


@contextmanager
def _reached(settings: Settings, access: ApiAccess, *, change: bool = True) -> Iterator[Api]:
    """The API for users, virtual hosts and tokens. Unlike orders about branches, these changes need no lease.

    Args:
        settings: which dtx.
        access: the user's options about its API.
        change: whether the command changes something.

    Raises:
        CommandError: no token, no way to the API, or the tables have another version than this dtx needs.
    """
    with reach(settings, access, orders=change, make=change) as api:
        api.require_tables()
        yield api


def _changing(
    group: click.Group, name: str, *options: Callable[[Any], Any], epilog: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of *group* that changes something, with ``--reason``.

    It is called with ``change``, which posts its arguments to a path of the API, and with the values of *options*.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        @wraps(function)
        def run(settings: Settings, reason: str, access: ApiAccess, **given: Any) -> int:
            def change(path: str, **body: object) -> Any:
                with _reached(settings, access) as api:
                    return api.post(path, body | {"reason": reason})

            function(change, **given)
            return Exit.OK

        command = with_options(_api, *options, _reason)(run)
        return group.command(name, cls=SettingsCommand, epilog=epilog)(command)

    return decorate


def _listing(
    group: click.Group,
    path: str,
    about: str,
    columns: Sequence[Column],
    empty: str,
    table: Callable[[Iterable[Row]], Iterable[str]] | None = None,
) -> None:
    """Make the command ``list`` of *group* for the list at *path* of the API; see :meth:`Listing.show`."""

    def run(settings: Settings, listing: Listing, access: ApiAccess) -> int:
        with _reached(settings, access, change=False) as api:
            listing.show(lambda: api.get(path), columns, empty, table=table)
        return Exit.OK

    group.command("list", cls=SettingsCommand, help=about)(with_options(_api, with_listing)(run))


@click.group(cls=Subcommands, epilog=_USER_EPILOG)
def user() -> None:
    """Users: passwords and permissions in each virtual host."""


@_changing(
    user,
    "add",
    _name,
    _password_stdin,
    click.option(
        "--tag",
        "tags",
        multiple=True,
        type=_TAG,
        help=f"{'; '.join(f'{tag}: {sentence}' for tag, (_, sentence) in TAGS.items())}. Can be repeated.",
    ),
)
def add_user(change: Any, name: str, password_stdin: bool, tags: tuple[str, ...]) -> None:
    """Create a user. It has no permissions until 'dtx user grant'."""
    change("/dtx/v1/users", name=name, **_password(name, stdin=password_stdin), tags=tags)
    click.echo(f"user {safe(name)} is created; 'dtx user grant' gives it permissions in a virtual host")


def _user_lines(users: Iterable[Row]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    topics: list[tuple[str, ...]] = []
    for found in users:
        head = (found["name"], ", ".join(found["tags"]))
        for each in found["permissions"]:
            rows.append((*head, each["vhost"], *(_quoted(each[word]) for word in _WORDS)))
            head = ("", "")
        if not found["permissions"]:
            rows.append((*head, "", "", "", ""))
        for each in found["topic_permissions"]:
            patterns = (_quoted(each[word]) for word in _WORDS[1:])
            topics.append((found["name"], each["vhost"], each["exchange"], *patterns))
    yield from table_lines(("user", "tags", "vhost", *_WORDS), ([*map(safe, row)] for row in rows))
    if topics:
        yield ""
        columns = ("user", "vhost", "topic exchange", *_WORDS[1:])
        yield from table_lines(columns, ([*map(safe, row)] for row in topics))


_listing(
    user,
    "/dtx/v1/users",
    "List users with their permissions in each virtual host.",
    (Column("user", "name"), Column("tags")),
    "there is no user yet; the first start of dtx without a broker creates guest",
    _user_lines,
)


@_changing(user, "passwd", _name, _password_stdin)
def set_password(change: Any, name: str, password_stdin: bool) -> None:
    """Change a password. It counts from the next login; open connections stay open."""
    change("/dtx/v1/users/password", name=name, **_password(name, stdin=password_stdin))
    click.echo(f"user {safe(name)} has a new password")


@_changing(
    user,
    "grant",
    _name,
    _vhost,
    click.option("--configure", metavar="PATTERN", help="Names that the user may declare and delete."),
    click.option("--write", metavar="PATTERN", help="Names of exchanges that it may publish to."),
    click.option("--read", metavar="PATTERN", help="Names of queues that it may consume from."),
    click.option("--all", "everything", is_flag=True, help="'.*' for each of these options that is not given."),
    epilog=_PERMISSIONS,
)
def grant(change: Any, name: str, vhost: str, everything: bool, **patterns: str | None) -> None:
    """Give a user permissions in a virtual host."""
    if everything:
        patterns = {word: ".*" if pattern is None else pattern for word, pattern in patterns.items()}
    if all(pattern is None for pattern in patterns.values()):
        raise click.UsageError("no permission was given: use --configure, --write, --read, or --all")
    now = change("/dtx/v1/users/grant", name=name, vhost=vhost, **patterns)
    click.echo(f"user {safe(name)} in {safe(vhost)}: {_words(now, _WORDS)}")


@_changing(
    user,
    "tag",
    _name,
    click.argument("tags", nargs=-1, type=_TAG, metavar="[TAG]..."),
    epilog=_TAGS_HELP,
)
def set_tags(change: Any, name: str, tags: tuple[str, ...]) -> None:
    """Replace the tags of a user; without TAG, remove all of them."""
    change("/dtx/v1/users/tags", name=name, tags=tags)
    click.echo(f"tags of user {safe(name)}: {', '.join(sorted(set(tags))) or 'none'}")


@_changing(user, "revoke", _name, _vhost)
def revoke(change: Any, name: str, vhost: str) -> None:
    """Revoke all permissions of a user in a virtual host.

    The user can no longer connect to it; its connections there are closed within a few seconds.
    """
    change("/dtx/v1/users/revoke", name=name, vhost=vhost)
    click.echo(f"user {safe(name)} has no permissions in {safe(vhost)} now")


@_changing(user, "remove", _name)
def remove_user(change: Any, name: str) -> None:
    """Remove a user with all its permissions.

    Its connections are closed within a few seconds. Its branches in doubt stay; a --coordinator can complete them.
    """
    owned = change("/dtx/v1/users/remove", name=name)["branches"]
    click.echo(f"user {safe(name)} is removed")
    if owned:
        click.echo(
            f"branches in doubt that it has started: {owned}; only users named by --coordinator can complete them; "
            "'dtx branches' lists them",
            err=True,
        )


@_changing(
    user,
    "grant-topic",
    _name,
    click.argument("exchange"),
    _vhost,
    click.option("--write", metavar="PATTERN", help="Routing keys that the user may publish with."),
    click.option("--read", metavar="PATTERN", help="Routing keys that the user may bind with."),
    epilog=_TOPICS,
)
def grant_topic(change: Any, name: str, exchange: str, vhost: str, write: str | None, read: str | None) -> None:
    """Limit the routing keys of a user at a topic exchange."""
    if write is None and read is None:
        raise click.UsageError("no permission was given: use --write or --read")
    now = change("/dtx/v1/users/grant-topic", name=name, vhost=vhost, exchange=exchange, write=write, read=read)
    words = _words(now, _WORDS[1:])
    click.echo(f"user {safe(name)} in {safe(vhost)}, topics of exchange {safe(exchange)}: {words}")


@_changing(user, "revoke-topic", _name, click.argument("exchange", required=False), _vhost)
def revoke_topic(change: Any, name: str, exchange: str | None, vhost: str) -> None:
    """Revoke topic permissions. The user may use every routing key again, at EXCHANGE or at all exchanges."""
    count = change("/dtx/v1/users/revoke-topic", name=name, vhost=vhost, exchange=exchange)["exchanges"]
    click.echo(f"user {safe(name)} may use every routing key again at {count} exchange{'s' if count != 1 else ''}")


def _password(name: str, *, stdin: bool) -> dict[str, str]:
    """The password for the API, read from the terminal or from the first line of stdin."""
    if stdin:
        line = sys.stdin.buffer.readline(_MAX_LINE)
        octets = line.removesuffix(b"\n").removesuffix(b"\r")
        return {"password": b64encode(octets).decode(), "encoding": "base64"}
    if not sys.stdin.isatty():
        raise CommandError(
            Exit.USAGE, "the password cannot be asked for, because stdin is no terminal: use --password-stdin"
        )
    asked: str = click.prompt(f"password of {safe(name)}", hide_input=True, confirmation_prompt=True, err=True)
    return {"password": asked}


def _words(permission: dict[str, str], words: tuple[str, ...]) -> str:
    return ", ".join(f"{word} {safe(_quoted(permission[word]))}" for word in words)


def _quoted(pattern: str) -> str:
    """The pattern in quotes, so that an empty one is visible."""
    return f"'{pattern}'"


@click.group(cls=Subcommands, epilog=_VHOST_EPILOG)
def vhost() -> None:
    """Virtual hosts: separate exchanges, queues and branches."""


@_changing(vhost, "add", _name)
def add_vhost(change: Any, name: str) -> None:
    """Create a virtual host. No user can connect to it until 'dtx user grant'."""
    change("/dtx/v1/vhosts", name=name)
    click.echo(f"virtual host {safe(name)} is created; 'dtx user grant' gives users permissions in it")


_listing(
    vhost,
    "/dtx/v1/vhosts",
    "List virtual hosts.",
    (Column("name"),),
    "there is no virtual host yet; the first start of dtx without a broker creates /",
    lambda found: (safe(each["name"]) for each in found),
)


@_changing(vhost, "remove", _name)
def remove_vhost(change: Any, name: str) -> None:
    """Remove an empty virtual host.

    It is refused while the virtual host has branches in doubt, durable queues or durable exchanges.
    """
    change("/dtx/v1/vhosts/remove", name=name)
    click.echo(f"virtual host {safe(name)} is removed")


@click.group(cls=Subcommands, epilog=_TOKEN_EPILOG)
def token() -> None:
    """Tokens for the operators' API.

    A viewer may look, an operator may decide about single branches, and a coordinator about many at once.
    """


@_changing(
    token,
    "add",
    _name,
    click.option("--role", type=click.Choice([*map(str, OperatorRole)]), required=True, help="What the token permits."),
    click.option("--expires", callback=duration, metavar="DURATION", help="Time until the token expires."),
)
def add_token(change: Any, name: str, role: str, expires: float | None) -> None:
    """Create a token and print it. It cannot be printed again."""
    click.echo(change("/dtx/v1/tokens", name=name, role=role, seconds=expires)["secret"])


_listing(
    token,
    "/dtx/v1/tokens",
    "List tokens without their secrets.",
    (
        Column("token", "name"),
        Column("role"),
        Column("made by"),
        Column("made", "made_at"),
        Column("expires", "expires_at", lambda each: safe(each["expires_at"] or "never")),
    ),
    "there is no token",
)


@token.command("remove", cls=SettingsCommand)
@_api
@_name
@_reason
def remove_token(settings: Settings, name: str, reason: str, access: ApiAccess) -> int:
    """Revoke a token at once."""
    with _reached(settings, access) as api:
        api.delete(f"/dtx/v1/tokens/{quote(name, safe='')}", reason=reason)
    return Exit.OK

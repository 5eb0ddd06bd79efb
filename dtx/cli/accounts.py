"""``dtx user``, ``dtx vhost`` and ``dtx token``: who may connect to a dtx without a broker, what each may do where, and
tokens for the operators' API.
"""

import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
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
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, SettingsCommand, duration, with_options, with_settings
from dtx.cli.output import show_list, show_table
from dtx.config import Settings

_MAX_LINE: Final = 64 * 1024
"""Octets read from stdin in search of the end of a password."""
_TAG: Final = click.Choice([*map(str, Tag)])
_WORDS: Final = ("configure", "write", "read")

_ABOUT: Final = """\b
The users of a dtx without a broker. Alongside one clients log in with the broker's users; these are operators then.
A running dtx needs no restart: a login sees what has changed at once, open connections within a few seconds.

"""
_USER_EPILOG: Final = (
    """\b
Examples:
  dtx user add alice                            asks for the password
  dtx user add tm --password-stdin < secret     takes it from a file, without its end of line
  dtx user grant alice --all                    everything in the virtual host /
  dtx user grant alice --vhost shop --write '^orders$' --read '^orders\\.' --configure ''
  dtx user list

A password is never an argument: other users of this machine can read those.

"""
    + _ABOUT
    + """
\b
The first start makes user guest with password guest and all permissions in /; it can connect from this machine alone.

"""
    + HOW
)
_PERMISSIONS: Final = """\b
A pattern is a regular expression that is searched in names of exchanges and queues: 'orders' is found in 'my.orders.1',
'^orders$' is that name alone, '.*' is every name, '' is none. The default exchange counts as 'amq.default'.
  configure  declare and delete
  write      publish to an exchange; bind a queue, or an exchange to another as destination
  read       consume from, get from and purge a queue; bind to an exchange as source
What is not given stays as it was; at first nothing is permitted. Any permission, even '', lets the user enter.

\b
Examples:
  dtx user grant alice --all
  dtx user grant alice --vhost shop --read '^(orders|invoices)$'
"""

_TOPICS: Final = """\b
Who may use a topic exchange at all (dtx user grant) may use every routing key of it, unless topic permissions for this
exchange say which. A pattern is a regular expression that is searched in the routing key; {username} and {vhost} in it
stand for the names.
  write      publish with such routing keys
  read       bind and unbind with such routing keys
What is not given stays as it was; at first nothing is permitted.

\b
Examples:
  dtx user grant-topic alice amq.topic --write '^{username}\\.' --read '^(news|{username})\\.'
  dtx user revoke-topic alice amq.topic
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
  dtx vhost rm shop

\b
A virtual host has exchanges, queues and branches of its own; a client names it when it opens its connection.

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

Whoever can open the database can make the first one. Commands take tokens by --token-file or DTX_TOKEN, others as
'Authorization: Bearer TOKEN'.

"""
    + HOW
)

_name = click.argument("name")
_vhost = click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="In this virtual host.")
_password_stdin = click.option("--password-stdin", is_flag=True, help="Read the password from stdin, do not ask.")
_reason = click.option("--reason", default="", metavar="TEXT", help="Why; for the trail.")
_api = with_options(with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS), with_access)
"""Whom a command asks: it is called with ``settings`` first, and ``access``."""


class _Subcommands(click.Group):
    """A group that lists its commands in the order in which they are defined, which is that of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in that order."""
        return list(self.commands)


@contextmanager
def _reached(settings: Settings, access: ApiAccess, *, change: bool = True) -> Iterator[Api]:
    """Whom such a command asks. Unlike branches these tables need no lease, where no dtx has it.

    Args:
        settings: which dtx.
        access: what the user said about its API.
        change: whether something is to be changed.

    Raises:
        CommandError: no token, no way to the API, or the tables are not those of this dtx.
    """
    with reach(settings, access, orders=change, make=change) as api:
        api.require_tables()
        yield api


def _changing(
    group: click.Group, name: str, *options: Callable[[Any], Any], epilog: str | None = None
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of *group* that changes something, for a reason.

    It is called with ``change``, which asks the API at a path for what it is given, and with the values of *options*.
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
    group: click.Group, path: str, empty: str
) -> Callable[[Callable[[list[dict[str, Any]]], None]], click.Command]:
    """Make the command ``list`` of *group*, of a function that shows people what the API has at *path*."""

    def decorate(show: Callable[[list[dict[str, Any]]], None]) -> click.Command:
        @wraps(show)
        def run(settings: Settings, as_json: bool, access: ApiAccess) -> int:
            with _reached(settings, access, change=False) as api:
                found = api.get(path)
            show_list(found, show, empty, as_json=as_json)
            return Exit.OK

        as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
        return group.command("list", cls=SettingsCommand)(with_options(_api, as_json)(run))

    return decorate


@click.group(cls=_Subcommands, epilog=_USER_EPILOG)
def user() -> None:
    """Users: passwords, and what each may do where."""


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
    """Make a user. It may do nothing until 'dtx user grant'."""
    change("/api/users", name=name, **_password(name, stdin=password_stdin), tags=tags)
    click.echo(f"user {safe(name)} is there; 'dtx user grant' lets it into a virtual host")


@_listing(user, "/api/users", "there is no user yet; the first start of dtx without a broker makes guest")
def list_users(users: list[dict[str, Any]]) -> None:
    """List users with their permissions in each virtual host."""
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
    show_table(("user", "tags", "vhost", *_WORDS), ([*map(safe, row)] for row in rows))
    if topics:
        click.echo()
        show_table(("user", "vhost", "topic exchange", *_WORDS[1:]), ([*map(safe, row)] for row in topics))


@_changing(user, "passwd", _name, _password_stdin)
def set_password(change: Any, name: str, password_stdin: bool) -> None:
    """Change a password. It counts from the next login; open connections stay."""
    change("/api/users/password", name=name, **_password(name, stdin=password_stdin))
    click.echo(f"user {safe(name)} has a new password")


@_changing(
    user,
    "grant",
    _name,
    _vhost,
    click.option("--configure", metavar="PATTERN", help="What it may declare and delete."),
    click.option("--write", metavar="PATTERN", help="Where it may publish."),
    click.option("--read", metavar="PATTERN", help="What it may consume."),
    click.option("--all", "everything", is_flag=True, help="The same as '.*' for those that are not given."),
    epilog=_PERMISSIONS,
)
def grant(change: Any, name: str, vhost: str, everything: bool, **patterns: str | None) -> None:
    """Let a user into a virtual host, and say what it may do there."""
    if everything:
        patterns = {word: ".*" if pattern is None else pattern for word, pattern in patterns.items()}
    if all(pattern is None for pattern in patterns.values()):
        raise click.UsageError("say what is granted: --configure, --write, --read, or --all")
    now = change("/api/users/grant", name=name, vhost=vhost, **patterns)
    click.echo(f"user {safe(name)} in {safe(vhost)}: {_words(now, _WORDS)}")


@_changing(
    user,
    "tag",
    _name,
    click.argument("tags", nargs=-1, type=_TAG, metavar="[TAG]..."),
    epilog=_TAGS_HELP,
)
def set_tags(change: Any, name: str, tags: tuple[str, ...]) -> None:
    """Give a user these tags and no others; without any, take all away."""
    change("/api/users/tags", name=name, tags=tags)
    click.echo(f"tags of user {safe(name)}: {', '.join(sorted(set(tags))) or 'none'}")


@_changing(user, "revoke", _name, _vhost)
def revoke(change: Any, name: str, vhost: str) -> None:
    """Take all permissions in a virtual host back.

    The user may not enter it any more; its connections there are closed within a few seconds.
    """
    change("/api/users/revoke", name=name, vhost=vhost)
    click.echo(f"user {safe(name)} may not enter {safe(vhost)}")


@_changing(user, "rm", _name)
def remove_user(change: Any, name: str) -> None:
    """Remove a user with all its permissions.

    Its connections are closed within a few seconds. Its branches in doubt stay: a --coordinator can complete them.
    """
    owned = change("/api/users/remove", name=name)["branches"]
    click.echo(f"user {safe(name)} is removed")
    if owned:
        click.echo(
            f"branches in doubt that it has started: {owned}; only users named by --coordinator can complete them, "
            "'dtx branches' shows them",
            err=True,
        )


@_changing(
    user,
    "grant-topic",
    _name,
    click.argument("exchange"),
    _vhost,
    click.option("--write", metavar="PATTERN", help="Routing keys with which it may publish."),
    click.option("--read", metavar="PATTERN", help="Routing keys with which it may bind."),
    epilog=_TOPICS,
)
def grant_topic(change: Any, name: str, exchange: str, vhost: str, write: str | None, read: str | None) -> None:
    """Say with which routing keys a user may use a topic exchange."""
    if write is None and read is None:
        raise click.UsageError("say what is granted: --write, --read")
    now = change("/api/users/grant-topic", name=name, vhost=vhost, exchange=exchange, write=write, read=read)
    words = _words(now, _WORDS[1:])
    click.echo(f"user {safe(name)} in {safe(vhost)}, topics of exchange {safe(exchange)}: {words}")


@_changing(user, "revoke-topic", _name, click.argument("exchange", required=False), _vhost)
def revoke_topic(change: Any, name: str, exchange: str | None, vhost: str) -> None:
    """Lift what grant-topic has limited: every routing key will do again, at EXCHANGE or at all."""
    count = change("/api/users/revoke-topic", name=name, vhost=vhost, exchange=exchange)["exchanges"]
    click.echo(f"user {safe(name)} may use every routing key again at {count} exchange{'s' if count != 1 else ''}")


def _password(name: str, *, stdin: bool) -> dict[str, str]:
    """The password as the API takes it, from the terminal or from the first line of stdin."""
    if stdin:
        line = sys.stdin.buffer.readline(_MAX_LINE)
        octets = line.removesuffix(b"\n").removesuffix(b"\r")
        return {"password": b64encode(octets).decode(), "encoding": "base64"}
    if not sys.stdin.isatty():
        raise CommandError(Exit.USAGE, "there is no terminal to ask for the password: use --password-stdin")
    asked: str = click.prompt(f"password of {safe(name)}", hide_input=True, confirmation_prompt=True, err=True)
    return {"password": asked}


def _words(permission: dict[str, str], words: tuple[str, ...]) -> str:
    return ", ".join(f"{word} {safe(_quoted(permission[word]))}" for word in words)


def _quoted(pattern: str) -> str:
    """As it was given to grant; an empty one is seen, too."""
    return f"'{pattern}'"


@click.group(cls=_Subcommands, epilog=_VHOST_EPILOG)
def vhost() -> None:
    """Virtual hosts: separate exchanges, queues and branches."""


@_changing(vhost, "add", _name)
def add_vhost(change: Any, name: str) -> None:
    """Make a virtual host. Nobody may enter it until 'dtx user grant'."""
    change("/api/vhosts", name=name)
    click.echo(f"virtual host {safe(name)} is there; 'dtx user grant' lets users in")


@_listing(vhost, "/api/vhosts", "there is no virtual host yet; the first start of dtx without a broker makes /")
def list_vhosts(found: list[dict[str, Any]]) -> None:
    """List virtual hosts."""
    for each in found:
        click.echo(safe(each["name"]))


@_changing(vhost, "rm", _name)
def remove_vhost(change: Any, name: str) -> None:
    """Remove a virtual host that nothing is kept in.

    One that has branches in doubt, durable queues or durable exchanges stays.
    """
    change("/api/vhosts/remove", name=name)
    click.echo(f"virtual host {safe(name)} is removed")


@click.group(cls=_Subcommands, epilog=_TOKEN_EPILOG)
def token() -> None:
    """Tokens for the operators' API: a viewer looks, an operator decides about branches, a coordinator about many."""


@_changing(
    token,
    "add",
    _name,
    click.option("--role", type=click.Choice([*map(str, OperatorRole)]), required=True, help="What it permits."),
    click.option("--expires", callback=duration, metavar="DURATION", help="After this it permits nothing."),
)
def add_token(change: Any, name: str, role: str, expires: float | None) -> None:
    """Make a token and print it; nobody can print it again."""
    click.echo(change("/api/tokens", name=name, role=role, seconds=expires)["secret"])


@_listing(token, "/api/tokens", "there is no token")
def list_tokens(found: list[dict[str, Any]]) -> None:
    """List tokens without their secrets."""
    columns = ("name", "role", "made_by", "made_at", "expires_at")
    rows = ([safe(each[name] or "never") for name in columns] for each in found)
    show_table(("token", "role", "made by", "made", "expires"), rows)


@token.command("remove", cls=SettingsCommand)
@_api
@_name
@_reason
def remove_token(settings: Settings, name: str, reason: str, access: ApiAccess) -> int:
    """Revoke a token: from now on it permits nothing."""
    with _reached(settings, access) as api:
        api.delete(f"/api/tokens/{quote(name, safe='')}", reason=reason)
    return Exit.OK

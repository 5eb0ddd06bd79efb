"""``dtx user``: who may connect to a dtx without a broker, and what they may do."""

import sys
from base64 import b64encode
from typing import Any, Final

import click
from rich.text import Text

from dtx.admin.safe_text import json_line, safe
from dtx.auth.tables import TAGS
from dtx.cli.accounts import ABOUT, Subcommands, api_of, with_api, with_reason
from dtx.cli.console.access import HOW, Access
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import SettingsCommand
from dtx.cli.output import new_table, show_table
from dtx.config import Settings

_MAX_LINE: Final = 64 * 1024
"""Octets read from stdin in search of the end of a password."""

_EPILOG = (
    """\b
Examples:
  dtx user add alice                            asks for the password
  dtx user add tm --password-stdin < secret     takes it from a file, without its end of line
  dtx user grant alice --all                    everything in the virtual host /
  dtx user grant alice --vhost shop --write '^orders$' --read '^orders\\.' --configure ''
  dtx user list

A password is never an argument: other users of this machine can read those.

"""
    + ABOUT
    + """
\b
The first start makes user guest with password guest and all permissions in /; it can connect from this machine alone.

"""
    + HOW
)
_PERMISSIONS = """\b
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

_TOPICS = """\b
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
_TAGS = """\b
monitoring      look at branches by the operators' API and its pages
operator        look, and decide about a branch
administrator   look, decide about many, make users and tokens, read the trail
impersonator    publish messages with the user-id of another user

\b
Examples:
  dtx user tag relay impersonator
  dtx user tag relay
"""

_WORDS: Final = ("configure", "write", "read")
_name = click.argument("name")
_vhost = click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="In this virtual host.")
_password_stdin = click.option("--password-stdin", is_flag=True, help="Read the password from stdin, do not ask.")


@click.group(cls=Subcommands, epilog=_EPILOG)
def user() -> None:
    """Users: passwords, and what each may do where."""


@user.command(cls=SettingsCommand)
@with_api
@_name
@_password_stdin
@click.option(
    "--tag",
    "tags",
    multiple=True,
    type=click.Choice(TAGS),
    help="In the operators' API monitoring: look; operator: decide about a branch; administrator: about many. "
    "impersonator: publish with the user-id of another. Can be repeated.",
)
@with_reason
def add(settings: Settings, name: str, password_stdin: bool, tags: tuple[str, ...], reason: str, access: Access) -> int:
    """Make a user. It may do nothing until 'dtx user grant'."""
    password = _password(name, stdin=password_stdin)
    with api_of(settings, access) as api:
        api.post("/api/users", {"name": name, **password, "tags": tags, "reason": reason})
    click.echo(f"user {safe(name)} is there; 'dtx user grant' lets it into a virtual host")
    return Exit.OK


@user.command("list", cls=SettingsCommand)
@with_api
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_users(settings: Settings, as_json: bool, access: Access) -> int:
    """List users with their permissions in each virtual host."""
    with api_of(settings, access, change=False) as api:
        users = api.get("/api/users")
    if as_json:
        for found in users:
            click.echo(json_line(found))
    elif users:
        _show(users)
    else:
        click.echo("there is no user yet; the first start of dtx without a broker makes guest")
    return Exit.OK


@user.command(cls=SettingsCommand)
@with_api
@_name
@_password_stdin
@with_reason
def passwd(settings: Settings, name: str, password_stdin: bool, reason: str, access: Access) -> int:
    """Change a password. It counts from the next login; open connections stay."""
    password = _password(name, stdin=password_stdin)
    with api_of(settings, access) as api:
        api.post("/api/users/password", {"name": name, **password, "reason": reason})
    click.echo(f"user {safe(name)} has a new password")
    return Exit.OK


@user.command(cls=SettingsCommand, epilog=_PERMISSIONS)
@with_api
@_name
@_vhost
@click.option("--configure", metavar="PATTERN", help="What it may declare and delete.")
@click.option("--write", metavar="PATTERN", help="Where it may publish.")
@click.option("--read", metavar="PATTERN", help="What it may consume.")
@click.option("--all", "everything", is_flag=True, help="The same as '.*' for those that are not given.")
@with_reason
def grant(
    settings: Settings,
    name: str,
    vhost: str,
    configure: str | None,
    write: str | None,
    read: str | None,
    everything: bool,
    reason: str,
    access: Access,
) -> int:
    """Let a user into a virtual host, and say what it may do there."""
    patterns = {"configure": configure, "write": write, "read": read}
    if everything:
        patterns = {word: ".*" if pattern is None else pattern for word, pattern in patterns.items()}
    if all(pattern is None for pattern in patterns.values()):
        raise click.UsageError("say what is granted: --configure, --write, --read, or --all")
    with api_of(settings, access) as api:
        now = api.post("/api/users/grant", {"name": name, "vhost": vhost, **patterns, "reason": reason})
    click.echo(f"user {safe(name)} in {safe(vhost)}: {_words(now, _WORDS)}")
    return Exit.OK


@user.command(cls=SettingsCommand, epilog=_TAGS)
@with_api
@_name
@click.argument("tags", nargs=-1, type=click.Choice(TAGS), metavar="[TAG]...")
@with_reason
def tag(settings: Settings, name: str, tags: tuple[str, ...], reason: str, access: Access) -> int:
    """Give a user these tags and no others; without any, take all away."""
    with api_of(settings, access) as api:
        api.post("/api/users/tags", {"name": name, "tags": tags, "reason": reason})
    click.echo(f"tags of user {safe(name)}: {', '.join(sorted(set(tags))) or 'none'}")
    return Exit.OK


@user.command(cls=SettingsCommand)
@with_api
@_name
@_vhost
@with_reason
def revoke(settings: Settings, name: str, vhost: str, reason: str, access: Access) -> int:
    """Take all permissions in a virtual host back.

    The user may not enter it any more; its connections there are closed within a few seconds.
    """
    with api_of(settings, access) as api:
        api.post("/api/users/revoke", {"name": name, "vhost": vhost, "reason": reason})
    click.echo(f"user {safe(name)} may not enter {safe(vhost)}")
    return Exit.OK


@user.command(cls=SettingsCommand)
@with_api
@_name
@with_reason
def rm(settings: Settings, name: str, reason: str, access: Access) -> int:
    """Remove a user with all its permissions.

    Its connections are closed within a few seconds. Its branches in doubt stay: a --coordinator can complete them.
    """
    with api_of(settings, access) as api:
        owned = api.post("/api/users/remove", {"name": name, "reason": reason})["branches"]
    click.echo(f"user {safe(name)} is removed")
    if owned:
        click.echo(
            f"branches in doubt that it has started: {owned}; only users named by --coordinator can complete them, "
            "'dtx branches' shows them",
            err=True,
        )
    return Exit.OK


@user.command("grant-topic", cls=SettingsCommand, epilog=_TOPICS)
@with_api
@_name
@click.argument("exchange")
@_vhost
@click.option("--write", metavar="PATTERN", help="Routing keys with which it may publish.")
@click.option("--read", metavar="PATTERN", help="Routing keys with which it may bind.")
@with_reason
def grant_topic(
    settings: Settings,
    name: str,
    exchange: str,
    vhost: str,
    write: str | None,
    read: str | None,
    reason: str,
    access: Access,
) -> int:
    """Say with which routing keys a user may use a topic exchange."""
    if write is None and read is None:
        raise click.UsageError("say what is granted: --write, --read")
    place = {"name": name, "vhost": vhost, "exchange": exchange}
    with api_of(settings, access) as api:
        now = api.post("/api/users/grant-topic", {**place, "write": write, "read": read, "reason": reason})
    words = _words(now, _WORDS[1:])
    click.echo(f"user {safe(name)} in {safe(vhost)}, topics of exchange {safe(exchange)}: {words}")
    return Exit.OK


@user.command("revoke-topic", cls=SettingsCommand)
@with_api
@_name
@click.argument("exchange", required=False)
@_vhost
@with_reason
def revoke_topic(settings: Settings, name: str, exchange: str | None, vhost: str, reason: str, access: Access) -> int:
    """Lift what grant-topic has limited: every routing key will do again, at EXCHANGE or at all."""
    place = {"name": name, "vhost": vhost, "exchange": exchange}
    with api_of(settings, access) as api:
        count = api.post("/api/users/revoke-topic", {**place, "reason": reason})["exchanges"]
    click.echo(f"user {safe(name)} may use every routing key again at {count} exchange{'s' if count != 1 else ''}")
    return Exit.OK


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


def _show(users: list[dict[str, Any]]) -> None:
    table = new_table("user", "tags", "vhost", *_WORDS)
    for found in users:
        rows = [(each["vhost"], *(_quoted(each[word]) for word in _WORDS)) for each in found["permissions"]]
        for number, row in enumerate(rows or [("", "", "", "")]):
            head = (found["name"], ", ".join(found["tags"])) if number == 0 else ("", "")
            table.add_row(*(Text(safe(cell)) for cell in (*head, *row)))
    show_table(table)
    _show_topics([found for found in users if found["topic_permissions"]])


def _show_topics(users: list[dict[str, Any]]) -> None:
    if not users:
        return
    click.echo()
    table = new_table("user", "vhost", "topic exchange", *_WORDS[1:])
    for found in users:
        for each in found["topic_permissions"]:
            cells = (found["name"], each["vhost"], each["exchange"], *(_quoted(each[word]) for word in _WORDS[1:]))
            table.add_row(*(Text(safe(cell)) for cell in cells))
    show_table(table)


def _words(permission: dict[str, str], words: tuple[str, ...]) -> str:
    return ", ".join(f"{word} {safe(_quoted(permission[word]))}" for word in words)


def _quoted(pattern: str) -> str:
    """As it was given to grant; an empty one is seen, too."""
    return f"'{pattern}'"

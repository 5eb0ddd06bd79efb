"""``dtx token``: tokens for the operators' API."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from dtx.admin.shown.text import iso_time, json_line, safe
from dtx.cli.accounts import Subcommands
from dtx.cli.connect import database_at_hand
from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.person import user_name
from dtx.cli.console.reach import reach
from dtx.cli.console.remote import Remote
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, duration, with_settings
from dtx.cli.output import new_table, show_table
from dtx.config import Settings
from dtx.log.operator_tables import Role
from dtx.log.operators import OperatorLog, TokenError

_EPILOG = (
    """\b
Examples:
  dtx token add prometheus --role viewer
  dtx token add olga --role operator --expires 30d > olga.token
  dtx token list
  dtx token remove olga

Without --api tokens are made in the database, so that whoever can open it can make the first one. Commands take them by
--token-file or DTX_TOKEN, others as 'Authorization: Bearer TOKEN'.

"""
    + HOW
)


_COLUMNS = ("name", "role", "made_by", "made_at", "expires_at")


@click.group(cls=Subcommands, epilog=_EPILOG)
def token() -> None:
    """Tokens for the operators' API: a viewer looks, an operator decides about branches, a coordinator about many."""


@token.command("add", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.argument("name")
@click.option("--role", type=click.Choice([str(role) for role in Role]), required=True, help="What it permits.")
@click.option("--expires", callback=duration, metavar="DURATION", help="After this it permits nothing.")
@with_access
def add(settings: Settings, name: str, role: str, expires: float | None, access: Access) -> int:
    """Make a token and print it; nobody can print it again."""
    with _tokens(settings, access) as tokens:
        click.echo(tokens.make(name, Role(role), expires))
    return Exit.OK


@token.command("list", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
@with_access
def list_tokens(settings: Settings, as_json: bool, access: Access) -> int:
    """List tokens without their secrets."""
    with _tokens(settings, access) as tokens:
        found = tokens.all()
    if as_json:
        for each in found:
            click.echo(json_line(each))
        return Exit.OK
    if not found:
        click.echo("there is no token")
        return Exit.OK
    table = new_table("token", "role", "made by", "made", "expires")
    for each in found:
        table.add_row(
            *(Text(safe(each[name] or "never")) for name in ("name", "role", "made_by", "made_at", "expires_at"))
        )
    show_table(table)
    return Exit.OK


@token.command("remove", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.argument("name")
@with_access
def remove(settings: Settings, name: str, access: Access) -> int:
    """Revoke a token: from now on it permits nothing."""
    with _tokens(settings, access) as tokens:
        tokens.revoke(name)
    return Exit.OK


class _InDatabase:
    def __init__(self, log: OperatorLog) -> None:
        self._log = log

    def make(self, name: str, role: Role, seconds: float | None) -> str:
        return self._log.make_token(name, role, user_name(), seconds=seconds)

    def all(self) -> list[dict[str, Any]]:
        return [
            {
                "name": each.name,
                "role": str(each.role),
                "made_by": each.made_by,
                "made_at": iso_time(each.made_at),
                "expires_at": iso_time(each.expires_at),
            }
            for each in self._log.tokens()
        ]

    def revoke(self, name: str) -> None:
        self._log.revoke_token(name)


class _AtApi:
    def __init__(self, api: Remote) -> None:
        self._api = api

    def make(self, name: str, role: Role, seconds: float | None) -> str:
        form = {"name": name, "role": str(role)} | ({} if seconds is None else {"seconds": seconds})
        return str(self._api.post("/api/tokens", form)["secret"])

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.get("/api/tokens")
        return found

    def revoke(self, name: str) -> None:
        self._api.delete(f"/api/tokens/{quote(name, safe='')}")


@contextmanager
def _tokens(settings: Settings, access: Access) -> Iterator[_InDatabase | _AtApi]:
    """Whoever can open the database needs no API to make a token, and makes the first one there."""
    if access.api is not None:
        with reach(settings, access, orders=True) as api:
            assert isinstance(api, Remote)
            yield _AtApi(api)
        return
    with database_at_hand(settings) as url:
        try:
            yield _InDatabase(OperatorLog(url, settings.rm))
        except TokenError as error:
            raise CommandError(Exit.FAILED, str(error)) from None

"""``dtx token``: tokens for the operators' API."""

from typing import Final
from urllib.parse import quote

import click
from rich.text import Text

from dtx.admin.safe_text import json_line, safe
from dtx.cli.accounts import Subcommands, api_of, with_api, with_reason
from dtx.cli.console.access import HOW, Access
from dtx.cli.errors import Exit
from dtx.cli.options import SettingsCommand, duration
from dtx.cli.output import new_table, show_table
from dtx.config import Settings
from dtx.log.operator_tables import Role

_EPILOG = (
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
_COLUMNS: Final = ("name", "role", "made_by", "made_at", "expires_at")


@click.group(cls=Subcommands, epilog=_EPILOG)
def token() -> None:
    """Tokens for the operators' API: a viewer looks, an operator decides about branches, a coordinator about many."""


@token.command("add", cls=SettingsCommand)
@with_api
@click.argument("name")
@click.option("--role", type=click.Choice([str(role) for role in Role]), required=True, help="What it permits.")
@click.option("--expires", callback=duration, metavar="DURATION", help="After this it permits nothing.")
@with_reason
def add(settings: Settings, name: str, role: str, expires: float | None, reason: str, access: Access) -> int:
    """Make a token and print it; nobody can print it again."""
    with api_of(settings, access) as api:
        made = api.post("/api/tokens", {"name": name, "role": role, "seconds": expires, "reason": reason})
    click.echo(made["secret"])
    return Exit.OK


@token.command("list", cls=SettingsCommand)
@with_api
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_tokens(settings: Settings, as_json: bool, access: Access) -> int:
    """List tokens without their secrets."""
    with api_of(settings, access, change=False) as api:
        found = api.get("/api/tokens")
    if as_json:
        for each in found:
            click.echo(json_line(each))
        return Exit.OK
    if not found:
        click.echo("there is no token")
        return Exit.OK
    table = new_table("token", "role", "made by", "made", "expires")
    for each in found:
        table.add_row(*(Text(safe(each[name] or "never")) for name in _COLUMNS))
    show_table(table)
    return Exit.OK


@token.command("remove", cls=SettingsCommand)
@with_api
@click.argument("name")
@with_reason
def remove(settings: Settings, name: str, reason: str, access: Access) -> int:
    """Revoke a token: from now on it permits nothing."""
    with api_of(settings, access) as api:
        api.delete(f"/api/tokens/{quote(name, safe='')}", reason=reason)
    return Exit.OK

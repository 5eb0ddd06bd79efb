"""``dtx token``: tokens for the operators' API."""

import click

from dtx.cli.accounts import Subcommands
from dtx.cli.api import user_name
from dtx.cli.connect import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, duration, with_settings
from dtx.cli.text import json_line
from dtx.config import Settings
from dtx.log.operator_tables import Role
from dtx.log.operators import OperatorLog, TokenError


@click.group(cls=Subcommands)
def token() -> None:
    """Tokens for the operators' API: a viewer looks, an operator decides about branches, a coordinator about many."""


@token.command("add", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.argument("name")
@click.option("--role", type=click.Choice([str(role) for role in Role]), required=True, help="What it permits.")
@click.option("--expires", callback=duration, metavar="DURATION", help="After this it permits nothing.")
def add(settings: Settings, name: str, role: str, expires: float | None) -> int:
    """Make a token and print it; nobody can print it again."""
    with database_at_hand(settings) as url:
        try:
            click.echo(OperatorLog(url, settings.rm).make_token(name, Role(role), user_name(), seconds=expires))
        except TokenError as error:
            raise CommandError(Exit.FAILED, str(error)) from None
    return Exit.OK


@token.command("list", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
def list_tokens(settings: Settings) -> int:
    """List tokens, one JSON object a line, without their secrets."""
    with database_at_hand(settings) as url:
        for found in OperatorLog(url, settings.rm).tokens():
            times = {"made_at": found.made_at, "expires_at": found.expires_at}
            click.echo(json_line({"name": found.name, "role": found.role, "made_by": found.made_by, **times}))
    return Exit.OK


@token.command("remove", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.argument("name")
def remove(settings: Settings, name: str) -> int:
    """Revoke a token: from now on it permits nothing."""
    with database_at_hand(settings) as url:
        try:
            OperatorLog(url, settings.rm).revoke_token(name)
        except TokenError as error:
            raise CommandError(Exit.FAILED, str(error)) from None
    return Exit.OK

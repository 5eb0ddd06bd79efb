"""``dtx vhost``: the virtual hosts of a dtx without a broker."""

import click

from dtx.admin.shown.text import json_line, safe
from dtx.cli.accounts import ABOUT, Subcommands, editor
from dtx.cli.errors import Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.config import Settings

_EPILOG = (
    """\b
Examples:
  dtx vhost add shop
  dtx user grant alice --vhost shop --all
  dtx vhost rm shop

\b
A virtual host has exchanges, queues and branches of its own; a client names it when it opens its connection.

"""
    + ABOUT
)

_name = click.argument("name")


@click.group(cls=Subcommands, epilog=_EPILOG)
def vhost() -> None:
    """Virtual hosts: separate exchanges, queues and branches."""


@vhost.command(cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@_name
def add(settings: Settings, name: str) -> int:
    """Make a virtual host. Nobody may enter it until 'dtx user grant'."""
    with editor(settings) as accounts:
        accounts.add_vhost(name)
    click.echo(f"virtual host {safe(name)} is there; 'dtx user grant' lets users in")
    return Exit.OK


@vhost.command("list", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_vhosts(settings: Settings, as_json: bool) -> int:
    """List virtual hosts."""
    with editor(settings) as accounts:
        names = sorted(accounts.read().vhosts)
    for name in names:
        click.echo(json_line({"name": name}) if as_json else safe(name))
    if not names and not as_json:
        click.echo("there is no virtual host yet; the first start of dtx without a broker makes /")
    return Exit.OK


@vhost.command(cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS)
@_name
def rm(settings: Settings, name: str) -> int:
    """Remove a virtual host that nothing is kept in.

    One that has branches in doubt, durable queues or durable exchanges stays.
    """
    with editor(settings) as accounts:
        accounts.remove_vhost(name)
    click.echo(f"virtual host {safe(name)} is removed")
    return Exit.OK

"""``dtx vhost``: the virtual hosts of a dtx without a broker."""

import click

from dtx.admin.safe_text import json_line, safe
from dtx.cli.accounts import ABOUT, Subcommands, api_of, with_api, with_reason
from dtx.cli.console.access import HOW, Access
from dtx.cli.errors import Exit
from dtx.cli.options import SettingsCommand
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
    + HOW
)

_name = click.argument("name")


@click.group(cls=Subcommands, epilog=_EPILOG)
def vhost() -> None:
    """Virtual hosts: separate exchanges, queues and branches."""


@vhost.command(cls=SettingsCommand)
@with_api
@_name
@with_reason
def add(settings: Settings, name: str, reason: str, access: Access) -> int:
    """Make a virtual host. Nobody may enter it until 'dtx user grant'."""
    with api_of(settings, access) as api:
        api.post("/api/vhosts", {"name": name, "reason": reason})
    click.echo(f"virtual host {safe(name)} is there; 'dtx user grant' lets users in")
    return Exit.OK


@vhost.command("list", cls=SettingsCommand)
@with_api
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def list_vhosts(settings: Settings, as_json: bool, access: Access) -> int:
    """List virtual hosts."""
    with api_of(settings, access, change=False) as api:
        found = api.get("/api/vhosts")
    for each in found:
        click.echo(json_line(each) if as_json else safe(each["name"]))
    if not found and not as_json:
        click.echo("there is no virtual host yet; the first start of dtx without a broker makes /")
    return Exit.OK


@vhost.command(cls=SettingsCommand)
@with_api
@_name
@with_reason
def rm(settings: Settings, name: str, reason: str, access: Access) -> int:
    """Remove a virtual host that nothing is kept in.

    One that has branches in doubt, durable queues or durable exchanges stays.
    """
    with api_of(settings, access) as api:
        api.post("/api/vhosts/remove", {"name": name, "reason": reason})
    click.echo(f"virtual host {safe(name)} is removed")
    return Exit.OK

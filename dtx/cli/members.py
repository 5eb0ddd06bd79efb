"""``dtx members``: several active dtx of one resource manager, and the secret that they prove to each other."""

from typing import Final

import click

from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import Exit
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, SettingsCommand, Subcommands, with_settings
from dtx.cli.output import Column, Listing, with_listing
from dtx.config import Settings

_EPILOG: Final = (
    """\b
Examples:
  dtx members list
  dtx members rotate-secret --reason "an administrator has left"

Members take a new secret within a second. The one before stays valid until the next rotation. If a secret was stolen,
rotate twice, with some seconds between.

"""
    + HOW
)
_COLUMNS: Final = (
    Column("holder"),
    Column("address"),
    Column("since", "joined_at"),
    Column("epoch", number=True),
    Column("lease seconds", "remaining", number=True),
    Column("branches", number=True),
    Column("instance", wide=True),
)


@click.group(cls=Subcommands, epilog=_EPILOG)
def members() -> None:
    """Active dtx that share the branches of a resource manager (--advertise)."""


@members.command("list", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)
@with_listing
@with_access
def list_members(settings: Settings, listing: Listing, access: ApiAccess) -> int:
    """List the members with their leases and their branches."""
    with reach(settings, access, orders=False) as api:
        listing.show(lambda: api.get("/dtx/v1/members"), _COLUMNS, "there are no members")
    return Exit.OK


@members.command("rotate-secret", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)
@click.option("--reason", required=True, metavar="TEXT", help="Reason, for the audit log.")
@with_access
def rotate_secret(settings: Settings, reason: str, access: ApiAccess) -> int:
    """Change the secret that members prove to each other. They need no restart."""
    with reach(settings, access, orders=False) as api:
        found = api.post("/dtx/v1/members/rotate-secret", {"reason": reason})
    click.echo(
        f"the members have a new secret (members: {len(found)}); the one before is valid until the next rotation"
    )
    return Exit.OK

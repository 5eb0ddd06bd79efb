"""``dtx members``: several active dtx of one resource manager, and the secret that they prove to each other."""

from collections.abc import Iterator
from typing import Final

import click

from dtx.admin.safe_text import safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import Exit
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, SettingsCommand, Subcommands, with_settings
from dtx.cli.output import Column, Listing, Row, with_listing
from dtx.config import Settings

_EPILOG: Final = (
    """\b
Examples:
  dtx members list
  dtx members unvoted --vhost orders
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


_UNVOTED: Final = (
    Column("since", "started_at"),
    Column("xid", cut=True),
    Column("state"),
    Column("owner"),
    Column("vhost"),
    Column("publishes", number=True),
    Column("consumes", number=True),
    Column("member", cell=lambda row: safe(row["member"] or "this one")),
)


@members.command("unvoted", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)
@click.option("--vhost", metavar="VHOST", help="Only in this virtual host.")
@click.option("--owner", metavar="USER", help="Only of this user.")
@with_listing
@with_access
def list_unvoted(settings: Settings, vhost: str | None, owner: str | None, listing: Listing, access: ApiAccess) -> int:
    """List branches that have not voted, of all members. dtx must be running.

    They are not in the database. Members that do not answer within 2 seconds are named on stderr.
    """
    with reach(settings, access, orders=True) as api:

        def rows() -> Iterator[Row]:
            cursor: str | None = None
            while True:
                page = api.get("/dtx/v1/associations", vhost=vhost, owner=owner, cursor=cursor, limit=1000)
                yield from page["associations"]
                cursor = page["cursor"]
                if cursor is None:
                    break
            for name in page["missing"]:
                click.echo(f"{safe(name)} did not answer, so its branches are missing", err=True)

        listing.show(rows, _UNVOTED, "there is no such branch")
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

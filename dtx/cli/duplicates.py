"""``dtx duplicates``: second copies of messages that dtx did not deliver."""

from typing import Final
from urllib.parse import quote

import click

from dtx.admin.safe_text import safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import Exit
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, SettingsCommand, Subcommands, with_settings
from dtx.cli.output import Column, Listing, name_columns, with_listing
from dtx.config import Settings

_EPILOG: Final = (
    """\b
Examples:
  dtx duplicates list --queue orders
  dtx duplicates restore 6f1c1e5e-0d2b-4b0e-9d59-3f0a6c9f7f55/0 --queue orders --reason "not a second copy"

dtx keeps a copy for --duplicate-window. Its ID is the message's header x-dtx-put-back, or without it x-dtx-id.

"""
    + HOW
)

_COLUMNS: Final = (
    Column("time", "at"),
    Column("id"),
    *name_columns("vhost", "queue", "exchange", "routing key"),
    Column("bytes", number=True),
)


@click.group(cls=Subcommands, epilog=_EPILOG)
def duplicates() -> None:
    """Second copies of messages that dtx did not deliver, because another copy had been settled."""


@duplicates.command("list", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, metavar="NUMBER", help="Number of copies."
)
@click.option("--vhost", metavar="VHOST", help="Only in this virtual host.")
@click.option("--queue", metavar="QUEUE", help="Only of this queue.")
@with_listing
@with_access
def list_duplicates(
    settings: Settings, limit: int, vhost: str | None, queue: str | None, listing: Listing, access: ApiAccess
) -> int:
    """List the copies, the latest first."""
    with reach(settings, access, orders=False) as api:
        listing.show(
            lambda: api.get("/dtx/v1/duplicates", limit=limit, vhost=vhost, queue=queue),
            _COLUMNS,
            "there is no such copy",
        )
    return Exit.OK


@duplicates.command("restore", cls=SettingsCommand)
@with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS)
@click.argument("message", metavar="ID")
@click.option("--queue", required=True, metavar="QUEUE", help="Queue of the copy.")
@click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="Virtual host of the queue.")
@click.option("--reason", required=True, metavar="TEXT", help="Reason, for the audit log.")
@with_access
def restore(settings: Settings, message: str, queue: str, vhost: str, reason: str, access: ApiAccess) -> int:
    """Publish a copy to its queue. dtx must be running. Consumers get it as a message that was put back."""
    with reach(settings, access, orders=True) as api:
        api.post(f"/dtx/v1/duplicates/{quote(message)}/restore", {"queue": queue, "vhost": vhost, "reason": reason})
    click.echo(f"{safe(message)} is in queue {safe(queue)} again")
    return Exit.OK

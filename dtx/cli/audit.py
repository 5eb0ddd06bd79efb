"""``dtx audit``: the audit log, which has the actions of operators and their reasons."""

from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from dtx.admin.safe_text import safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import Column, Listing, Row, with_listing
from dtx.config import Settings

if TYPE_CHECKING:
    from rich.text import Text

_PAGE: Final = 1000


def _result(line: Row) -> "str | Text":
    from rich.text import Text

    return Text("not known", style="yellow") if line["result"] is None else safe(line["result"])


_COLUMNS: Final = (
    Column("time", "at"),
    Column("user", "actor", lambda line: safe(f"{line['actor']} ({line['role']})")),
    Column("from", "address"),
    Column("action"),
    Column("subject"),
    Column("reason"),
    Column("result", cell=_result),
)

_EPILOG: Final = (
    """\b
Examples:
  dtx audit
  dtx audit --limit 1000 --json | jq -r 'select(.result == null)'

The audit log has every request, refused or not: orders, dry runs, messages that were viewed or exported, tokens.
It has refused sign-ins too: at most ten a minute from one address, with the number of those left out before a line.

A line is written before its action begins, and completed when the action has ended. A line without a result was broken
off; the journal ('dtx show XID') shows whether the action took place. An API requires a coordinator's token for it.

"""
    + HOW
)


@click.command("audit", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="NUMBER", help="Number of lines."
)
@click.option("--actor", metavar="NAME", help="Only actions of this user; a token is token:NAME.")
@click.option("--action", metavar="ACTION", help="Only this action: rollback, bulk-rollback, view, sign-in ...")
@click.option("--subject", metavar="TEXT", help="Only actions on this, for example an xid.")
@click.option("--about", metavar="TEXT", hidden=True, help="Deprecated: the former name of --subject.")
@with_listing
@with_access
def audit(
    settings: Settings,
    limit: int,
    actor: str | None,
    action: str | None,
    subject: str | None,
    about: str | None,
    listing: Listing,
    access: ApiAccess,
) -> int:
    """List the actions of operators and their reasons, the latest first."""
    wanted = {"actor": actor, "action": action, "subject": about if subject is None else subject}
    with reach(settings, access, orders=False) as api:
        filtered = any(value is not None for value in wanted.values())
        empty = "no line matches the filter" if filtered else "the audit log is empty"
        listing.show(
            lambda: islice(api.pages("/dtx/v1/audit", "lines", limit=min(limit, _PAGE), **wanted), limit),
            _COLUMNS,
            empty,
        )
    return Exit.OK

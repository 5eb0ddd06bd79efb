"""``dtx audit``: the audit log, which has the actions of operators and their reasons."""

from itertools import islice
from typing import Any, Final

import click

from dtx.admin.safe_text import safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.errors import Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import show_list, show_table
from dtx.config import Settings

_PAGE: Final = 1000

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
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
@with_access
def audit(
    settings: Settings,
    limit: int,
    actor: str | None,
    action: str | None,
    subject: str | None,
    about: str | None,
    as_json: bool,
    access: ApiAccess,
) -> int:
    """List the actions of operators and their reasons, the latest first."""
    wanted = {"actor": actor, "action": action, "subject": about if subject is None else subject}
    with reach(settings, access, orders=False) as api:
        lines = list(islice(api.pages("/dtx/v1/audit", "lines", limit=min(limit, _PAGE), **wanted), limit))
    filtered = any(value is not None for value in wanted.values())
    empty = "no line matches the filter" if filtered else "the audit log is empty"
    show_list(lines, _show, empty, as_json=as_json)
    return Exit.OK


def _show(lines: list[dict[str, Any]]) -> None:
    from rich.text import Text

    unknown = Text("not known", style="yellow")
    rows = (
        [
            line["at"],
            safe(f"{line['actor']} ({line['role']})"),
            *(safe(line[name]) for name in ("address", "action", "subject", "reason")),
            unknown if line["result"] is None else safe(line["result"]),
        ]
        for line in lines
    )
    show_table(("time", "user", "from", "action", "subject", "reason", "result"), rows)

"""``dtx audit``: what operators did, and why."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import click
from rich.text import Text

from dtx.admin.safe_text import json_line, safe
from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.reach import reach
from dtx.cli.errors import Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import new_table, show_table
from dtx.config import Settings

_PAGE: Final = 1000

_EPILOG: Final = (
    """\b
Examples:
  dtx audit
  dtx audit --limit 1000 --json | jq -r 'select(.result == null)'

Everything that was asked for is here, refused or not: orders, dry runs, messages that were viewed or exported, tokens.
So are sign-ins that were refused: of one address ten a minute, and how many were left out before a line.

A line is written before its action begins, and completed when that has ended: one without a result was broken off, and
the journal ('dtx show XID') says whether it has happened. Over an API it takes a coordinator's token.

"""
    + HOW
)


@click.command("audit", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, metavar="NUMBER", help="The latest so many."
)
@click.option("--actor", metavar="NAME", help="Only what this user did; a token is token:NAME.")
@click.option("--action", metavar="ACTION", help="Only such actions: rollback, bulk-rollback, view, sign-in ...")
@click.option("--about", metavar="TEXT", help="Only what is about this, an xid for example.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
@with_access
def audit(
    settings: Settings,
    limit: int,
    actor: str | None,
    action: str | None,
    about: str | None,
    as_json: bool,
    access: Access,
) -> int:
    """List who did what and why, the latest first."""
    wanted = {"actor": actor, "action": action, "subject": about}
    with reach(settings, access, orders=False) as api:
        lines = list(islice(_lines(api, limit, wanted), limit))
    if as_json:
        for line in lines:
            click.echo(json_line(line))
    elif lines:
        _show(lines)
    else:
        filtered = any(value is not None for value in wanted.values())
        click.echo("no line matches the filter" if filtered else "nobody has done anything yet")
    return Exit.OK


def _lines(api: Any, limit: int, wanted: dict[str, str | None]) -> Iterator[dict[str, Any]]:
    cursor: int | None = None
    while True:
        page = api.get("/api/audit", limit=min(limit, _PAGE), cursor=cursor, **wanted)
        yield from page["lines"]
        cursor = page["cursor"]
        if cursor is None:
            return


def _show(lines: list[dict[str, Any]]) -> None:
    table = new_table("time", "who", "from", "action", "about", "reason", "result")
    for line in lines:
        result = line["result"]
        table.add_row(
            Text(line["at"]),
            Text(safe(f"{line['actor']} ({line['role']})")),
            Text(safe(line["address"])),
            Text(safe(line["action"])),
            Text(safe(line["subject"])),
            Text(safe(line["reason"])),
            Text("not known" if result is None else safe(result), style="yellow" if result is None else ""),
        )
    show_table(table)

"""``dtx in-doubt``: the branches that have voted and are not completed."""

from itertools import islice

import click
from rich.text import Text

from dtx.cli.connect import database_url
from dtx.cli.errors import Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, duration, with_settings
from dtx.cli.output import new_table, show_table
from dtx.cli.text import human_duration, human_size, json_line, name_text, safe
from dtx.cli.values import in_doubt_value
from dtx.config import Settings
from dtx.log.reading import Filter, InDoubt, LogReader, Totals
from dtx.log.records import LogState
from dtx.xa.xid import Xid

_TABLE_LIMIT = 1000
"""Branches in a table where no --limit is given: more is for programs."""
_NAMES_SHOWN = 5

_EPILOG = """\b
Examples:
  dtx in-doubt
  dtx in-doubt --state prepared --older-than 10m
  dtx in-doubt --json | jq -r 'select(.stuck) | .xid'

States: taking (consumed messages are being taken over, not yet a vote), prepared (waits for its transaction manager),
committing and rolling-back (decided, under way), heuristic (completed without its transaction manager, until forget).
An empty list is no error. The list is read from the database, and may be read while dtx serves.
"""


@click.command("in-doubt", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.option("--state", type=click.Choice([str(state) for state in LogState]), help="Only branches in this state.")
@click.option("--owner", metavar="USER", help="Only branches that this user started.")
@click.option("--vhost", metavar="VHOST", help="Only branches of this virtual host.")
@click.option(
    "--older-than", callback=duration, metavar="DURATION", help="Only branches started at least this long ago."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="At most so many, the oldest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def in_doubt(
    settings: Settings,
    state: str | None,
    owner: str | None,
    vhost: str | None,
    older_than: float | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """List the branches whose outcome is open, the oldest first."""
    wanted = Filter(
        rm=settings.rm,
        vhost=vhost,
        state=None if state is None else LogState(state),
        owner=owner,
        older_than=older_than,
    )
    with LogReader(database_url(settings)) as log:
        if as_json:
            for found in log.in_doubt(wanted, limit=limit):
                click.echo(json_line(in_doubt_value(found)))
        else:
            _show(list(log.in_doubt(wanted, limit=limit or _TABLE_LIMIT)), log.totals(wanted))
    return Exit.OK


def xid_text(xid: Xid) -> Text:
    """The xid as every command takes it, and as its maker may recognise it."""
    text = Text(str(xid))
    if xid.readable is not None:
        text.append(f" {xid.readable}", style="dim")
    return text


def _show(found: list[InDoubt], totals: list[Totals]) -> None:
    if not found:
        click.echo("no branch is in doubt")
        return
    table = new_table(
        "xid", "vhost", "state", "owner", "age", "messages", "bytes", "queues", "exchanges", "stuck",
        numbers=("age", "messages", "bytes"),
    )  # fmt: skip
    for item in found:
        branch = item.branch
        state = str(branch.state) if branch.outcome is None else f"{branch.state} ({branch.outcome})"
        table.add_row(
            xid_text(branch.xid),
            Text(safe(branch.vhost)),
            Text(state),
            Text(safe(branch.owner)),
            Text(human_duration(max(item.age, 0))),
            Text(str(branch.publishes + branch.consumes)),
            Text(human_size(branch.bytes)),
            _names(item.queues),
            _names(item.exchanges),
            Text(safe(branch.stuck or ""), style="red"),
        )
    show_table(table)
    count = sum(total.branches for total in totals)
    states = ", ".join(f"{total.branches} {total.state}" for total in totals)
    stuck = sum(total.stuck for total in totals)
    shown = f"; the oldest {len(found)} are shown" if len(found) < count else ""
    click.echo(f"{count} in doubt: {states}{f'; {stuck} stuck' if stuck else ''}{shown}")


def _names(names: tuple[bytes, ...]) -> Text:
    shown = [name_text(name) or "(default)" for name in islice(names, _NAMES_SHOWN)]
    more = len(names) - len(shown)
    return Text(", ".join(shown) + (f" and {more} more" if more > 0 else ""))

"""``dtx branches``: the branches that have voted and are not completed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import click
from rich.text import Text

from dtx.admin.safe_text import human_duration, human_size, json_line, safe
from dtx.cli.connect import database_at_hand
from dtx.cli.console.access import HOW, Access, with_access
from dtx.cli.console.reach import reach
from dtx.cli.errors import Exit
from dtx.cli.filters import ABOUT, wanted_of, with_filter
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import new_table, show_table
from dtx.cli.values import in_doubt_value, listed_value
from dtx.config import Settings
from dtx.xa.xid import Xid

_TABLE_LIMIT: Final = 1000
"""Branches in a table where no --limit is given: more is for programs."""
_PAGE: Final = 1000
_NAMES_SHOWN: Final = 5

_EPILOG: Final = (
    """\b
Examples:
  dtx branches
  dtx branches --state prepared --older-than 10m
  dtx branches --gtrid 'order-*' --queue payments
  dtx branches --stuck --json | jq -r .xid
  DTX_TOKEN=... dtx branches --api https://dtx.example:15673

"""
    + ABOUT
    + """
An empty list is no error. Without --api the list is read from the database, whether a dtx serves or not.

"""
    + HOW
)


@click.command("branches", cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@with_access
@with_filter
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="At most so many, the oldest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for programs.")
def branches(settings: Settings, wanted: dict[str, Any], access: Access, limit: int | None, as_json: bool) -> int:
    """List the branches whose outcome is open, the oldest first."""
    if access.api is not None:
        _list_from_api(settings, access, wanted, limit, as_json=as_json)
    else:
        _list_from_database(settings, wanted, limit, as_json=as_json)
    return Exit.OK


def xid_text(xid: Xid) -> Text:
    """The xid as every command takes it, and as its maker may recognise it."""
    text = Text(str(xid))
    if xid.readable is not None:
        text.append(f" {xid.readable}", style="dim")
    return text


def _list_from_database(settings: Settings, wanted: dict[str, Any], limit: int | None, *, as_json: bool) -> None:
    from dtx.log.listing import conditions
    from dtx.log.reading import Filter, LogReader

    mine = Filter(rm=settings.rm)
    where = conditions(settings.rm, wanted_of(wanted))
    with database_at_hand(settings) as url, LogReader(url) as log:
        if as_json:
            _print(map(in_doubt_value, log.in_doubt(mine, where=where, limit=limit)))
            return
        found = [in_doubt_value(each) for each in log.in_doubt(mine, where=where, limit=limit or _TABLE_LIMIT)]
        totals = log.totals(mine, where=where)
        states = {str(total.state): total.branches for total in totals}
        _show(found, states, sum(total.stuck for total in totals), filtered=bool(wanted))


def _list_from_api(
    settings: Settings, access: Access, wanted: dict[str, Any], limit: int | None, *, as_json: bool
) -> None:
    with reach(settings, access, orders=False) as api:
        found = islice(map(listed_value, pages(api, wanted)), limit)
        if as_json:
            _print(found)
            return
        shown: list[Mapping[str, Any]] = []
        states: Counter[str] = Counter()
        stuck = 0
        for each in found:
            if len(shown) < _TABLE_LIMIT:
                shown.append(each)
            states[each["state"]] += 1
            stuck += each["stuck"] is not None
        _show(shown, dict(sorted(states.items())), stuck, filtered=bool(wanted))


def pages(api: Any, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All branches that the API finds, as it says them."""
    cursor: str | None = None
    while True:
        page = api.get("/api/branches", **wanted, limit=_PAGE, cursor=cursor)
        yield from page["branches"]
        cursor = page["cursor"]
        if cursor is None:
            return


def _print(found: Iterable[Mapping[str, object]]) -> None:
    for each in found:
        click.echo(json_line(each))


def _show(
    found: list[Mapping[str, Any]] | list[dict[str, Any]], states: Mapping[str, int], stuck: int, *, filtered: bool
) -> None:
    if not found:
        click.echo("no branch in doubt matches the filter" if filtered else "no branch is in doubt")
        return
    table = new_table(
        "xid", "vhost", "state", "owner", "age", "messages", "bytes", "queues", "destinations", "exchanges", "stuck",
        numbers=("age", "messages", "bytes"),
    )  # fmt: skip
    for each in found:
        state = each["state"] if each["outcome"] is None else f"{each['state']} ({each['outcome']})"
        table.add_row(
            xid_text(Xid.parse(each["xid"])),
            Text(safe(each["vhost"])),
            Text(state),
            Text(safe(each["owner"])),
            Text(human_duration(max(each["age"], 0))),
            Text(str(each["messages"])),
            Text(human_size(each["bytes"])),
            _names(each["queues"]),
            _names(each["destinations"]),
            _names(each["exchanges"]),
            Text(safe(each["stuck"] or ""), style="red"),
        )
    show_table(table)
    count = sum(states.values())
    words = ", ".join(f"{number} {state}" for state, number in states.items())
    shown = f"; the oldest {len(found)} are shown" if len(found) < count else ""
    click.echo(f"{count} in doubt: {words}{f'; {stuck} stuck' if stuck else ''}{shown}")


def _names(names: list[str]) -> Text:
    shown = [safe(name) or "(default)" for name in islice(names, _NAMES_SHOWN)]
    more = len(names) - len(shown)
    return Text(", ".join(shown) + (f" and {more} more" if more > 0 else ""))

"""``dtx branches`` and ``dtx show``: the branches whose outcome is open, and all that is known about one xid.

JSON has the exact values for programs; tables have the same values, escaped, for people.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain, islice
from typing import Any, Final
from uuid import UUID

import click
from rich.text import Text

from dtx.admin.branch_filter import FilterForm
from dtx.admin.message_properties import decode_properties
from dtx.admin.safe_text import exact_name, human_duration, human_size, iso_time, name_text, preview, safe
from dtx.cli.access import HOW, ApiAccess, reach, with_access
from dtx.cli.database import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import ABOUT_FILTER, DATABASE_SETTINGS, SettingsCommand, with_filter, with_settings
from dtx.cli.output import MOST_ROWS, Column, Listing, Row, shortened, show_table, with_form, with_listing
from dtx.config import Settings
from dtx.log.pages import CopyCounts, InDoubt, JournalRow, copies_of, history, in_doubt, totals
from dtx.log.reader import Detail, LoggedDecision, LogReader
from dtx.log.records import BranchRecord, JournalEntry, Unit, WorkKind, WorkRow
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

_PAGE: Final = 1000
_NAMES_SHOWN: Final = 5

_LIST_EPILOG: Final = (
    """\b
Examples:
  dtx branches
  dtx branches --state prepared --older-than 10m
  dtx branches --gtrid 'order-*' --queue payments
  dtx branches --sort -bytes --limit 20 --watch
  dtx branches --stuck --json | jq -r .xid
  DTX_TOKEN=... dtx branches --api https://dtx.example:15673

"""
    + ABOUT_FILTER
    + """
Tables cut long xids and names; --output wide shows them whole. An empty list is no error. Without --api the list is
read from the database, whether a dtx serves or not.

"""
    + HOW
)


@click.command("branches", cls=SettingsCommand, epilog=_LIST_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@with_access
@with_filter
@click.option("--limit", type=click.IntRange(min=1), metavar="NUMBER", help="At most this many, the first ones.")
@with_listing
def branches(settings: Settings, wanted: dict[str, Any], access: ApiAccess, limit: int | None, listing: Listing) -> int:
    """List the branches whose outcome is open, the oldest first."""
    if access.api is not None:
        with reach(settings, access, orders=False) as api:
            _list(
                listing,
                lambda: map(listed_value, api.pages("/dtx/v1/branches", "branches", **wanted, limit=_PAGE)),
                _counted,
                limit,
                filtered=bool(wanted),
            )
        return Exit.OK
    mine = FilterForm.model_construct(**wanted).wanted(settings.rm)
    with database_at_hand(settings) as url, LogReader(url) as log:
        most = None if listing.sort else limit or (MOST_ROWS if listing.for_people else None)
        _list(
            listing,
            lambda: map(in_doubt_value, in_doubt(log, mine, limit=most)),
            lambda _: [(str(total.state), total.branches, total.stuck) for total in totals(log, mine)],
            limit,
            filtered=bool(wanted),
        )
    return Exit.OK


def xid_text(xid: Xid, *, whole: bool = True) -> Text:
    """The xid in the form that commands take, and its readable form if it has one; long ones cut unless *whole*."""
    cut: Callable[[str], str] = str if whole else shortened
    text = Text(cut(str(xid)))
    if xid.readable is not None:
        text.append(f" {cut(xid.readable)}", style="dim")
    return text


def _list(
    listing: Listing,
    read: Callable[[], Iterable[Row]],
    sums: Callable[[Iterable[Row]], Iterable[tuple[str, int, int]]],
    limit: int | None,
    *,
    filtered: bool,
) -> None:
    columns = _columns(whole=listing.wide)

    def lines(found: Iterable[Row]) -> Iterator[str]:
        rest = iter(found)
        shown = list(islice(rest, MOST_ROWS))
        yield from listing.table(columns, shown)
        totals_of = list(sums(chain(shown, rest)))
        count, stuck = sum(each[1] for each in totals_of), sum(each[2] for each in totals_of)
        words = ", ".join(f"{number} {state}" for state, number, _ in totals_of)
        more = f"; the first {len(shown)} are shown" if len(shown) < count else ""
        yield f"{count} in doubt: {words}{f'; {stuck} stuck' if stuck else ''}{more}"

    empty = "no branch in doubt matches the filter" if filtered else "no branch is in doubt"
    listing.show(read, columns, empty, table=lines, limit=limit)


def _counted(rows: Iterable[Row]) -> list[tuple[str, int, int]]:
    """States with the numbers of their branches and of those that are stuck."""
    states: Counter[str] = Counter()
    stuck: Counter[str] = Counter()
    for row in rows:
        states[row["state"]] += 1
        stuck[row["state"]] += row["stuck"] is not None
    return [(state, number, stuck[state]) for state, number in sorted(states.items())]


def _names(field: str, cut: Callable[[str], str]) -> Column:
    def cell(row: Row) -> str:
        shown = [cut(safe(name)) or "(default)" for name in islice(row[field], _NAMES_SHOWN)]
        more = len(row[field]) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")

    return Column(field, cell=cell)


def _columns(*, whole: bool) -> tuple[Column, ...]:
    cut: Callable[[str], str] = str if whole else shortened
    return (
        Column("xid", cell=lambda row: xid_text(Xid.parse(row["xid"]), whole=whole)),
        Column("vhost", cut=True),
        Column("state", cell=lambda row: f"{row['state']} ({row['outcome']})" if row["outcome"] else row["state"]),
        Column("owner", cut=True),
        Column("age", cell=lambda row: human_duration(max(row["age"], 0)), number=True),
        Column("messages", number=True),
        Column("bytes", cell=lambda row: human_size(row["bytes"]), number=True),
        *(_names(field, cut) for field in ("queues", "destinations", "exchanges")),
        Column("started", "started_at", wide=True),
        Column("prepared", "prepared_at", wide=True),
        Column("stuck", cell=lambda row: Text(safe(row["stuck"] or ""), style="red")),
    )


_SHOW_EPILOG: Final = """\b
Examples:
  dtx show 1:6774:62
  dtx show 1:6774:62 --vhost orders --output yaml

An xid is written format:gtrid-hex:bqual-hex, as 'dtx branches' prints it. The same xid may exist in several virtual
hosts; all are shown. The exit code is 1 if neither the log nor the journal has it.
"""


@click.command(cls=SettingsCommand, epilog=_SHOW_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.argument("xid")
@click.option("--vhost", metavar="VHOST", help="Only in this virtual host.")
@click.option(
    "--messages", "limit", type=click.IntRange(min=0), default=50, metavar="NUMBER",
    help="Show at most this many messages of a branch; default 50. JSON and YAML have all.",
)  # fmt: skip
@click.option(
    "--preview", "length", type=click.IntRange(min=8, max=100_000), default=120, metavar="CHARACTERS",
    help="Length of the preview of each body; default 120.",
)  # fmt: skip
@with_form
def show(settings: Settings, xid: str, vhost: str | None, limit: int, length: int, listing: Listing) -> int:
    """Show the branch, its messages and its whole history: its present state from the log, its events from the journal.

    Control characters in properties and bodies are escaped, so that they cannot affect the terminal.
    """
    try:
        wanted = Xid.parse(xid)
    except XaError as error:
        raise click.BadParameter(safe(error.reason), param_hint="XID") from None
    with database_at_hand(settings) as url, LogReader(url) as log:
        details = {detail.branch.vhost: detail for detail in log.show(wanted, vhost=vhost, rm=settings.rm)}
        lines: defaultdict[str, list[JournalRow]] = defaultdict(list)
        for line in history(log, wanted, vhost=vhost, rm=settings.rm):
            lines[line.entry.vhost].append(line)
        ids = {detail.branch.id for detail in details.values()}
        ids |= {line.entry.branch_id for found in lines.values() for line in found}
        copies = copies_of(log, settings.rm, ids)
    hosts = sorted(details.keys() | lines.keys())
    if not hosts:
        raise CommandError(Exit.FAILED, f"nothing is known about {wanted}: it is neither in the log nor in the journal")
    if listing.for_people:
        for host in hosts:
            _show_text(wanted, host, details.get(host), lines[host], copies, limit, length)
    else:
        values = (_value(settings.rm, wanted, host, details.get(host), lines[host], copies, length) for host in hosts)
        listing.show(lambda: values, (), "")
    return Exit.OK


def _value(
    rm: str,
    xid: Xid,
    vhost: str,
    detail: Detail | None,
    lines: list[JournalRow],
    copies: Mapping[UUID, CopyCounts],
    length: int,
) -> dict[str, object]:
    return {
        **xid_value(xid),
        "rm": rm,
        "vhost": vhost,
        "in_log": None if detail is None else detail_value(detail, length),
        "history": [line_value(line) for line in lines],
        "copies": [
            {"branch": str(branch_id), "replayed": counts.replayed, "suppressed": counts.suppressed}
            for branch_id, counts in _of_these(copies, detail, lines)
        ],
    }


def _of_these(
    copies: Mapping[UUID, CopyCounts], detail: Detail | None, lines: list[JournalRow]
) -> list[tuple[UUID, CopyCounts]]:
    """The counts of the branches of one virtual host, in the order of their journal."""
    ids = [line.entry.branch_id for line in lines] + ([] if detail is None else [detail.branch.id])
    return [(branch_id, copies[branch_id]) for branch_id in dict.fromkeys(ids) if branch_id in copies]


def _show_text(
    xid: Xid,
    vhost: str,
    detail: Detail | None,
    lines: list[JournalRow],
    copies: Mapping[UUID, CopyCounts],
    limit: int,
    length: int,
) -> None:
    facts: list[tuple[str, str | Text]] = [
        ("xid", xid_text(xid)),
        ("vhost", safe(vhost)),
        *((name, safe(value)) for name, value in _facts(detail)),
        *(
            ("sent again", f"{counts.replayed} messages; {counts.suppressed} duplicates not delivered")
            for _, counts in _of_these(copies, detail, lines)
        ),
    ]
    show_table(("", ""), ((Text(name, style="bold"), value) for name, value in facts), head=False)
    if lines:
        click.echo()
        _show_history([line.entry for line in lines])
    if detail is not None and detail.work:
        click.echo()
        _show_work(detail.work, limit, length)
    click.echo()


def _facts(detail: Detail | None) -> list[tuple[str, str]]:
    if detail is None:
        return [("state", "not in the log any more: see the history")]
    branch = detail.branch
    facts = [
        ("state", str(branch.state) + (f" ({branch.outcome})" if branch.outcome else "")),
        ("owner", branch.owner),
        ("started", _time(branch.started_at)),
        ("prepared", _time(branch.prepared_at)),
        ("decided", _time(branch.decided_at)),
        ("timeout", human_duration(branch.timeout) if branch.timeout else "none"),
        ("messages", f"{branch.publishes} published, {branch.consumes} consumed, {human_size(branch.bytes)}"),
        ("stuck", branch.stuck or ""),
    ]
    if detail.decision is not None:
        made = detail.decision
        facts.append(
            ("decision", f"{made.outcome} by {made.actor} at {_time(made.at)}: {made.reason or 'no reason given'}")
        )
    facts += [
        (f"unit {unit.number}", f"{unit.state}, {'with' if unit.receipt else 'without'} receipt, lock {unit.lock}")
        for unit in branch.units
    ]
    return [(name, value) for name, value in facts if value]


def _show_history(entries: list[JournalEntry]) -> None:
    columns = ("time", "event", "actor", "messages", "bytes", "reason")
    rows = (
        [
            _time(entry.at),
            f"{entry.event}{f' ({entry.outcome})' if entry.outcome else ''}{', one phase' if entry.one_phase else ''}",
            safe(entry.actor),
            str(entry.publishes + entry.consumes),
            human_size(entry.bytes),
            safe(entry.reason or ""),
        ]
        for entry in entries
    )
    show_table(columns, rows, numbers=("messages", "bytes"))


def _show_work(work: tuple[WorkRow, ...], limit: int, length: int) -> None:
    rows = (
        [
            str(item.position),
            _where(item),
            human_size(len(item.body)),
            "; ".join(f"{name}={_word(value)}" for name, value in decode_properties(item.properties).items()),
            preview(item.body, length),
        ]
        for item in islice(work, limit)
    )
    show_table(("#", "message", "bytes", "properties", "body"), rows, numbers=("#", "bytes"))
    if len(work) > limit:
        click.echo(f"{len(work) - limit} more messages: --messages {len(work)} or --json shows them")


def _where(work: WorkRow) -> str:
    source = f"exchange {name_text(work.exchange) or '(default)'} key {name_text(work.routing_key)}"
    if work.kind is WorkKind.PUBLISH:
        into = "" if work.queue is None else f" into queue {name_text(work.queue)}"
        return f"publish to {source}{into}{', mandatory' if (work.flags or 0) & 1 else ''}"
    again = ", redelivered" if (work.flags or 0) & 1 else ""
    return f"consumed from queue {name_text(work.queue or b'')}{again} ({source})"


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _time(at: float | None) -> str:
    return iso_time(at) or ""


def xid_value(xid: Xid) -> dict[str, object]:
    """An xid in its text form, and in parts; ``readable`` where all of it is printable ASCII."""
    return {
        "xid": str(xid),
        "format_id": xid.format_id,
        "gtrid": xid.gtrid.hex(),
        "bqual": xid.bqual.hex(),
        "readable": xid.readable,
    }


def branch_value(branch: BranchRecord) -> dict[str, object]:
    """A logged branch without its xid and work."""
    return {
        "branch": str(branch.id),
        "vhost": branch.vhost,
        "state": str(branch.state),
        "version": branch.version,
        "outcome": None if branch.outcome is None else str(branch.outcome),
        "owner": branch.owner,
        "messages": branch.publishes + branch.consumes,
        "publishes": branch.publishes,
        "consumes": branch.consumes,
        "bytes": branch.bytes,
        "stuck": branch.stuck,
        "one_phase": branch.one_phase,
        "timeout": branch.timeout,
        "started_at": iso_time(branch.started_at),
        "prepared_at": iso_time(branch.prepared_at),
        "decided_at": iso_time(branch.decided_at),
    }


def in_doubt_value(found: InDoubt) -> dict[str, object]:
    """One line of ``dtx branches --json``. Ages are in seconds; bytes of names that are no UTF-8 are escaped."""
    return {
        **xid_value(found.branch.xid),
        "rm": found.rm,
        **branch_value(found.branch),
        "age": round(found.age, 3),
        "queues": [exact_name(name) for name in found.queues],
        "destinations": [exact_name(name) for name in found.destinations],
        "exchanges": [exact_name(name) for name in found.exchanges],
    }


def listed_value(form: Mapping[str, Any]) -> dict[str, Any]:
    """The same as :func:`in_doubt_value`, from a branch of the API; fields that the API does not have are left out."""
    return {
        **xid_value(Xid.parse(form["xid"])),
        **{name: form[name] for name in ("vhost", "state", "version", "outcome", "owner")},
        "branch": form["id"],
        "messages": form["publishes"] + form["consumes"],
        **{name: form[name] for name in ("publishes", "consumes", "bytes", "stuck")},
        **{name: form[name] for name in ("started_at", "prepared_at", "decided_at")},
        "age": form["age"],
        "queues": form["queues"],
        "destinations": form["destinations"],
        "exchanges": form["exchanges"],
    }


def detail_value(detail: Detail, preview_length: int) -> dict[str, object]:
    """A logged branch with its units and messages."""
    return {
        **branch_value(detail.branch),
        "decision": None if detail.decision is None else _decision_value(detail.decision),
        "units": [_unit_value(unit) for unit in detail.branch.units],
        "work": [message_value(work, len(work.body), preview_length) for work in detail.work],
    }


def line_value(line: JournalRow) -> dict[str, object]:
    """One line of the journal, without its xid."""
    entry = line.entry
    value = {each.name: getattr(entry, each.name) for each in fields(entry) if each.name not in {"vhost", "xid"}}
    times = {name: iso_time(found) for name, found in value.items() if isinstance(found, float)}
    return {"branch": str(value.pop("branch_id"))} | value | times


def _decision_value(decision: LoggedDecision) -> dict[str, object]:
    return {
        "outcome": str(decision.outcome),
        "actor": decision.actor,
        "reason": decision.reason,
        "at": iso_time(decision.at),
    }


def _unit_value(unit: Unit) -> dict[str, object]:
    return {
        "number": unit.number,
        "state": str(unit.state),
        "lock": unit.lock,
        "nonce": str(unit.nonce),
        "incarnation": unit.incarnation,
        "receipt": unit.receipt,
        "attempt": unit.attempt,
    }


def message_value(work: WorkRow, size: int, preview_length: int) -> dict[str, object]:
    """One message as a JSON object.

    Args:
        work: the message; its body may be cut to the bytes that the preview needs.
        size: bytes of the whole body.
        preview_length: characters of the preview.
    """
    value: dict[str, object] = {
        "position": work.position,
        "kind": str(work.kind),
        "exchange": name_text(work.exchange),
        "routing_key": name_text(work.routing_key),
        "queue": None if work.queue is None else name_text(work.queue),
        "unit": work.unit,
        "bytes": size,
        "properties": decode_properties(work.properties),
        "preview": preview(work.body, preview_length, size),
    }
    value["mandatory" if work.kind is WorkKind.PUBLISH else "redelivered"] = (
        None if work.flags is None else bool(work.flags & 1)
    )
    return value

"""``dtx show``: all that is known about one xid."""

import json
from collections import defaultdict
from itertools import islice

import click
from rich.text import Text

from dtx.admin.message_properties import decode_properties
from dtx.admin.safe_text import human_duration, human_size, iso_time, json_line, name_text, preview, safe
from dtx.cli.branches import xid_text
from dtx.cli.connect import database_at_hand
from dtx.cli.errors import CommandError, Exit
from dtx.cli.options import DATABASE_SETTINGS, SettingsCommand, with_settings
from dtx.cli.output import new_table, show_table
from dtx.cli.values import detail_value, line_value, xid_value
from dtx.config import Settings
from dtx.log.reading import Detail, Line, LogReader
from dtx.log.records import JournalEntry, Work, WorkKind
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

_EPILOG = """\b
Examples:
  dtx show 1:6774:62
  dtx show 1:6774:62 --vhost orders --json

An xid is written format:gtrid-hex:bqual-hex, as 'dtx branches' prints it. The same xid may exist in several virtual
hosts; all are shown. The exit code is 1 when neither the log nor the journal knows it.
"""


@click.command(cls=SettingsCommand, epilog=_EPILOG)
@with_settings(*DATABASE_SETTINGS)
@click.argument("xid")
@click.option("--vhost", metavar="VHOST", help="Only in this virtual host.")
@click.option(
    "--messages", "limit", type=click.IntRange(min=0), default=50, metavar="NUMBER",
    help="Show at most so many messages of a branch; default 50. JSON has them all.",
)  # fmt: skip
@click.option(
    "--preview", "length", type=click.IntRange(min=8, max=100_000), default=120, metavar="CHARACTERS",
    help="Length of the preview of each body; default 120.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line for each virtual host, for programs.")
def show(settings: Settings, xid: str, vhost: str | None, limit: int, length: int, as_json: bool) -> int:
    """Show the branch, its messages and its whole history: what is in the log now, and what the journal remembers.

    Properties and bodies are shown so that nothing in them can do harm to a terminal.
    """
    try:
        wanted = Xid.parse(xid)
    except XaError as error:
        raise click.BadParameter(safe(error.reason), param_hint="XID") from None
    with database_at_hand(settings) as url, LogReader(url) as log:
        details = {detail.branch.vhost: detail for detail in log.show(wanted, vhost=vhost, rm=settings.rm)}
        lines: defaultdict[str, list[Line]] = defaultdict(list)
        for line in log.history(wanted, vhost=vhost, rm=settings.rm):
            lines[line.entry.vhost].append(line)
    hosts = sorted(details.keys() | lines.keys())
    if not hosts:
        raise CommandError(Exit.FAILED, f"nothing is known about {wanted}: it is neither in the log nor in the journal")
    for host in hosts:
        if as_json:
            _show_json(settings.rm, wanted, host, details.get(host), lines[host], length)
        else:
            _show_text(wanted, host, details.get(host), lines[host], limit, length)
    return Exit.OK


def _show_json(rm: str, xid: Xid, vhost: str, detail: Detail | None, lines: list[Line], length: int) -> None:
    value = {
        **xid_value(xid),
        "rm": rm,
        "vhost": vhost,
        "in_log": None if detail is None else detail_value(detail, length),
        "history": [line_value(line) for line in lines],
    }
    click.echo(json_line(value))


def _show_text(xid: Xid, vhost: str, detail: Detail | None, lines: list[Line], limit: int, length: int) -> None:
    head = new_table("", "")
    head.show_header = False
    head.add_row(Text("xid", style="bold"), xid_text(xid))
    head.add_row(Text("vhost", style="bold"), Text(safe(vhost)))
    for name, value in _facts(detail):
        head.add_row(Text(name, style="bold"), Text(safe(value)))
    show_table(head)
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
    table = new_table("time", "event", "actor", "messages", "bytes", "reason", numbers=("messages", "bytes"))
    for entry in entries:
        event = str(entry.event) + (f" ({entry.outcome})" if entry.outcome else "")
        if entry.one_phase:
            event += ", one phase"
        table.add_row(
            Text(_time(entry.at)),
            Text(event),
            Text(safe(entry.actor)),
            Text(str(entry.publishes + entry.consumes)),
            Text(human_size(entry.bytes)),
            Text(safe(entry.reason or "")),
        )
    show_table(table)


def _show_work(work: tuple[Work, ...], limit: int, length: int) -> None:
    table = new_table("#", "message", "bytes", "properties", "body", numbers=("#", "bytes"))
    for item in islice(work, limit):
        properties = "; ".join(f"{name}={_word(value)}" for name, value in decode_properties(item.properties).items())
        table.add_row(
            Text(str(item.position)),
            Text(_where(item)),
            Text(human_size(len(item.body))),
            Text(properties),
            Text(preview(item.body, length)),
        )
    show_table(table)
    if len(work) > limit:
        click.echo(f"{len(work) - limit} more messages: --messages {len(work)} or --json shows them")


def _where(work: Work) -> str:
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

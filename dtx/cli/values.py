"""What the log says of a branch, as JSON objects with exact values; people see the same ones escaped."""

from collections.abc import Mapping
from typing import Any

from dtx.admin.message_properties import decode_properties
from dtx.admin.safe_text import iso_time, name_text, preview
from dtx.log.reading import Decision, Detail, InDoubt, Line
from dtx.log.records import BranchRecord, Unit, Work, WorkKind
from dtx.xa.xid import Xid


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
    """One line of ``dtx branches --json``. Ages are in seconds; names that are no UTF-8 are escaped."""
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
    """The same of a branch as the API says it; what it does not say is left out."""
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


def line_value(line: Line) -> dict[str, object]:
    """One line of the journal, without its xid."""
    entry = line.entry
    return {
        "at": iso_time(entry.at),
        "event": str(entry.event),
        "outcome": None if entry.outcome is None else str(entry.outcome),
        "actor": entry.actor,
        "owner": entry.owner,
        "reason": entry.reason,
        "branch": str(entry.branch_id),
        "one_phase": entry.one_phase,
        "publishes": entry.publishes,
        "consumes": entry.consumes,
        "bytes": entry.bytes,
        "started_at": iso_time(entry.started_at),
        "prepared_at": iso_time(entry.prepared_at),
        "decided_at": iso_time(entry.decided_at),
    }


def exact_name(name: bytes) -> str:
    """A name as text that JSON can carry, unescaped where it is UTF-8."""
    return name.decode("utf-8", "backslashreplace")


def _decision_value(decision: Decision) -> dict[str, object]:
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
    }


def message_value(work: Work, size: int, preview_length: int) -> dict[str, object]:
    """One message as a JSON object.

    Args:
        work: the message; its body may be cut to what the preview needs.
        size: octets of the whole body.
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

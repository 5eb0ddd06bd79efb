"""Messages of a branch as safe, plain values."""

from dtx.admin.shown.properties import decode_properties
from dtx.admin.shown.text import name_text, preview
from dtx.log.records import Work, WorkKind


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

"""What comes from clients, shown to people safely: at the command line and in pages alike.

Nothing of it reaches a terminal as control characters. Properties are total: what cannot be decoded is shown as it is.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from dtx.config.values import DAY, GIB, KIB, MIB
from dtx.log.records import Work, WorkKind
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property

_ELLIPSIS: Final = "…"


def safe(text: str) -> str:
    """*text* with everything that is not printable escaped: controls, bidirectional marks, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def name_text(name: bytes) -> str:
    """A queue's, exchange's or key's octets as safe text; what is no UTF-8 is shown as an escape."""
    return safe(name.decode("utf-8", "backslashreplace"))


def preview(body: bytes, limit: int = 120, size: int | None = None) -> str:
    """The beginning of a message body for people: text where it is UTF-8, else hex. Never a control character.

    Args:
        body: the body, or its first octets.
        limit: characters of the answer, about.
        size: octets of the whole body where *body* is only its beginning.
    """
    whole = len(body) if size is None else size
    head = body[: limit * 4]
    text = _text_of(head, cut=len(head) < whole)
    if text is None:
        shown = "hex " + head[: limit // 2].hex(" ", 4)
        return shown if limit // 2 >= whole else shown + _ELLIPSIS
    shown = safe(text)
    return shown if len(shown) <= limit and len(head) == whole else shown[:limit] + _ELLIPSIS


def _text_of(head: bytes, *, cut: bool) -> str | None:
    """*head* as text where it is some; where it was cut, up to three octets of a broken character are let go."""
    for dropped in range(4 if cut else 1):
        try:
            text = head[: len(head) - dropped].decode("utf-8")
        except UnicodeDecodeError:
            continue
        return text if (text or not head) and _mostly_text(text) else None
    return None


def _mostly_text(text: str) -> bool:
    """Whether control characters are rare in *text*: binary data can be valid UTF-8 by accident."""
    controls = sum((char < " " or "\x7f" <= char <= "\x9f") and char not in "\t\r\n" for char in text)
    return controls * 10 <= len(text)


def human_size(octets: int) -> str:
    """``0 B``, ``1023 B``, ``1.5 KiB``, ``64 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if octets >= unit:
            return f"{octets / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{octets} B"


def human_duration(seconds: float) -> str:
    """The two largest units that say something: ``3d 4h``, ``5m 2s``, ``12s``, ``0.5s``."""
    if seconds < 60:
        return f"{seconds:.3g}s" if seconds < 10 else f"{seconds:.0f}s"
    left = int(seconds)
    parts: list[str] = []
    for unit, name in ((DAY, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, unit)
        if count:
            parts.append(f"{count}{name}")
        elif parts:
            break
    return " ".join(parts[:2])


def iso_time(at: float | None) -> str | None:
    """Seconds since the epoch as ``2026-01-31T12:00:00.000000Z``."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def json_line(value: Mapping[str, object]) -> str:
    """One JSON object on one line, ASCII alone, so that no terminal and no pipe can misread it."""
    return json.dumps(value, ensure_ascii=True, separators=(", ", ": "))


_NUMBERS: Final = (Property.DELIVERY_MODE, Property.PRIORITY)


def _integer(form: str) -> Callable[[bytes], object]:
    return lambda value: struct.unpack(form, value)[0]


def _real(form: str) -> Callable[[bytes], object]:
    def decode(value: bytes) -> object:
        (number,) = struct.unpack(form, value)
        # JSON has no word for NaN and infinity.
        return number if math.isfinite(number) else str(number)

    return decode


def _decimal(value: bytes) -> object:
    scale, digits = struct.unpack(">Bi", value)
    return f"{digits}e-{scale}" if scale else str(digits)


def _time(value: bytes) -> object:
    seconds = int.from_bytes(value, "big")
    try:
        return iso_time(seconds)
    except (ValueError, OverflowError, OSError):
        return seconds


def decode_properties(raw: bytes) -> dict[str, object]:
    """The properties that are set, by name; those that are malformed as ``{"undecodable": hex}``."""
    try:
        found = properties.read(raw)
        return {
            which.name.lower(): _property(which, found.value(which) or b"")
            for which in Property
            if which in found.spans
        }
    except WireError:
        return {"undecodable": preview(raw)}


def _property(which: Property, value: bytes) -> object:
    if which in _NUMBERS:
        return value[0]
    if which is Property.TIMESTAMP:
        return _time(value)
    return _table(value) if which is Property.HEADERS else name_text(value)


def _table(data: bytes) -> dict[str, object]:
    return {name_text(entry.key): _DECODERS[entry.kind](entry.value) for entry in tables.entries(data)}


def _array(data: bytes) -> Iterator[object]:
    """The elements of an array; called for what :func:`tables.entries` has checked to its last octet."""
    position = 0
    while position < len(data):
        kind = data[position : position + 1]
        position += 1
        size = _FIXED.get(kind)
        if size is None:
            size = int.from_bytes(data[position : position + 4], "big")
            position += 4
        yield _DECODERS[kind](data[position : position + size])
        position += size


_FIXED: Final = {
    letter.encode(): size
    for letters, size in (("V", 0), ("tbB", 1), ("suU", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_DECODERS: Final[dict[bytes, Callable[[bytes], object]]] = {
    b"V": lambda _: None,
    b"t": lambda value: value != b"\0",
    b"b": _integer(">b"),
    b"B": _integer(">B"),
    b"s": _integer(">h"),
    b"U": _integer(">h"),
    b"u": _integer(">H"),
    b"I": _integer(">i"),
    b"i": _integer(">I"),
    b"l": _integer(">q"),
    b"L": _integer(">q"),
    b"f": _real(">f"),
    b"d": _real(">d"),
    b"D": _decimal,
    b"T": _time,
    b"S": name_text,
    b"x": name_text,
    b"F": _table,
    b"A": lambda value: list(_array(value)),
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

"""Text that is safe to show: control characters from clients are escaped before they reach a terminal or page."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from dtx.config.values import DAY, GIB, KIB, MIB

_ELLIPSIS: Final = "…"


class _Escapes(dict[int, int | str]):
    """What :func:`safe` shows for each code point. It grows with the characters that are met, to some limit."""

    def __missing__(self, point: int) -> int | str:
        char = chr(point)
        shown = point if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        if len(self) < _MOST_ESCAPES:
            self[point] = shown
        return shown


_MOST_ESCAPES: Final = 10_000
_ESCAPES: Final = _Escapes()


def safe(text: str) -> str:
    """*text* with all unprintable characters escaped: controls, bidirectional marks, lone surrogates."""
    if text.isprintable():
        return text
    return text.translate(_ESCAPES)


def cut(text: str, longest: int) -> str:
    """*text*, or its first *longest* characters and an ellipsis."""
    return text if len(text) <= longest else text[:longest] + _ELLIPSIS


def exact_name(name: bytes) -> str:
    """The bytes of the name of a queue, exchange or key as text for JSON. Bytes that are no UTF-8 are escaped."""
    return name.decode("utf-8", "backslashreplace")


def name_text(name: bytes) -> str:
    """The same as :func:`exact_name`, made safe by :func:`safe`."""
    return safe(exact_name(name))


def preview(body: bytes, limit: int = 120, size: int | None = None) -> str:
    """The beginning of a message body for people: text where it is UTF-8, else hex. Never a control character.

    Args:
        body: the body, or its first bytes.
        limit: characters of the answer, about.
        size: bytes of the whole body if *body* is only its beginning.
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
    """*head* as text, or ``None`` if it is none; if it was cut, up to three bytes of a broken character are dropped."""
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
    """A duration in its two largest units: ``3d 4h``, ``5m 2s``, ``12s``, ``0.5s``."""
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
    """A JSON object on one line, in ASCII only, so that no terminal and no pipe can misread it."""
    return json.dumps(value, ensure_ascii=True, separators=(", ", ": "))

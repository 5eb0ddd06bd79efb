"""Records data that was not read: source, reason, count and a sample. A run with such records ends with exit code 3."""

from dataclasses import dataclass
from typing import Final

SAMPLE_LETTERS: Final = 200
"""Limit of a sample: enough to recognise a line, too little to fill a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Data that was not read.

    Args:
        source: the configured name of the database, participant or log; ``lake`` for the lake and the results.
        item: the part: a table, a path, ``path:line``.
        reason: why, in lower case.
        count: rows or lines; ``None`` where the number is unknown, such as for a database that is down.
        sample: the beginning of one of them, at most :data:`SAMPLE_LETTERS` characters, printable.
        whole: whether nothing of the database, log or file was read.
    """

    source: str
    item: str
    reason: str
    count: int | None = 1
    sample: str = ""
    whole: bool = False

    @property
    def is_away(self) -> bool:
        """Whether a whole source, or an unknown amount of data, was not read; else all other lines were read."""
        return self.whole or self.count is None

    def __str__(self) -> str:
        count = "" if self.count is None else f" ({self.count:,})"
        sample = f": {self.sample}" if self.sample else ""
        return f"{self.source}: {self.item}: {self.reason}{count}{sample}"


def sample(text: str | bytes) -> str:
    """Return the beginning of *text* on one line, with control characters escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * SAMPLE_LETTERS].decode("utf-8", "backslashreplace")
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text[:SAMPLE_LETTERS]
    )
    return shown if len(text) <= SAMPLE_LETTERS and len(shown) <= SAMPLE_LETTERS else f"{shown[: SAMPLE_LETTERS - 1]}…"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

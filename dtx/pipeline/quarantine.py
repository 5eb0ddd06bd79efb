"""What was not read: named, counted, with a sample. A run that has any of it ends with an exit code of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SAMPLE_LETTERS: Final = 200
"""Of a sample: enough to recognise a line, too little to fill a report."""


class ExitCode(IntEnum):
    """What a run of the pipeline ends with."""

    CLEAN = 0
    ERROR = 1
    QUARANTINED = 3
    """It finished, but something was quarantined or a source was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Something that was not read.

    Args:
        source: the configured name of the database or log.
        item: which part: a table, a path, ``path:line``.
        reason: why, lower case.
        count: how many rows or lines; ``None`` where that cannot be known, as of a database that is down.
        sample: the beginning of one of them, at most :data:`SAMPLE_LETTERS` letters, printable.
        whole: whether that is a whole database, log or file, of which nothing else was read either.
    """

    source: str
    item: str
    reason: str
    count: int | None = 1
    sample: str = ""
    whole: bool = False

    @property
    def is_away(self) -> bool:
        """Whether nobody knows what else there was: of lines that are counted the others were read."""
        return self.whole or self.count is None

    def __str__(self) -> str:
        count = "" if self.count is None else f" ({self.count:,})"
        sample = f": {self.sample}" if self.sample else ""
        return f"{self.source}: {self.item}: {self.reason}{count}{sample}"


def sample(text: str | bytes) -> str:
    """The beginning of *text*, as it can be shown to people: one line, nothing that a terminal obeys."""
    if isinstance(text, bytes):
        text = text[: 4 * SAMPLE_LETTERS].decode("utf-8", "backslashreplace")
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text[:SAMPLE_LETTERS]
    )
    return shown if len(text) <= SAMPLE_LETTERS and len(shown) <= SAMPLE_LETTERS else f"{shown[: SAMPLE_LETTERS - 1]}…"


def exit_code(rows: Iterable[Quarantined]) -> ExitCode:
    """What a run ends with that finished, and set *rows* aside."""
    return ExitCode.QUARANTINED if any(True for _ in rows) else ExitCode.CLEAN

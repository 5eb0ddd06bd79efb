"""What goes wrong with a database, in one sentence that names it and never its password."""

from typing import Final

from dtx.config.values import redact

_CONNECTION: Final = ("08", "53", "57P")
"""SQLSTATE classes of connections lost, of a server that is full, and of one that is starting or stopping."""
_RETRIED: Final = frozenset({"40001", "40P01", "55P03", "25006"})
"""Serialization, deadlock, a lock that was not had in time; a standby that cancels a query says 40001."""
_MOST: Final = 500


class SourceError(Exception):
    """A database, or a part of one, was not read."""


class SourceAway(SourceError):
    """It does not answer now; later it may."""


def sentence(error: BaseException) -> str:
    """The first line of a driver's error, without passwords, bounded."""
    lines = str(error).strip().splitlines()
    text = redact(lines[0].strip().rstrip(".")) if lines else type(error).__name__
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"


def passes(sqlstate: str | None) -> bool:
    """Whether an error with this SQLSTATE may be gone the next time; without one the connection was lost."""
    return sqlstate is None or sqlstate in _RETRIED or sqlstate.startswith(_CONNECTION)

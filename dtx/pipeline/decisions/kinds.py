"""The kinds of decision logs, and the columns that are read of each.

The neutral format, for any transaction manager: one decision in each row, in Parquet, CSV with a header, or JSON lines.

=============  ============================  ==========================================================================
column         CSV and JSON                  Parquet
=============  ============================  ==========================================================================
``gtrid``      hexadecimal, 1 to 64 bytes    binary
``decision``   ``commit`` or ``rollback``    the same
``time``       ISO 8601; UTC without a zone  timestamp
``format_id``  unsigned 32 bit, optional     the same
``tm``         text, optional                the same; without it the log's configured name
``finished``   true or false, optional       boolean: whether every branch has been completed
=============  ============================  ==========================================================================
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Final

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)


class LogKind(StrEnum):
    """The format of a log."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    ATOMIKOS = "atomikos"
    """``tmlog*.log``: JSON lines of release 4, lines with ``|`` of later releases."""
    SQLITE = "sqlite"
    """The SQLite file of :mod:`dtx.client.tm`."""
    POSTGRESQL = "postgresql"
    """The schema ``dtx_tm`` of :mod:`dtx.client.tm`."""


_SUFFIXES: Final = {
    ".parquet": LogKind.PARQUET,
    ".csv": LogKind.CSV,
    ".json": LogKind.JSON,
    ".jsonl": LogKind.JSON,
    ".ndjson": LogKind.JSON,
    ".log": LogKind.ATOMIKOS,
    ".sqlite": LogKind.SQLITE,
    ".sqlite3": LogKind.SQLITE,
    ".db": LogKind.SQLITE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerLog:
    """A decision log.

    Args:
        kind: its format.
        name: its configured name.
        place: a path or URL that Spark reads; for SQLite, a file of this machine; for PostgreSQL, a database URL.
    """

    kind: LogKind
    name: str
    place: str


def kind_of(place: str) -> LogKind | None:
    """Return the format of a path or URL by its scheme or suffix, ``None`` where these are unknown."""
    if place.startswith(("postgresql://", "postgres://", "postgresql+psycopg://")):
        return LogKind.POSTGRESQL
    return _SUFFIXES.get(PurePosixPath(place).suffix.lower())


DECISIONS: Final = StructType(
    [
        StructField("tm", StringType()),
        StructField("format_id", LongType()),
        StructField("gtrid", BinaryType()),
        StructField("decision", StringType()),
        StructField("at", TimestampType()),
        StructField("finished", BooleanType()),
        StructField("source", StringType()),
    ]
)

"""Logs of transaction managers: which there are, and what is read of each.

The neutral format, for any transaction manager: one decision to a row, in Parquet, CSV with a header, or JSON lines.

=============  ============================  ==========================================================================
column         CSV and JSON                  Parquet
=============  ============================  ==========================================================================
``gtrid``      hexadecimal, 1 to 64 octets   binary
``decision``   ``commit`` or ``rollback``    the same
``time``       ISO 8601; UTC without a zone  timestamp
``format_id``  unsigned 32 bit, optional     the same
``tm``         text, optional                the same; without it the log's configured name
``finished``   true or false, optional       boolean: whether every branch has been told
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
    """What wrote a log."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"
    ATOMIKOS = "atomikos"
    """``tmlog*.log``: JSON lines of release 4, records with bars of later ones."""
    SQLITE = "sqlite"
    """Of :mod:`dtx.client.tm`: its file."""
    POSTGRESQL = "postgresql"
    """Of :mod:`dtx.client.tm`: its schema ``dtx_tm``."""


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
    """One log of decisions.

    Args:
        kind: what it is.
        name: its configured name.
        place: path or URL: files and directories as Spark reads them; of SQLite a file of this machine.
    """

    kind: LogKind
    name: str
    place: str


def kind_of(place: str) -> LogKind | None:
    """What a path or URL is by its look, ``None`` where that says nothing."""
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

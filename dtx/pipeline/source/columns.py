"""The tables that can be read, and their columns, from :mod:`dtx.log.tables`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType
from sqlalchemy import BigInteger, Boolean, Column, DateTime, Integer, LargeBinary, Text, Uuid

from dtx.log import tables
from dtx.pipeline.source.server import SourceError

SOURCE: Final = "source"
"""The column with the configured name of the database of a row; no table has it."""
ARROW: Final[dict[str, pa.DataType]] = {
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
}
"""Arrow's types by Spark's names."""
UUID: Final = "uuid"
XID8: Final = "xid8"
_KINDS: Final[dict[type[object], str]] = {
    BigInteger: "bigint",  # before Integer, which BigInteger is, too
    Integer: "int",
    Boolean: "boolean",
    DateTime: "timestamp",
    LargeBinary: "binary",
    Uuid: UUID,
    Text: "string",
    tables.Xid8: XID8,
}
"""Spark's names of SQLAlchemy's types; Spark lacks the types uuid and xid8."""
_SPARK: Final = {UUID: "string", XID8: "bigint"}
_SENT: Final = {UUID: "uuid_send({})", XID8: "xid8send({})"}


@dataclass(frozen=True, slots=True)
class Readable:
    """A table that can be read, with the type of each column by name."""

    name: str
    columns: dict[str, str]

    @property
    def schema(self) -> StructType:
        """All columns; the last one is the source."""
        return spark_schema(**{name: _SPARK.get(kind, kind) for name, kind in self.columns.items()}, source="string")

    def sent(self, names: Sequence[str]) -> str:
        """Return a select list in SQL without the source, with the forms that cost PostgreSQL the least work."""
        found = [f'{_SENT.get(self.columns[name], "{}").format(name)} AS "{name}"' for name in names if name != SOURCE]
        # a schema of only the source still needs the number of rows
        return ", ".join(found) or 'true AS "nothing"'


def readable(table: str) -> Readable:
    """Return the table of this name."""
    try:
        return TABLES[table]
    except KeyError:
        raise SourceError(f"table {table!r} cannot be read: there are {', '.join(sorted(TABLES))}") from None


def chosen(table: Readable, schema: StructType) -> None:
    """Refuse columns that the table lacks, or has with another type."""
    there = {field.name: field.dataType for field in table.schema.fields}
    for field in schema.fields:
        if field.name not in there:
            raise SourceError(f"{table.name} has no column {field.name!r}: there are {', '.join(there)}")
        if field.dataType != there[field.name]:
            wanted, found = field.dataType.simpleString(), there[field.name].simpleString()
            raise SourceError(f"column {field.name} of {table.name} is {found}, not {wanted}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the same columns as an Arrow schema, with the types that Spark expects."""
    return pa.schema(
        [pa.field(field.name, ARROW[field.dataType.simpleString()], field.nullable) for field in schema.fields]
    )


def spark_schema(**columns: str) -> StructType:
    """Return columns of these types, in Spark's names."""
    return from_arrow_schema(pa.schema({name: ARROW[kind] for name, kind in columns.items()}))


def _kind(column: Column[object]) -> str:
    return next(kind for sql, kind in _KINDS.items() if isinstance(column.type, sql))


TABLES: Final = {
    table.name: Readable(table.name, {column.name: _kind(column) for column in table.columns})
    for table in (tables.journal, tables.branch, tables.work, tables.heuristic_outcome)
}
"""The tables that can be read, by name."""

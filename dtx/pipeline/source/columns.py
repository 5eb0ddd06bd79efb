"""The tables that can be read, and their columns, from :mod:`dtx.log.tables`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
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


class ColumnKind(Enum):
    """The type of a column: SQLAlchemy's and Spark's."""

    LONG = BigInteger, LongType()  # before Integer, which BigInteger is, too
    INTEGER = Integer, IntegerType()
    BOOLEAN = Boolean, BooleanType()
    TIME = DateTime, TimestampType()
    BYTES = LargeBinary, BinaryType()
    UUID = Uuid, StringType()
    TEXT = Text, StringType()
    XID8 = tables.Xid8, LongType()

    def __init__(self, sql: type[object], spark: DataType) -> None:
        self.sql = sql
        self.spark = spark


_SENT: Final = {ColumnKind.UUID: "uuid_send({})", ColumnKind.XID8: "xid8send({})"}


@dataclass(frozen=True, slots=True)
class Readable:
    """A table that can be read, with the type of each column by name."""

    name: str
    columns: dict[str, ColumnKind]

    @property
    def schema(self) -> StructType:
        """All columns; the last one is the source."""
        fields = [StructField(name, kind.spark) for name, kind in self.columns.items()]
        return StructType([*fields, StructField(SOURCE, StringType())])

    def sent(self, names: Sequence[str]) -> str:
        """Return a select list in SQL without the source, with the forms that cost PostgreSQL the least work."""
        found = [f'{_SENT.get(self.columns[name], "{}").format(name)} AS "{name}"' for name in names if name != SOURCE]
        # a schema of only the source still needs the number of rows
        return ", ".join(found) or 'true AS "nothing"'


def readable(table: str) -> Readable:
    """Return the table of this name.

    Raises:
        SourceError: there is no such table, or it cannot be read.
    """
    try:
        return TABLES[table]
    except KeyError:
        raise SourceError(f"table {table!r} cannot be read: there are {', '.join(sorted(TABLES))}") from None


def chosen(table: Readable, schema: StructType) -> None:
    """Check the columns that a user has chosen.

    Raises:
        SourceError: the table does not have a column, or has it with another type.
    """
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


def _kind(column: Column[object]) -> ColumnKind:
    for kind in ColumnKind:
        if isinstance(column.type, kind.sql):
            return kind
    raise TypeError(f"column {column} has a type that the pipeline does not read")


TABLES: Final = {
    table.name: Readable(table.name, {column.name: _kind(column) for column in table.columns})
    for table in (tables.journal, tables.branch, tables.work, tables.heuristic_outcome)
}
"""The tables that can be read, by name."""

"""The hot statements' form: set-based, with binary parameters.

Plain SQL, not SQLAlchemy: they run thousands of times a second, are prepared once per connection, and take arrays
that :mod:`dtx.log.binary` builds.

What has one row is another plan of the same statement: its values are parameters, and no arrays are taken apart. A
client that is alone has one row of everything, and that is a third of PostgreSQL's work for it. Where such a statement
begins a group, it proves the lease as well: a statement less for PostgreSQL to begin and to end, and to answer.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dtx.log import binary

CONFLICT: Final = "DTX01"
"""SQLSTATE raised when a row was not in the expected state and version."""
LEASE_LOST: Final = "DTX02"
"""SQLSTATE raised when the lease's epoch is not the writer's."""
OUT_OF_TURN: Final = "DTX03"
"""SQLSTATE raised when the group before was not written."""

PROOF: Final = (
    # The lock, not the look, is the proof: it waits for a successor that is taking the lease, and makes one wait that
    # comes before this group's commit. EXISTS would let a group commit that began before the lease was lost.
    f"dtx.require((SELECT true FROM dtx.lease WHERE rm = $1::text AND epoch = $2::bigint FOR SHARE) IS TRUE, "
    f"'{LEASE_LOST}', 'another dtx holds the lease')"
)
"""What makes a statement fail unless ``$2`` is the epoch of the lease, and keeps it that until the group's commit."""
MAX_STATEMENT_BYTES: Final = 32 * 1024 * 1024
"""Bodies in one statement: PostgreSQL holds each three times while it reads them, and takes no message of 1 GiB."""

Column = tuple[str, str, str, binary.Encoder]
"""Name in the table, attribute of the record, element type, encoder."""


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One prepared statement.

    Args:
        name: under which it is prepared.
        sql: with ``$1`` the resource manager, ``$2`` a count or epoch, then one array for each column, which
            :func:`unnest` makes rows of.
        columns: of the arrays.
        begins: whether it may be the only statement of a group, or the first: then it has a form that proves the lease.
    """

    name: bytes
    sql: str
    columns: tuple[Column, ...] = ()
    begins: bool = False
    of_one: "Statement | None" = field(init=False, default=None)
    """The same for one row, whose values are the parameters; ``None`` where there are no rows."""
    proving: "Statement | None" = field(init=False, default=None)
    """That, with ``$2`` the epoch, and the proof of it; ``None`` unless it *begins*."""
    cells: tuple[Callable[[Any], bytes | None], ...] = field(init=False, default=())
    """The encoders of one row's values."""

    def __post_init__(self) -> None:
        rows = unnest(self.columns)
        object.__setattr__(self, "cells", tuple([binary.CELL[column[3]] for column in self.columns]))
        if self.columns and rows in self.sql:
            # Arrays are taken apart once, wherever their rows are read; one row is parameters in every place.
            sql = self.sql.replace(rows, _one(self.columns)).replace(" AS MATERIALIZED ", " AS NOT MATERIALIZED ")
            object.__setattr__(self, "of_one", Statement(self.name + b"_of_one", sql, self.columns))
            if self.begins:
                proving = Statement(self.name + b"_proving", _proving(sql), self.columns)
                object.__setattr__(self, "proving", proving)

    def bind(self, rm: bytes, number: int, rows: Sequence[Sequence[Any]]) -> "Bound":
        """The statement with its parameters, from rows of values in the order of the columns."""
        if len(rows) == 1 and self.of_one is not None:
            return self.of_one, self._parameters(rm, number, rows[0])
        arrays = [column[3](values) for column, values in zip(self.columns, zip(*rows, strict=True), strict=True)]
        return self, [rm, binary.int8(number), *arrays]

    def bind_proving(self, rm: bytes, epoch: int, row: Sequence[Any]) -> "Bound":
        """The statement that proves the lease, too; it has such a form."""
        assert self.proving is not None
        return self.proving, self._parameters(rm, epoch, row)

    def _parameters(self, rm: bytes, number: int, row: Sequence[Any]) -> list[bytes | None]:
        return [rm, binary.int8(number), *[cell(value) for cell, value in zip(self.cells, row, strict=True)]]


Bound = tuple[Statement, Sequence[bytes | None]]


def both(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """*statements* as they are prepared: for many rows, for one, and for one that begins a group."""
    forms = [form for statement in statements for form in (statement, statement.of_one, statement.proving)]
    return tuple(form for form in forms if form is not None)


def unnest(columns: Iterable[Column], first: int = 3) -> str:
    """The arrays of *columns* as rows ``u``."""
    columns = list(columns)
    arrays = ", ".join(f"${number}::{column[2]}[]" for number, column in enumerate(columns, first))
    return f"unnest({arrays}) AS u({', '.join(column[0] for column in columns)})"


def _one(columns: Iterable[Column], first: int = 3) -> str:
    """As :func:`unnest`, where each column has one value: PostgreSQL puts it in its place when it plans."""
    cells = ", ".join(f"${number}::{column[2]} AS {column[0]}" for number, column in enumerate(columns, first))
    return f"(SELECT {cells}) AS u"


def _proving(sql: str) -> str:
    """*sql*, a statement for one row, that fails unless the lease is proved, whatever rows it finds.

    Raises:
        ValueError: *sql* neither inserts what :func:`insert` does nor counts what it has done.
    """
    counted = "SELECT dtx.require((SELECT count(*)"
    if sql.startswith("INSERT INTO") or sql.count(counted) == 0:
        inserts = re.fullmatch(r"(.*SELECT \$1::text, .* FROM .* WHERE )\$2::bigint >= 0( .*)?", sql)
        if inserts is None:
            raise ValueError(f"cannot prove the lease: {sql}")
        return f"{inserts[1]}{PROOF}{inserts[2] or ''}"
    # columns are computed in their order
    return sql.replace(counted, f"SELECT {PROOF}, {counted.removeprefix('SELECT ')}").replace("= $2::bigint, ", "= 1, ")


def ours(table: str) -> str:
    """That the row of *table*, which its id finds, is the resource manager's.

    Written so that no index can answer it: while a table is empty PostgreSQL takes one that begins with ``rm`` for as
    good as the id's, and keeps the plan, by which it reads every branch in doubt for each write.
    """
    return f"{table}.rm || '' = $1::text"


def ours_by_row(table: str) -> str:
    """The same where the key begins with ``rm``: the index is of use together with a row of ``u`` alone."""
    return f"{table}.rm = CASE WHEN u.vhost IS NOT NULL THEN $1::text END"


def _names(columns: Iterable[Column]) -> str:
    return ", ".join(column[0] for column in columns)


def insert(table: str, columns: tuple[Column, ...], conflict: str = "") -> str:
    """An insert of rows into *table*, which all belong to the resource manager."""
    # $2 is not needed here, but a parameter without a type is an error
    return (
        f"INSERT INTO dtx.{table} (rm, {_names(columns)}) "
        f"SELECT $1::text, u.* FROM {unnest(columns)} WHERE $2::bigint >= 0 {conflict}"
    )


def expect_all(change: str, what: str) -> str:
    """*change*, which returns each row that it changed, and the proof that there were as many as expected."""
    return (
        f"WITH done AS ({change}) SELECT dtx.require((SELECT count(*) FROM done) = $2::bigint, '{CONFLICT}', '{what}')"
    )


def in_pieces(rows: list[Any], body: int) -> Iterable[list[Any]]:
    """Rows, whose column *body* is their weight, in statements of ``MAX_STATEMENT_BYTES`` at most, or of one row."""
    start = size = 0
    for index, row in enumerate(rows):
        length = len(row[body])
        if size + length > MAX_STATEMENT_BYTES and index > start:
            yield rows[start:index]
            start, size = index, 0
        size += length
    yield rows[start:]

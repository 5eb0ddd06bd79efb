"""Rows of one part as Arrow batches, by ADBC: a thread reads ahead while Spark works, and nobody waits for ever.

A part that has had no row yet begins again by itself when its database comes back within moments. One that has had
rows fails, with a sentence that names it: Spark repeats the task as a whole, and drops what the first one gave.

A uuid and an xid8 are sent as their octets: to write them as text takes PostgreSQL longer than all of a batch here.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi
from pyspark.sql.types import StructType

from dtx.pipeline.source.columns import SOURCE, Kind, Readable, arrow_schema
from dtx.pipeline.source.errors import SourceAway, SourceError, passes, sentence
from dtx.pipeline.source.options import Options
from dtx.pipeline.source.planning import Part, statement
from dtx.pipeline.source.server import conninfo

_UUID_OCTETS: Final = 16
_XID8_OCTETS: Final = 8
_GROUPS: Final = ("8", "4", "4", "4", "12")
"""Digits of a uuid between its hyphens (RFC 9562, section 4)."""
_DIGITS: Final = np.dtype([(f"group{number}", f"V{width}") for number, width in enumerate(_GROUPS)])


def _with_hyphens() -> Iterator[tuple[str, str]]:
    for number, width in enumerate(_GROUPS):
        if number:
            yield f"hyphen{number}", "u1"
        yield f"group{number}", f"V{width}"


_TEXT: Final = np.dtype(list(_with_hyphens()))


def shaped(batch: pa.RecordBatch, table: Readable, target: pa.Schema, source: str) -> pa.RecordBatch:
    """*batch* with exactly the columns that Spark expects.

    Args:
        batch: rows of :meth:`Readable.sent`.
        table: what they are of.
        target: the columns.
        source: the configured name of the database.
    """
    return pa.RecordBatch.from_arrays([_column(batch, table, field, source) for field in target], schema=target)


def _column(batch: pa.RecordBatch, table: Readable, field: pa.Field, source: str) -> pa.Array:
    if field.name == SOURCE:
        return pa.repeat(pa.scalar(source, field.type), batch.num_rows)
    column = batch.column(field.name)
    match table.columns[field.name]:
        case Kind.UUID:
            return _present(column, uuids(_octets(column, _UUID_OCTETS)))
        case Kind.XID8:
            return _present(column, pa.array(_octets(column, _XID8_OCTETS).view(">i8").ravel().astype(np.int64)))
        case _:
            return column.cast(field.type)


def uuids(octets: "np.ndarray[Any, np.dtype[np.uint8]]") -> pa.Array:
    """Uuids as text.

    Args:
        octets: 16 of each, in a row of their own.
    """
    digits = np.frombuffer(octets.tobytes().hex().encode(), _DIGITS)
    text = np.empty(len(digits), _TEXT)
    for name in _TEXT.names or ():
        text[name] = digits[name] if name in (_DIGITS.names or ()) else ord("-")
    ends = np.arange(0, (len(text) + 1) * _TEXT.itemsize, _TEXT.itemsize, dtype=np.int32)
    return pa.StringArray.from_buffers(len(text), pa.py_buffer(ends), pa.py_buffer(text))


def _octets(column: pa.BinaryArray, width: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The values of a column, of *width* octets each, beside each other; zeros where there is none."""
    whole = column.fill_null(bytes(width)) if column.null_count else column
    _, ends, data = whole.buffers()
    start = int(np.frombuffer(ends, np.int32, count=1, offset=whole.offset * 4)[0])
    return np.frombuffer(data, np.uint8, count=len(whole) * width, offset=start).reshape(len(whole), width)


def _present(column: pa.Array, values: pa.Array) -> pa.Array:
    """*values* where *column* has some."""
    return pc.if_else(column.is_valid(), values, None) if column.null_count else values


_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Of one batch: large enough that the calls do not count, and a few of them are all that a task holds."""
_AHEAD: Final = 2
"""Batches read ahead of Spark."""
_FIRST_PAUSE: Final = 0.5
_NO_SNAPSHOT: Final = frozenset({"22023", "42704"})
"""invalid_parameter_value, undefined_object: what SET TRANSACTION SNAPSHOT says of one that nobody holds."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """What the reading thread ends with."""

    error: BaseException


def read(options: Options, schema: StructType, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of *part*.

    Args:
        options: where and how.
        schema: the columns.
        part: planned by :mod:`dtx.pipeline.source.planning`.

    Raises:
        SourceError: they could not be read, or not to their end.
    """
    attempt = 0
    while True:
        given = False
        try:
            for batch in _once(options, schema, part):
                given = True
                yield batch
        except SourceAway as error:
            if given or attempt >= options.waits.retries:
                how = "in the middle of it" if given else f"asked {attempt + 1} times"
                raise SourceAway(f"{error} ({how})") from None
            time.sleep(_FIRST_PAUSE * 2**attempt)
            attempt += 1
        else:
            return


def _once(options: Options, schema: StructType, part: Part) -> Iterator[pa.RecordBatch]:
    where = f"{part.source}: {options.table.name}, {part.shown}"
    batches: queue.Queue[pa.RecordBatch | _Failed | None] = queue.Queue(_AHEAD)
    over = threading.Event()
    threading.Thread(
        target=_fetch, args=(options, schema, part, batches, over), name=f"dtx {part.source}", daemon=True
    ).start()
    try:
        while True:
            try:
                got = batches.get(timeout=options.waits.stall)
            except queue.Empty:
                raise SourceAway(f"{where}: no row for {options.waits.stall} seconds") from None
            if got is None:
                return
            if isinstance(got, _Failed):
                raise _explained(where, part, got.error) from None
            yield got
    finally:
        over.set()  # whoever reads ahead ends with its next batch


def _explained(where: str, part: Part, error: BaseException) -> SourceError:
    state = getattr(error, "sqlstate", None)
    if isinstance(error, SourceError):
        return error
    if part.exported is not None and state in _NO_SNAPSHOT:
        return SourceError(f"{where}: nobody holds snapshot {part.exported} any more: hold it for longer")
    if isinstance(error, adbc_driver_manager.Error | OSError):
        return (SourceAway if passes(state) else SourceError)(f"{where}: {sentence(error)}")
    return SourceError(f"{where}: {type(error).__name__}: {sentence(error)}")


def _fetch(
    options: Options,
    schema: StructType,
    part: Part,
    batches: "queue.Queue[pa.RecordBatch | _Failed | None]",
    over: threading.Event,
) -> None:
    """Read a part into *batches*: in a thread, since nothing wakes somebody who waits in the driver for a dead peer."""
    last: _Failed | None = None
    try:
        for batch in _rows(options, schema, part):
            if not _put(batches, batch, over):
                return
    except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the task, which this thread is not
        last = _Failed(error)
    _put(batches, last, over)


def _put(batches: "queue.Queue[Any]", item: object, over: threading.Event) -> bool:
    """Whether somebody still wants it."""
    while not over.is_set():
        try:
            batches.put(item, timeout=1)
        except queue.Full:
            continue
        return True
    return False


class _Database:
    """One that stays when its connections are closed."""

    def __init__(self, uri: str) -> None:
        self.kept = adbc_driver_postgresql.connect(uri)

    def close(self) -> None:
        """Nothing: the next task of this process connects to it."""


# ADBC asks for all of PostgreSQL's types whenever it meets a database: 30 ms, as long as a short range takes.
_database: Final = lru_cache(maxsize=8)(_Database)


def _connect(uri: str) -> dbapi.Connection:
    """As the driver's own ``connect``, to a database that is met once in a process."""
    database = _database(uri)
    return dbapi.Connection(database, adbc_driver_manager.AdbcConnection(database.kept))


def _rows(options: Options, schema: StructType, part: Part) -> Iterator[pa.RecordBatch]:
    target = arrow_schema(schema)
    names = [name for name in target.names if name != SOURCE]
    uri = conninfo(options.sources[part.source], options.waits)
    with _connect(uri) as connection, connection.cursor() as cursor:
        if part.exported is not None:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{part.exported}'")
        hint = adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value
        cursor.adbc_statement.set_options(**{hint: _BATCH_BYTES})
        cursor.execute(statement(options.table, names, part.conditions))
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield shaped(batch, options.table, target, part.source)

"""Batch reads: divides a table among tasks, and reads the rows of one part as Arrow batches.

The journal is divided by ranges of ``at``, which do not depend on its partitions. A line that moves meanwhile from the
default partition into that of its day is still read once. All ranges show the same snapshot by its numbers, so no
transaction stays open. The other tables change in place, so one task reads each of them.

Rows come by ADBC. A thread reads ahead while Spark works, and every wait has a limit. If the database fails before the
first row, the read starts again after a short pause. If it fails after that, the task fails with an error that names
the part. Spark then repeats the whole task, and drops the rows of the first attempt. PostgreSQL sends uuid and xid8 as
bytes: converting them to text takes PostgreSQL longer than all the work on a batch here.
"""

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import adbc_driver_manager
import adbc_driver_postgresql
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dtx.log import tables
from dtx.pipeline.source.columns import SOURCE, UUID, XID8, Readable, arrow_schema
from dtx.pipeline.source.options import Options
from dtx.pipeline.source.server import AT_ONCE, Server, SourceAway, SourceError, connected, conninfo, failed, sentence
from dtx.pipeline.source.snapshot import shown

_SAMPLED: Final = 300
"""Blocks of a sample: about 10,000 lines, enough for a few dozen even ranges."""
_SAMPLED_FOR_EACH: Final = 30
_MOST_RANGES: Final = 10_000
"""Limit for one database: each range is a task and a statement."""
_SIZE: Final = """
SELECT coalesce(sum(blocks), 0)::float8, coalesce(sum(blocks * of_a_block), 0)::float8
FROM (
    SELECT pg_relation_size(c.oid) / current_setting('block_size')::float8 AS blocks,
        -- the number of rows may be old, and a partition that is not analyzed yet has none
        CASE WHEN c.reltuples > 0 AND c.relpages > 0 THEN c.reltuples / c.relpages ELSE 35 END AS of_a_block
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'dtx.journal'::regclass
) partitions
"""
"""The number of blocks and the approximate number of rows of the journal."""
_UUID_OCTETS: Final = 16
_XID8_OCTETS: Final = 8
_DIGITS: Final = 32
_LETTERS: Final = 36
"""Length of a uuid as text: its digits and four hyphens."""
_GROUPS: Final = (0, 8, 12, 16, 20, _DIGITS)
"""Starts of the groups of digits, and the end of the last one."""
_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Size of a batch: large enough that the cost of calls is small. A task holds only a few batches."""
_AHEAD: Final = 2
"""Batches that are read ahead of Spark."""
_FIRST_PAUSE: Final = 0.5


class TablePart(InputPartition):
    """The rows that one task reads: all *conditions*, in SQL, hold for them; *shown* is the range, for messages."""

    def __init__(self, source: str, conditions: tuple[str, ...], *, shown: str) -> None:
        super().__init__(None)
        self.source = source
        self.conditions = conditions
        self.shown = shown


def parts(source: str, ranges: list[tuple[str, ...]], conditions: tuple[str, ...], *, whole: str) -> list[TablePart]:
    """Make one part for each range, with its and further conditions; *whole* names a range without conditions."""
    return [TablePart(source, (*range_, *conditions), shown=" and ".join(range_) or whole) for range_ in ranges]


def times(points: list[str]) -> list[tuple[str, ...]]:
    """Return conditions of the ranges between *points* in time; each line of the journal is in exactly one range."""
    edges = [None, *points, None]
    return [
        (
            *(() if low is None else (f"at >= '{low}'::timestamptz",)),
            *(() if high is None else (f"at < '{high}'::timestamptz",)),
        )
        for low, high in pairwise(edges)
    ]


def cuts(server: Server, options: Options) -> list[str]:
    """Return points in time, in order and as PostgreSQL writes them, that divide the journal evenly."""
    blocks, rows = server.rows(_SIZE)[0]
    pieces = min(options.partitions or math.ceil(rows / options.rows), _MOST_RANGES)
    if pieces <= 1 or not blocks:
        return []
    sampled = max(_SAMPLED, _SAMPLED_FOR_EACH * pieces)
    return evenly(server, pieces, f"TABLESAMPLE SYSTEM ({min(100.0, 100.0 * sampled / blocks):.6f})")


def evenly(server: Server, pieces: int, lines: str) -> list[str]:
    """Return points in time, in order, that divide the journal into about *pieces* (2 or more) even ranges.

    *lines* is SQL after the name of the table, which selects lines.
    """
    fractions = ",".join(f"{number / pieces:.6f}" for number in range(1, pieces))
    points = f"percentile_disc(ARRAY[{fractions}]::float8[]) WITHIN GROUP (ORDER BY at)"
    found = f"SELECT DISTINCT unnest((SELECT {points} FROM dtx.journal {lines})) AS cut"
    return [text for (text,) in server.rows(f"SELECT cut::text FROM ({found}) AS cuts ORDER BY cuts.cut")]


def where(conditions: Sequence[str]) -> str:
    """Return the SQL clause for all *conditions*."""
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def shaped(batch: pa.RecordBatch, table: Readable, target: pa.Schema, source: str) -> pa.RecordBatch:
    """Return *batch*, rows of :meth:`Readable.sent`, with exactly the columns that Spark expects."""
    return pa.RecordBatch.from_arrays([_column(batch, table, field, source) for field in target], schema=target)


def _column(batch: pa.RecordBatch, table: Readable, field: pa.Field, source: str) -> pa.Array:
    if field.name == SOURCE:
        return pa.repeat(pa.scalar(source, field.type), batch.num_rows)
    column = batch.column(field.name)
    kind = table.columns[field.name]
    if kind == UUID:
        return _present(column, _uuids(_octets(column, _UUID_OCTETS)))
    if kind == XID8:
        return _present(column, pa.array(_octets(column, _XID8_OCTETS).view(">i8").ravel().astype(np.int64)))
    return column.cast(field.type)


def _uuids(octets: "np.ndarray[Any, np.dtype[np.uint8]]") -> pa.Array:
    """Return uuids as text: 16 bytes in hexadecimal, with hyphens (RFC 9562, section 4)."""
    count = len(octets)
    digits = np.frombuffer(octets.tobytes().hex().encode(), np.uint8).reshape(count, _DIGITS)
    text = np.full((count, _LETTERS), ord("-"), np.uint8)
    for hyphens, (start, end) in enumerate(pairwise(_GROUPS)):
        text[:, start + hyphens : end + hyphens] = digits[:, start:end]
    ends = np.arange(0, (count + 1) * _LETTERS, _LETTERS, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(text))


def _octets(column: pa.BinaryArray, width: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the values of a column as rows of *width* bytes; nulls are zeros."""
    whole = column.fill_null(bytes(width)) if column.null_count else column
    _, ends, data = whole.buffers()
    start = int(np.frombuffer(ends, np.int32, count=1, offset=whole.offset * 4)[0])
    return np.frombuffer(data, np.uint8, count=len(whole) * width, offset=start).reshape(len(whole), width)


def _present(column: pa.Array, values: pa.Array) -> pa.Array:
    """Return *values*, with null wherever *column* is null."""
    return pc.if_else(column.is_valid(), values, None) if column.null_count else values


def read(options: Options, schema: StructType, part: TablePart) -> Iterator[pa.RecordBatch]:
    """Read the rows of *part*, to their end or a :class:`SourceError`."""
    for attempt in range(options.waits.retries + 1):
        given = False
        try:
            for batch in _once(options, schema, part):
                given = True
                yield batch
        except SourceAway as error:
            if given or attempt == options.waits.retries:
                how = "after the first rows" if given else f"asked {attempt + 1} times"
                raise SourceAway(f"{error} ({how})") from None
            time.sleep(_FIRST_PAUSE * 2**attempt)
        else:
            return


def _once(options: Options, schema: StructType, part: TablePart) -> Iterator[pa.RecordBatch]:
    where = f"{part.source}: {options.table.name}, {part.shown}"
    batches: queue.Queue[pa.RecordBatch | BaseException | None] = queue.Queue(_AHEAD)
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
            if isinstance(got, adbc_driver_manager.Error | OSError):
                raise failed(where, got) from None
            if isinstance(got, SourceError):
                raise got
            if isinstance(got, BaseException):
                raise SourceError(f"{where}: {type(got).__name__}: {sentence(got)}") from None
            yield got
    finally:
        over.set()  # the reading thread ends with its next batch


def _fetch(
    options: Options,
    schema: StructType,
    part: TablePart,
    batches: "queue.Queue[pa.RecordBatch | BaseException | None]",
    over: threading.Event,
) -> None:
    """Read a part into *batches*, in a thread: a wait in the driver for a dead server cannot be interrupted."""
    last: BaseException | None = None
    try:
        for batch in _rows(options, schema, part):
            if not _put(batches, batch, over):
                return
    except BaseException as error:  # noqa: BLE001 - the task must raise every error of this thread
        last = error
    _put(batches, last, over)


def _put(batches: "queue.Queue[Any]", item: object, over: threading.Event) -> bool:
    """Put *item* into the queue; return false if the task has ended meanwhile."""
    while not over.is_set():
        try:
            batches.put(item, timeout=1)
        except queue.Full:
            continue
        return True
    return False


def _rows(options: Options, schema: StructType, part: TablePart) -> Iterator[pa.RecordBatch]:
    target = arrow_schema(schema)
    uri = conninfo(options.sources[part.source], options.waits, statement=options.waits.statement)
    wanted = options.table.sent(target.names)
    with dbapi.connect(uri) as connection, connection.cursor() as cursor:
        hint = adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value
        cursor.adbc_statement.set_options(**{hint: _BATCH_BYTES})
        cursor.execute(f"SELECT {wanted} FROM dtx.{options.table.name}{where(part.conditions)}")
        for batch in cursor.fetch_record_batch():
            if batch.num_rows:
                yield shaped(batch, options.table, target, part.source)


class BatchReader(DataSourceReader):
    """Plans and reads one table of the databases.

    Spark filters the rows. Its push-down of filters into Python sources is not used: in 4.3 it keeps the filter of the
    last query with the DataFrame, so ``df.filter(a).union(df.filter(b))`` applies *b* twice.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the parts of all databases."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [part for found in pool.map(self._plan, self._options.sources) for part in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one part; see :func:`dtx.pipeline.source.batch_reader.read`."""
        assert isinstance(partition, TablePart)
        yield from read(self._options, self._schema, partition)

    def _plan(self, name: str) -> list[TablePart]:
        with connected(name, self._options.sources[name], self._options.waits) as server:
            server.identity()
            if self._options.table.name != tables.journal.name:
                return parts(name, [()], (), whole="all rows")
            seen = shown(server.snapshot())
            return parts(name, times(cuts(server, self._options)), (seen,), whole="all rows")


def read_table(options: Options, schema: StructType) -> pa.Table:
    """Read a table into the memory of this process, without Spark."""
    reader = BatchReader(options, schema)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, arrow_schema(schema))

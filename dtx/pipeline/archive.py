"""Copies the journals into the lake, exactly once, without Spark: ADBC reads, ``deltalake`` writes.

If this process dies before a commit, the lake has none of its lines, and they are read again. After the commit, the
lake has the lines, and the commit has the place that they reach (:mod:`dtx.pipeline.lake`).
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, WriterProperties, write_deltalake

from dtx.pipeline.delta import gathered, refused, transaction
from dtx.pipeline.files import LakeBusy, LakeError
from dtx.pipeline.lake import APP, BATCH, EVENTS, LOCK, LOCK_SECONDS, MONTH, PLACES, SCHEMA, Lake, last_batch, unknown
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source.datasource import StreamReader
from dtx.pipeline.source.options import parse
from dtx.pipeline.source.server import SourceError

_AT_ONCE: Final = 4
"""Databases read at the same time."""
_GATHERED: Final = 200_000
"""Lines kept in memory before a commit, so that databases with few lines share one."""
_CHUNK: Final = 100_000
"""Lines that are written, or compared with the lake, in one step."""
_LONGEST_WAIT: Final = 300.0
"""Seconds between two tries of a database that keeps failing."""
_MOST_DOUBLINGS: Final = 30
_TICK: Final = 0.2


@dataclass(slots=True)
class Archived:
    """The result for one database.

    Args:
        source: its configured name.
        rows: number of new lines.
        again: number of lines that the lake had already; they were read again because the checkpoint was lost.
        error: why archiving stopped; ``None``: the lake has all lines.
        read_at: microseconds since the epoch: the lake has the journal as of this time; 0: not known.
    """

    source: str
    rows: int = 0
    again: int = 0
    error: str | None = None
    read_at: int = 0


Watcher = Callable[[Sequence[Archived]], None]


@dataclass(slots=True)
class _Journal:
    result: Archived
    reader: StreamReader
    is_cut: bool
    """Whether the option ``maxRowsPerBatch`` limits a batch."""
    place: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    rejoins: bool = False
    ends_at: int | None = None
    """Microseconds since the epoch: later lines are left for the next run."""
    failures: int = 0
    due: float = 0.0


@dataclass(slots=True)
class _New:
    """New lines of a database, read at a time in microseconds, that reach the place *end*; *rest* may be none."""

    journal: _Journal
    end: Mapping[str, Any]
    asked_at: int
    first: list[pa.RecordBatch]
    rest: Iterator[pa.RecordBatch] | None


def archive(
    root: str, sources: Mapping[str, Mapping[str, str]], *, again: bool = False, watch: Watcher | None = None
) -> list[Archived]:
    """Copy new lines of the journals into the lake, which is made where there is none.

    Args:
        root: of the lake.
        sources: options of ``format("dtx")`` for each database, by its configured name.
        again: read the journals from the beginning; lines that the lake has are left out.
        watch: called repeatedly with the results so far.

    Returns:
        The result for each database; one that fails does not stop the others.
    """
    lake = Lake(root)
    with lake.files.alone(LOCK, LOCK_SECONDS):
        for source in sources if again else ():
            lake.note(source, batch=None, place=None, read_at=lake.read_at(source))
        run = _Run(lake, sources, watch)
        for journal in run.journals:
            if journal.is_cut:
                journal.ends_at = time.time_ns() // 1000
                try:
                    journal.reader.prepareForTriggerAvailableNow()
                except SourceError as error:
                    journal.result.error = str(error)
        todo = [journal for journal in run.journals if journal.result.error is None]
        while todo:
            moved = run.round(todo)
            todo = [journal for journal in moved if journal.is_cut and journal.result.error is None]
        return run.results


def follow(
    root: str,
    sources: Mapping[str, Mapping[str, str]],
    *,
    interval: float = 10,
    watch: Watcher | None = None,
    until: Callable[[], bool] = lambda: False,
    maintain_every: float = 3600,
) -> list[Archived]:
    """Do as :func:`archive`, repeatedly, until *until* returns true or Ctrl-C.

    After a failure, a database is tried again after twice the interval, then four times, up to five minutes or the
    interval. Between two rounds, other commands may archive into the lake or remove lines from it. *interval* and
    *maintain_every* are seconds. *until* is called several times a second.
    """
    lake = Lake(root)
    with lake.files.alone(LOCK, LOCK_SECONDS):
        run = _Run(lake, sources, watch)
    maintained = time.monotonic()
    while not until():
        now = time.monotonic()
        if any(now >= journal.due for journal in run.journals):
            with suppress(LakeBusy), lake.files.alone(LOCK):
                run.catch_up()
                due = [journal for journal in run.journals if now >= journal.due]
                run.round(due)
                for journal in due:
                    journal.failures = 0 if journal.result.error is None else journal.failures + 1
                    journal.due = now + pause(interval, journal.failures)
                if now - maintained > maintain_every:
                    with suppress(LakeError):  # what cannot be joined now can be the next time
                        lake.table.maintain()
                    maintained = now
        time.sleep(_TICK)
    return run.results


def pause(interval: float, failures: int) -> float:
    """Return the seconds until the next read of a database, after *failures* in a row."""
    return min(max(_LONGEST_WAIT, interval), interval * 2.0 ** min(failures, _MOST_DOUBLINGS))


def maintain(root: str, watch: Callable[[str], None] = lambda _: None) -> list[Quarantined]:
    """Join small files of the lake, and remove old files; see :meth:`~dtx.pipeline.delta.Table.maintain`."""
    lake = Lake(root)
    with lake.files.alone(LOCK, LOCK_SECONDS):
        return lake.table.maintain(watch)


class _Run:
    def __init__(self, lake: Lake, sources: Mapping[str, Mapping[str, str]], watch: Watcher | None) -> None:
        self._lake = lake
        self._watch = watch
        self._ended = threading.Event()
        self._table: DeltaTable = lake.table.create()
        self._sources = sources
        self.journals = [self._journal(Archived(source)) for source in sources]
        self.results = [journal.result for journal in self.journals]

    def _journal(self, result: Archived) -> _Journal:
        source = result.source
        place, rejoins = self._lake.place(self._table, source)
        options = parse({**self._sources[source], "pollInterval": "0"})
        if rejoins:
            options = replace(options, batch_rows=None)  # in one commit: a part would not record the rest
        journal = _Journal(result, StreamReader(options, EVENTS), options.batch_rows is not None)
        journal.place, journal.rejoins = place, rejoins
        journal.batch = self._table.transaction_version(f"{APP}/{source}")
        result.read_at = self._lake.read_at(source)
        return journal

    def catch_up(self) -> None:
        """Take over the places of databases that another process has archived meanwhile."""
        self._table.update_incremental()
        for index, journal in enumerate(self.journals):
            if self._table.transaction_version(f"{APP}/{journal.result.source}") != journal.batch:
                self.journals[index] = self._journal(journal.result)

    def round(self, journals: list[_Journal]) -> list[_Journal]:
        """Read and commit the new lines of *journals*; return those that had new lines."""
        moved = []
        gathered: list[_New] = []
        waiting = list(journals)
        reading: deque[Future[_New | None]] = deque()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            while waiting or reading:
                while waiting and len(reading) < _AT_ONCE:
                    reading.append(pool.submit(self._read, waiting.pop(0)))
                new = reading.popleft().result()
                if new is None:
                    continue
                moved.append(new.journal)
                if new.rest is not None:
                    self._commit([new])
                    continue
                gathered.append(new)
                if sum(batch.num_rows for each in gathered for batch in each.first) >= _GATHERED:
                    self._commit(gathered)
                    gathered = []
            self._commit(gathered)
        return moved

    def _read(self, journal: _Journal) -> _New | None:
        asked_at = journal.ends_at or time.time_ns() // 1000
        journal.result.error = None
        try:
            reader = journal.reader
            end = reader.latestOffset(dict(journal.place), reader.getDefaultReadLimit())
            if end == journal.place:
                journal.result.read_at = asked_at
                self._note(journal)
                return None
            lines = chain.from_iterable(reader.read(part) for part in reader.partitions(dict(journal.place), dict(end)))
            first, rows = [], 0
            for batch in lines:
                first.append(batch)
                rows += batch.num_rows
                if rows >= _GATHERED:
                    return _New(journal, end, asked_at, first, lines)
            return _New(journal, end, asked_at, first, None)
        except SourceError as error:
            journal.result.error = str(error)
            return None

    def _commit(self, news: list[_New]) -> None:
        """Write new lines of some databases, and the places that they reach."""
        if not news:
            return
        self._table.update_incremental()
        number = last_batch(self._table) + 1
        sources = {new.journal.result.source: new for new in news}
        for source, new in sources.items():
            if self._table.transaction_version(f"{APP}/{source}") != new.journal.batch:
                raise LakeError(f"another process has archived {source} into {self._lake.files.uri}: run again")
        before = {source: (new.journal.result.rows, new.journal.result.again) for source, new in sources.items()}
        known: Any = None
        if any(new.journal.rejoins for new in news):
            # with Arrow's file system: deltalake's own cannot be used while it writes
            known = self._lake.table.dataset(self._table)
        lines = pa.RecordBatchReader.from_batches(
            SCHEMA, chain.from_iterable(self._lines(new, number, known) for new in news)
        )
        read_to = {PLACES: json.dumps({source: new.end for source, new in sources.items()})}
        versions = dict.fromkeys([APP, *(f"{APP}/{source}" for source in sources)], number)
        try:
            # in a thread: Ctrl-C does not interrupt a call of deltalake, but it can end the lines
            with refused(self._lake.files.uri), ThreadPoolExecutor(1) as pool:
                written = pool.submit(
                    write_deltalake,
                    self._table,
                    lines,
                    mode="append",
                    schema_mode="merge",
                    writer_properties=WriterProperties(compression="ZSTD"),
                    commit_properties=transaction(versions, read_to),
                )
                try:
                    written.result()
                except KeyboardInterrupt:
                    self._ended.set()
                    raise
        except BaseException as error:
            for source, new in sources.items():
                new.journal.result.rows, new.journal.result.again = before[source]
            failed = [new.journal for new in news if new.journal.result.error is not None]
            if not failed or not isinstance(error, Exception):
                raise
            return  # the database failed in the middle of its lines; it was alone in this commit
        for new in news:
            journal = new.journal
            journal.place, journal.batch, journal.rejoins = new.end, number, False
            if not journal.is_cut:
                journal.result.read_at = new.asked_at
            self._note(journal)

    def _lines(self, new: _New, number: int, known: Any) -> Iterator[pa.RecordBatch]:
        journal = new.journal
        try:
            for batches in gathered(chain(new.first, new.rest or ()), _CHUNK, lambda batch: batch.num_rows):
                chunk = pa.Table.from_batches(batches)
                fresh = unknown(chunk, known) if journal.rejoins else chunk
                journal.result.rows += fresh.num_rows
                journal.result.again += chunk.num_rows - fresh.num_rows
                yield from _stored(fresh, number).to_batches()
                if self._ended.is_set():
                    raise InterruptedError
                if self._watch is not None:
                    self._watch(self.results)
        except SourceError as error:
            journal.result.error = str(error)
            raise

    def _note(self, journal: _Journal) -> None:
        result = journal.result
        self._lake.note(result.source, batch=journal.batch, place=journal.place, read_at=result.read_at)


def _stored(lines: pa.Table, number: int) -> pa.Table:
    """Return *lines* with the columns of the table, ordered by time."""
    lines = lines.sort_by("at")
    at = lines["at"]
    months = pc.strftime(at, format="%Y-%m") if lines.num_rows else pa.chunked_array([], pa.string())
    batch = pa.repeat(pa.scalar(number, pa.int64()), lines.num_rows)
    columns = {**{name: lines[name] for name in lines.column_names}, BATCH: batch, MONTH: months}
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)

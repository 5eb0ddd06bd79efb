"""The Spark data source ``format("dtx")``, and the stream of the journal.

A stream comes in micro-batches or with ``Trigger.AvailableNow``. A micro-batch has the lines that one snapshot shows
and an earlier one does not (:mod:`.snapshot`). So no line is lost, even if its transaction commits late, and a batch
that Spark repeats after a crash has the same lines.

By default the journal has no index by transaction, and reading years of journal every second costs too much. So a
stream reads recent days in each round (``at >= since``), and older days less often: a wrong clock, or a transaction
that was open for days, writes there. *snapshot* shows the lines of recent days that were read, *swept* those of older
days. Both are equal whenever *since* moves.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from dtx.log import tables
from dtx.pipeline.source.batch_reader import BatchReader, TablePart, cuts, evenly, parts, read, times, where
from dtx.pipeline.source.columns import chosen
from dtx.pipeline.source.options import Options, parse
from dtx.pipeline.source.server import AT_ONCE, Server, SourceAway, SourceError, SourceIdentity, connected
from dtx.pipeline.source.snapshot import NOTHING, SourceSnapshot, between

_LONGEST_WAIT: Final = 1.0
"""Limit, in seconds, of one wait for new lines: a stream cannot stop before the wait ends."""
_MOST_RANGES: Final = 1_000
_INDEXED: Final = """
SELECT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = 'dtx.journal'::regclass AND i.indisvalid AND a.attname = 'xid8')
"""
_YESTERDAY: Final = "SELECT (date_trunc('day', now()) - interval '1 day')::text"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place that one database has been read to.

    Args:
        identity: of the database that the snapshots belong to.
        snapshot: the lines at or after *since* that were read.
        swept: the lines before *since* that were read.
        since: a point in time, as PostgreSQL writes it; ``None``: all lines are recent.
    """

    identity: SourceIdentity
    snapshot: SourceSnapshot = NOTHING
    swept: SourceSnapshot = NOTHING
    since: str | None = None

    @classmethod
    def read(cls, name: str, given: Any) -> Self:
        """Read an offset of Spark, the result of :meth:`written`."""
        try:
            since = given["since"]
            return cls(
                identity=SourceIdentity(system=str(given["system"]), timeline=int(given["timeline"])),
                snapshot=SourceSnapshot.parse(given["snapshot"]),
                swept=SourceSnapshot.parse(given["swept"]),
                since=None if since is None else _time(str(since)),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise SourceError(f"{name}: the checkpoint holds no place that this dtx understands") from None

    def written(self) -> dict[str, Any]:
        """Return this place as an offset of Spark."""
        return {
            "system": self.identity.system,
            "timeline": self.identity.timeline,
            "snapshot": str(self.snapshot),
            "swept": str(self.swept),
            "since": self.since,
        }

    def follow(self, name: str, now: SourceIdentity, latest: SourceSnapshot | None, *, any_timeline: bool) -> Self:
        """Check that the snapshots of this place still apply, and return it with the identity *now*.

        A standby may lag behind, so it has no *latest* snapshot.
        """
        if now.system != self.identity.system:
            raise SourceError(
                f"{name}: this is not the database that was read before (it is a restored dump or another server): "
                "begin a new checkpoint (dtx pipeline archive --again), or give the source a new name"
            )
        if now.timeline != self.identity.timeline and not any_timeline:
            raise SourceError(
                f"{name}: the database has changed its timeline from {self.identity.timeline} to {now.timeline} (a "
                "fail-over, or a recovery to a point in time): if no commit was lost, set option timeline=any, "
                "else begin a new checkpoint (dtx pipeline archive --again)"
            )
        if latest is not None and latest.xmax < self.snapshot.xmax:
            raise SourceError(
                f"{name}: the database is in an older state than when it was last read: begin a new checkpoint (dtx "
                "pipeline archive --again)"
            )
        return replace(self, identity=now)

    def advanced(self, end: SourceSnapshot) -> Self:
        """Return the place after recent days were read up to *end*."""
        return replace(self, snapshot=end, swept=end if self.since is None else self.swept)

    def complete(self, end: SourceSnapshot, since: str) -> Self:
        """Return the place after all days were read up to *end*; recent days then begin at *since*."""
        return replace(self, snapshot=end, swept=end, since=since)


def recent(start: Place, end: Place) -> tuple[str, ...] | None:
    """Return conditions of the recent lines that *end* shows and *start* does not; ``None`` if there are none."""
    if start.snapshot == end.snapshot:
        return None
    of_days = () if start.since is None else (f"at >= '{start.since}'::timestamptz",)
    return (*of_days, between(start.snapshot, end.snapshot))


def older(start: Place, end: Place) -> tuple[str, ...] | None:
    """Return conditions of the older lines that *end* shows and *start* does not; ``None`` if there are none."""
    if start.since is None or start.swept == end.swept:
        return None
    return (f"at < '{start.since}'::timestamptz", between(start.swept, end.swept))


def places(offset: Mapping[str, Any]) -> dict[str, Place]:
    """Return the places of an offset of Spark, by source."""
    return {name: Place.read(name, given) for name, given in offset.items()}


def _time(text: str) -> str:
    """Return *text*, which becomes part of SQL, after a check of its characters."""
    if not text or any(letter not in "0123456789-+:. " for letter in text):
        raise ValueError(text)
    return text


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new lines of the journals of some databases."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: dict[str, SourceSnapshot] | None = None
        self._swept_at: dict[str, float] = {}
        self._next_look = 0.0

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the offset before the first line, or with ``startingOffsets=latest`` after the last one."""
        if not self._options.latest:
            return {}
        found = self._each(lambda _, server: Place(identity=server.identity(), snapshot=server.snapshot()))
        return {name: place.advanced(place.snapshot).written() for name, place in found.items()}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Leave out lines that come after this call."""
        self._target = self._each(lambda _, server: (server.identity(), server.snapshot())[1])

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of option ``maxRowsPerBatch``."""
        most = self._options.batch_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the offset after the next micro-batch; *start* if there are no new lines."""
        left = self._next_look - time.monotonic()
        if left > 0 and self._target is None:
            time.sleep(min(left, _LONGEST_WAIT))
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        begun = places({name: start[name] for name in self._options.sources if name in start})
        found = self._each(lambda name, server: self._latest(server, begun.get(name), most))
        moved = {name: place.written() for name, place in found.items() if place is not None}
        if not moved:
            self._next_look = time.monotonic() + self._options.poll
        return {**start, **moved}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the parts of one micro-batch."""
        gone = sorted(name for name in end if name not in self._options.sources and start.get(name) != end[name])
        if gone:
            raise SourceError(f"{gone[0]}: the last micro-batch is repeated and needs this source: configure it again")
        before, after = places(start), places(end)
        changed = {name for name in after if name in self._options.sources and before.get(name) != after[name]}
        found = self._each(lambda name, server: self._parts(server, before.get(name), after[name]), changed, wait=False)
        return [part for planned in found.values() for part in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one part; see :func:`dtx.pipeline.source.batch_reader.read`."""
        assert isinstance(partition, TablePart)
        yield from read(self._options, self._schema, partition)

    def _each(
        self, ask: Callable[[str, Server], _T], names: set[str] | None = None, *, wait: bool | None = None
    ) -> dict[str, _T]:
        """Return the answer of each database; with *wait*, databases that are away are left out, else they raise."""
        wait = self._options.wait_for_away if wait is None else wait

        def answer(name: str) -> _T:
            with connected(name, self._options.sources[name], self._options.waits) as server:
                return ask(name, server)

        asked = sorted(self._options.sources if names is None else names)
        found: dict[str, _T] = {}
        with ThreadPoolExecutor(min(AT_ONCE, len(asked)) or 1) as pool:
            for name, future in [(name, pool.submit(answer, name)) for name in asked]:
                try:
                    found[name] = future.result()
                except SourceAway:
                    if not wait:
                        raise
        return found

    def _latest(self, server: Server, begun: Place | None, most: int | None) -> Place | None:
        """Return the place after the next micro-batch; ``None`` if that would be empty."""
        identity = server.identity()
        now = server.snapshot()
        start = (
            Place(identity=identity)
            if begun is None
            else begun.follow(
                server.name, identity, None if server.standby else now, any_timeline=self._options.any_timeline
            )
        )
        if self._target is not None:
            now = self._target.get(server.name, start.snapshot)
        if not now.contains(start.snapshot):
            return None  # a standby that lags behind the lines that were read, or the end of AvailableNow is reached
        sweep = start.since is None or self._sweep_due(server)
        if now == start.snapshot and (not sweep or now == start.swept):
            return None
        yesterday = str(server.rows(_YESTERDAY)[0][0])
        end = start.complete(now, yesterday) if sweep else start.advanced(now)
        if start.snapshot == NOTHING and most is None:
            return end
        count = _count(server, recent(start, end))
        if most is not None and count > most:
            return start.advanced(_cut(server, start, end, most))
        if sweep:
            count += _count(server, older(start, end))
            self._swept_at[server.name] = time.monotonic()
        return end if count else None

    def _sweep_due(self, server: Server) -> bool:
        last = self._swept_at.get(server.name)
        if last is None or time.monotonic() - last >= self._options.sweep:
            return True
        return bool(server.rows(_INDEXED)[0][0])

    def _parts(self, server: Server, start: Place | None, end: Place) -> list[TablePart]:
        start = start or Place(identity=end.identity)
        whole = start.snapshot == NOTHING
        found: list[TablePart] = []
        for conditions in (recent(start, end), older(start, end)):
            if conditions is None:
                continue
            ranges = times(cuts(server, self._options)) if whole else _ranges(server, conditions, self._options)
            found += parts(server.name, ranges, conditions, whole="all new rows")
        return found


def _cut(server: Server, start: Place, end: Place, most: int) -> SourceSnapshot:
    """Return the snapshot at the end of a micro-batch of about *most* rows, without dividing a transaction.

    The places are those before the micro-batch and after all new lines, which are more than *most*.
    """
    new = recent(start, end) or ()
    xids = "SELECT xid8::text::bigint FROM dtx.journal"
    first = server.rows(f"{xids}{where(new)} ORDER BY xid8 LIMIT 1")[0][0]
    beyond = server.rows(f"{xids}{where(new)} ORDER BY xid8 OFFSET {most} LIMIT 1")[0][0]
    if beyond == first:
        others = where((*new, f"xid8 > '{first}'::xid8"))
        more = server.rows(f"{xids}{others} ORDER BY xid8 LIMIT 1")
        if not more:
            return end.snapshot
        beyond = more[0][0]
    return end.snapshot.cut(start.snapshot, beyond)


def _count(server: Server, conditions: tuple[str, ...] | None) -> int:
    if conditions is None:
        return 0
    return int(server.rows(f"SELECT count(*) FROM dtx.journal{where(conditions)}")[0][0])


def _ranges(server: Server, conditions: tuple[str, ...], options: Options) -> list[tuple[str, ...]]:
    """Divide the times of new lines evenly; only the partitions of the journal in this range are read."""
    new = where(conditions)
    count, low, high = server.rows(f"SELECT count(*), min(at)::text, max(at)::text FROM dtx.journal{new}")[0]
    if not count:
        return []
    pieces = min(options.partitions or math.ceil(count / options.rows), _MOST_RANGES)
    ends = (f"at >= '{low}'::timestamptz", f"at <= '{high}'::timestamptz")
    if pieces <= 1:
        return [ends]
    return [(*ends, *range_) for range_ in times(evenly(server, pieces, new))]


class DtxDataSource(DataSource):
    """Tables of dtx in PostgreSQL.

    Options (names in any case):

    ====================  =============================================================================================
    ``url``, ``name``     one database, and its name (default ``dtx``)
    ``sources``           several databases: a JSON object of name and URL
    ``table``             ``journal`` (default), ``branch``, ``work``, ``heuristic_outcome``; or as ``load(table)``
    ``partitions``        tasks for the journal of each database; default: by ``rowsPerPartition`` (1,000,000)
    ``connectTimeout``    limit for connecting, in seconds (10)
    ``statementTimeout``  limit for the statement of a task, in seconds (1800; 0: no limit)
    ``stallTimeout``      limit of time without a row, in seconds; the database then counts as away (120)
    ``retries``           retries of a task before its first row (3)
    ====================  =============================================================================================

    Options for streams, of which only the journal can be one:

    ====================  =============================================================================================
    ``maxRowsPerBatch``   approximate limit of rows of one micro-batch and database (default: no limit)
    ``unavailable``       ``fail`` (default), or ``wait``: read the others, and continue later where this database was
    ``pollInterval``      seconds between two reads if nothing is new (1)
    ``sweepInterval``     seconds between two reads of past days, where wrong clocks write (3600)
    ``startingOffsets``   ``earliest`` (default) or ``latest``
    ``timeline``          ``same`` (default), or ``any``: continue after a fail-over that may have lost commits
    ====================  =============================================================================================

    The schema selects the columns: for ``.schema("rm string, gtrid binary")`` the database sends only these two.
    """

    @classmethod
    def name(cls) -> str:
        """``dtx``."""
        return "dtx"

    def schema(self) -> StructType:
        """Return all columns of the table, and the source."""
        return parse(self.options).table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for ``spark.read``."""
        options = parse(self.options)
        chosen(options.table, schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader for ``spark.readStream``."""
        options = parse(self.options)
        if options.table.name != tables.journal.name:
            raise SourceError(f"only the journal can be streamed: rows of {options.table.name} change in place")
        chosen(options.table, schema)
        return StreamReader(options, schema)

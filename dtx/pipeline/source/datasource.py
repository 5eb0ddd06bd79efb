"""What Spark asks for when somebody writes ``format("dtx")``; and the journal as it grows.

A stream comes in micro-batches or with ``Trigger.AvailableNow``. Lines of a micro-batch are those that one snapshot
shows and an earlier one does not (:mod:`.snapshot`): none is lost, however late its transaction commits, and a batch
that Spark repeats after a crash has the very same lines.

A database has no index by transaction unless somebody makes one, and a look at years of journal every second is too
much. So a stream looks at recent days all the time (``at >= since``), and at the days before now and then: a clock that
is wrong, or a transaction that was open for days, writes there. What has come of recent days is what *snapshot* shows,
what has come of older ones is what *swept* shows; both are the same whenever *since* moves.
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
"""Seconds of one wait for something new: a stream that is stopped waits for the end of it."""
_MOST_RANGES: Final = 1_000
_INDEXED: Final = """
SELECT EXISTS (SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
WHERE i.indrelid = 'dtx.journal'::regclass AND i.indisvalid AND a.attname = 'xid8')
"""
_YESTERDAY: Final = "SELECT (date_trunc('day', now()) - interval '1 day')::text"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far one database has been read.

    Args:
        identity: of the history that the numbers belong to.
        snapshot: what has been read of lines at or after *since*.
        swept: what has been read of lines before it.
        since: a point in time, as PostgreSQL writes it; ``None``: all lines are recent.
    """

    identity: SourceIdentity
    snapshot: SourceSnapshot = NOTHING
    swept: SourceSnapshot = NOTHING
    since: str | None = None

    @classmethod
    def read(cls, name: str, given: Any) -> Self:
        """From an offset of Spark.

        Raises:
            SourceError: somebody else wrote it.
        """
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
        """As an offset of Spark."""
        return {
            "system": self.identity.system,
            "timeline": self.identity.timeline,
            "snapshot": str(self.snapshot),
            "swept": str(self.swept),
            "since": self.since,
        }

    def follow(self, name: str, now: SourceIdentity, latest: SourceSnapshot | None, *, any_timeline: bool) -> Self:
        """The same place in the database as it is *now*.

        Args:
            name: of the source.
            now: which database that is.
            latest: what has ended there; ``None`` where that may lag behind (a standby).
            any_timeline: whether a fail-over is fine.

        Raises:
            SourceError: it is not the same history any more: what the numbers say would be wrong.
        """
        if now.system != self.identity.system:
            raise SourceError(
                f"{name}: this is not the database that the stream has read until now (a restored dump, or another "
                "server): begin a new checkpoint (dtx pipeline archive --again), or give the source a new name"
            )
        if now.timeline != self.identity.timeline and not any_timeline:
            raise SourceError(
                f"{name}: the database has changed its timeline from {self.identity.timeline} to {now.timeline} (a "
                "fail-over, or a recovery to a point in time): where no commit was lost, option timeline=any goes on; "
                "else begin a new checkpoint (dtx pipeline archive --again)"
            )
        if latest is not None and latest.xmax < self.snapshot.xmax:
            raise SourceError(
                f"{name}: the database is older than what the stream has read of it: begin a new checkpoint (dtx "
                "pipeline archive --again)"
            )
        return replace(self, identity=now)

    def advanced(self, end: SourceSnapshot) -> Self:
        """When recent days have been read as far as *end*."""
        return replace(self, snapshot=end, swept=end if self.since is None else self.swept)

    def complete(self, end: SourceSnapshot, since: str) -> Self:
        """When everything has been read as far as *end*; from now on days from *since* on are the recent ones."""
        return replace(self, snapshot=end, swept=end, since=since)


def recent(start: Place, end: Place) -> tuple[str, ...] | None:
    """Conditions of the recent lines that *end* has and *start* has not; ``None`` where there can be none."""
    if start.snapshot == end.snapshot:
        return None
    of_days = () if start.since is None else (f"at >= '{start.since}'::timestamptz",)
    return (*of_days, between(start.snapshot, end.snapshot))


def older(start: Place, end: Place) -> tuple[str, ...] | None:
    """Conditions of the lines of days before, which *end* has and *start* has not."""
    if start.since is None or start.swept == end.swept:
        return None
    return (f"at < '{start.since}'::timestamptz", between(start.swept, end.swept))


def places(offset: Mapping[str, Any]) -> dict[str, Place]:
    """All places of an offset of Spark."""
    return {name: Place.read(name, given) for name, given in offset.items()}


def _time(text: str) -> str:
    """*text*, which becomes part of SQL."""
    if not text or any(letter not in "0123456789-+:. " for letter in text):
        raise ValueError(text)
    return text


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows the journals of the databases.

    Args:
        options: which databases, and how.
        schema: the columns.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._target: dict[str, SourceSnapshot] | None = None
        self._swept_at: dict[str, float] = {}
        self._next_look = 0.0

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Before the first line, or after the last one."""
        if not self._options.latest:
            return {}
        found = self._each(lambda _, server: Place(identity=server.identity(), snapshot=server.snapshot()))
        return {name: place.advanced(place.snapshot).written() for name, place in found.items()}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """From now on nothing counts that comes later."""
        self._target = self._each(lambda _, server: (server.identity(), server.snapshot())[1])

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """As option ``maxRowsPerBatch`` says."""
        most = self._options.batch_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """How far the next micro-batch goes: *start* itself where nothing is new.

        Raises:
            SourceError: a database is away, or is not the one that was read until now.
        """
        self._wait()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        begun = places({name: start[name] for name in self._options.sources if name in start})
        found = self._each(lambda name, server: self._latest(server, begun.get(name), most))
        moved = {name: place.written() for name, place in found.items() if place is not None}
        if not moved:
            self._next_look = time.monotonic() + self._options.poll
        return {**start, **moved}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The ranges of one micro-batch.

        Raises:
            SourceError: a database is away.
        """
        gone = sorted(name for name in end if name not in self._options.sources and start.get(name) != end[name])
        if gone:
            raise SourceError(f"{gone[0]}: the last micro-batch is repeated and needs this source: name it again")
        before, after = places(start), places(end)
        changed = {name for name in after if name in self._options.sources and before.get(name) != after[name]}
        found = self._each(lambda name, server: self._parts(server, before.get(name), after[name]), changed, wait=False)
        return [part for planned in found.values() for part in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range; see :func:`dtx.pipeline.source.batch_reader.read`."""
        assert isinstance(partition, TablePart)
        yield from read(self._options, self._schema, partition)

    def _wait(self) -> None:
        left = self._next_look - time.monotonic()
        if left > 0 and self._target is None:
            time.sleep(min(left, _LONGEST_WAIT))

    def _each(
        self, ask: Callable[[str, Server], _T], names: set[str] | None = None, *, wait: bool | None = None
    ) -> dict[str, _T]:
        """What each database answers; those that are away are left out, or nobody goes on, as the options say."""
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
        """The place after the next micro-batch; ``None`` where it would be empty."""
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
            return None  # a standby that is behind what was read elsewhere, and catches up; or the run's end is reached
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
            found += parts(server.name, ranges, conditions, whole="all that is new")
        return found


def _cut(server: Server, start: Place, end: Place, most: int) -> SourceSnapshot:
    """Where a micro-batch ends that must not have more than *most* rows: a transaction is never divided.

    Args:
        server: the database.
        start: where the micro-batch begins.
        end: where it would end if it had all that is new, which is more than *most* rows.
        most: how many rows are wanted, about: one transaction that has more comes alone.
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
    """The times of what is new, divided evenly: the only partitions of the journal that are looked at."""
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
    ``url``, ``name``     one database, and what it is called (default ``dtx``)
    ``sources``           several: a JSON object of name and URL
    ``table``             ``journal`` (default), ``branch``, ``work``, ``heuristic_outcome``; or as ``load(table)``
    ``partitions``        tasks for the journal of each database; default: by ``rowsPerPartition`` (1,000,000)
    ``connectTimeout``    seconds until a connection stands (10)
    ``statementTimeout``  seconds for one task's statement (1800; 0: for ever)
    ``stallTimeout``      seconds without a row until a database counts as away (120)
    ``retries``           how often a task asks again before its first row (3)
    ====================  =============================================================================================

    Streams, of the journal alone:

    ====================  =============================================================================================
    ``maxRowsPerBatch``   rows of one micro-batch and database, about (default: all there is)
    ``unavailable``       ``fail`` (default), or ``wait``: a database that is away keeps its place, the others go on
    ``pollInterval``      seconds between two looks at a database that had nothing new (1)
    ``sweepInterval``     seconds between two looks at days that are over, where clocks that are wrong write (3600)
    ``startingOffsets``   ``earliest`` (default) or ``latest``
    ``timeline``          ``same`` (default), or ``any``: go on after a fail-over that may have lost commits
    ====================  =============================================================================================

    Columns are chosen by schema: ``.schema("rm string, gtrid binary")`` reads these two, and no other is sent.
    """

    @classmethod
    def name(cls) -> str:
        """``dtx``."""
        return "dtx"

    def schema(self) -> StructType:
        """All columns of the table, and the source."""
        return self._parsed().table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        options = self._parsed()
        chosen(options.table, schema)
        return BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For ``spark.readStream``: the journal.

        Raises:
            SourceError: another table, whose rows change in place, so nothing says what is new.
        """
        options = self._parsed()
        if options.table.name != tables.journal.name:
            raise SourceError(f"only the journal can be streamed: rows of {options.table.name} change in place")
        chosen(options.table, schema)
        return StreamReader(options, schema)

    def _parsed(self) -> Options:
        return parse(self.options)

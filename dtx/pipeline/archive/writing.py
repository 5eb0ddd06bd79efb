"""From the journals into the lake, exactly once: a stream for each database, and batches that replace themselves.

What dies where:

- before a batch is planned: nothing has happened;
- between its plan and the end of its write: the plan is in the checkpoint, the batch is read and written again, and
  replaces what was written of it;
- between its write and the checkpoint's commit: the same;
- the checkpoint is lost: a new epoch reads everything again and leaves out what is in the lake.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark.sql import functions as sf

from dtx.pipeline.archive.layout import (
    BATCH,
    CHECKPOINTS,
    EVENTS,
    ORIGIN,
    PARTITIONS,
    STORED,
    Batch,
    path_word,
    stream_name,
)
from dtx.pipeline.archive.reading import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_POLL_SECONDS: Final = 0.5
"""Between two looks at how far the streams are."""
_NO_WORKER: Final = "Python worker failed to connect back"
"""Spark gives a Python process ten seconds to start, which on a busy machine is too little. Nothing was done then."""
_STARTS: Final = 10


@dataclass(slots=True)
class Archived:
    """What became of one database.

    Args:
        source: its configured name.
        batches: rows of each batch that was written, by its number.
        error: why it stopped; ``None``: everything there was is in the lake.
    """

    source: str
    batches: dict[int, int] = field(default_factory=dict)
    error: str | None = None

    @property
    def rows(self) -> int:
        """Rows that were written."""
        return sum(self.batches.values())


Watcher = Callable[[Sequence[Archived]], None]


def archive(
    spark: "SparkSession",
    root: str,
    sources: Mapping[str, Mapping[str, str]],
    *,
    at_once: int = 4,
    watch: Watcher | None = None,
) -> list[Archived]:
    """Bring what the journals have new into the lake, then end.

    Args:
        spark: the session.
        root: of the lake; it is made where there is none.
        sources: options of ``format("dtx")`` for each database, by its configured name.
        at_once: databases that are read at the same time.
        watch: called now and then with what has been done so far.

    Returns:
        What became of each database; one that fails does not stop the others.

    Raises:
        LakeError: the lake cannot be used, or another process writes it.
    """
    lake = Lake(root)
    done: list[Archived] = []
    waiting = list(sources.items())
    running: dict[str, tuple[StreamingQuery, Archived]] = {}
    starts = dict.fromkeys(sources, 1)
    with lake.files.alone(f"{CHECKPOINTS}/lock"):
        lake.create()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    source, options = waiting.pop(0)
                    running[source] = (_start(spark, lake, source, options, None), Archived(source))
                    done.append(running[source][1])
                time.sleep(_POLL_SECONDS)
                for source, (query, result) in list(running.items()):
                    if _look(query, result):
                        del running[source]
                        if _NO_WORKER in (result.error or "") and starts[source] < _STARTS:
                            starts[source] += 1
                            result.error = None
                            again = _start(spark, lake, source, sources[source], None)
                            running[source] = (again, result)
                if watch is not None:
                    watch(done)
        finally:
            _stop(query for query, _ in running.values())
    return done


def follow(
    spark: "SparkSession",
    root: str,
    sources: Mapping[str, Mapping[str, str]],
    *,
    interval: float = 10,
    watch: Watcher | None = None,
    until: Callable[[], bool] = lambda: False,
) -> list[Archived]:
    """As :func:`archive`, but go on until *until* says so, or Ctrl-C.

    A database that fails is tried again after the interval, and so on, each time after twice as long, up to minutes.

    Args:
        spark: the session.
        root: of the lake.
        sources: see :func:`archive`.
        watch: see :func:`archive`.
        interval: seconds between two looks at each database.
        until: asked now and then.
    """
    lake = Lake(root)
    results = {source: Archived(source) for source in sources}
    queries: dict[str, StreamingQuery] = {}
    again = dict.fromkeys(sources, 0.0)
    failures = dict.fromkeys(sources, 0)
    trigger = f"{max(1, round(interval * 1000))} milliseconds"
    with lake.files.alone(f"{CHECKPOINTS}/lock"):
        lake.create()
        try:
            while not until():
                for source, options in sources.items():
                    if source not in queries and time.monotonic() >= again[source]:
                        queries[source] = _start(spark, lake, source, options, trigger)
                for source, query in list(queries.items()):
                    written = len(results[source].batches)
                    ended = _look(query, results[source])
                    if len(results[source].batches) > written:
                        failures[source], results[source].error = 0, None
                    if ended:
                        del queries[source]
                        failures[source] += 1
                        again[source] = time.monotonic() + min(_LONGEST_WAIT, interval * 2 ** failures[source])
                if watch is not None:
                    watch(list(results.values()))
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(queries.values())
    return list(results.values())


_LONGEST_WAIT: Final = 300.0
"""Seconds between two tries of a database that keeps failing."""


def write_batch(frame: "DataFrame", number: int, *, root: str, stream: str, source: str, rejoin: bool) -> None:
    """Write one batch into the lake, in the place of what is there of it.

    Args:
        frame: its rows, columns of the journal and ``source``.
        number: of the batch.
        root: URI of the lake.
        stream: see :func:`~dtx.pipeline.archive.layout.stream_name`.
        source: the configured name of the database.
        rejoin: whether the lake may have some of the rows already, from an earlier epoch.
    """
    name = str(Batch(stream, number))
    events = frame.select(
        *[column for column in EVENTS.names if column != "day"],
        sf.to_date("at").alias("day"),
        sf.lit(name).alias(ORIGIN.name),
        sf.lit(name).alias(BATCH.name),
    )
    if rejoin:
        stored = frame.sparkSession.read.schema(STORED).option("basePath", root).parquet(f"{root}/rm=*")
        there = stored.where((sf.col("source") == source) & (sf.col(ORIGIN.name) != name))
        events = events.join(there.select("rm", "day", "source", "id"), ["rm", "day", "source", "id"], "left_anti")
        events = events.select(STORED.names)
    (
        events.hint("rebalance", sf.col("rm"), sf.col("day"))  # few files for each day, and no task with all of them
        .sortWithinPartitions("rm", "day", "at")
        .write.mode("overwrite")
        .option("partitionOverwriteMode", "dynamic")
        .partitionBy(*PARTITIONS)
        .parquet(root)
    )


def _start(
    spark: "SparkSession", lake: Lake, source: str, options: Mapping[str, str], trigger: str | None
) -> "StreamingQuery":
    epoch, rejoin = _epoch(spark, lake, source)
    write = functools.partial(
        write_batch, root=lake.files.uri, stream=stream_name(source, epoch), source=source, rejoin=rejoin
    )
    frame = spark.readStream.format("dtx").options(**options).load()
    writer = frame.writeStream.foreachBatch(write).queryName(f"archive {source} {uuid4().hex[:6]}")
    where = lake.files.path(f"{CHECKPOINTS}/{path_word(source)}/{epoch}")
    writer = writer.option("checkpointLocation", where)
    writer = writer.trigger(availableNow=True) if trigger is None else writer.trigger(processingTime=trigger)
    return writer.start()


def _epoch(spark: "SparkSession", lake: Lake, source: str) -> tuple[str, bool]:
    """The epoch to write in, and whether its batches have to leave out what earlier ones have brought."""
    word = path_word(source)
    if epochs := lake.epochs(word):
        return epochs[-1], bool(lake.note(word, epochs[-1])["before"])
    epoch = f"{int(time.time()):010x}{uuid4().hex[:6]}"
    there = lake.stored(spark).where(sf.col("source") == source)
    stream, number = sf.regexp_extract(ORIGIN.name, r"^(.*)\.\d+$", 1), sf.regexp_extract(ORIGIN.name, r"\.(\d+)$", 1)
    last = there.groupBy(stream.alias("stream")).agg(sf.max(number.cast("long")).alias("last")).collect()
    lake.files.write(f"{CHECKPOINTS}/{word}/{epoch}.json", {"before": {row["stream"]: row["last"] for row in last}})
    return epoch, bool(last)


def _look(query: "StreamingQuery", result: Archived) -> bool:
    """Note how far *query* is; whether it has ended."""
    ended = not query.isActive
    for progress in query.recentProgress:
        number, rows = int(progress["batchId"]), int(progress["numInputRows"])
        if rows:
            result.batches[number] = rows
    if ended and (error := query.exception()) is not None:
        result.error = explain(error)
    return ended


def _stop(queries: "Iterable[StreamingQuery]") -> None:
    for query in queries:
        query.stop()


def explain(error: BaseException) -> str:
    """The sentence in Spark's words about *error*: what was raised in a Python worker, without the stack around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        kind, colon, sentence = line.partition(": ")
        if colon and kind.startswith("dtx.") and sentence:
            return sentence
    return lines[0] if lines else type(error).__name__

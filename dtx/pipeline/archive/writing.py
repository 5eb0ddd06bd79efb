"""From the journals into the lake, exactly once: a stream for each database, and batches that replace themselves.

What dies where:

- before a batch is planned: nothing has happened;
- between its plan and the end of its write: the plan is in the checkpoint, the batch is read and written again, and
  replaces what was written of it;
- between its write and the checkpoint's commit: the same;
- the checkpoint is lost: a new epoch reads everything again and leaves out what is in the lake;
- this process alone, and Spark lives on for a moment and still moves files into their places: whoever comes next waits
  until that has ended, or both would be at the same batch.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark.sql import functions as sf

from dtx.pipeline import java
from dtx.pipeline.archive import delta
from dtx.pipeline.archive.layout import (
    BATCH,
    CHECKPOINTS,
    EVENTS,
    ORIGIN,
    PARTITIONS,
    STORED,
    Batch,
    Form,
    LakeError,
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
_CALLED: Final = "An error occurred while calling "
"""So begins what py4j has no class of its own for; it goes on with the stack of Java."""
_CAUSE: Final = "Caused by: "
LONGEST_LIFE: Final = 300.0
"""Seconds that Spark has to end when the process is gone that it works for: it does so by itself, at once."""
_JAVA: Final = f"{CHECKPOINTS}/java.json"
_STARTED: Final = 18
"""Of the fields of /proc/…/stat after the state: starttime, the 22nd of all."""


@dataclass(slots=True)
class Archived:
    """What became of one database.

    Args:
        source: its configured name.
        batches: rows of each batch that was written, by its number.
        read_at: microseconds since the epoch: what it had then is in the lake; 0: not known.
        error: why it stopped; ``None``: everything there was is in the lake.
    """

    source: str
    batches: dict[int, int] = field(default_factory=dict)
    error: str | None = None
    read_at: int = 0

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
    form: Form = Form.PARQUET,
) -> list[Archived]:
    """Bring what the journals have new into the lake, then end.

    Args:
        spark: the session.
        root: of the lake; it is made where there is none.
        sources: options of ``format("dtx")`` for each database, by its configured name.
        at_once: databases that are read at the same time.
        watch: called now and then with what has been done so far.
        form: of what is written.

    Returns:
        What became of each database; one that fails does not stop the others.

    Raises:
        LakeError: the lake cannot be used, or another process writes it.
    """
    lake = _place(root, form)
    done: list[Archived] = []
    waiting = list(sources.items())
    running: dict[str, tuple[StreamingQuery, Archived]] = {}
    starts = dict.fromkeys(sources, 1)
    with lake.files.alone(f"{CHECKPOINTS}/lock"):
        lake.create()
        _succeed(lake)
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    source, options = waiting.pop(0)
                    done.append(Archived(source, read_at=time.time_ns() // 1000))
                    running[source] = (_start(spark, lake, source, options, None, form), done[-1])
                time.sleep(_POLL_SECONDS)
                for source, (query, result) in list(running.items()):
                    if _look(query, result):
                        del running[source]
                        if result.error is None:
                            lake.note_archived(source, result.read_at)
                        if _NO_WORKER in (result.error or "") and starts[source] < _STARTS:
                            starts[source] += 1
                            result.error = None
                            again = _start(spark, lake, source, sources[source], None, form)
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
    form: Form = Form.PARQUET,
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
        form: of what is written.
    """
    lake = _place(root, form)
    results = {source: Archived(source) for source in sources}
    queries: dict[str, StreamingQuery] = {}
    again = dict.fromkeys(sources, 0.0)
    failures = dict.fromkeys(sources, 0)
    trigger = f"{max(1, round(interval * 1000))} milliseconds"
    with lake.files.alone(f"{CHECKPOINTS}/lock"):
        lake.create()
        _succeed(lake)
        try:
            while not until():
                for source, options in sources.items():
                    if source not in queries and time.monotonic() >= again[source]:
                        queries[source] = _start(spark, lake, source, options, trigger, form)
                for source, query in list(queries.items()):
                    written = len(results[source].batches)
                    ended = _look(query, results[source])
                    read_at = _read_at(query, _options(sources[source], form))
                    if read_at > results[source].read_at:
                        lake.note_archived(source, read_at)
                        results[source].read_at = read_at
                    if len(results[source].batches) > written:
                        failures[source], results[source].error = 0, None
                    if ended:
                        del queries[source]
                        failures[source] += 1
                        again[source] = time.monotonic() + _pause(interval, failures[source])
                if watch is not None:
                    watch(list(results.values()))
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(queries.values())
    return list(results.values())


_LONGEST_WAIT: Final = 300.0
"""Seconds between two tries of a database that keeps failing."""
_MOST_DOUBLINGS: Final = 30
"""Of the pause: whoever is away for days fails more often than a number of seconds can be doubled."""


def _pause(interval: float, failures: int) -> float:
    """Seconds until a database is tried again that has failed so often in a row."""
    return min(_LONGEST_WAIT, interval * 2.0 ** min(failures, _MOST_DOUBLINGS))


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
        # not between the two steps of a compaction: what it has taken away and not yet put back would come twice
        stored, _ = Lake(root).stored(frame.sparkSession)
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


def _succeed(lake: Lake) -> None:
    """Wait for the end of the Spark that a predecessor has left behind, and write down which one is ours.

    Raises:
        LakeError: it does not end.
    """
    if not lake.files.is_local:
        return
    left = lake.files.read(_JAVA) or {}
    ends = time.monotonic() + LONGEST_LIFE
    while left and _started(left["pid"]) == left["started"] and left["pid"] != java.running():
        if time.monotonic() > ends:
            raise LakeError(
                f"the Java of an earlier run, process {left['pid']}, is still at work in {lake.files.uri}: end it"
            )
        time.sleep(_POLL_SECONDS)
    pid = java.running()
    if pid is not None and (started := _started(pid)) is not None:
        lake.files.write(_JAVA, {"pid": pid, "started": started})


def _started(pid: int) -> str | None:
    """When a process was started, in the system's own count; ``None`` where it is gone, or nobody can say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else fields[_STARTED]


def _place(root: str, form: Form) -> Lake:
    """Where files of *form* and their checkpoints are."""
    if form is Form.PARQUET:
        return Lake(root)
    Lake(root)  # which has to be one that this dtx knows
    return Lake(f"{root.rstrip('/')}/{delta.TABLE}")


def _start(
    spark: "SparkSession", lake: Lake, source: str, options: Mapping[str, str], trigger: str | None, form: Form
) -> "StreamingQuery":
    epoch, rejoin = _epoch(spark, lake, source, form)
    # what is here called write has to be a function of its own: Spark Connect sends it to the server
    write = functools.partial(
        write_batch if form is Form.PARQUET else delta.write_batch,
        root=lake.files.uri,
        stream=stream_name(source, epoch),
        source=source,
        rejoin=rejoin,
    )
    frame = spark.readStream.format("dtx").options(**_options(options, form)).load()
    writer = frame.writeStream.foreachBatch(write).queryName(f"archive {source} {uuid4().hex[:6]}")
    where = lake.files.path(f"{CHECKPOINTS}/{path_word(source)}/{epoch}")
    writer = writer.option("checkpointLocation", where)
    writer = writer.trigger(availableNow=True) if trigger is None else writer.trigger(processingTime=trigger)
    return writer.start()


def _options(options: Mapping[str, str], form: Form) -> dict[str, str]:
    """Of the reader of one database."""
    return {"maxRowsPerBatch": str(delta.MOST_ROWS), **options} if form is Form.DELTA else dict(options)


def _epoch(spark: "SparkSession", lake: Lake, source: str, form: Form) -> tuple[str, bool]:
    """The epoch to write in, and whether its batches have to leave out what earlier ones have brought."""
    word = path_word(source)
    if epochs := lake.epochs(word):
        return epochs[-1], bool(lake.note(word, epochs[-1])["before"])
    epoch = f"{int(time.time()):010x}{uuid4().hex[:6]}"
    last = delta.last(lake.files.uri, source) if form is Form.DELTA else _last(spark, lake, source)
    lake.files.write(f"{CHECKPOINTS}/{word}/{epoch}.json", {"before": last})
    return epoch, bool(last)


def _last(spark: "SparkSession", lake: Lake, source: str) -> dict[str, int]:
    """The last batch of each stream that has brought rows of *source*."""
    there = lake.stored(spark)[0].where(sf.col("source") == source)
    stream, number = sf.regexp_extract(ORIGIN.name, r"^(.*)\.\d+$", 1), sf.regexp_extract(ORIGIN.name, r"\.(\d+)$", 1)
    last = there.groupBy(stream.alias("stream")).agg(sf.max(number.cast("long")).alias("last")).collect()
    return {row["stream"]: row["last"] for row in last}


def _look(query: "StreamingQuery", result: Archived) -> bool:
    """Note how far *query* is; whether it has ended."""
    ended = not query.isActive
    for progress in query.recentProgress:
        # as properties: the sum over all sources is no field of what comes through Spark Connect
        if progress.numInputRows:
            result.batches[progress.batchId] = progress.numInputRows
    if ended and (error := query.exception()) is not None:
        result.error = explain(error)
    return ended


def _read_at(query: "StreamingQuery", options: Mapping[str, str]) -> int:
    """Microseconds since the epoch: what the journal had then has been read; 0 where *query* does not tell.

    A batch has all that there was when it was planned, unless it was cut; where there was nothing, none is executed.
    """
    found = 0
    most = int(options.get("maxRowsPerBatch", 0))
    for progress in query.recentProgress:
        executed = "addBatch" in progress.durationMs
        if executed:
            is_whole = progress.numInputRows > 0 and (not most or 2 * progress.numInputRows < most)
        else:
            is_whole = options.get("unavailable") != "wait"  # who waits for a database that is away reads nothing
        if is_whole:
            found = int(datetime.fromisoformat(progress.timestamp).timestamp() * 1e6)
    return found


def _stop(queries: "Iterable[StreamingQuery]") -> None:
    for query in queries:
        query.stop()


def explain(error: BaseException) -> str:
    """The sentence in Spark's words about *error*, without the stack around it: what was raised in a Python worker, or
    what was at the bottom of it in Java.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        kind, colon, sentence = line.partition(": ")
        if colon and kind.startswith("dtx.") and sentence:
            return sentence
    if lines and lines[0].startswith(_CALLED):
        causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
        return causes[-1] if causes else " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__

"""Compaction and retention: fewer, larger files, and no days that nobody needs any more.

What is to be changed is prepared out of sight, and written down as a plan: that is the moment from which on it happens.
A plan that was cut off is finished by whoever comes next, reader or writer; each of its steps may be repeated. Readers
who list files while a plan is under way list them again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

from pyspark.sql import functions as sf

from dtx.pipeline.archive.layout import BATCH, COMPACTED, PARTITIONS, STORED, UPKEEP, Batch, LakeError
from dtx.pipeline.archive.reading import LOCK, PLAN, Lake, Progress, damaged, finish
from dtx.pipeline.quarantine import Quarantined

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES: Final = 128 << 20
"""Bytes of a file of compressed Parquet that readers can share out well."""
_GROUP: Final = 200
"""Days that are compacted in one go: what was done so far stays done when somebody stops it."""


class Day(NamedTuple):
    """A day of a resource manager: its directory, and the batches in it that may be changed."""

    path: str
    batches: tuple[str, ...]
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was done.

    Args:
        days: directories of days that were changed or removed.
        before, after: files in them.
        rows: rows that were written anew.
        quarantined: files that are damaged; the days that they are in were left alone.
    """

    days: int = 0
    before: int = 0
    after: int = 0
    rows: int = 0
    quarantined: tuple[Quarantined, ...] = ()

    def __add__(self, other: "Upkeep") -> "Upkeep":
        return Upkeep(
            self.days + other.days,
            self.before + other.before,
            self.after + other.after,
            self.rows + other.rows,
            self.quarantined + other.quarantined,
        )


def compact(
    spark: "SparkSession",
    root: str,
    *,
    least_files: int = 4,
    file_bytes: int = FILE_BYTES,
    watch: Callable[[int, int], None] | None = None,
) -> Upkeep:
    """Join the small files of each day. A day with a damaged file stays as it is: somebody may mend it yet.

    Args:
        spark: the session.
        root: of the lake.
        least_files: leave days alone that have fewer files.
        file_bytes: about how large files become.
        watch: called with days done and days in all.

    Raises:
        LakeError: it is no lake, another upkeep is under way, or what was written anew is not what was read; then
            nothing has changed.
    """
    lake = _opened(root)
    with lake.files.alone(LOCK):
        finish(lake.files)
        _sweep(lake)
        lake.damaged = damaged(lake.files, lake.resource_managers)
        spoilt = {"/".join(name.split("/")[:2]) for name in lake.damaged}
        due = [
            day for day in _days(lake) if len(day.batches) > 1 and day.files >= least_files and day.path not in spoilt
        ]
        done = Upkeep(quarantined=tuple(lake.quarantined))
        for start in range(0, len(due), _GROUP):
            group = due[start : start + _GROUP]
            done += _compact(spark, lake, group, file_bytes)
            if watch is not None:
                watch(start + len(group), len(due))
        return done


def retain(root: str, *, before: date, dry_run: bool = False) -> Upkeep:
    """Remove the days before *before*, for good.

    Args:
        root: of the lake.
        before: the first day that stays.
        dry_run: count them, and remove nothing.

    Raises:
        LakeError: it is no lake, or another upkeep is under way.
    """
    lake = _opened(root)
    with lake.files.alone(LOCK):
        finish(lake.files)
        old = []
        count = 0
        for rm in lake.resource_managers:
            for name in lake.files.names(rm):
                if _date(name) is not None and str(_date(name)) < str(before):
                    old.append(f"{rm}/{name}")
                    count += sum(lake.files.size(f"{rm}/{name}/{batch}")[0] for batch in lake.files.names(old[-1]))
        if old and not dry_run:
            _commit(lake, uuid4().hex, remove=old)
        return Upkeep(days=len(old), before=count)


def _opened(root: str) -> Lake:
    lake = Lake(root)
    if not lake.files.exists("_lake.json"):
        raise LakeError(f"{root} is no lake: dtx pipeline archive makes one")
    return lake


def _days(lake: Lake) -> Iterator[Day]:
    progress = lake.progress()
    for rm in lake.resource_managers:
        for day in lake.files.names(rm):
            path = f"{rm}/{day}"
            batches = [name for name in lake.files.names(path) if _is_finished(name, progress)]
            sizes = [lake.files.size(f"{path}/{name}") for name in batches]
            yield Day(path, tuple(batches), sum(count for count, _ in sizes), sum(size for _, size in sizes))


def _is_finished(name: str, progress: Progress) -> bool:
    """Whether a batch will not be written again.

    The last of each stream is left alone, though it is whole: its commit is a file that a failing machine could lose.
    """
    word, _, text = name.partition("=")
    if word != BATCH.name:
        return False
    batch = Batch.parse(text)
    return text.startswith(COMPACTED) if batch is None else batch.number < progress.get(batch.stream, 0)


def _compact(spark: "SparkSession", lake: Lake, days: list[Day], file_bytes: int) -> Upkeep:
    change = uuid4().hex
    name = f"{COMPACTED}-{change}"
    paths = [lake.files.path(f"{day.path}/{batch}") for day in days for batch in day.batches]
    reader = spark.read.option("basePath", lake.files.uri)
    # columns that this dtx does not know are kept, too: the schema is what is in the files
    found = reader.option("mergeSchema", "true").parquet(*paths).columns
    schema = {field.name: field for field in STORED.fields}
    known = reader.schema(STORED).parquet(*paths) if set(found) <= set(schema) else _widened(spark, lake, paths)
    rows, total = _totals(known)
    pieces = max(1, sum(day.bytes for day in days) // file_bytes)
    target = lake.files.path(f"{UPKEEP}/{change}")
    (
        known.withColumn(BATCH.name, sf.lit(name))
        .repartition(max(pieces, len(days)), "rm", "day", sf.pmod(sf.hash("id"), sf.lit(max(1, pieces // len(days)))))
        .sortWithinPartitions("rm", "day", "at")
        .write.mode("overwrite")
        .partitionBy(*PARTITIONS)
        .parquet(target)
    )
    written = spark.read.schema(known.schema).option("basePath", target).parquet(target)
    if _totals(written) != (rows, total):
        lake.files.remove(f"{UPKEEP}/{change}")
        raise LakeError(
            f"compaction of {days[0].path} and others read {rows:,} rows and wrote others: nothing was changed"
        )
    moves = [
        (f"{UPKEEP}/{change}/{rm}/{day}/{BATCH.name}={name}", f"{rm}/{day}/{BATCH.name}={name}")
        for rm in lake.files.names(f"{UPKEEP}/{change}")
        for day in lake.files.names(f"{UPKEEP}/{change}/{rm}")
    ]
    after = sum(lake.files.size(source)[0] for source, _ in moves)
    _commit(lake, change, remove=[f"{day.path}/{batch}" for day in days for batch in day.batches], move=moves)
    return Upkeep(days=len(days), before=sum(day.files for day in days), after=after, rows=rows)


def _widened(spark: "SparkSession", lake: Lake, paths: list[str]) -> "DataFrame":
    """The rows with all columns that any of the files has; those of directories as text, whatever they look like."""
    reader = spark.read.option("basePath", lake.files.uri).option("mergeSchema", "true")
    merged = reader.parquet(*paths).schema
    fields = {field.name: field for field in merged.fields} | {field.name: field for field in STORED.fields}
    return spark.read.schema(type(merged)(list(fields.values()))).option("basePath", lake.files.uri).parquet(*paths)


def _totals(frame: "DataFrame") -> tuple[int, int]:
    """How many rows, and a sum over all that is in them but the name of their batch."""
    columns = [column for column in sorted(frame.columns) if column != BATCH.name]
    total = sf.sum(sf.xxhash64(*columns).cast("decimal(38,0)"))
    row = frame.agg(sf.count("*").alias("rows"), total.alias("total")).first()
    assert row is not None
    return int(row["rows"]), int(row["total"] or 0)


def _commit(lake: Lake, change: str, *, remove: list[str], move: list[tuple[str, str]] | None = None) -> None:
    lake.files.write(f"{UPKEEP}/{PLAN}{change}.json", {"id": change, "remove": remove, "move": move or []})
    finish(lake.files)


def _sweep(lake: Lake) -> None:
    """Remove what compactions have left that never came to their plan."""
    for name in lake.files.names(UPKEEP):
        lake.files.remove(f"{UPKEEP}/{name}")


def _date(name: str) -> date | None:
    word, _, text = name.partition("=")
    try:
        return date.fromisoformat(text) if word == "day" else None
    except ValueError:
        return None

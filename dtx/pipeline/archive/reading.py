"""Reading a lake, as it is between two batches and between two upkeeps."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from pyspark.sql import functions as sf

from dtx.pipeline.archive.files import Files
from dtx.pipeline.archive.layout import (
    CHECKPOINTS,
    EVENTS,
    MARKER,
    STORED,
    UPKEEP,
    VERSION,
    LakeError,
    from_path_word,
    path_word,
    stream_name,
)
from dtx.pipeline.quarantine import Quarantined

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PLAN: Final = "plan-"
"""Begins the name of the file of a plan, in the directory of upkeeps. Each has its own: whoever is late to finish one
must not take away the next."""
GENERATION: Final = f"{UPKEEP}/generation.json"
LOCK: Final = f"{UPKEEP}/lock"
READ: Final = "read.json"
_LOOKS: Final = 20
"""How often a reader looks again because an upkeep came between: each takes but a moment."""
_MAGIC: Final = b"PAR1"
"""Parquet: "Magic Number", the first and the last four octets of a file."""
_LEAST: Final = 12
"""Octets of a file: two of these, and between them the length of a footer."""
_AT_ONCE: Final = 16

Progress = Mapping[str, int]
"""The last batch that is whole, by stream; -1 where there is none."""


class Lake:
    """A lake.

    Args:
        root: see :class:`~dtx.pipeline.archive.files.Files`.

    Raises:
        LakeError: it was written by a newer dtx, or its file system cannot be used.
    """

    def __init__(self, root: str) -> None:
        self.files: Final = Files(root)
        marker = self.files.read(MARKER)
        if marker is not None and marker.get("version", 0) > VERSION:
            raise LakeError(
                f"the lake {root} has layout {marker['version']} and this dtx knows {VERSION}: use the newer dtx"
            )
        self._exists = marker is not None
        self.identity: str | None = None if marker is None else marker.get("id")
        """Which lake it is, wherever it is moved; ``None`` of one that an older dtx has made."""
        self.damaged: dict[str, str] = {}
        """What the last look found damaged: names of files, and why they were left out."""

    def create(self) -> None:
        """Mark the directory as a lake, where it is none yet."""
        if not self._exists:
            self.identity = uuid4().hex
            self.files.write(MARKER, {"version": VERSION, "id": self.identity})
            self._exists = True

    @property
    def resource_managers(self) -> list[str]:
        """Directories of resource managers, as they are called on disk."""
        return [name for name in self.files.names() if name.startswith("rm=")]

    def epochs(self, source_word: str) -> list[str]:
        """Of a source, by its name on disk; the last is the one that is used."""
        under = f"{CHECKPOINTS}/{source_word}"
        return [name for name in self.files.names(under) if self.files.exists(f"{under}/{name}/metadata")]

    def note(self, source_word: str, epoch: str) -> dict[str, Any]:
        """What was written down when an epoch began: what earlier ones had brought of its source, by stream."""
        found = self.files.read(f"{CHECKPOINTS}/{source_word}/{epoch}.json")
        return {"before": {}} if found is None else dict(found)

    def progress(self) -> dict[str, int]:
        """The last whole batch of every stream. What earlier epochs have brought counts as whole: it comes no more."""
        found: dict[str, int] = {}
        for source_word in self.files.names(CHECKPOINTS):
            for epoch in self.epochs(source_word)[-1:]:
                commits = self.files.names(f"{CHECKPOINTS}/{source_word}/{epoch}/commits", directories=False)
                found |= self.note(source_word, epoch)["before"]
                stream = stream_name(from_path_word(source_word), epoch)
                found[stream] = max((int(name) for name in commits if name.isdigit()), default=-1)
        return found

    def archived(self) -> dict[str, int]:
        """When each source was last read to its end, microseconds since the epoch; 0 where that is not known."""
        return {from_path_word(word): self._archived(word) for word in self.files.names(CHECKPOINTS)}

    def _archived(self, source_word: str) -> int:
        read = self.files.read(f"{CHECKPOINTS}/{source_word}/{READ}")
        if read is not None:
            return int(read["at"])
        # of an older dtx: its last batch but one was not the end, and what was read then is in the lake
        under = f"{CHECKPOINTS}/{source_word}"
        commits = [self.files.changed(f"{under}/{epoch}/commits") for epoch in self.epochs(source_word)]
        return max((at for times in commits for at in sorted(times)[:-1]), default=0)

    def note_archived(self, source: str, at: int) -> None:
        """Every line that *source* had *at* that time, microseconds since the epoch, is in the lake."""
        self.files.write(f"{CHECKPOINTS}/{path_word(source)}/{READ}", {"at": at})

    def frame(self, spark: "SparkSession", since: Progress | None = None) -> tuple["DataFrame", dict[str, int]]:
        """The rows of whole batches, and which these are.

        Args:
            spark: the session.
            since: what an earlier call returned: leave out what it had already.

        Returns:
            Rows with the columns of :data:`~dtx.pipeline.archive.layout.EVENTS`, and what *since* may be next time.
            Rows of files that are damaged are not among them: see :attr:`quarantined`.

        Raises:
            LakeError: it is no lake, or is changed all the time.
        """
        if not self._exists:
            raise LakeError(f"{self.files.uri} is no lake: dtx pipeline archive makes one")
        stored, progress = self.stored(spark)
        whole = stored.where(~_beyond("batch", progress))
        if since is not None:
            whole = whole.where(~reached("origin", since))
        return whole.select(EVENTS.names), progress

    @contextmanager
    def kept(self) -> Iterator[None]:
        """As long as this lasts, nobody compacts it or removes days: Spark reads files later than it lists them.

        Where somebody is at that already, wait until that has ended.
        """
        with self.files.alone(LOCK, shared=True) if self._exists else nullcontext():
            yield

    def stored(self, spark: "SparkSession") -> "tuple[DataFrame, dict[str, int]]":
        """All rows, also of batches that are being written, with the columns of files and directories; and progress.

        Raises:
            LakeError: it is changed all the time.
        """
        for _ in range(_LOOKS):
            finish(self.files)
            generation = self.files.read(GENERATION)
            progress = self.progress()
            try:
                self.damaged = damaged(self.files, self.resource_managers)
                # Spark lists the files here and now
                found = self._listed(spark)
            except FileNotFoundError:  # replaced while it was looked at
                continue
            if not plans(self.files) and self.files.read(GENERATION) == generation:
                return found, progress
        raise LakeError(f"{self.files.uri} is compacted all the time: try again when that has ended")

    def _listed(self, spark: "SparkSession") -> "DataFrame":
        if not self.resource_managers:
            return spark.createDataFrame([], STORED)
        # an explicit schema: the resource manager 007 is no number, and files of older versions lack columns
        reader = spark.read.schema(STORED).option("basePath", self.files.uri)
        if not self.damaged:
            return reader.parquet(self.files.path("rm=*"))
        sound = [name for rm in self.resource_managers for name, _ in self.files.data(rm) if name not in self.damaged]
        return reader.parquet(*map(self.files.path, sound)) if sound else spark.createDataFrame([], STORED)

    @property
    def quarantined(self) -> list[Quarantined]:
        """The same, to be reported; how many rows these files had, nobody knows."""
        return [
            Quarantined(source="lake", item=name, reason=reason, count=None) for name, reason in self.damaged.items()
        ]


def read_lake(spark: "SparkSession", root: str) -> "DataFrame":
    """All rows of the lake at *root*: see :meth:`Lake.frame`."""
    return Lake(root).frame(spark)[0]


def damaged(files: Files, directories: list[str]) -> dict[str, str]:
    """Data files that cannot be whole, and why. Spark passes over empty ones without a word, and stops at the others.

    Stores of objects have a file whole or not at all: there the size alone is looked at, and not the end of each.

    Args:
        files: of the lake.
        directories: where to look.
    """
    found: dict[str, str] = {}
    whole: list[str] = []
    for name, size in (each for directory in directories for each in files.data(directory)):
        if size < _LEAST:
            found[name] = "empty: 0 octets" if size == 0 else f"cut off: {size} octets are no Parquet file"
        elif files.is_local:
            whole.append(name)
    return found | cut_off(files, whole)


def cut_off(files: Files, names: list[str], *, missing: str | None = None) -> dict[str, str]:
    """Which of some data files do not end as such files do, and why.

    Args:
        files: of the lake.
        names: of these.
        missing: why one that is not there is not whole; ``None``: that is an error.

    Raises:
        FileNotFoundError: one has just been replaced.
    """

    def look(name: str) -> str | None:
        try:
            return _ending(files, name)
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = zip(names, pool.map(look, names), strict=True)
        return {name: reason for name, reason in found if reason is not None}


def _ending(files: Files, name: str) -> str | None:
    tail = files.tail(name, len(_MAGIC))
    if not tail:
        return "empty: 0 octets"
    return None if tail == _MAGIC else "cut off, or no Parquet file: its end is missing"


def plans(files: Files) -> list[str]:
    """Files of plans that are under way, or were cut off."""
    return [
        f"{UPKEEP}/{name}"
        for name in files.names(UPKEEP, directories=False)
        if name.startswith(PLAN) and name.endswith(".json")
    ]


def finish(files: Files) -> None:
    """Finish what compaction or retention has begun to change, whoever that was: every step may be repeated.

    Several may be at it at the same time.
    """
    for name in plans(files):
        plan = files.read(name)
        if plan is None:
            continue  # somebody else has just finished it
        for each in plan["remove"]:
            files.remove(each)
        for source, target in plan["move"]:
            files.move(source, target)
        # another one each time it is written, so that nobody takes what was for what is
        files.write(GENERATION, {"last": plan["id"], "written": uuid4().hex})
        files.remove(name)
        if plan["move"]:
            files.remove(f"{UPKEEP}/{plan['id']}")


def _beyond(column: str, progress: Progress) -> "Column":
    """Whether the batch that *column* names is not whole; what compaction made, and lost checkpoints left, is."""
    return _compared(column, progress, lambda number, last: number > last)


def reached(column: str, progress: Progress) -> "Column":
    """Whether the batch that *column* names is one of *progress*."""
    return _compared(column, progress, lambda number, last: number <= last)


def _compared(column: str, progress: Progress, compare: "Callable[[Column, int], Column]") -> "Column":
    stream = sf.regexp_extract(sf.col(column), r"^(.*)\.\d+$", 1)
    number = sf.regexp_extract(sf.col(column), r"\.(\d+)$", 1).try_cast("long")
    condition = sf.lit(False)
    for name, last in progress.items():
        condition |= (stream == name) & compare(number, last)
    return sf.coalesce(condition, sf.lit(False))

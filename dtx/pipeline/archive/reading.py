"""Reading a lake, as it is between two batches and between two upkeeps."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

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
    stream_name,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PLAN: Final = f"{UPKEEP}/plan.json"
GENERATION: Final = f"{UPKEEP}/generation.json"
LOCK: Final = f"{UPKEEP}/lock"
_LOOKS: Final = 20
"""How often a reader looks again because an upkeep came between: each takes but a moment.""" ""

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

    def create(self) -> None:
        """Mark the directory as a lake, where it is none yet."""
        if not self._exists:
            self.files.write(MARKER, {"version": VERSION})
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

    def frame(self, spark: "SparkSession", since: Progress | None = None) -> tuple["DataFrame", dict[str, int]]:
        """The rows of whole batches, and which these are.

        Args:
            spark: the session.
            since: what an earlier call returned: leave out what it had already.

        Returns:
            Rows with the columns of :data:`~dtx.pipeline.archive.layout.EVENTS`, and what *since* may be next time.

        Raises:
            LakeError: it is no lake, or is changed all the time.
        """
        if not self._exists:
            raise LakeError(f"{self.files.uri} is no lake: dtx pipeline archive makes one")
        for _ in range(_LOOKS):
            finish(self.files)
            generation = self.files.read(GENERATION)
            progress = self.progress()
            # Spark lists the files here and now
            stored = self.stored(spark)
            if not self.files.exists(PLAN) and self.files.read(GENERATION) == generation:
                whole = stored.where(~_beyond("batch", progress))
                if since is not None:
                    whole = whole.where(~_reached("origin", since))
                return whole.select(EVENTS.names), progress
        raise LakeError(f"{self.files.uri} is compacted all the time: try again when that has ended")

    def stored(self, spark: "SparkSession") -> "DataFrame":
        """All rows, also of batches that are being written; with the columns of files and directories."""
        if not self.resource_managers:
            return spark.createDataFrame([], STORED)
        # an explicit schema: the resource manager 007 is no number, and files of older versions lack columns
        return spark.read.schema(STORED).option("basePath", self.files.uri).parquet(self.files.path("rm=*"))


def read_lake(spark: "SparkSession", root: str) -> "DataFrame":
    """All rows of the lake at *root*: see :meth:`Lake.frame`."""
    return Lake(root).frame(spark)[0]


def finish(files: Files) -> None:
    """Finish what compaction or retention has begun to change, whoever that was: every step may be repeated."""
    plan = files.read(PLAN)
    if plan is None:
        return
    for name in plan["remove"]:
        files.remove(name)
    for source, target in plan["move"]:
        files.move(source, target)
    files.write(GENERATION, {"last": plan["id"]})
    files.remove(PLAN)
    if plan["move"]:
        files.remove(f"{UPKEEP}/{plan['id']}")


def _beyond(column: str, progress: Progress) -> "Column":
    """Whether the batch that *column* names is not whole; what compaction made, and lost checkpoints left, is."""
    return _compared(column, progress, lambda number, last: number > last)


def _reached(column: str, progress: Progress) -> "Column":
    """Whether the batch that *column* names is one of *progress*."""
    return _compared(column, progress, lambda number, last: number <= last)


def _compared(column: str, progress: Progress, compare: "Callable[[Column, int], Column]") -> "Column":
    stream = sf.regexp_extract(sf.col(column), r"^(.*)\.\d+$", 1)
    number = sf.regexp_extract(sf.col(column), r"\.(\d+)$", 1).try_cast("long")
    condition = sf.lit(False)
    for name, last in progress.items():
        condition |= (stream == name) & compare(number, last)
    return sf.coalesce(condition, sf.lit(False))

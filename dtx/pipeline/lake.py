"""The lake: every line of every journal of a fleet, once, as a Delta table.

::

    LAKE/_delta_log/, month=<month of at, UTC>/part-….parquet
    LAKE/_checkpoints/<source>.json    how far a database has been read, and when it was last read to its end

A *batch* is what one commit of ``archive`` has brought, of one or several databases. Each commit names application
transactions: ``dtx`` and ``dtx/<source>`` for each of these databases, with the number of the batch. The commit also
says how far it has read each of them (``dtx.places``), so lines and place are written together or not at all. The file
of the checkpoint repeats that place, since logs of commits are kept for a month only. Where neither has it, the journal
is read from its beginning, and the lines that the lake has are left out.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql import functions as sf

from dtx.pipeline.delta import DataFile, Table
from dtx.pipeline.files import LakeError
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source.columns import TABLES, arrow_schema

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

EVENTS: Final = TABLES["journal"].schema
"""Columns of the lake as it is read: those of the journal, and the source."""
BATCH: Final = "batch"
MONTH: Final = "month"
SCHEMA: Final = arrow_schema(EVENTS).append(pa.field(BATCH, pa.int64())).append(pa.field(MONTH, pa.string()))
"""Columns of the table."""
LOCK: Final = "_checkpoints/lock"
LOCK_SECONDS: Final = 5
"""For how long a command waits for the lock, which ``archive --follow`` has while it reads."""
APP: Final = "dtx"
_CHECKPOINTS: Final = "_checkpoints"
_PLACES: Final = "dtx.places"
OLDER: Final = ("_lake.json", "delta/_lake.json")
"""Marks of lakes that an older dtx has made: of Parquet files, and of a Delta table beside."""
_MOST_COMMITS: Final = 1_000
"""In which the last one of a database is looked for, where its file is older: after a crash it is the very last."""


class Lake:
    """A lake.

    Args:
        root: see :class:`~dtx.pipeline.files.Files`.

    Raises:
        LakeError: an older dtx has made it, or its file system cannot be used.
    """

    def __init__(self, root: str) -> None:
        self.table: Final = Table(root, SCHEMA, "is no lake: dtx pipeline archive makes one")
        self.files: Final = self.table.files
        self._pinned: DeltaTable | None = None
        if any(map(self.files.exists, OLDER)):
            raise LakeError(f"an older dtx has made the lake {root}: dtx pipeline migrate-lake makes a table of it")

    @property
    def identity(self) -> str | None:
        """Which lake it is, wherever it is moved; ``None`` where there is none."""
        return str(self.table.load().metadata().id) if self.table.exists else None

    def pin(self) -> None:
        """From now on the lines are those of the version of now, whatever is archived meanwhile."""
        self._pinned = self.table.load()

    @property
    def quarantined(self) -> list[Quarantined]:
        """Files that the last look has left out."""
        return self.table.quarantined

    def frame(
        self,
        spark: "SparkSession",
        since: int | None = None,
        between: tuple[datetime, datetime] | None = None,
    ) -> tuple["DataFrame", int]:
        """Lines, and the number of the last batch that they are of.

        Args:
            spark: the session.
            since: what an earlier call returned: leave out what it had.
            between: leave out files that have no line of this time.

        Raises:
            LakeError: there is no lake, or it needs more than plain Parquet.
        """
        table = self._pinned or self.table.load()
        files = self.table.data_files(table)
        if since is not None:
            files = [file for file in files if _greatest(file, BATCH, since + 1) > since]
        if between is not None:
            first, last = between
            files = [
                file
                for file in files
                if _greatest(file, "at", last) >= first and (file.stats.get("min.at") or first) <= last
            ]
        found = self.table.frame(spark, files)
        if since is not None:
            found = found.where(sf.col(BATCH) > since)
        return found.select(EVENTS.names), last_batch(table)

    def archived(self) -> dict[str, int]:
        """When each source was last read to its end, microseconds since the epoch; 0 where that is not known."""
        return {noted["source"]: noted["read_at"] for noted in self._checkpoints()}

    def place(self, table: "DeltaTable", source: str) -> tuple[Mapping[str, Any], bool]:
        """How far *source* has been read; and whether lines of it may be there that this does not say.

        Args:
            table: the newest version.
            source: the configured name of a database.
        """
        last = table.transaction_version(f"{APP}/{source}")
        noted = self.files.read(_file(source))
        if noted is not None and noted["place"] is None:
            return {}, bool(table.count())
        if noted is not None and noted["batch"] == last:
            return noted["place"], False
        if last is not None:
            for commit in table.history(_MOST_COMMITS):
                place = json.loads(commit.get(_PLACES) or "{}").get(source)
                if place is not None:
                    return place, False
        return {}, bool(table.count())

    def note(self, source: str, *, batch: int | None, place: Mapping[str, Any] | None, read_at: int) -> None:
        """Write the checkpoint of *source*: its last batch, how far that went, and when it was read to its end.

        A place of ``None`` has it read from its beginning; lines that the lake has are left out.
        """
        content = {"source": source, "batch": batch, "place": place, "read_at": read_at}
        self.files.write(_file(source), content)

    def read_at(self, source: str) -> int:
        """As of :meth:`archived`."""
        noted = self.files.read(_file(source))
        return 0 if noted is None else int(noted["read_at"])

    def _checkpoints(self) -> list[dict[str, Any]]:
        names = [name for name in self.files.names(_CHECKPOINTS, directories=False) if name.endswith(".json")]
        return [self.files.read(f"{_CHECKPOINTS}/{name}") for name in names]


def read_lake(spark: "SparkSession", root: str) -> "DataFrame":
    """All lines of the lake at *root*: see :meth:`Lake.frame`."""
    return Lake(root).frame(spark)[0]


def last_batch(table: "DeltaTable") -> int:
    """The number of the last batch; 0 where there is none."""
    last = table.transaction_version(APP)
    if last is not None:
        return last
    # another program has written the table anew
    stats = pa.table(table.get_add_actions(flatten=True))
    numbers = stats[f"max.{BATCH}"].to_pylist() if f"max.{BATCH}" in stats.column_names else []
    return max((number for number in numbers if number is not None), default=0)


def places(read: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What a commit says of how far it has read each source."""
    return {_PLACES: json.dumps(read)}


def _file(source: str) -> str:
    word = quote(source, safe="").replace(".", "%2E")
    return f"{_CHECKPOINTS}/{word}.json"


def _greatest(file: DataFile, column: str, unknown: Any) -> Any:
    found = file.stats.get(f"max.{column}")
    return unknown if found is None else found

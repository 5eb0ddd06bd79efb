"""The lake: every line of every journal of a fleet, once, as a Delta table.

::

    LAKE/_delta_log/, month=<month of at, UTC>/part-….parquet
    LAKE/_checkpoints/<source>.json    how far a database has been read, and when it was last read to its end

A *batch* is the lines of one commit of ``archive``, of one or several databases. Each commit names application
transactions: ``dtx`` and ``dtx/<source>`` for each of these databases, with the number of the batch. The commit also
has the place reached in each journal (``dtx.places``), so lines and place are written together or not at all. The
checkpoint file repeats the place, because logs of commits are kept for one month only. Where neither has the place,
the journal is read from its beginning, and lines that the lake has are left out.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.delta import DataFile, Table
from dtx.pipeline.files import LakeError
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source.columns import TABLES, arrow_schema

EVENTS: Final = TABLES["journal"].schema
"""Columns of the lake for readers: those of the journal, and the source."""
BATCH: Final = "batch"
MONTH: Final = "month"
SCHEMA: Final = arrow_schema(EVENTS).append(pa.field(BATCH, pa.int64())).append(pa.field(MONTH, pa.string()))
"""Columns of the stored table."""
LOCK: Final = "_checkpoints/lock"
LOCK_SECONDS: Final = 5
"""How long a command waits for the lock, which ``archive --follow`` holds while it reads."""
APP: Final = "dtx"
_CHECKPOINTS: Final = "_checkpoints"
PLACES: Final = "dtx.places"
"""Metadata of a commit: a JSON object of the place reached in each source."""
OLDER: Final = ("_lake.json", "delta/_lake.json")
"""Files that mark the lakes of an older dtx: one of Parquet files, and one with a Delta table in ``delta``."""
_MOST_COMMITS: Final = 1_000
"""Commits that are searched for the last one of a database whose file is older. After a crash it is the newest."""


class Lake:
    """A lake; one that an older dtx has made is refused."""

    def __init__(self, root: str) -> None:
        self.table: Final = Table(root, SCHEMA, "is no lake: dtx pipeline archive makes one")
        self.files: Final = self.table.files
        self._pinned: DeltaTable | None = None
        if any(map(self.files.exists, OLDER)):
            raise LakeError(f"an older dtx has made the lake {root}: dtx pipeline migrate-lake converts it")

    @property
    def identity(self) -> str | None:
        """The id of the lake, which stays when the lake is moved; ``None`` where there is no lake."""
        return str(self.table.load().metadata().id) if self.table.exists else None

    def pin(self) -> None:
        """Read only the current version of the table from now on, also when more lines are archived."""
        self._pinned = self.table.load()

    @property
    def quarantined(self) -> list[Quarantined]:
        """Missing or damaged files that the last read left out."""
        return self.table.quarantined

    def frame(
        self, spark: SparkSession, since: int | None = None, between: tuple[datetime, datetime] | None = None
    ) -> tuple[DataFrame, int]:
        """Return lines of the lake, and the number of its last batch.

        *since* is the number that an earlier call returned: its lines are left out. Files without a line from the first
        to the last of the times *between* are left out too.
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
        """Return when each source was last read to its end, in microseconds since the epoch; 0 if not known."""
        names = [name for name in self.files.names(_CHECKPOINTS, directories=False) if name.endswith(".json")]
        noted = [self.files.read(f"{_CHECKPOINTS}/{name}") for name in names]
        return {each["source"]: each["read_at"] for each in noted}

    def place(self, table: DeltaTable, source: str) -> tuple[Mapping[str, Any], bool]:
        """Return the place that *source* has been read to, and whether the lake may have lines behind that place."""
        last = table.transaction_version(f"{APP}/{source}")
        noted = self.files.read(_file(source))
        if noted is not None and noted["place"] is None:
            return {}, bool(table.count())
        if noted is not None and noted["batch"] == last:
            return noted["place"], False
        if last is not None:
            for commit in table.history(_MOST_COMMITS):
                place = json.loads(commit.get(PLACES) or "{}").get(source)
                if place is not None:
                    return place, False
        return {}, bool(table.count())

    def note(self, source: str, *, batch: int | None, place: Mapping[str, Any] | None, read_at: int) -> None:
        """Write the checkpoint of *source*: its last batch, the place of that, and when it was read to its end.

        With a place of ``None`` the next ``archive`` reads from the beginning, and leaves out lines of the lake.
        """
        content = {"source": source, "batch": batch, "place": place, "read_at": read_at}
        self.files.write(_file(source), content)

    def read_at(self, source: str) -> int:
        """Return the time of *source*, see :meth:`archived`."""
        noted = self.files.read(_file(source))
        return 0 if noted is None else int(noted["read_at"])


def last_batch(table: DeltaTable) -> int:
    """Return the number of the last batch; 0 where there is none."""
    last = table.transaction_version(APP)
    if last is not None:
        return last
    # another program has replaced the table
    stats = pa.table(table.get_add_actions(flatten=True))
    numbers = stats[f"max.{BATCH}"].to_pylist() if f"max.{BATCH}" in stats.column_names else []
    return max((number for number in numbers if number is not None), default=0)


def unknown(lines: pa.Table, known: ds.Dataset) -> pa.Table:
    """Return the lines that *known* lacks. They are close in time, so few of its files are read."""
    edges, at = pc.min_max(lines["at"]), pc.field("at")
    of_then = pc.field("source").isin(pc.unique(lines["source"])) & (at >= edges["min"]) & (at <= edges["max"])
    keys = ["source", "id"]
    there = known.to_table(columns=keys, filter=of_then).cast(pa.schema([SCHEMA.field(key) for key in keys]))
    return lines.join(there, keys, join_type="left anti")


def _file(source: str) -> str:
    word = quote(source, safe="").replace(".", "%2E")
    return f"{_CHECKPOINTS}/{word}.json"


def _greatest(file: DataFile, column: str, default: Any) -> Any:
    found = file.stats.get(f"max.{column}")
    return default if found is None else found

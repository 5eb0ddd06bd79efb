"""The lines of the journals as a Delta table, which other engines read, too. Without a jar: ``deltalake``.

Each batch is one commit of the table, and names its stream and its number in it (Delta's protocol, "Transaction
Identifiers": ``txn`` with ``appId`` and ``version``). A batch that comes once more after a crash is one that the table
has, and is left out; a commit is there as a whole or not at all.

Spark reads the files that one version of the table names, as plain Parquet. That is all there is to a table that needs
no more than version 1 of Delta's reader protocol, as the archive writes it; what others have made of it since (vectors
of deleted rows, other names of columns) is refused.
"""

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from dtx.pipeline.archive.layout import EVENTS, MARKER, ORIGIN, Batch, LakeError
from dtx.pipeline.archive.reading import Lake, Progress, cut_off, reached
from dtx.pipeline.quarantine import Quarantined

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

TABLE: Final = "delta"
"""The directory of the table in the lake."""
MOST_ROWS: Final = 500_000
"""Of a batch, about, where the fleet does not say: it is written by one process, which has all of it in memory."""
_PARTITIONS: Final = ("rm", "day")
_LOCAL: Final = "file://"
_OCTET: Final = re.compile("%([0-9A-Fa-f]{2})")
_STORED: Final = StructType([*EVENTS.fields, ORIGIN])
"""The columns of the table."""
_READER: Final = 1
"""The version of Delta's reader protocol in which the files that a table names have its rows, and nothing else."""


class DeltaLake:
    """The table of a lake, read as the lake is.

    Args:
        root: of the lake, see :class:`~dtx.pipeline.archive.files.Files`.

    Raises:
        LakeError: it was written by a newer dtx, or its file system cannot be used.
    """

    def __init__(self, root: str) -> None:
        self._lake = Lake(f"{root.rstrip('/')}/{TABLE}")
        self.files: Final = self._lake.files
        self.identity: Final = self._lake.identity
        """As of a lake: a table that is moved away and written anew is another one."""
        self._damaged: dict[str, str] = {}

    def table(self) -> "DeltaTable":
        """The table as it is now.

        Raises:
            LakeError: there is none yet.
        """
        table = opened(self.files.uri)
        if table is None:
            raise LakeError(f"{self.files.uri} is no Delta table: dtx pipeline archive --format delta makes one")
        return table

    def archived(self) -> dict[str, int]:
        """As of a lake."""
        return self._lake.archived()

    def frame(self, spark: "SparkSession", since: Progress | None = None) -> tuple["DataFrame", dict[str, int]]:
        """The rows of one version of the table, and which batches these are.

        Args:
            spark: the session.
            since: what an earlier call returned: leave out what it had already.

        Raises:
            LakeError: there is no table, or it needs more than plain Parquet.
        """
        place = self.files.uri
        if self.files.exists(MARKER) and opened(place) is None:
            return spark.createDataFrame([], EVENTS), {}  # nothing has come yet
        table = self.table()
        if table.protocol().min_reader_version > _READER:
            raise LakeError(
                f"{place} needs version {table.protocol().min_reader_version} of Delta's reader protocol, and its "
                f"files alone say all in version {_READER} only: something else has changed the table"
            )
        # of this version of the table, not of the checkpoints: a commit comes before its batch is checkpointed
        numbers = {stream: table.transaction_version(stream) for stream in self._lake.progress()}
        names, misread = _files(table)
        ours = [name for name in names if "://" not in name] if self.files.is_local else []
        self._damaged = cut_off(self.files, ours, missing="it is not there, and the table's log says that it is")
        files = [name if "://" in name else self.files.path(name) for name in names if name not in self._damaged]
        reader = spark.read.schema(_STORED).option("basePath", place)
        found = reader.parquet(*files) if files else spark.createDataFrame([], _STORED)
        rm = sf.col("rm")
        for seen, true in misread.items():
            rm = sf.when(sf.col("rm") == seen, sf.lit(true)).otherwise(rm)
        found = found.withColumn("rm", rm)
        if since is not None:
            found = found.where(~reached(ORIGIN.name, since))
        progress = {stream: number for stream, number in numbers.items() if number is not None}
        return found.select(EVENTS.names), progress

    @property
    def quarantined(self) -> list[Quarantined]:
        """What the last look found damaged, or missing: how many rows these files had, nobody knows."""
        return [
            Quarantined(source="lake", item=f"{TABLE}/{name}", reason=reason, count=None)
            for name, reason in self._damaged.items()
        ]


def write_batch(frame: "DataFrame", number: int, *, root: str, stream: str, source: str, rejoin: bool) -> None:
    """Commit one batch to the table, unless the table has it.

    Args:
        frame: its rows, columns of the journal and ``source``.
        number: of the batch.
        root: URI of the table.
        stream: see :func:`~dtx.pipeline.archive.layout.stream_name`.
        source: the configured name of the database.
        rejoin: whether the table may have some of the rows already, from an earlier epoch.

    Raises:
        LakeError: the package ``deltalake`` is not installed.
    """
    from deltalake import CommitProperties, Transaction, write_deltalake

    table = opened(root)
    known = None if table is None else table.transaction_version(stream)
    if known is not None and known >= number:
        return
    events = frame.withColumn("day", sf.to_date("at")).withColumn(ORIGIN.name, sf.lit(str(Batch(stream, number))))
    rows = events.select(*EVENTS.names, ORIGIN.name).toArrow()
    if rejoin and table is not None:
        rows = _new(rows, table, source)
    if rows.num_rows:
        write_deltalake(
            _place(root) if table is None else table,
            rows,
            mode="append",
            partition_by=list(_PARTITIONS),
            schema_mode=None if table is None else "merge",
            commit_properties=CommitProperties(app_transactions=[Transaction(stream, number)]),
        )


def opened(root: str) -> "DeltaTable | None":
    """The table as it is now; ``None`` where there is none yet.

    Args:
        root: its URI.

    Raises:
        LakeError: the package ``deltalake`` is not installed.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise LakeError(f"a Delta table needs deltalake ({error}): pip install 'dtx[pipeline]'") from error
    place = _place(root)
    return DeltaTable(place) if DeltaTable.is_deltatable(place) else None


def last(root: str, source: str) -> dict[str, int]:
    """The last batch of each stream that has brought rows of *source*."""
    table = opened(root)
    found: dict[str, int] = {}
    if table is None:
        return found
    scanned: Any = table.to_pyarrow_dataset().scanner(columns=[ORIGIN.name], filter=_of(source))
    for name in {name for batch in scanned.to_batches() for name in batch.column(0).unique().to_pylist()}:
        batch = Batch.parse(name)
        if batch is not None:
            found[batch.stream] = max(batch.number, found.get(batch.stream, -1))
    return found


def _files(table: "DeltaTable") -> tuple[list[str], dict[str, str]]:
    """The files of this version of the table, and resource managers that Spark would call something else.

    The table's log has names of files as URIs have them ("Add File"). Of a directory, Spark takes each octet that is
    written as ``%XX`` for a character of its own: where UTF-8 has more than one for a character, it is wrong.
    """
    import pyarrow as pa

    added = pa.table(table.get_add_actions(flatten=True))
    names = [unquote(name) for name in added["path"].to_pylist()]
    misread = {}
    for name, true in zip(names, added["partition.rm"].to_pylist(), strict=True):
        (word,) = (part.removeprefix("rm=") for part in name.split("/") if part.startswith("rm="))
        seen = _OCTET.sub(lambda octet: chr(int(octet[1], 16)), word)
        if seen != true:
            misread[seen] = true
    return names, misread


def _new(rows: "pa.Table", table: "DeltaTable", source: str) -> "pa.Table":
    """Those that the table does not have; only days are read that there are rows of."""
    import pyarrow.compute as pc

    days = pc.unique(rows["day"])
    dataset: Any = table.to_pyarrow_dataset()
    there = dataset.to_table(columns=["id"], filter=_of(source) & pc.field("day").isin(days))["id"]
    return rows.filter(pc.invert(pc.is_in(rows["id"], value_set=there.combine_chunks())))


def _of(source: str) -> Any:
    import pyarrow.compute as pc

    return pc.field("source") == source


def _place(root: str) -> str:
    """The same place for deltalake: of this machine a path, which has no signs that mean something else."""
    return root.removeprefix(_LOCAL)

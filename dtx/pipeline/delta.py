"""A Delta table without a jar: ``deltalake`` commits, Spark reads and writes the Parquet files that a commit names.

A commit is atomic. A reader uses the files of one version. Files that a later commit removes stay on disk for a week
(``delta.deletedFileRetentionDuration``), so readers need no lock. Two commits that name the same application
transaction (Delta's protocol, "Transaction Identifiers": ``txn`` with ``appId`` and ``version``) exclude each other:
the second one is refused.

A table that needs only version 1 of Delta's reader protocol has all its rows in these files. Tables that other programs
have changed to a newer version (deletion vectors, column mapping) are refused.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from dtx.pipeline import parquet_files
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.quarantine import Quarantined, first_line

FILE_BYTES: Final = 128 << 20
"""Target size of a compressed Parquet file: several readers can still share the rows of a table."""
_LEAST_FILES: Final = 8
"""A partition with this many small files is compacted."""
_GROUP_BYTES: Final = 64 << 20
_READER: Final = 1
"""The newest version of Delta's reader protocol whose tables are plain Parquet files."""


_Item = TypeVar("_Item")


class DataFile(NamedTuple):
    """A file of one version of a table."""

    name: str
    """Its path in the table's directory, or a URI."""
    size: int
    partition: str
    """The value of the table's partition column."""
    stats: dict[str, Any]
    """Least and greatest values of columns, such as ``min.at``, and ``num_records``."""


class Table:
    """A Delta table.

    Args:
        root: its directory, see :class:`~dtx.pipeline.files.Files`.
        columns: all columns; the last one is the partition column.
        what: the error text, after the URI, if there is no table.
    """

    def __init__(self, root: str, columns: pa.Schema, what: str) -> None:
        self.files: Final = Files(root)
        self.columns: Final = columns
        self._stored = from_arrow_schema(columns.remove(len(columns) - 1))
        self.partition: Final = columns.names[-1]
        self._what = what
        self.damaged: dict[str, str] = {}
        """Missing or damaged files of the last :meth:`data_files`: the reason by name of file."""

    @property
    def exists(self) -> bool:
        """Whether the directory has a Delta table."""
        return DeltaTable.is_deltatable(self.files.place)

    def load(self) -> DeltaTable:
        """Return the newest version; refuse a table that needs a newer reader protocol."""
        if not self.exists:
            raise LakeError(f"{self.files.uri} {self._what}")
        table = DeltaTable(self.files.place)
        if table.protocol().min_reader_version > _READER:
            raise LakeError(
                f"{self.files.uri} needs version {table.protocol().min_reader_version} of Delta's reader protocol, and "
                f"dtx knows version {_READER}: another program has changed the table (deletion vectors or column "
                "mapping)"
            )
        return table

    def create(self) -> DeltaTable:
        """Return the newest version; make an empty table where there is none."""
        if self.exists:
            return self.load()
        with refused(self.files.uri):
            return DeltaTable.create(self.files.place, self.columns, partition_by=[self.partition])

    def data_files(self, table: DeltaTable) -> list[DataFile]:
        """Return the files of a version, without those that are missing or damaged; see :attr:`damaged`."""
        found = []
        for row in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            stats = {name: value for name, value in row.items() if name.startswith(("min.", "max.", "num_"))}
            # Delta's protocol, "Add File": the path is a URI, so a blank in it is %20
            name = unquote(row["path"])
            found.append(DataFile(name, row["size_bytes"], str(row[f"partition.{self.partition}"]), stats))
        sizes = self.files.sizes(file.name for file in found if "://" not in file.name)
        self.damaged = {
            file.name: "it is missing, and the table's log names it" if sizes[file.name] is None else
            f"damaged: it has {sizes[file.name]:,} bytes instead of {file.size:,}"
            for file in found
            if "://" not in file.name and sizes[file.name] != file.size
        }  # fmt: skip
        return [file for file in found if file.name not in self.damaged]

    def dataset(self, table: DeltaTable) -> Any:
        """Return the rows of a version, for Arrow, which filters by statistics of the files and not of the log."""
        names = [file.name for file in self.data_files(table)]
        if self.damaged:
            raise LakeError(f"{self.files.uri}: {next(iter(self.damaged))} is damaged or missing: restore it first")
        return ds.dataset(names, self.columns.remove(len(self.columns) - 1), "parquet", self.files.tree)

    @property
    def quarantined(self) -> list[Quarantined]:
        """The files of :attr:`damaged`, for the report."""
        return [
            Quarantined(source="lake", item=name, reason=reason, count=None) for name, reason in self.damaged.items()
        ]

    def frame(self, spark: SparkSession, files: Iterable[DataFile], *, named: bool = False) -> DataFrame:
        """Return the rows of *files* without the partition column; if *named*, with ``file``, see :meth:`names_of`."""
        return parquet_files.read(spark, self.files, (file.name for file in files), self._stored, named=named)

    def write(self, frame: DataFrame, mark: str, *, further: Sequence[str] = ()) -> list[AddAction]:
        """Write rows with Spark; they become part of the table when :meth:`commit` names them.

        Names of their directories begin with *mark*, and have the values of the *further* columns, which no file has.
        """
        place = f"data/{mark}-{uuid4().hex[:12]}"
        word = f"{self.partition}="
        added = []
        for name, (size, rows) in parquet_files.write(frame, self.files, place, [self.partition, *further]).items():
            (value,) = (part.removeprefix(word) for part in name.split("/") if part.startswith(word))
            added.append(self._action(name, size, value, {"numRecords": rows}, is_change=True))
        return added

    def names_of(self, files: Iterable[str]) -> set[str]:
        """Return the paths in the table's directory for URIs of the column ``file``."""
        place = _without_scheme(self.files.place)
        return {_without_scheme(unquote(file)).removeprefix(f"{place}/") for file in files}

    def written(self, added: Iterable[AddAction]) -> list[DataFile]:
        """Return the files of :meth:`write`, to read them before they are committed."""
        return [DataFile(file.path, file.size, str(file.partition_values[self.partition]), {}) for file in added]

    def commit(
        self,
        table: DeltaTable,
        added: list[AddAction],
        removed: Iterable[DataFile],
        versions: dict[str, int],
        *,
        is_change: bool = True,
    ) -> None:
        """Replace files of the version *table* by others, in one commit, unless another process has changed the table.

        *versions* are application transactions, each newer than in the table. *is_change*: whether rows change.
        """
        if any((table.transaction_version(app) or 0) >= version for app, version in versions.items()):
            raise LakeError(f"another process has written {self.files.uri} at the same time: run again")
        now = time.time_ns() // 1_000_000
        gone = [
            RemoveAction(file.name, is_change, now, file.size, {self.partition: file.partition}) for file in removed
        ]
        properties = transaction(versions, retries=0)
        with refused(self.files.uri):
            table.create_write_transaction(
                [*added, *gone], "append", self.columns, [self.partition], commit_properties=properties
            )

    def maintain(self, watch: Callable[[str], None] = lambda _: None) -> list[Quarantined]:
        """Join the small files of partitions that have many, and remove files that the table has not named for a week.

        A partition with a damaged file stays as it is; partitions whose files could not be joined are returned.
        ``deltalake`` has its own compaction, but two of them at once double rows (seen with 1.6). Here a commit is
        refused when another one has come since the files were read.
        """
        wrong: list[Quarantined] = []
        many = Counter(file.partition for file in self.data_files(self.load()) if file.size < FILE_BYTES // 2)
        for partition in sorted(partition for partition, count in many.items() if count >= _LEAST_FILES):
            table = self.load()  # if another commit comes after this version, the swap is refused
            small = [file for file in self.data_files(table) if file.partition == partition]
            small = [file for file in small if file.size < FILE_BYTES // 2]
            spoilt = any(f"{self.partition}={partition}/" in name for name in self.damaged)
            if len(small) < _LEAST_FILES or spoilt:
                continue
            watch(f"joining {len(small):,} files of {partition}")
            small.sort(key=lambda file: (str(file.stats.get("min.at")), file.name))
            try:
                groups = gathered(small, FILE_BYTES, lambda file: file.size)
                added = [self._joined(table, partition, some) for some in groups]
            except (pa.ArrowException, OSError) as error:
                wrong.append(Quarantined(source="lake", item=partition, reason=first_line(error), count=None))
                continue
            self.commit(table, added, small, {}, is_change=False)
        with refused(self.files.uri):
            table = self.load()
            if table.vacuum(dry_run=True, full=True):
                table.vacuum(dry_run=False, full=True)
        return wrong

    def _joined(self, table: DeltaTable, partition: str, files: list[DataFile]) -> AddAction:
        name = f"{self.partition}={partition}/part-{uuid4().hex}.zstd.parquet"
        # the table's own schema has columns that a newer dtx has added
        schema = pa.schema([field for field in pa.schema(table.schema().to_arrow()) if field.name != self.partition])
        nulls = dict.fromkeys(schema.names, 0)
        rows = 0
        tree = self.files.tree
        tree.create_dir(name.rpartition("/")[0], recursive=True)
        with tree.open_output_stream(name) as target, pq.ParquetWriter(target, schema, compression="zstd") as writer:
            batches = ds.dataset([file.name for file in files], schema, "parquet", tree).to_batches()
            for some in gathered(batches, _GROUP_BYTES, lambda batch: batch.nbytes):
                group = pa.Table.from_batches(some)
                rows += group.num_rows
                for column in schema.names:
                    nulls[column] += group[column].null_count
                writer.write_table(group)
        stats = [file.stats for file in files]
        expected = sum(each["num_records"] or 0 for each in stats)
        if rows != expected:
            raise OSError(f"its files have {rows:,} rows, and the table's log says {expected:,}")
        # edges of all columns: readers take a column without edges for one that has only nulls (deltalake 1.6)
        merged: dict[str, Any] = {"numRecords": rows, "nullCount": nulls}
        for kind, edge in (("min", min), ("max", max)):
            merged[f"{kind}Values"] = {
                key.partition(".")[2]: edge(known)
                for key in {key for each in stats for key in each if key.startswith(f"{kind}.")}
                if (known := [each[key] for each in stats if each.get(key) is not None])
            }
        return self._action(name, self.files.sizes([name])[name] or 0, partition, merged, is_change=False)

    def _action(self, name: str, size: int, partition: str, stats: dict[str, Any], *, is_change: bool) -> AddAction:
        text = json.dumps(stats, default=lambda time: time.isoformat(timespec="microseconds"))
        return AddAction(name, size, {self.partition: partition}, time.time_ns() // 1_000_000, is_change, text)

    def remove_before(self, day: date, column: str, *, also: str = "true", dry_run: bool) -> int:
        """Remove, or only count, rows whose *column* is before *day* in UTC and for which *also* (SQL) holds."""
        table = self.load()
        condition = f"{column} < '{day}T00:00:00Z' AND {also}"
        with refused(self.files.uri):
            asked = QueryBuilder().register("t", table).execute(f"SELECT count(*) AS n FROM t WHERE {condition}")  # noqa: S608
            count = int(pa.table(asked.read_all())["n"][0].as_py())
            if count and not dry_run:
                table.delete(condition)
        return count


def transaction(versions: dict[str, int], metadata: dict[str, str] | None = None, retries: int | None = None) -> Any:
    """Return the properties of a commit.

    It is refused if another one has named one of the application transactions *versions* meanwhile; with 0 *retries*,
    if there has been any other one.
    """
    named = [Transaction(app, version) for app, version in versions.items()]
    return CommitProperties(metadata, retries, named or None)


def gathered(items: Iterable[_Item], least: int, size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Join items to lists of at least *least*, as counted by *size*; the last one may be smaller."""
    waiting: list[_Item] = []
    total = 0
    for item in items:
        waiting.append(item)
        total += size(item)
        if total >= least:
            yield waiting
            waiting, total = [], 0
    if waiting:
        yield waiting


@contextmanager
def refused(place: str) -> Iterator[None]:
    """Raise errors of ``deltalake`` as :class:`LakeError`."""
    try:
        yield
    except CommitFailedError as error:
        raise LakeError(f"another process has written {place} at the same time: run again") from error
    except Exception as error:
        if isinstance(error, DeltaError) or type(error) is Exception:  # queries raise no subclass
            raise LakeError(f"{place}: {first_line(error)}") from error
        raise


def _without_scheme(uri: str) -> str:
    return re.sub(r"^\w+:/+|^/+", "", uri)

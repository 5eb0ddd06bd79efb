"""Reads and writes Parquet files: on this machine by Spark's own code, elsewhere by Arrow in Spark's tasks.

Spark needs Hadoop's jars for S3 and the like, which must fit its build, and it has none of them. Arrow and
``deltalake`` need only their wheels, and take keys and endpoint from the same environment variables (``AWS_…``).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from dtx.pipeline.files import Files
from dtx.pipeline.session import few_rows, no_rows

FILE: Final = "file"
"""The optional column with the URI of a row's file."""
_AT_ONCE: Final = 16
_MOST_TASKS: Final = 64
_ROWS: Final = 65_536
_WRITTEN: Final = "name string, size bigint, rows bigint"


def read(spark: SparkSession, files: Files, names: Iterable[str], schema: StructType, *, named: bool) -> DataFrame:
    """Return the rows of some files.

    Args:
        spark: the session.
        files: their directory.
        names: of the files, in the directory; or URIs.
        schema: the columns; a column that a file lacks is null.
        named: whether rows have the column :data:`FILE`.
    """
    paths = [name if "://" in name else files.path(name) for name in names]
    whole = StructType([*schema.fields, StructField(FILE, StringType())]) if named else schema
    if not paths:
        return no_rows(spark, whole)
    if files.is_local:
        # recursiveFileLookup turns off partition discovery, which would guess types from names of directories
        found = spark.read.schema(schema).option("recursiveFileLookup", "true").parquet(*paths)
        return found.select("*", sf.col("_metadata.file_path").alias(FILE)) if named else found
    spark.dataSource.register(StoredFiles)
    return spark.read.format(StoredFiles.name()).schema(whole).option("paths", json.dumps(paths)).load()


def write(frame: DataFrame, files: Files, place: str, by: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Write rows, and return the size in bytes and the number of rows of each file.

    Args:
        frame: the rows.
        files: a directory.
        place: a new directory in it.
        by: columns whose values are kept in names of directories, ``column=value``, and not in the files.
    """
    if not files.is_local:
        written = frame.mapInArrow(partial(_write, files.uri, place, tuple(by)), _WRITTEN).collect()
        return {row["name"]: (row["size"], row["rows"]) for row in written}
    few = few_rows(frame)
    if few is not None:
        written = next(_write(files.uri, place, tuple(by), iter(few.to_batches()))).to_pylist()
        return {row["name"]: (row["size"], row["rows"]) for row in written}
    writer = frame.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    (writer.partitionBy(*by) if by else writer).parquet(files.path(place))

    def count(name: str) -> int:
        with files.open(name) as file:
            return int(pq.read_metadata(file).num_rows)

    sizes = files.data(place)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {name: (size, rows) for (name, size), rows in zip(sizes.items(), pool.map(count, sizes), strict=True)}


def _write(root: str, place: str, by: tuple[str, ...], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the rows of one task. No table names the files of a task that Spark repeats."""
    tree = Files(root).tree
    opened: dict[str, tuple[Any, Any]] = {}
    rows: dict[str, int] = {}
    for batch in batches:
        for directory, some in _divided(pa.Table.from_batches([batch]), by):
            if directory not in opened:
                name = f"{place}/{directory}part-{uuid4().hex}.zstd.parquet"
                tree.create_dir(name.rpartition("/")[0], recursive=True)
                sink = tree.open_output_stream(name)
                opened[directory] = (name, pq.ParquetWriter(sink, some.schema, compression="zstd")), sink
                rows[directory] = 0
            opened[directory][0][1].write_table(some)
            rows[directory] += some.num_rows
    found = []
    for directory, ((name, writer), sink) in opened.items():
        writer.close()
        size = sink.tell()
        sink.close()
        found.append({"name": name, "size": size, "rows": rows[directory]})
    schema = pa.schema({"name": pa.string(), "size": pa.int64(), "rows": pa.int64()})
    yield pa.RecordBatch.from_pylist(found, schema)


def _divided(table: pa.Table, by: tuple[str, ...], directory: str = "") -> Iterator[tuple[str, pa.Table]]:
    if not by:
        if table.num_rows:
            yield directory, table
        return
    column, *further = by
    for value in pc.unique(table[column]).to_pylist():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        some = table.filter(pc.equal(table[column], value)).drop_columns([column])
        yield from _divided(some, tuple(further), f"{directory}{column}={text}/")


class _Some(InputPartition):
    def __init__(self, paths: list[str]) -> None:
        super().__init__(None)
        self.paths = paths


class _Reader(DataSourceReader):
    def __init__(self, schema: StructType, paths: list[str]) -> None:
        self._schema = schema
        self._paths = paths

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the files among tasks."""
        tasks = min(_MOST_TASKS, len(self._paths))
        return [_Some(self._paths[number::tasks]) for number in range(tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of one task."""
        assert isinstance(partition, _Some)
        schema = to_arrow_schema(self._schema, timezone="UTC")
        for path in partition.paths:
            root, _, name = path.rpartition("/")
            with Files(root).open(name) as source, pq.ParquetFile(source) as file:
                there = [column for column in schema.names if column in file.schema_arrow.names]
                for batch in file.iter_batches(_ROWS, columns=there):
                    columns = {column: batch.column(column) for column in there}
                    columns[FILE] = pa.repeat(pa.scalar(path), batch.num_rows)
                    yield pa.RecordBatch.from_arrays(
                        [
                            columns[field.name].cast(field.type)
                            if field.name in columns
                            else pa.nulls(batch.num_rows, field.type)
                            for field in schema
                        ],
                        schema=schema,
                    )


class StoredFiles(DataSource):
    """Files on file systems that Spark cannot reach."""

    @classmethod
    def name(cls) -> str:
        """``dtx-files``."""
        return "dtx-files"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for ``spark.read``."""
        return _Reader(schema, json.loads(self.options["paths"]))

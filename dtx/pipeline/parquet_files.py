"""Reads and writes Parquet files: on this machine by Spark's own code, elsewhere by Arrow in Spark's tasks.

Spark needs Hadoop's jars for S3 and the like, which must fit its build, and it has none of them. Arrow and
``deltalake`` need only their wheels, and take keys and endpoint from the same environment variables (``AWS_…``).
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from dtx.pipeline.files import Files
from dtx.pipeline.session import few_rows, no_rows

FILE: Final = "file"
"""The optional column with the URI of a row's file."""
_AT_ONCE: Final = 16
_MOST_TASKS: Final = 64
_ROWS: Final = 65_536
_WRITTEN: Final = pa.schema({"name": pa.string(), "size": pa.int64(), "rows": pa.int64()})


def read(spark: SparkSession, files: Files, names: Iterable[str], schema: StructType, *, named: bool) -> DataFrame:
    """Return rows of the directory *files*: of *names* in it, or URIs. A column that a file lacks is null.

    If *named*, rows have the column :data:`FILE`.
    """
    paths = [name if "://" in name else files.path(name) for name in names]
    whole = StructType([*schema.fields, StructField(FILE, StringType())]) if named else schema
    if not paths:
        return no_rows(spark, whole)
    if files.is_local:
        # recursiveFileLookup turns off partition discovery, which would guess types from names of directories
        found = spark.read.schema(schema).option("recursiveFileLookup", "true").parquet(*paths)
        return found.select("*", sf.col("_metadata.file_path").alias(FILE)) if named else found
    listed = spark.createDataFrame(pa.table({FILE: paths})).repartition(min(_MOST_TASKS, len(paths)))
    return listed.mapInArrow(partial(_read, to_arrow_schema(whole, timezone="UTC")), whole)


def write(frame: DataFrame, files: Files, place: str, by: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Write rows to *place*, a new directory, and return the size in bytes and the number of rows of each file.

    The values of the columns *by* are kept in names of directories, ``column=value``, and not in the files.
    """
    if not files.is_local:
        written = frame.mapInArrow(partial(_write, files.uri, place, tuple(by)), from_arrow_schema(_WRITTEN)).collect()
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
    found = []

    def note(file: Any) -> None:
        found.append({"name": file.path, "size": file.size, "rows": file.metadata.num_rows})

    first = next(batches, None)
    if first is not None:
        ds.write_dataset(
            pa.RecordBatchReader.from_batches(first.schema, chain([first], batches)),
            place,
            basename_template=f"part-{uuid4().hex}-{{i}}.zstd.parquet",
            format="parquet",
            partitioning=ds.partitioning(pa.schema([first.schema.field(name) for name in by]), flavor="hive"),
            filesystem=Files(root).tree,
            file_options=ds.ParquetFileFormat().make_write_options(compression="zstd"),
            existing_data_behavior="overwrite_or_ignore",  # tasks write into the same directories
            file_visitor=note,
        )
    yield pa.RecordBatch.from_pylist(found, _WRITTEN)


def _read(schema: pa.Schema, listed: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read the files of one task."""
    stored = pa.schema([field for field in schema if field.name != FILE])
    for path in (path for batch in listed for path in batch.column(0).to_pylist()):
        root, _, name = path.rpartition("/")
        for batch in ds.dataset(name, stored, "parquet", Files(root).tree).to_batches(batch_size=_ROWS):
            columns = [*batch.columns, pa.repeat(pa.scalar(path), batch.num_rows)]
            yield pa.RecordBatch.from_arrays(columns[: len(schema)], schema=schema)

"""``spark.read.format("dtx")``: what the databases have at one moment, which is that of the first use of the DataFrame.

A DataFrame is planned once: its second action reads the same rows as its first. Another ``load()`` is another moment.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dtx.pipeline.source.options import Options
from dtx.pipeline.source.planning import Part, plan
from dtx.pipeline.source.reading import read
from dtx.pipeline.source.server import connected

AT_ONCE: Final = 16
"""Databases that are asked at a time: one that is away must not make hundreds wait for their turn."""


class BatchReader(DataSourceReader):
    """Plans and reads one table of the databases.

    Args:
        options: which databases, and how.
        schema: the columns.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Each database's ranges, with what each has to show.

        Raises:
            SourceError: a database is away, or its journal cannot be read.
        """
        names = [name for name in self._options.sources if self._options.wants(name)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            parts: list[InputPartition] = [part for found in pool.map(self._plan, names) for part in found]
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one range; see :func:`dtx.pipeline.source.reading.read`."""
        if isinstance(partition, Part):
            yield from read(self._options, self._schema, partition)

    def _plan(self, name: str) -> list[Part]:
        with connected(name, self._options.sources[name], self._options.waits) as server:
            return plan(server, self._options)

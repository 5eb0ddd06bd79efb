"""``format("dtx")``: tables of dtx in one or many databases as DataFrames, and the journal as a stream."""

from pyspark.sql import SparkSession

from dtx.pipeline.source.datasource import DtxDataSource
from dtx.pipeline.source.server import SourceAway, SourceError, Waits, reachable

__all__ = ["DtxDataSource", "SourceAway", "SourceError", "Waits", "reachable", "register"]


def register(spark: SparkSession) -> None:
    """Add ``format("dtx")`` to a session; see :class:`DtxDataSource` for its options."""
    spark.dataSource.register(DtxDataSource)

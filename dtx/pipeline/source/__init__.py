"""``format("dtx")``: journal, branch, work and heuristic_outcome of one or many databases as DataFrames and streams."""

from typing import TYPE_CHECKING

from dtx.pipeline.source.datasource import DtxDataSource
from dtx.pipeline.source.server import SourceAway, SourceError, Waits, reachable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "DtxDataSource",
    "SourceAway",
    "SourceError",
    "Waits",
    "reachable",
    "register",
]


def register(spark: "SparkSession") -> None:
    """Make ``format("dtx")`` known to a session."""
    spark.dataSource.register(DtxDataSource)

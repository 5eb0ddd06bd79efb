"""Spark for tests: one small session for a whole test process, since a JVM takes seconds to start."""

import atexit
import functools
import tempfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dtx.pipeline.session import SessionOptions, make_session
from tests.support.processes import unmeasured

_MEMORY = 1 << 30


@functools.cache
def shared_spark() -> SparkSession:
    """The session of this process: two cores, tiny shuffles, no web pages. It ends with the process."""
    directory = tempfile.TemporaryDirectory(prefix="dtx-spark-")
    options = SessionOptions(
        master="local[2]",
        memory=_MEMORY,
        partitions=2,
        local_dir=Path(directory.name),
        # a test is over before the optimising compiler has paid for itself
        java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        settings={"spark.sql.sources.parallelPartitionDiscovery.parallelism": "2"},
    )
    with unmeasured():  # what runs in its Python workers, other tests run in their own process
        spark = make_session(options)

    def end() -> None:
        spark.stop()
        directory.cleanup()

    atexit.register(end)
    return spark


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """See :func:`shared_spark`. Use it from a ``conftest.py``: ``from tests.support.spark import spark``."""
    return shared_spark()

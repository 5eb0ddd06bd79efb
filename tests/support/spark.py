"""Spark for tests: one small session for a whole test process, since a JVM takes seconds to start.

What is tiny and planned anew each time takes Spark longer to plan, watch and compile than to do: so nothing is compiled
or adapted, and no plan is drawn. ``DTX_PIPELINE=long`` (``make pipeline``) leaves Spark as the pipeline has it, and
plays more.
"""

import atexit
import functools
import os
import tempfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dtx.pipeline.session import SessionOptions, make_session
from tests.support.processes import unmeasured

LONG = os.environ.get("DTX_PIPELINE") == "long"
"""Whether tests of the pipeline play their long forms."""
_MEMORY = 1 << 30
_QUICK = {
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.ui.explainMode": "simple",
}


@functools.cache
def shared_spark() -> SparkSession:
    """The session of this process: two cores, tiny shuffles, no web pages. It ends with the process."""
    directory = tempfile.TemporaryDirectory(prefix="dtx-spark-")
    options = SessionOptions(
        master="local[2]",
        memory=_MEMORY,
        partitions=2 if LONG else 1,
        local_dir=Path(directory.name),
        # a test is over before the optimising compiler has paid for itself
        java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        settings={"spark.sql.sources.parallelPartitionDiscovery.parallelism": "2"} | ({} if LONG else _QUICK),
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

"""Spark for tests: one small session for a whole test process, since a JVM takes seconds to start.

For tiny data Spark takes longer to plan, monitor and compile a query than to run it. So these settings turn off
compilation, adaptive execution and plan output. The evidence tier uses the settings of the pipeline instead.
"""

import atexit
import functools
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dtx.pipeline.session import SessionOptions, make_session
from tests.support.postgres import PostgresServer
from tests.support.processes import unmeasured

_MEMORY = 1 << 30
_QUICK_WORKER = Path(__file__).with_name("quick_worker.py")
_QUICK = {
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.ui.explainMode": "simple",
}


def quick_python() -> Path:
    """A Python for workers that imports the installed PySpark and connects back to Spark at once.

    Spark puts PySpark on their path as an archive; Python compiles its modules again for every worker: a start is
    three times slower (1.5 s instead of 0.5 s). Workers that must connect back within ten seconds
    run :mod:`tests.support.quick_worker`.
    """
    import pyspark

    directory = Path(tempfile.mkdtemp(prefix="dtx-python-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program = directory / "python"
    installed = shlex.quote(str(Path(pyspark.__file__).parent.parent))
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={installed}"${{PYTHONPATH:+:$PYTHONPATH}}"\nexport PYTHONPATH\n'
        f'case "$1${{PYTHON_WORKER_FACTORY_PORT}}${{PYTHON_WORKER_FACTORY_SOCK_PATH}}" in\n'
        f'-m?*) exec {shlex.quote(sys.executable)} {shlex.quote(str(_QUICK_WORKER))} "$@" ;;\n'
        "esac\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    program.chmod(0o755)
    return program


@functools.cache
def shared_spark(*, quick: bool = True) -> SparkSession:
    """The session of this process: two cores, no web pages. It ends with the process.

    Args:
        quick: settings for tiny data; otherwise those of the pipeline.
    """
    directory = tempfile.TemporaryDirectory(prefix="dtx-spark-")
    options = SessionOptions(
        master="local[2]",
        memory=_MEMORY,
        partitions=1 if quick else 2,
        local_dir=Path(directory.name),
        # tests are too short for the optimising compiler
        java_options="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        settings={"spark.sql.sources.parallelPartitionDiscovery.parallelism": "2"} | (_QUICK if quick else {}),
    )
    os.environ.setdefault("PYSPARK_PYTHON", str(quick_python()))
    with unmeasured():  # other tests run the code of its Python workers in their own process
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


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """A database with dtx's tables, for one test."""
    url = postgres.create_migrated_database()
    yield url
    postgres.drop_database(url)

"""Starts a Spark session: in this process, on a cluster, or through Spark Connect.

Where Spark starts in this process, this module finds Java, limits memory (Spark spills the rest to disk) and shows
errors alone of Spark's log. A remote session (``sc://``) needs no Java here, and keeps the settings of its server.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dtx.pipeline.java import class_archive, find_java, is_newest, make_java_home
from dtx.pipeline.progress import Progress

LOCAL: Final = "local[*]"
LOG_LEVELS: Final = ("error", "warn", "info", "debug")
_GIB: Final = 1 << 30
_LEAST_MEMORY: Final = _GIB
"""Spark refuses to start with less than 450 MiB; below 1 GiB it spills all the time."""
_MOST_MEMORY: Final = 5 * _GIB
"""Of the default heap: a run with Python workers and buffers then stays below 8 GB."""
_MOST_PARTITIONS: Final = 64
"""Of the default: 100,000,000 lines are 1.6 million for each partition."""
_LINES_OF_A_PARTITION: Final = 500_000
_FEW_LINES: Final = 200_000
_SHORT_LINES: Final = 3_000_000
_QUICK_NAME: Final = "spark.dtx.quick"
_QUICK: Final = {
    _QUICK_NAME: "true",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.ui.explainMode": "simple",
}
"""For few lines: compiling a query takes longer than running it."""
_ARCHIVE_SECONDS: Final = 300.0
"""Limit for writing the archive of classes, which takes Java about 25 s."""
_ABANDONED_SECONDS: Final = 86_400.0
"""Age of an unfinished archive whose process has been killed."""
_SHORT_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUIET_ARCHIVE: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_CALLED: Final = "An error occurred while calling "
"""Start of errors that py4j has no class for; Java's stack follows."""
_CAUSE: Final = "Caused by: "
_CONFIGURATION: Final = Path(__file__).with_name("log4j2.properties")

_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.maxConcurrentOutputFileWriters": "100",  # else rows are sorted by the columns of directories
    "spark.sql.codegen.hugeMethodLimit": "8000",  # bytes: Java interprets longer methods, and never compiles them
}
"""Settings that results depend on. They can be set in any session, also of a remote server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Where Spark runs, and its limits.

    Args:
        master: ``local[*]``, ``local[2]``, ``spark://host:7077``, ….
        remote: a Spark Connect server, ``sc://host:15002``; then *master* and the sizes have no effect.
        memory: bytes of Java heap of the driver, which in local mode does all the work; ``None``: a quarter of this
            machine's memory, 1 to 5 GiB.
        executor_memory: bytes of heap of each executor of a cluster; ``None``: the default of the cluster.
        partitions: of a shuffle; ``None``: by *lines*.
        lines: approximate number of journal lines and verdicts that will be read; ``None``: very many.
        local_dir: for spilled data; ``None``: the system's directory for temporary files.
        ui: whether Spark's own web pages are served, on loopback.
        log: the lowest level of Spark's log that is shown.
        java_options: further options for the driver's Java.
        keep_classes: write :func:`~dtx.pipeline.java.class_archive` at the end, if there is none that fits.
        settings: further settings of Spark, which override all others.
    """

    master: str = LOCAL
    remote: str | None = None
    memory: int | None = None
    executor_memory: int | None = None
    partitions: int | None = None
    lines: int | None = None
    local_dir: Path | None = None
    ui: bool = False
    log: str = "error"
    java_options: str = ""
    keep_classes: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_quick(self) -> bool:
        """Whether there are so few lines that starting, planning and compiling take longest."""
        return self.lines is not None and self.lines <= _FEW_LINES

    @property
    def is_short(self) -> bool:
        """Whether Java's optimising compiler would take longer than it saves."""
        return self.lines is not None and self.lines <= _SHORT_LINES

    @property
    def pieces(self) -> int:
        """Partitions of a shuffle."""
        if self.partitions is not None:
            return self.partitions
        if self.lines is None:
            return _MOST_PARTITIONS
        return 1 if self.is_quick else min(_MOST_PARTITIONS, max(8, self.lines // _LINES_OF_A_PARTITION))


def default_memory() -> int:
    """Return the default heap in bytes: a quarter of the memory of the machine or control group, within limits."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):  # no control groups here, or no limit in them ("max")
            there = min(there, int(limit.read_text()))
    return max(_LEAST_MEMORY, min(_MOST_MEMORY, there // 4))


@contextmanager
def open_session(options: SessionOptions | None = None) -> Iterator[SparkSession]:
    """Open a session, and stop it at the end; Ctrl-C cancels running work first."""
    options = options or SessionOptions()
    root = logging.getLogger()
    root.addFilter(_no_stack_of_py4j)
    try:
        words, archive, unfinished = _class_options(options)  # before JAVA_HOME changes
        spark = make_session(replace(options, java_options=f"{words} {options.java_options}"))
        is_done = False
        if threading.current_thread() is threading.main_thread():
            # PySpark's own handler calls Java in the middle of another call, which fails with an error
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield spark
            is_done = True
        except KeyboardInterrupt:
            with suppress(Exception):  # the server may be gone
                spark.interruptAll()
            raise
        finally:
            with suppress(Exception):  # the work has ended or failed: an error here changes neither
                spark.stop()
            if unfinished is not None:
                _keep_classes(archive, unfinished, complete=is_done)
    finally:
        root.removeFilter(_no_stack_of_py4j)


def _class_options(options: SessionOptions) -> tuple[str, Path, Path | None]:
    """Return options of Java that map or write its archive of classes, and the path of the archive.

    If Java is to write it, return its path until it is complete too: Java that maps a part of an archive ends at once.
    """
    if options.remote:
        return "", Path(), None
    java = find_java()
    archive = class_archive(java)
    if is_newest(archive, java):
        return f'"-XX:SharedArchiveFile={archive}" {_QUIET_ARCHIVE}', archive, None
    unfinished = archive.with_suffix(f".{os.getpid()}.new")
    try:
        if not options.keep_classes:
            return "", archive, None
        archive.parent.mkdir(parents=True, exist_ok=True)
        for old in archive.parent.glob(f"{archive.stem}.*.new"):
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                old.unlink()
        unfinished.touch()
    except OSError:  # it cannot be written there, or another process has removed an old file
        return "", archive, None
    return f'"-XX:ArchiveClassesAtExit={unfinished}" {_QUIET_ARCHIVE}', archive, unfinished


def _keep_classes(archive: Path, unfinished: Path, *, complete: bool) -> None:
    """End Java, which then writes its archive of classes; without it the next start takes longer, and no more.

    Java must write none if the session has not loaded the classes of a *complete* run.
    """
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway = context._gateway  # noqa: SLF001 - no other way to end Java
    context._gateway = context._jvm = None  # noqa: SLF001 - the next session starts another
    try:
        with Progress(None, "keeping Java's classes for later runs"):
            if complete:
                gateway.shutdown()
            else:
                gateway.proc.kill()
            gateway.proc.stdin.close()
            status = gateway.proc.wait(_ARCHIVE_SECONDS)
        if complete and status == 0 and unfinished.stat().st_size:
            unfinished.replace(archive)
    except (OSError, subprocess.TimeoutExpired):
        return
    finally:
        gateway.proc.kill()
        unfinished.unlink(missing_ok=True)


def _no_stack_of_py4j(record: logging.LogRecord) -> bool:
    """Drop records of py4j: it logs a stack when Ctrl-C or the end of Java cuts off a call, and raises an error too."""
    return "py4j" not in Path(record.pathname).parts


def make_session(options: SessionOptions) -> SparkSession:
    """Start a session as :func:`open_session` does; the caller stops it."""
    builder = SparkSession.builder.appName("dtx pipeline")
    settings = {**_ALWAYS, "spark.sql.shuffle.partitions": str(options.pieces), **(_QUICK if options.is_quick else {})}
    if options.remote:
        builder = builder.remote(options.remote)
    else:
        os.environ["JAVA_HOME"] = str(make_java_home(find_java()))
        if options.master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the machine's own name may not resolve
        for name in ("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON"):
            os.environ.setdefault(name, sys.executable)
        builder = builder.master(options.master)
        settings |= _static(options)
    for name, text in {**settings, **options.settings}.items():
        builder = builder.config(name, text)
    session: SparkSession = builder.getOrCreate()
    return session


def _static(options: SessionOptions) -> dict[str, str]:
    """Return settings that Spark reads only when it starts."""
    memory = options.memory or default_memory()
    words = [_SHORT_JAVA, options.java_options] if options.is_short else [options.java_options]
    settings = {
        "spark.driver.memory": f"{memory >> 20}m",
        "spark.python.authenticate.socketTimeout": "300s",  # loopback: a slow worker lacks processor time
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_CONFIGURATION.as_uri()} -Ddtx.spark.log={options.log} "
            f"-Ddtx.spark.log.level={'off' if options.log == LOG_LEVELS[0] else options.log} {' '.join(words)}"
        ),
        "spark.driver.maxResultSize": "1g",
        "spark.ui.enabled": str(options.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.python.sql.dataFrameDebugging.enabled": "false",  # five more calls of Java for each column
    }
    if options.local_dir is not None:
        settings["spark.local.dir"] = str(options.local_dir)
        settings["spark.sql.warehouse.dir"] = (options.local_dir / "warehouse").as_uri()
    if options.executor_memory is not None:
        settings["spark.executor.memory"] = f"{options.executor_memory >> 20}m"
    if options.master.startswith("local"):
        # no other machine needs to reach a driver without remote executors
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # the executor is this process: it may be slow on a busy machine, and is never lost
        settings |= {"spark.network.timeout": "1h", "spark.executor.heartbeatInterval": "60s"}
    return settings


def few_rows(frame: DataFrame) -> pa.Table | None:
    """Return the rows of *frame*, computed now; ``None`` if the session is not for few lines, or there are many rows.

    For few lines, each further job, and each file that Spark itself writes, takes longer than all rows.
    """
    if frame.sparkSession.conf.get(_QUICK_NAME, "false") != "true":
        return None
    rows = frame.limit(_FEW_LINES + 1).toArrow()
    return rows if rows.num_rows <= _FEW_LINES else None


def no_rows(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame without rows. For an empty list, Spark would start Python workers and run jobs."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return spark.createDataFrame(to_arrow_schema(schema, timezone="UTC").empty_table(), schema)


def explain(error: BaseException) -> str:
    """Return the message of a Spark *error* without its stack.

    It is the error of dtx in a Python worker, the last cause in Java, or the first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        kind, colon, sentence = line.partition(": ")
        if colon and kind.startswith("dtx.") and sentence:
            return sentence
    if lines and lines[0].startswith(_CALLED):
        causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
        return causes[-1] if causes else " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__

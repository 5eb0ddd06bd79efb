"""One way to a Spark session for everything here: in this process, on a cluster, or through Spark Connect.

Where Spark starts in this process, Java is found, memory and temporary files are sized by configuration (what does not
fit is spilled to disk), and its logs are quiet. A remote session (``sc://``) needs no Java here; what its server was
started with is the server's own.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dtx.pipeline.java import JavaMissing, class_archive, find_java, quiet_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
LOG_LEVELS: Final = ("error", "warn", "info", "debug")
_GIB: Final = 1 << 30
_LEAST_MEMORY: Final = _GIB
"""Spark refuses to start with less than 450 MiB; below 1 GiB it spills all the time."""
_MOST_MEMORY: Final = 5 * _GIB
"""Of a default: the heap, and a run with Python workers and buffers beside it stays below 8 GB."""
_MOST_PARTITIONS: Final = 64
"""Of a default: 100,000,000 lines are 1.6 million to a piece."""
_LINES_OF_A_PARTITION: Final = 500_000
_FEW_LINES: Final = 200_000
_SHORT_LINES: Final = 3_000_000
_QUICK: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.maxPlanStringLength": "100",
    "spark.sql.ui.explainMode": "simple",
}
"""For few lines: to compile a query takes longer than to do it."""
_ARCHIVE_SECONDS: Final = 300.0
"""How long Java may take to write its archive of classes: about 25 s."""
_SHORT_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_QUIET_ARCHIVE: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_CALLED: Final = "An error occurred while calling "
"""So begins what py4j has no class of its own for; it goes on with the stack of Java."""
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
"""What results depend on; can be set in any session, also of somebody else's server."""


class SparkMissing(Exception):
    """The extra is not installed; the sentence says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Where Spark runs, and how large it may become.

    Args:
        master: ``local[*]``, ``local[2]``, ``spark://host:7077``, ….
        remote: a Spark Connect server, ``sc://host:15002``; then *master* and the sizes do not count.
        memory: bytes of Java heap of the driver, which in local mode does all the work; ``None``: a quarter of this
            machine's memory, 1 to 5 GiB.
        executor_memory: bytes of heap of each executor of a cluster; ``None``: what the cluster gives.
        partitions: pieces of a shuffle; ``None``: as suits *lines*.
        lines: of journals that will be read, about; ``None``: very many.
        local_dir: for what is spilled; ``None``: the system's directory for temporary files.
        ui: whether Spark's own web pages are served, on loopback.
        log: from which level on Spark's log is shown.
        java_options: further words for the driver's Java.
        keep_classes: write :func:`~dtx.pipeline.java.class_archive` at the end, if there is none.
        settings: further settings of Spark; these win.
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
        """Whether so little is read that starting, planning and compiling take longest."""
        return self.lines is not None and self.lines <= _FEW_LINES

    @property
    def is_short(self) -> bool:
        """Whether the optimising compiler of Java would take longer than it saves."""
        return self.lines is not None and self.lines <= _SHORT_LINES

    @property
    def pieces(self) -> int:
        """Of a shuffle."""
        if self.partitions is not None:
            return self.partitions
        if self.lines is None:
            return _MOST_PARTITIONS
        return 1 if self.is_quick else min(_MOST_PARTITIONS, max(8, self.lines // _LINES_OF_A_PARTITION))


def default_memory() -> int:
    """Bytes of heap where nothing is said: a quarter of what there is, within limits."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):  # no control groups here, or no limit in them ("max")
            there = min(there, int(limit.read_text()))
    return max(_LEAST_MEMORY, min(_MOST_MEMORY, there // 4))


@contextmanager
def open_session(options: SessionOptions | None = None) -> Iterator["SparkSession"]:
    """A session, stopped at the end; when it ends with Ctrl-C, what runs is cancelled first.

    Raises:
        SparkMissing: pyspark is not installed.
        JavaMissing: Spark is to start here, and there is no Java for it.
    """
    root = logging.getLogger()
    root.addFilter(_no_stack_of_py4j)
    try:
        with _session(options or SessionOptions()) as spark:
            yield spark
    finally:
        root.removeFilter(_no_stack_of_py4j)


@contextmanager
def _session(options: SessionOptions) -> Iterator["SparkSession"]:
    keeps = not options.remote and _keeps(options)
    spark = make_session(options)
    if threading.current_thread() is threading.main_thread():
        # PySpark's own asks Java to stop in the middle of whatever is being asked already, which fails and is told
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield spark
    except KeyboardInterrupt:
        with suppress(Exception):  # a server that is gone has nothing to be cancelled
            spark.interruptAll()
        raise
    finally:
        with suppress(Exception):  # the work is done or has failed: the end of Spark changes neither
            spark.stop()
    if keeps:
        _keep_classes()


def _keeps(options: SessionOptions) -> bool:
    return options.keep_classes and not class_archive(find_java()).exists()


def _keep_classes() -> None:
    """End Java, which writes its archive then.

    Raises:
        JavaMissing: it has written none.
    """
    from pyspark import SparkContext

    context: Any = SparkContext
    gateway, archive = context._gateway, class_archive(find_java())  # noqa: SLF001 - the one way to end Java
    context._gateway = context._jvm = None  # noqa: SLF001 - the next session starts another
    gateway.shutdown()
    gateway.proc.stdin.close()
    status = gateway.proc.wait(_ARCHIVE_SECONDS)
    new = _unfinished(archive)
    if status or not new.exists():
        new.unlink(missing_ok=True)
        raise JavaMissing(f"Java has not kept its classes in {archive}: look for space there, or try another Java")
    new.replace(archive)


def _unfinished(archive: Path) -> Path:
    """Java ends at once when it maps part of an archive: it gets its name when it is whole."""
    return archive.with_suffix(f".{os.getpid()}")


def _no_stack_of_py4j(record: logging.LogRecord) -> bool:
    """py4j shows a stack when Ctrl-C or the end of Java cuts off what it asks; what it raises says that as well."""
    return "py4j" not in Path(record.pathname).parts


def make_session(options: SessionOptions) -> "SparkSession":
    """As :func:`open_session`; the caller stops it."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkMissing(f"the pipeline needs PySpark ({error}): pip install 'dtx[pipeline]'") from error
    settings = {**_ALWAYS, "spark.sql.shuffle.partitions": str(options.pieces), **(_QUICK if options.is_quick else {})}
    builder = SparkSession.builder.appName("dtx pipeline")
    if options.remote:
        builder = builder.remote(options.remote)
    else:
        _prepare_environment(local=options.master.startswith("local"))
        builder = builder.master(options.master)
        settings |= _static(options)
    for name, text in {**settings, **options.settings}.items():
        builder = builder.config(name, text)
    session: SparkSession = builder.getOrCreate()
    return session


def _prepare_environment(*, local: bool) -> None:
    """Spark's launcher and its Python workers read these; what is there already stays."""
    os.environ["JAVA_HOME"] = str(quiet_home(find_java()))
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # machines whose own name nobody can resolve
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _static(options: SessionOptions) -> dict[str, str]:
    """Settings that Spark reads when it starts."""
    memory = options.memory or default_memory()
    words = [_SHORT_JAVA] if options.is_short else []
    archive = class_archive(find_java())
    if _keeps(options):
        archive.parent.mkdir(parents=True, exist_ok=True)
        words.append(f'"-XX:ArchiveClassesAtExit={_unfinished(archive)}" {_QUIET_ARCHIVE}')
    elif archive.exists():
        words.append(f'"-XX:SharedArchiveFile={archive}" {_QUIET_ARCHIVE}')
    words.append(options.java_options)
    settings = {
        "spark.driver.memory": f"{memory >> 20}m",
        "spark.python.authenticate.socketTimeout": "300s",  # loopback: whoever is slow there is starved, not away
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_CONFIGURATION.as_uri()} -Ddtx.spark.log={options.log} "
            f"-Ddtx.spark.log.told={'off' if options.log == LOG_LEVELS[0] else options.log} {' '.join(words)}"
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
        # nobody else has business with a driver that has no executors elsewhere
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        # nor is the executor, which is this process, ever away: it is slow where others compute
        settings |= {"spark.network.timeout": "1h", "spark.executor.heartbeatInterval": "60s"}
    return settings


def explain(error: BaseException) -> str:
    """The sentence in Spark's words about *error*, without the stack around it: what was raised in a Python worker, or
    what was at the bottom of it in Java.
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

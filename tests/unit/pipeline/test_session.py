"""A session that is stopped with Ctrl-C, without Spark."""

import logging
import os
import signal
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest

from dtx.pipeline import session
from dtx.pipeline.java import Java, JavaMissing, class_archive
from dtx.pipeline.session import SessionOptions, open_session


class Spark:
    """A stub of a session that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def interruptAll(self) -> None:  # noqa: N802 - Spark's name
        self.asked.append("interrupt")
        raise ConnectionError("Java has heard of Ctrl-C, too")

    def stop(self) -> None:
        self.asked.append("stop")


def test_ctrl_c_cancels_running_jobs_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark's signal handler calls Java in the middle of another call, and py4j logs a traceback."""
    spark = Spark()

    def make(_: SessionOptions) -> Spark:
        signal.signal(signal.SIGINT, lambda *_: pytest.fail("PySpark's own"))
        return spark

    monkeypatch.setattr(session, "make_session", make)
    record = logging.LogRecord("root", logging.ERROR, "/x/py4j/java_gateway.py", 1, "stack", None, None)

    def work() -> None:
        with open_session():
            logging.getLogger().handle(record)
            logging.getLogger().error("of somebody else")
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert spark.asked == ["interrupt", "stop"]
    assert caplog.messages == ["of somebody else"]
    logging.getLogger().handle(record)
    assert caplog.messages == ["of somebody else", "stack"], "the filter ends with the session"


def test_an_error_that_ends_a_task_is_reported_once() -> None:
    """The pipeline reports it in one sentence. Only with Spark's log does Spark report it too."""
    words = [session._static(SessionOptions(log=log))["spark.driver.extraJavaOptions"] for log in ("error", "info")]
    assert ["-Ddtx.spark.log.level=off" in each for each in words] == [True, False]
    assert "-Ddtx.spark.log.level=info" in words[1]
    assert session._CONFIGURATION.read_text().count("${sys:dtx.spark.log.level:-error}") == 3


def test_a_session_suits_the_lines_that_it_reads() -> None:
    """For few lines, compilation takes longer than reading. Many lines are partitioned."""
    found = {lines: SessionOptions(lines=lines) for lines in (None, 2_000, 1_000_000, 20_000_000, 10**9)}
    assert [(each.is_quick, each.pieces) for each in found.values()] == [
        (False, 64), (True, 1), (False, 8), (False, 40), (False, 64),
    ]  # fmt: skip
    assert SessionOptions(lines=2_000, partitions=7).pieces == 7
    words = [session._static(each)["spark.driver.extraJavaOptions"] for each in found.values()]
    assert ["TieredStopAtLevel" in each for each in words] == [False, True, True, False, False]


def test_classes_are_mapped_once_they_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "a place/spark-java-17.jsa"
    monkeypatch.setattr(session, "class_archive", lambda _: archive)
    monkeypatch.setattr(session, "find_java", lambda: None)

    def words(*, keep: bool) -> str:
        return session._static(SessionOptions(keep_classes=keep))["spark.driver.extraJavaOptions"]

    assert ".jsa" not in words(keep=False)
    assert f'"-XX:ArchiveClassesAtExit={archive.with_suffix(f".{os.getpid()}")}"' in words(keep=True)
    archive.touch()
    assert f'"-XX:SharedArchiveFile={archive}"' in words(keep=False)
    assert words(keep=True) == words(keep=False), "the archive is written once"


def test_an_archive_of_classes_belongs_to_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    java = Java(Path("/java"), 21, "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr("sys.prefix", "/venv")
    assert class_archive(java) == Path(f"/venv/var/dtx/spark-{pyspark.__version__}-java-21.jsa")
    monkeypatch.setattr("sys.base_prefix", "/venv")
    assert class_archive(java) == Path(f"/cache/dtx/spark-{pyspark.__version__}-java-21.jsa")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/dtx-pipeline:/other")
    assert class_archive(java) == Path(f"/var/cache/dtx-pipeline/dtx/spark-{pyspark.__version__}-java-21.jsa")


def test_java_that_keeps_no_classes_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "spark-java-17.jsa"
    monkeypatch.setattr(session, "class_archive", lambda _: archive)
    monkeypatch.setattr(session, "find_java", lambda: None)
    monkeypatch.setattr("pyspark.SparkContext._jvm", None)
    for program, kept in (("exit 0", False), (f"touch {archive.with_suffix(f'.{os.getpid()}')}; exit 1", False),
                          (f"touch {archive.with_suffix(f'.{os.getpid()}')}", True)):  # fmt: skip
        process = subprocess.Popen(["/bin/sh", "-c", program], stdin=subprocess.PIPE)
        gateway = SimpleNamespace(proc=process, shutdown=lambda: None)
        monkeypatch.setattr("pyspark.SparkContext._gateway", gateway)
        with nullcontext() if kept else pytest.raises(JavaMissing, match="Java has not written its classes to"):
            session._keep_classes()
        assert [path.name for path in tmp_path.iterdir()] == ([archive.name] if kept else [])


def test_a_java_error_is_its_last_cause_without_stack() -> None:
    stack = "An error occurred while calling o7.parquet.\n: a.SparkException: Job aborted\n\tat a.b(c)\n"
    assert session.explain(Exception(f"{stack}Caused by: a.A: first\n\tat d\nCaused by: a.B: disk full\n\tat e")) == (
        "a.B: disk full"
    )
    assert (
        session.explain(Exception(stack))
        == "An error occurred while calling o7.parquet. : a.SparkException: Job aborted"
    )
    assert session.explain(
        Exception("[STREAM_FAILED] it\n\tat x\ndtx.a.b.SourceAway: bank: gone\n SQLSTATE: 38000")
    ) == ("bank: gone")
    assert session.explain(Exception("")) == "Exception"

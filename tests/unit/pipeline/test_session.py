"""A session that is stopped with Ctrl-C, without Spark."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest

from dtx.pipeline import session
from dtx.pipeline.java import Java, class_archive
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


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the place of the archive of classes of a Java that was just installed."""
    archive = tmp_path / "a place/spark-java-17.jsa"
    program = tmp_path / "java/bin/java"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(session, "class_archive", lambda _: archive)
    monkeypatch.setattr(session, "find_java", lambda: Java(tmp_path / "java", 17, ""))
    return archive


def _new(archive: Path) -> Path:
    return archive.with_suffix(f".{os.getpid()}.new")


def _options(*, keep: bool = True) -> str:
    return session._class_options(SessionOptions(keep_classes=keep))[0]


def test_classes_are_mapped_once_they_are_kept(archive: Path) -> None:
    assert _options(keep=False) == ""
    assert f'"-XX:ArchiveClassesAtExit={_new(archive)}"' in _options()
    archive.touch()
    assert f'"-XX:SharedArchiveFile={archive}"' in _options(keep=False)
    assert _options() == _options(keep=False), "the archive is written once"


def test_classes_of_an_older_java_are_written_again(archive: Path, tmp_path: Path) -> None:
    archive.parent.mkdir()
    archive.touch()
    assert "SharedArchiveFile" in _options()
    program = tmp_path / "java/bin/java"
    installed = archive.stat().st_mtime
    os.utime(archive, (installed - 60, installed - 60))
    os.utime(program, (installed - 3_600, installed - 3_600))  # the build's time, in a package
    assert "ArchiveClassesAtExit" in _options()
    assert _options(keep=False) == ""


def test_classes_are_not_kept_in_a_read_only_place(archive: Path) -> None:
    archive.parent.touch()  # no directory, which even root cannot write to
    assert _options() == ""


def test_unfinished_classes_of_a_killed_run_are_removed(archive: Path) -> None:
    archive.parent.mkdir()
    old, newer = (archive.with_suffix(f".{name}.new") for name in ("1", "2"))
    for path, age in ((old, 90_000), (newer, 3_600)):
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    _options()
    assert set(archive.parent.iterdir()) == {newer, _new(archive)}


def test_an_archive_of_classes_belongs_to_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java, name = Java(Path("/java"), 21, ""), f"dtx/spark-{pyspark.__version__}-java-21.jsa"
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert class_archive(java) == tmp_path / "var" / name
    monkeypatch.setattr("os.access", lambda *_: False)
    assert class_archive(java) == Path("/cache", name), "the environment belongs to another user"
    monkeypatch.undo()
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    monkeypatch.setattr("sys.base_prefix", sys.prefix)
    assert class_archive(java) == Path("/cache", name)
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/dtx-pipeline:/other")
    assert class_archive(java) == Path("/var/cache/dtx-pipeline", name)


def test_classes_are_kept_only_after_complete_runs(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    """Java that ends with an error, and a run that failed, leave no file and no process."""
    archive.parent.mkdir()
    new = _new(archive)
    monkeypatch.setattr("pyspark.SparkContext._jvm", None)
    for program, complete, kept in (
        ("exit 0", True, False),
        (f"echo classes > '{new}'; exit 1", True, False),
        (f"echo classes > '{new}'; sleep 600", False, False),
        (f"echo classes > '{new}'", True, True),
    ):
        new.touch()
        process = subprocess.Popen(["/bin/sh", "-c", program], stdin=subprocess.PIPE)
        gateway = SimpleNamespace(proc=process, shutdown=lambda: None)
        monkeypatch.setattr("pyspark.SparkContext._gateway", gateway)
        session._keep_classes(archive, new, complete=complete)
        assert process.poll() is not None
        assert [path.name for path in archive.parent.iterdir()] == ([archive.name] if kept else [])


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

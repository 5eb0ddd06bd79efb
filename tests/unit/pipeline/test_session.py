"""A session that is stopped with Ctrl-C, without Spark; with Spark nobody hears more of it either."""

import logging
import signal

import pytest

from dtx.pipeline import session
from dtx.pipeline.session import SessionOptions, open_session


class Spark:
    """A session that remembers what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def interruptAll(self) -> None:  # noqa: N802 - Spark's name
        self.asked.append("interrupt")
        raise ConnectionError("Java has heard of Ctrl-C, too")

    def stop(self) -> None:
        self.asked.append("stop")


def test_ctrl_c_cancels_what_runs_and_shows_no_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PySpark asks Java from its handler of the signal, in the middle of another question, and py4j shows a stack."""
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
    assert caplog.messages == ["of somebody else", "stack"], "outside it is as it was"


def test_what_ends_a_task_is_said_once() -> None:
    """By the pipeline, in one sentence; whoever asks for Spark's log has that, too."""
    words = [session._static(SessionOptions(log=log))["spark.driver.extraJavaOptions"] for log in ("error", "info")]
    assert ["-Ddtx.spark.log.told=off" in each for each in words] == [True, False]
    assert "-Ddtx.spark.log.told=info" in words[1]
    assert session._CONFIGURATION.read_text().count("${sys:dtx.spark.log.told:-error}") == 3


def test_a_session_suits_the_lines_that_it_reads() -> None:
    """Few lines take longer to compile for than to read; many are divided."""
    found = {lines: SessionOptions(lines=lines) for lines in (None, 2_000, 1_000_000, 20_000_000, 10**9)}
    assert [(each.is_quick, each.pieces) for each in found.values()] == [
        (False, 64), (True, 1), (False, 8), (False, 40), (False, 64),
    ]  # fmt: skip
    assert SessionOptions(lines=2_000, partitions=7).pieces == 7
    words = [session._static(each)["spark.driver.extraJavaOptions"] for each in found.values()]
    assert ["TieredStopAtLevel" in each for each in words] == [False, True, True, False, False]


def test_what_java_says_is_its_last_cause_and_no_stack() -> None:
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

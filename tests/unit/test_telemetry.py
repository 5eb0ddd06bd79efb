"""Logs have one event per line, no secrets and no control characters. Metrics have the text format of Prometheus."""

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from dtx.telemetry import Metrics, configure, get_logger
from dtx.telemetry.logs import REPEAT_SECONDS, REPEATS, Repeats
from dtx.xa.xid import Xid

SECRET = "s3cret-word"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to. The logging configuration is restored afterwards."""
    root = logging.getLogger()
    logging.getLogger("pika").setLevel(logging.NOTSET)  # the doctor sets it when it runs in this process
    before = root.handlers[:], root.level, logging.raiseExceptions
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_json(stream: io.StringIO) -> None:
    configure("info", "json", stream)
    get_logger(connection=7).info("branch prepared", xid=Xid(1, b"g", b"b"), vhost="/")
    (event,) = lines(stream)
    assert list(event)[:3] == ["at", "level", "event"]
    assert event["at"].endswith("Z")
    assert {key: event[key] for key in ("level", "event", "connection", "xid", "vhost")} == {
        "level": "info", "event": "branch prepared", "connection": 7, "xid": "1:67:62", "vhost": "/",
    }  # fmt: skip


def test_a_logger_made_before_configuration_obeys_it(stream: io.StringIO) -> None:
    log = get_logger(connection=1)
    configure("warning", "json", stream)
    log.info("hidden")
    log.warning("shown")
    assert [event["event"] for event in lines(stream)] == ["shown"]


def test_no_secret_reaches_the_log_whichever_way_it_comes(stream: io.StringIO) -> None:
    """No secret may reach the log."""
    configure("debug", "json", stream)
    log = get_logger()
    url = f"amqp://u:{SECRET}@h/"
    log.info(
        "connecting to %s", url, url=url, password=SECRET, body=SECRET.encode(), nested={"password": SECRET, "url": url}
    )
    log.info("list", urls=[url, (url,)], error=ValueError(url), raw=url.encode())
    try:
        raise RuntimeError(f"postgresql://u:{SECRET}@h/x password={SECRET}")
    except RuntimeError:
        log.exception("failed")
    logging.getLogger("pika").warning("cannot connect to %s", url)
    assert len(lines(stream)) == 4
    assert SECRET not in stream.getvalue()


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    configure("info", "json", stream)
    try:
        raise ValueError("x")
    except ValueError:
        get_logger().exception("failed", xid=Xid(1, b"g"))
    (event,) = lines(stream)
    assert "ValueError: x" in event["exception"]
    assert event["xid"] == "1:67:"


@pytest.mark.parametrize("form", ["json", "console"])
def test_control_characters_chosen_by_a_client_are_escaped(stream: io.StringIO, form: Any) -> None:
    configure("info", form, stream)
    get_logger().info("start\n\x1b[2J", queue=b"q\x1b[31m\n", user="\x1b]0;x\x07\u202e", n={"\x1b": "\r"})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)


def test_numbers_booleans_and_null_keep_their_types(stream: io.StringIO) -> None:
    configure("info", "json", stream)
    get_logger().info("x", n=1, f=0.5, t=True, none=None, many=(1, "a"))
    event = lines(stream)[0]
    assert (event["n"], event["f"], event["t"], event["none"], event["many"]) == (1, 0.5, True, None, [1, "a"])


def test_a_runaway_text_is_cut(stream: io.StringIO) -> None:
    configure("info", "json", stream)
    get_logger().info("x", reason="a" * 1_000_000)
    assert len(stream.getvalue()) < 20_000


def test_libraries_log_only_warnings(stream: io.StringIO) -> None:
    configure("debug", "json", stream)
    logging.getLogger("pika").info("chatter")
    logging.getLogger("asyncio").error("bad")
    assert [(event["logger"], event["event"]) for event in lines(stream)] == [("asyncio", "bad")]


def test_a_log_without_a_reader_blocks_nothing(stream: io.StringIO) -> None:
    class Broken(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    configure("info", "json", Broken())
    get_logger().info("x")
    logging.getLogger("pika").error("x")


def test_auto_is_text_on_a_terminal_and_json_elsewhere(stream: io.StringIO) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    configure("info", "auto", stream)
    get_logger().info("x")
    assert lines(stream)[0]["event"] == "x"
    terminal = Terminal()
    configure("info", "auto", terminal)
    get_logger().info("hello")
    assert "hello" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")


def test_operations_are_counted_by_method_and_answer() -> None:
    metrics = Metrics()
    metrics.operation_done("prepare", "xa-ok", 0.002)
    metrics.operation_done("prepare", "xa-ok", 0.004)
    metrics.operation_done("commit", "404", 0.001)
    text = metrics.render().decode()
    assert 'dtx_operations_total{answer="xa-ok",operation="prepare"} 2.0' in text
    assert 'dtx_operations_total{answer="404",operation="commit"} 1.0' in text
    assert 'dtx_operation_seconds_count{operation="prepare"} 2.0' in text
    assert 'dtx_operation_seconds_bucket{le="0.001",operation="prepare"} 0.0' in text
    assert 'dtx_operation_seconds_bucket{le="0.0025",operation="prepare"} 1.0' in text
    assert 'dtx_operation_seconds_bucket{le="+Inf",operation="prepare"} 2.0' in text
    assert 'dtx_operation_seconds_bucket{le="0.001",operation="commit"} 1.0' in text, "`le` is inclusive"


class DownConnection:
    """The numbers of a commit connection that does not work."""

    problem: str | None = "not connected yet"
    distrust: str | None = "not checked"
    blocked = False
    channels = 16
    under_way = 16
    waiting = 3
    open_receipts = 0


def test_every_number_has_its_name() -> None:
    metrics = Metrics()
    metrics.connections.inc()
    metrics.branches["prepared"].set(3)
    metrics.oldest_in_doubt.set_function(lambda: 12.5)
    metrics.units_repeated.inc()
    metrics.validation_hits.inc(5)
    metrics.loop_lagged(0.07)
    metrics.log_committed(32, 0.0009)
    metrics.traffic.to_broker += 100
    metrics.traffic.to_client += 7
    metrics.stuck_branches.set(2)
    metrics.commit_connection_numbers([DownConnection()])
    text = metrics.render().decode()
    for expected in (
        "dtx_connections 1.0",
        "dtx_channels 0.0",
        'dtx_event_loop_lag_seconds_bucket{le="0.05"} 0.0',
        'dtx_event_loop_lag_seconds_bucket{le="0.1"} 1.0',
        'dtx_branches{state="prepared"} 3.0',
        'dtx_branches{state="heuristic"} 0.0',
        "dtx_in_doubt_oldest_seconds 12.5",
        "dtx_stuck_branches 2.0",
        'dtx_commit_connections{state="down"} 1.0',
        'dtx_commit_connections{state="blocked"} 0.0',
        "dtx_commit_channels 16.0",
        'dtx_commit_connection_units{state="waiting"} 3.0',
        'dtx_lanes{state="down"} 1.0',
        "dtx_lanes_without_receipts 1.0",
        "dtx_lane_channels 16.0",
        'dtx_lane_units{state="waiting"} 3.0',
        'dtx_units_total{result="repeated"} 1.0',
        'dtx_validations_total{cache="hit"} 5.0',
        'dtx_log_group_size_bucket{le="32.0"} 1.0',
        'dtx_log_commit_seconds_bucket{le="0.001"} 1.0',
        'dtx_forwarded_bytes_total{direction="to-broker"} 100.0',
        'dtx_forwarded_bytes_total{direction="to-client"} 7.0',
    ):
        assert f"{expected}\n" in text, expected


def test_two_services_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.connections.inc()
    assert b"dtx_connections 0.0" in second.render()


def test_warnings_that_repeat_are_limited_and_counted() -> None:
    """Repeated warnings about a full disk must not fill the disk."""
    now = 0.0
    limit = Repeats(lambda: now)

    def written(number: int, **fields: Any) -> list[dict[str, Any]]:
        found = []
        for _ in range(number):
            with contextlib.suppress(structlog.DropEvent):
                found.append(dict(limit(None, "warning", {"at": object(), "event": "lease lost", **fields})))
        return found

    assert len(written(REPEATS + 5)) == REPEATS
    assert len(written(1, error="another")) == 1
    assert len([limit(None, "info", {"event": "opened"}) for _ in range(100)]) == 100
    now = REPEAT_SECONDS
    (again,) = written(50)
    assert again["left_out"] == 5
    now = 2 * REPEAT_SECONDS
    (again,) = written(1)
    assert again["left_out"] == 49
    now = 4 * REPEAT_SECONDS
    assert "left_out" not in written(1)[0]
    assert len(written(REPEATS)) == REPEATS - 1

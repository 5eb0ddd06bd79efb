"""Failpoints in the service itself: what a branch passes, in order, and that dtx really dies, stops or holds there."""

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator, XAError, XaFlag, XAResource, Xid
from dtx.failpoint import DIED, Point
from tests.support.broker import MODES
from tests.support.client import connected
from tests.support.crash import PERSISTENT, work
from tests.support.failpoints import ArmedService, traced
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import DtxService

TIMED = frozenset(point for point in Point if point.name.startswith(("LEASE_RENEW", "PARTITIONS", "DRAIN")))
"""Reached as time goes by."""
WORK = """
reply-start-before reply-start-sent held-publish held-consume reply-end-before reply-end-sent
"""
LOCAL_PREPARE = """
log-prepared-before log-sent log-prepared-after answer-before reply-prepare-before answer-after reply-prepare-sent
"""
LOCAL_COMMIT = """
log-committed-before log-sent log-committed-after shown-before shown-after
answer-before reply-commit-before answer-after reply-commit-sent
"""
LOCAL_ROLLBACK = """
log-rolled-back-before log-sent log-rolled-back-after returned-before returned-after
answer-before reply-rollback-before answer-after reply-rollback-sent
"""
PREPARE = """
log-taking-before log-sent log-taking-after
take-before taking-before taking-acked taking-receipted taking-sent taking-committed take-after
log-prepared-before log-sent log-prepared-after answer-before reply-prepare-before answer-after reply-prepare-sent
"""
COMMIT = """
log-committing-before log-sent log-committing-after
apply-before unit-before unit-published unit-receipted unit-sent unit-committed apply-after
answer-before reply-commit-before answer-after reply-commit-sent
log-committed-before log-sent log-committed-after
"""
ROLLBACK = """
log-rolling-back-before log-sent log-rolling-back-after
put-back-before unit-before unit-published unit-receipted unit-sent unit-committed put-back-after
log-rolled-back-before log-sent log-rolled-back-after
answer-before reply-rollback-before answer-after reply-rollback-sent
"""
BOTH_ENDS = {
    "alongside": (WORK + PREPARE + COMMIT, WORK + PREPARE + ROLLBACK),
    "standalone": (WORK + LOCAL_PREPARE + LOCAL_COMMIT, WORK + LOCAL_PREPARE + LOCAL_ROLLBACK),
}
"""What a branch passes that publishes and consumes, committed and rolled back."""


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The URL of a fresh one."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(params=MODES)
def broker(request: pytest.FixtureRequest) -> str | None:
    """What keeps the messages: a broker, or dtx."""
    return str(request.getfixturevalue("rabbitmq").url()) if request.param == "alongside" else None


def _passed(file: Path) -> list[str]:
    return [point.label for point in traced(file) if point not in TIMED]


def _wait_passed(file: Path, before: int, expected: str) -> None:
    """Wait until *expected* has been passed, behind the first points, and see that nothing else was.

    The answer to start is in the socket before its point says so, and who reads it publishes at once: which of the two
    dtx comes to first is open.
    """
    points = expected.split()
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: len(_passed(file)) >= before + len(points), what="the last point")
    passed = _passed(file)[before:]
    if passed[1:3] == ["held-publish", "reply-start-sent"]:
        passed[1:3] = ["reply-start-sent", "held-publish"]
    assert passed == points


@contextlib.contextmanager
def _queues(channel: BlockingChannel) -> Iterator[list[str]]:
    """Two queues, the first of which has a message."""
    names = [f"failpoints-{secrets.token_hex(4)}" for _ in range(2)]
    for name in names:
        channel.queue_declare(name, durable=True)
    channel.basic_publish("", names[0], b"in", PERSISTENT)
    wait_until(lambda: _count(channel, names[0]) == 1, what="the message")
    yield names
    for name in names:
        channel.queue_delete(name)


def _count(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def test_a_branch_passes_its_points_in_order_of_durability(broker: str | None, database: str, tmp_path: Path) -> None:
    """Prepared means durable: an answer stands behind the write that it promises, a send behind the write before it."""
    file = tmp_path / "trace"
    committed, rolled_back = BOTH_ENDS["standalone" if broker is None else "alongside"]
    armed = ArmedService("--trace", str(file), broker=broker, database=database, options=("--replay", "receipts"))
    with (
        armed as service,
        connected(service.url()) as connection,
        connected(service.url()) as other,
        _queues(other.channel()) as (source, target),
    ):
        channel = connection.channel()
        XAResource(channel).select()
        wait_until(lambda: _passed(file)[-1] == "reply-select-sent", what="the answer to select")
        before = len(_passed(file))
        xa, xid = work(channel, publish={target: [b"out"]}, consume={source: 1})
        xa.prepare(xid)
        xa.commit(xid)
        _wait_passed(file, before, committed)
        before = len(_passed(file))
        xa, xid = work(channel, publish={source: [b"back"]}, consume={target: 1})
        xa.prepare(xid)
        xa.rollback(xid)
        _wait_passed(file, before, rolled_back)


def _prepare(url: str) -> Xid:
    """Ask for a vote that is not answered."""
    with connected(url) as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        xa, xid = work(channel, publish={"q": [b"1"]})
        with pytest.raises((XAError, pika.exceptions.AMQPError)):
            xa.prepare(xid)
    return xid


@pytest.mark.parametrize(("point", "voted"), [(Point.LOG_PREPARED_BEFORE, False), (Point.LOG_PREPARED_AFTER, True)])
def test_dtx_dies_at_the_point_that_it_is_armed_with(point: Point, voted: bool, database: str) -> None:
    """Before the write there is no vote, and behind it there is one; nobody was answered in either case."""
    with ArmedService("--at", point.label, "--do", "die", database=database) as service:
        xid = _prepare(service.url())
        assert service.wait() == DIED
        service.arming = ()
        service.start()
        with connected(service.url()) as connection, Coordinator(connection) as coordinator:
            assert list(coordinator.recover()) == ([xid] if voted else [])


def test_dtx_that_dies_while_it_starts_is_never_ready(database: str) -> None:
    with ArmedService("--at", "ready-before", "--do", "die", database=database, start=False) as service:
        with pytest.raises(RuntimeError, match=f"exit status {DIED}"):
            service.start()
        assert service.ready_line == ""


def test_dtx_pauses_at_a_point_until_its_file_is_removed(database: str, tmp_path: Path) -> None:
    """Nothing is answered meanwhile, not even by another connection: whatever else dies, dies at this point."""
    held = tmp_path / "held"
    arming = ("--at", "log-sent#2", "--do", "hold", "--hold-file", str(held), "--trace", str(tmp_path / "trace"))
    with (
        ArmedService(*arming, database=database) as service,
        connected(service.url()) as connection,
        ThreadPoolExecutor() as threads,
    ):
        channel = connection.channel()
        channel.queue_declare("q", durable=True)  # is #1
        xa, xid = work(channel, publish={"q": [b"1"]})
        prepared = threads.submit(xa.prepare, xid)
        wait_until(held.exists, what="dtx at its point")
        assert held.read_text() == "log-sent"
        assert traced(tmp_path / "trace")[-1] is Point.LOG_SENT
        assert not prepared.done()
        held.unlink()
        assert prepared.result(60) is XaFlag.OK
        assert "FAILPOINT log-sent" in service.log_path.read_text()


def test_an_unarmed_dtx_ignores_the_environment(database: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    words = {"AT": "ready-before", "DO": "die", "TRACE": str(trace)}
    env = {f"{prefix}{name}": word for prefix in ("", "FAILPOINT_", "FAILPOINT_MAIN_") for name, word in words.items()}
    with DtxService(database=database, env=env | {"FAILPOINT": "ready-before"}) as service:
        assert service.running
        assert service.stop() == 0
    assert not trace.exists()

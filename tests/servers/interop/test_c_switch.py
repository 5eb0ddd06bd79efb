"""A C program uses the XA switch: work, outcomes and recovery in both modes."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from dtx.client import Xid
from tests.servers.interop.c.programs import (
    DTX_EMPTY,
    DTX_TRUNCATED,
    FAIL,
    NO_FLAGS,
    ONE_PHASE,
    RM,
    SUCCESS,
    SUSPEND,
    XA_HEURRB,
    XA_OK,
    XA_RBROLLBACK,
    XA_RDONLY,
    XAER_INVAL,
    XAER_NOTA,
    XAER_PROTO,
    Driver,
)
from tests.support.broker import Broker
from tests.support.processes import wait_until
from tests.support.service import DtxService


def a_xid() -> Xid:
    """A binary xid of the maximum length, with NULs."""
    return Xid(0xFFFFFFFE, b"\0" + secrets.token_bytes(63), secrets.token_bytes(63) + b"\0")


@pytest.fixture(scope="module")
def driver(service: DtxService) -> Iterator[Driver]:
    """A program whose threads a and b have opened the service."""
    with Driver() as running:
        for thread in ("a", "b"):
            running.open(thread, service.url())
        yield running


def test_a_branch_is_committed_in_two_phases(driver: Driver, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    driver.published("a", xid, queue, "two")
    assert driver.call("a", "prepare", xid) == XA_OK
    assert bodies() == []
    assert driver.recovered("b") == [str(xid)]
    assert driver.call("b", "commit", xid) == XA_OK
    assert bodies() == ["two"]
    assert driver.recovered("b") == []


def test_a_branch_is_committed_in_one_phase(driver: Driver, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    driver.published("a", xid, queue, "one")
    driver("a", "commit", xid, RM, ONE_PHASE)
    assert bodies() == ["one"]


def test_a_branch_without_work_is_read_only(driver: Driver) -> None:
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "end", xid, RM, SUCCESS)
    assert driver.call("a", "prepare", xid) == XA_RDONLY
    assert driver.call("a", "commit", xid) == XAER_NOTA


def test_a_repeated_call_after_a_lost_answer_succeeds(driver: Driver, queue: str) -> None:
    """The manager repeats a call without an answer; dtx still knows that the branch ended as requested."""
    for call, other in (("commit", "rollback"), ("rollback", "commit")):
        xid = a_xid()
        driver.published("a", xid, queue)
        driver("a", "prepare", xid, RM, NO_FLAGS)
        driver("a", call, xid, RM, NO_FLAGS)
        driver("b", call, xid, RM, NO_FLAGS)
        assert driver.call("b", other, xid) == XAER_NOTA


def test_a_one_phase_commit_of_a_rolled_back_branch_fails(driver: Driver, queue: str) -> None:
    xid = a_xid()
    driver.published("a", xid, queue)
    driver("a", "prepare", xid, RM, NO_FLAGS)
    driver("a", "rollback", xid, RM, NO_FLAGS)
    assert driver.call("b", "commit", xid, ONE_PHASE) == XA_RBROLLBACK


def test_a_heuristic_outcome_is_reported_until_it_is_forgotten(
    driver: Driver, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    xid = a_xid()
    driver.published("a", xid, queue)
    driver("a", "prepare", xid, RM, NO_FLAGS)
    service.run("rollback", str(xid), "--reason", "the manager's machine is lost", "--yes")
    assert driver.recovered("b") == [str(xid)]
    for _ in range(2):
        assert driver.call("a", "commit", xid) == XA_HEURRB
    assert driver.call("a", "forget", xid) == XA_OK
    assert driver.call("a", "commit", xid) == XAER_NOTA
    assert bodies() == []


@pytest.mark.parametrize("outcome", ["commit", "rollback", "prepared rollback", "failed"])
def test_consumed_and_published_messages_commit_together(
    driver: Driver, broker: Broker, queue: str, bodies: Callable[[], list[str]], outcome: str
) -> None:
    with broker.channel() as channel:
        channel.basic_publish("", queue, b"taken")
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    tag, body = driver("a", "get", queue, 100).split()
    assert body == "taken"
    driver("a", "ack", tag)
    assert driver.code("a", "ack", tag) == XAER_INVAL  # only once
    assert driver.code("a", "get", queue, 100) == DTX_EMPTY
    driver("a", "publish", "-", queue, "published")
    driver("a", "end", xid, RM, FAIL if outcome == "failed" else SUCCESS)
    if outcome in {"commit", "prepared rollback"}:
        driver("b", "prepare", xid, RM, NO_FLAGS)
    driver("b", "commit" if outcome == "commit" else "rollback", xid, RM, NO_FLAGS)
    assert bodies() == (["published"] if outcome == "commit" else ["taken"])


def test_unacknowledged_messages_are_available_to_others(
    driver: Driver, broker: Broker, queue: str, bodies: Callable[[], list[str]]
) -> None:
    with broker.channel() as channel:
        for number in range(3):
            channel.basic_publish("", queue, b"%d" % number)
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    tags = [driver("a", "get", queue, 9).split()[0] for _ in range(3)]
    driver("a", "ack", tags[0])
    driver("a", "reject", tags[1], 0)  # dropped by the commit
    assert driver.code("a", "reject", tags[1], 0) == XAER_INVAL
    driver("a", "end", xid, RM, SUSPEND)
    assert driver.code("a", "ack", tags[2]) == XAER_PROTO
    driver("a", "start", xid, RM, "8000000")
    driver("a", "end", xid, RM, SUCCESS)
    driver("a", "commit", xid, RM, ONE_PHASE)
    wait_until(lambda: broker.count(queue) == 1, what="the message that was not acknowledged")
    assert bodies() == ["2"]


def test_a_message_too_large_for_the_buffer_stays_available(
    driver: Driver, queue: str, bodies: Callable[[], list[str]]
) -> None:
    xid, other = a_xid(), a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "publish-large", queue, 1_000_000)
    driver("a", "end", xid, RM, SUCCESS)
    driver("a", "commit", xid, RM, ONE_PHASE)
    driver("a", "start", other, RM, NO_FLAGS)
    for _ in range(2):
        assert driver.say("a", "get", queue, 999_999) == (DTX_TRUNCATED, "1000000")
    driver("a", "end", other, RM, SUCCESS)  # the message returns to the queue
    driver("a", "start", other, RM, "200000")
    assert driver.code("a", "get", queue, 0) == DTX_TRUNCATED
    tag = driver("a", "get", queue, 1_000_000).split()[0]
    driver("a", "ack", tag)
    driver("a", "end", other, RM, SUCCESS)
    driver("a", "commit", other, RM, ONE_PHASE)
    assert bodies() == []


def test_properties_come_along(driver: Driver, broker: Broker, queue: str) -> None:
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "publish-with", "-", queue, "x", 7)
    driver("a", "publish", "-", queue, "y")
    driver("a", "end", xid, RM, SUCCESS)
    driver("a", "commit", xid, RM, ONE_PHASE)
    driver("a", "start", xid, RM, NO_FLAGS)
    tag, body, redelivered, *rest = driver("a", "get", queue, 10, "properties").split(" ")
    assert (body, redelivered) == ("x", "0")
    assert rest == ["", queue, "text/plain", "m1", "c1", "r1", "t1", "gzip", "a1", "guest", "1700000000"]
    assert driver("a", "header", tag, "colour", 5) == "blue"
    assert driver("a", "header", tag, "count", 64) == "-7"
    assert driver.code("a", "header", tag, "colour", 4) == DTX_TRUNCATED
    assert driver.code("a", "header", tag, "shape", 64) == DTX_EMPTY
    driver("a", "ack", tag)
    assert driver.code("a", "header", tag, "colour", 64) == XAER_INVAL
    _, body, _, *rest = driver("a", "get", queue, 10, "properties").split(" ")
    assert (body, rest) == ("y", ["", queue, "", "", "", "", "", "", "", "", "0"])
    driver("a", "end", xid, RM, SUCCESS)
    driver("a", "rollback", xid, RM, NO_FLAGS)


def test_work_that_is_refused_dooms_its_branch_alone(
    driver: Driver, broker: Broker, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """The call itself or a later one reports 404, at the latest xa_end; other branches of the thread continue."""
    for call in (("publish", "no-such-exchange", queue, "x"), ("get", "no-such-queue", 10)):
        suspended, doomed = a_xid(), a_xid()
        driver("a", "start", suspended, RM, NO_FLAGS)
        driver("a", "publish", "-", queue, "good")
        driver("a", "end", suspended, RM, SUSPEND)
        driver("a", "start", doomed, RM, NO_FLAGS)
        driver("a", "publish", "-", queue, "bad")
        assert driver.code("a", *call) in {XA_OK, XA_RBROLLBACK}
        assert driver.call("a", "end", doomed, SUCCESS) == XA_RBROLLBACK
        assert "404" in driver.reason("a")
        assert driver.call("a", "prepare", doomed) == XA_RBROLLBACK
        assert driver.call("a", "rollback", doomed) == XA_OK
        driver("a", "start", suspended, RM, "8000000")
        driver("a", "end", suspended, RM, SUCCESS)
        driver("a", "commit", suspended, RM, ONE_PHASE)
        assert bodies() == ["good"]


def test_a_channel_closed_within_its_branch_takes_no_further_work(
    driver: Driver, queue: str, bodies: Callable[[], list[str]]
) -> None:
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "publish", "-", queue, "one")
    assert driver.code("a", "get", "no-such-queue", 10) == XA_RBROLLBACK
    for _ in range(2):
        assert driver.code("a", "publish", "-", queue, "escaped") == XA_RBROLLBACK
        assert driver.code("a", "get", queue, 10) == XA_RBROLLBACK
    assert driver.call("a", "end", xid, SUCCESS) == XA_RBROLLBACK
    assert driver.code("a", "publish", "-", queue, "escaped") == XAER_PROTO
    assert driver.call("a", "rollback", xid) == XA_OK
    assert bodies() == []


def test_work_belongs_between_start_and_end(driver: Driver, queue: str) -> None:
    for words in (("publish", "-", queue, "x"), ("get", queue, 10), ("ack", 1), ("reject", 1, 0)):
        assert driver.code("a", *words) == XAER_PROTO
    assert "call xa_start before the work" in driver.reason("a")

"""dtx dies within each call of the switch: before it has read the request, and after it has carried it out.

The call returns XAER_RMFAIL (xa_open has only XAER_RMERR). When dtx is back, the thread continues without another
xa_open, and after the transaction manager's calls each message is there exactly once.
"""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pika
import pytest

from dtx.client import Xid
from tests.servers.interop.c.programs import (
    NO_FLAGS,
    ONE_PHASE,
    RM,
    SCAN,
    SUCCESS,
    XA_OK,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    Driver,
)
from tests.support.broker import Broker, Mode, StandaloneBroker
from tests.support.client import bodies as taken
from tests.support.client import fresh_queue
from tests.support.failpoints import ArmedService
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN

WAITS: Final = ("start", "end", "prepare", "commit", "one-phase", "rollback", "forget", "recover", "get")
"""Calls that wait for an answer of dtx."""
POINTS: Final = {"one-phase": "commit", "get": None}
"""Calls whose failpoint has another name, or that have none."""


@pytest.fixture(scope="module")
def service(mode: Mode, postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[ArmedService]:
    """A service that dies at its failpoint."""
    database = postgres.create_migrated_database()
    broker: str | None = None
    options: tuple[str, ...] = ADMIN
    if mode == "alongside":
        node: RabbitNode = request.getfixturevalue("shared_rabbitmq")
        # without it receipts are not trusted, and messages may be repeated
        broker, options = node.url(), (*ADMIN, "--management", node.management_url)
    with ArmedService(broker=broker, database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def broker(mode: Mode, service: ArmedService, request: pytest.FixtureRequest) -> Broker:
    """Where the service stores its messages."""
    if mode == "alongside":
        node: RabbitNode = request.getfixturevalue("rabbitmq")
        return node
    return StandaloneBroker(service)


@pytest.fixture
def queue(service: ArmedService, broker: Broker) -> Iterator[str]:
    """A fresh queue; the service runs and has no failpoint."""
    if service.running:
        service.resume()  # an earlier test failed
    if service.arming or not service.running:
        _restart(service)
    with fresh_queue(broker) as name:
        yield name


@pytest.fixture(scope="module")
def driver(service: ArmedService) -> Iterator[Driver]:
    """One program for all tests; it does not call xa_open again after a death of dtx."""
    with Driver() as running:
        for thread in ("a", "b"):
            running.open(thread, service.url())
        yield running


def _restart(service: ArmedService, *arming: str) -> None:
    if service.running:
        service.kill9()
    service.arming = arming
    service.start()


def unread(port: int) -> int:
    """The number of received bytes at a port of this machine that dtx has not read."""
    found = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, _, state, queues = line.split()[1:5]
        if local.endswith(f":{port:04X}") and state == "01":
            found += int(queues.split(":")[1], 16)
    return found


def heard_nothing(service: ArmedService, driver: Driver, *words: object) -> tuple[int, str]:
    """The answer to a call whose request dtx has not read when it dies."""
    service.pause()
    state = Path(f"/proc/{service.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="the pause")
    before = unread(service.port)  # there may be frames without an answer
    driver.tell("a", *words)
    wait_until(lambda: unread(service.port) > before, what="the request")
    service.kill9()
    return driver.hear("a")


class Death:
    """A branch just before a call, and the transaction manager's calls when dtx is back."""

    def __init__(self, call: str, driver: Driver, service: ArmedService, queue: str) -> None:
        self.call = call
        self.xid = Xid(5, b"death" + secrets.token_bytes(20), b"c")
        self._driver = driver
        self._service = service
        self._queue = queue

    def prepare(self) -> None:
        """Do everything before the call."""
        if self.call == "start":
            return
        if self.call == "get":
            self._driver("a", "start", self.xid, RM, NO_FLAGS)
            return
        self._driver("a", "start", self.xid, RM, NO_FLAGS)
        self._driver("a", "publish", "-", self._queue, "x")
        if self.call == "end":
            return
        self._driver("a", "end", self.xid, RM, SUCCESS)
        if self.call in {"commit", "rollback", "forget", "recover"}:
            self._driver("a", "prepare", self.xid, RM, NO_FLAGS)
        if self.call == "forget":
            self._service.run("commit", str(self.xid), "--reason", "somebody has to", "--yes")

    @property
    def words(self) -> tuple[object, ...]:
        """The call."""
        match self.call:
            case "end":
                return ("end", self.xid, RM, SUCCESS)
            case "one-phase":
                return ("commit", self.xid, RM, ONE_PHASE)
            case "recover":
                return ("recover", 10, RM, SCAN)
            case "get":
                return ("get", self._queue, 10)
            case call:
                return (call, self.xid, RM, NO_FLAGS)

    def resolve(self, *, done: bool) -> int:
        """Make the transaction manager's calls in the thread that had the failure; returns the expected message count.

        Args:
            done: whether dtx had carried out the call.
        """
        driver, xid = self._driver, self.xid
        match self.call:
            case "start" | "end":
                assert driver.call("a", "rollback", xid) in {XA_OK, XAER_NOTA}
                driver("a", "start", xid, RM, NO_FLAGS)  # the same xid may be used again: nothing is left of it
                driver("a", "end", xid, RM, SUCCESS)
                driver("a", "rollback", xid, RM, NO_FLAGS)
                return 0
            case "get":
                assert driver.call("a", "end", xid, SUCCESS) in {XAER_RMFAIL, XAER_PROTO}
                assert driver.call("a", "rollback", xid) in {XA_OK, XAER_NOTA}
                return 1
            case "prepare":
                assert driver.recovered("b") == ([str(xid)] if done else [])
                assert driver.call("a", "commit", xid) == (XA_OK if done else XAER_NOTA)
                return int(done)
            case "commit" | "recover":
                # alongside, dtx answers when the decision is durable and applied; the end is logged later
                assert driver.recovered("b") in ([[], [str(xid)]] if done and self.call == "commit" else [[str(xid)]])
                assert driver.call("a", "commit", xid) == XA_OK
                assert driver.call("b", "commit", xid) == XA_OK  # a repetition
                return 1
            case "one-phase":
                assert driver.call("a", "commit", xid, ONE_PHASE) == (XA_OK if done else XAER_NOTA)
                return int(done)
            case "rollback":
                assert driver.call("a", "rollback", xid) == XA_OK
                return 0
            case "forget":
                assert driver.call("a", "forget", xid) == (XAER_NOTA if done else XA_OK)
                return 1
            case _:
                raise AssertionError(self.call)


@pytest.mark.parametrize("call", WAITS)
def test_dtx_dies_before_it_has_read_the_request(
    call: str, driver: Driver, service: ArmedService, broker: Broker, queue: str
) -> None:
    if call == "get":
        with broker.channel() as channel:
            channel.basic_publish("", queue, b"x", pika.BasicProperties(delivery_mode=2))
    death = Death(call, driver, service, queue)
    death.prepare()
    assert heard_nothing(service, driver, *death.words) == (XAER_RMFAIL, "")
    service.start()
    expected = death.resolve(done=False)
    assert len(taken(broker, queue)) == expected
    assert driver.recovered("b") == []


@pytest.mark.parametrize("call", [call for call in WAITS if POINTS.get(call, call) is not None])
def test_dtx_dies_after_the_work_before_the_answer(
    call: str, driver: Driver, service: ArmedService, broker: Broker, queue: str
) -> None:
    _restart(service, "--at", f"reply-{POINTS.get(call, call)}-before", "--do", "die", "--")
    death = Death(call, driver, service, queue)
    death.prepare()
    assert driver.say("a", *death.words) == (XAER_RMFAIL, "")
    service.wait()
    _restart(service)
    expected = death.resolve(done=True)
    assert len(taken(broker, queue)) == expected
    assert driver.recovered("b") == []


def test_dtx_dies_before_it_has_accepted_a_client(driver: Driver, service: ArmedService, queue: str) -> None:
    words = ("open", 9, NO_FLAGS, f"url={service.url()}")
    code, _ = heard_nothing(service, driver, *words)
    assert code == XAER_RMERR
    assert driver.code("a", *words) == XAER_RMERR  # dtx is not running
    service.start()
    assert driver.code("a", *words) == XA_OK
    assert driver.code("a", "close", 9, NO_FLAGS) == XA_OK


def test_dtx_dies_while_it_is_taken_leave_of(driver: Driver, service: ArmedService, queue: str) -> None:
    driver("a", "open", 9, NO_FLAGS, f"url={service.url()}")
    assert heard_nothing(service, driver, "close", 9, NO_FLAGS) == (XA_OK, "")
    service.start()


def test_a_restart_between_two_calls_goes_unnoticed(
    driver: Driver, service: ArmedService, queue: str, broker: Broker
) -> None:
    xid = Xid(5, b"between" + secrets.token_bytes(20), b"c")
    driver.published("a", xid, queue)
    driver("a", "prepare", xid, RM, NO_FLAGS)
    _restart(service)
    driver("a", "commit", xid, RM, NO_FLAGS)
    _restart(service)
    other = Xid(5, b"between" + secrets.token_bytes(20), b"c")
    driver.published("a", other, queue)
    driver("a", "commit", other, RM, ONE_PHASE)
    assert len(taken(broker, queue)) == 2


def test_work_for_a_branch_of_a_dead_dtx_fails(
    driver: Driver, service: ArmedService, queue: str, broker: Broker
) -> None:
    """The branch is not committed with the later work."""
    xid = Xid(5, b"work" + secrets.token_bytes(20), b"c")
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "publish", "-", queue, "x")
    _restart(service)
    assert driver.code("a", "publish", "-", queue, "y") == XAER_RMFAIL
    assert driver.code("a", "get", queue, 10) == XAER_RMFAIL
    assert driver.call("a", "end", xid, SUCCESS) == XAER_RMFAIL
    assert driver.call("a", "rollback", xid) == XAER_NOTA
    assert taken(broker, queue) == []


def test_a_suspended_branch_whose_dtx_has_died_is_not_resumed(
    driver: Driver, service: ArmedService, queue: str, resumed: Callable[[Xid], int]
) -> None:
    xid = Xid(5, b"suspended" + secrets.token_bytes(20), b"c")
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("a", "end", xid, RM, "2000000")
    _restart(service)
    assert resumed(xid) == XAER_RMFAIL
    assert resumed(xid) == XAER_NOTA


@pytest.fixture
def resumed(driver: Driver) -> Callable[[Xid], int]:
    """``xa_start`` with TMRESUME."""
    return lambda xid: driver.call("a", "start", xid, "8000000")

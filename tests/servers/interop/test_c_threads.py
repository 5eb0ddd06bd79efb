"""Threads and processes of the XA switch: a thread of control is a thread of the operating system.

Each thread calls xa_open for itself. Then it may prepare, commit, roll back and recover what other threads have ended.
"""

import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from dtx.client import Xid
from tests.servers.interop.c.programs import (
    END_SCAN,
    JOIN,
    NO_FLAGS,
    RESUME,
    RM,
    SCAN,
    START_SCAN,
    SUCCESS,
    SUSPEND,
    XA_OK,
    XA_RBROLLBACK,
    XA_RBTIMEOUT,
    XAER_INVAL,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    Driver,
)
from tests.support.broker import Broker, Mode, StandaloneBroker, only_standalone
from tests.support.client import fresh_queue
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


def a_xid() -> Xid:
    """An unused xid."""
    return Xid(6, secrets.token_bytes(64), b"\0")


@pytest.fixture
def driver(service: DtxService) -> Iterator[Driver]:
    """A program whose threads a and b have opened the service."""
    with Driver(getter="ndrx_get_xa_switch") as running:
        for thread in ("a", "b"):
            running.open(thread, service.url())
        yield running


@pytest.mark.parametrize("how", ["commit", "one", "mixed"])
def test_eight_threads_have_a_branch_each(
    driver: Driver, service: DtxService, queue: str, bodies: Callable[[], list[str]], how: str
) -> None:
    """Each message of a committed branch is there exactly once, and none of a branch that was rolled back."""
    threads, branches = 8, 12
    driver("a", "crowd", how, threads, branches, queue, secrets.token_hex(8), f"url={service.url()}")
    kept = [number for number in range(branches) if how != "mixed" or number % 2 == 0]
    assert Counter(bodies()) == {f"{thread}-{number}": 1 for thread in range(threads) for number in kept}
    assert driver.recovered("a") == []


def test_another_program_recovers_branches_of_killed_programs(
    service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """More than a hundred branches are recovered in pages of seven; half of them are committed."""
    threads, branches = 4, 28
    with Driver() as dying:
        dying("a", "crowd", "prepare", threads, branches, queue, secrets.token_hex(8), f"url={service.url()}")
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait(30)
    with Driver() as manager:
        manager.open("a", service.url())
        page = manager.recovered("a", 7, START_SCAN)
        found = list(page)
        while len(page) == 7:
            page = manager.recovered("a", 7, NO_FLAGS)
            found += page
        assert manager.recovered("a", 7, END_SCAN) == []
        assert manager.code("a", "recover", 7, RM, NO_FLAGS) == XAER_INVAL
        assert len(set(found)) == len(found) == threads * branches
        for number, xid in enumerate(found):
            manager("a", "rollback" if number % 2 else "commit", xid, RM, NO_FLAGS)
        assert manager.recovered("a") == []
        kept = {
            "-".join(bytes.fromhex(xid.split(":")[1]).decode().split()[1:]) for xid in found[::2]
        }  # its gtrid is "... thread number", and its message "thread-number"
    assert Counter(bodies()) == dict.fromkeys(kept, 1)


def test_a_scan_belongs_to_its_thread_and_restarts_by_flag(driver: Driver, queue: str) -> None:
    many = [a_xid() for _ in range(5)]
    for xid in many:
        driver.published("a", xid, queue)
        driver("a", "prepare", xid, RM, NO_FLAGS)
    first = driver.recovered("a", 2, START_SCAN)
    assert driver.code("b", "recover", 2, RM, NO_FLAGS) == XAER_INVAL
    assert sorted(driver.recovered("b", 9, SCAN)) == sorted(map(str, many))
    assert len(first + driver.recovered("a", 9, NO_FLAGS)) == 5
    assert driver.recovered("a", 9, NO_FLAGS) == []
    assert driver.recovered("a", 2, START_SCAN) == first
    assert driver.recovered("a", 0, NO_FLAGS) == []
    assert len(driver.recovered("a", 2, END_SCAN)) == 2  # ends the scan before the fifth
    assert driver.code("a", "recover", 2, RM, NO_FLAGS) == XAER_INVAL
    for xid in many:
        driver("b", "rollback", xid, RM, NO_FLAGS)


def test_a_thread_opens_for_itself(driver: Driver, service: DtxService) -> None:
    xid = a_xid()
    assert driver.call("c", "start", xid) == XAER_PROTO
    assert driver.code("c", "recover", 1, RM, SCAN) == XAER_PROTO
    assert driver.code("c", "close", RM, NO_FLAGS) == XA_OK
    driver.open("c", service.url())
    assert driver.code("c", "open", RM, NO_FLAGS, f"url={service.url()};answer-timeout=5") == XAER_INVAL
    assert driver.call("c", "start", xid) == XA_OK
    assert driver.call("a", "end", xid, SUCCESS) == XAER_PROTO  # associated, but not this thread
    assert driver.call("c", "end", xid, SUCCESS) == XA_OK
    assert driver.call("a", "rollback", xid) == XA_OK


def test_two_threads_work_for_one_branch(driver: Driver, queue: str, bodies: Callable[[], list[str]]) -> None:
    xid = a_xid()
    driver("a", "start", xid, RM, NO_FLAGS)
    driver("b", "start", xid, RM, JOIN)
    for thread in ("a", "b"):
        driver(thread, "publish", "-", queue, thread)
        assert driver.call("b", "prepare", xid) == XAER_PROTO
        driver(thread, "end", xid, RM, SUCCESS)
    driver("b", "prepare", xid, RM, NO_FLAGS)
    driver("a", "commit", xid, RM, NO_FLAGS)
    assert sorted(bodies()) == ["a", "b"]


def test_a_suspended_branch_is_resumed_by_its_own_thread(
    driver: Driver, queue: str, bodies: Callable[[], list[str]]
) -> None:
    """TMNOMIGRATE. Calls refused meanwhile, which close a channel each, do not affect it."""
    outer, inner = a_xid(), a_xid()
    driver("a", "start", outer, RM, NO_FLAGS)
    driver("a", "publish", "-", queue, "outer")
    driver("a", "end", outer, RM, SUSPEND)
    assert driver.code("a", "publish", "-", queue, "nobody's") == XAER_PROTO
    assert driver.call("b", "start", outer, RESUME) == XAER_PROTO
    assert driver.call("a", "start", a_xid(), JOIN) == XAER_NOTA
    assert driver.call("a", "end", a_xid(), SUCCESS) == XAER_NOTA
    driver.published("a", inner, queue, "inner")
    assert driver.call("a", "start", inner) == -8
    driver("a", "rollback", inner, RM, NO_FLAGS)
    driver("a", "start", outer, RM, RESUME)
    driver("a", "publish", "-", queue, "again")
    driver("a", "end", outer, RM, SUCCESS)
    driver("b", "prepare", outer, RM, NO_FLAGS)
    driver("b", "commit", outer, RM, NO_FLAGS)
    assert bodies() == ["outer", "again"]


def test_a_thread_that_ends_takes_its_branch_along(driver: Driver, service: DtxService, queue: str) -> None:
    xid = a_xid()
    driver.open("c", service.url())
    driver("c", "start", xid, RM, NO_FLAGS)
    driver("c", "publish", "-", queue, "x")
    assert driver.call("b", "prepare", xid) == XAER_PROTO
    driver("c", "leave")
    wait_until(lambda: driver.call("b", "prepare", xid) == XA_RBROLLBACK, what="the end of the thread's association")
    assert driver.call("b", "rollback", xid) == XA_OK
    assert driver.call("c", "end", xid, SUCCESS) == XAER_PROTO  # a new thread of that name, without xa_open


def test_a_process_that_was_forked_is_refused(driver: Driver, service: DtxService, queue: str) -> None:
    prepared, active = a_xid(), a_xid()
    driver.published("a", prepared, queue)
    driver("a", "prepare", prepared, RM, NO_FLAGS)
    driver("a", "start", active, RM, NO_FLAGS)
    for call, xid in (("open", prepared), ("start", a_xid()), ("commit", prepared)):
        assert driver.code("a", "fork", call, xid, RM, f"url={service.url()}") == XAER_PROTO
    driver("a", "end", active, RM, SUCCESS)  # the parent continues
    driver("a", "rollback", active, RM, NO_FLAGS)
    assert driver.recovered("a") == [str(prepared)]
    driver("a", "rollback", prepared, RM, NO_FLAGS)


def test_a_process_may_fork_before_it_opens(service: DtxService) -> None:
    with Driver() as driver:
        assert driver.code("a", "fork", "open", a_xid(), RM, f"url={service.url()}") == -128  # XA_OK, as fork has it
        driver.open("a", service.url())


def test_two_resource_managers_in_one_thread(
    driver: Driver, service: DtxService, queue: str, bodies: Callable[[], list[str]]
) -> None:
    one, two = a_xid(), a_xid()
    driver("a", "open", 8, NO_FLAGS, f"url={service.url()}")
    driver("a", "start", one, RM, NO_FLAGS)
    driver("a", "publish", "-", queue, "one")
    driver("a", "start", two, 8, NO_FLAGS)
    assert driver.code("a", "publish", "-", queue, "whose") == XAER_PROTO
    assert "dtx_use" in driver.reason("a")
    driver("a", "use", 8)
    driver("a", "publish", "-", queue, "two")
    assert driver.code("a", "use", 77) == XAER_PROTO
    driver("a", "end", two, 8, SUCCESS)
    assert driver.code("a", "publish", "-", queue, "whose") == XAER_PROTO
    driver("a", "use", -1)
    driver("a", "publish", "-", queue, "three")
    driver("a", "end", one, RM, SUCCESS)
    driver("a", "commit", one, RM, "40000000")
    driver("a", "rollback", two, 8, NO_FLAGS)
    driver("a", "close", 8, NO_FLAGS)
    assert bodies() == ["one", "three"]


def test_the_open_string_limits_a_branch(driver: Driver, service: DtxService, queue: str) -> None:
    driver("c", "open", RM, NO_FLAGS, f"url={service.url()};transaction-timeout=1")
    xid = a_xid()
    driver("c", "start", xid, RM, NO_FLAGS)
    driver("c", "publish", "-", queue, "late")

    def told() -> bool:
        """Whether a join reports the time-out; else the thread leaves the branch again."""
        if driver.call("a", "start", xid, JOIN) == XA_RBROLLBACK:
            return True
        driver.call("a", "end", xid, SUCCESS)
        return False

    wait_until(told, what="the end of its time")
    assert driver.call("c", "end", xid, SUCCESS) == XA_RBTIMEOUT
    assert driver.call("a", "prepare", xid) == XA_RBTIMEOUT
    assert driver.call("a", "rollback", xid) == XA_OK


@pytest.fixture(scope="module")
def guarded(postgres: PostgresServer) -> Iterator[DtxService]:
    """A service whose coordinator is guest."""
    database = postgres.create_migrated_database()
    with DtxService(database=database, options=("--coordinator", "guest")) as running:
        yield running
    postgres.drop_database(database)


@only_standalone
def test_outcomes_have_a_user_of_their_own(mode: Mode, guarded: DtxService) -> None:
    """``coordination``: a transaction manager recovers what programs of other users have prepared."""
    broker: Broker = StandaloneBroker(guarded)
    urls = [broker.add_user(name) for name in ("worker", "neighbour")]
    with fresh_queue(broker) as queue, Driver() as driver:
        for thread, url in zip("ab", urls, strict=True):
            driver(thread, "open", RM, NO_FLAGS, f"url={url};coordination={guarded.url()}")
        driver.open("c", urls[1])
        xid = a_xid()
        driver.published("a", xid, queue)
        driver("a", "prepare", xid, RM, NO_FLAGS)
        assert driver.recovered("c") == []
        assert driver.call("c", "commit", xid) == XAER_RMERR  # 403: the branch is the worker's
        assert driver.recovered("b") == [str(xid)]
        driver("b", "commit", xid, RM, NO_FLAGS)
        assert broker.count(queue) == 1


@only_standalone
def test_xa_open_reports_a_wrong_user_or_server(service: DtxService, rabbitmq: RabbitNode) -> None:
    with Driver() as driver:
        assert driver.code("a", "open", RM, NO_FLAGS, f"url={service.url('guest', 'wrong')}") == XAER_RMERR
        assert driver.code("a", "open", RM, NO_FLAGS, f"url={rabbitmq.url()}") == XAER_RMERR
        assert "the peer is not dtx" in driver.reason("a")
        string = f"url={service.url()};coordination={rabbitmq.url()}"
        assert driver.code("a", "open", RM, NO_FLAGS, string) == XAER_RMERR
        assert driver.call("a", "start", a_xid()) == XAER_PROTO

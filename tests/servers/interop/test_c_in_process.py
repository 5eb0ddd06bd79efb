"""The switch without C: a thread's work with messages, and its end."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtx.client import XA_RBROLLBACK, XAER_INVAL, XAER_NOTA, XAER_PROTO, XAER_RMERR, XAException, Xid
from dtx.client.xa_switch import messages
from dtx.client.xa_switch.interface import TMONEPHASE, TMSUCCESS, SwitchCall
from dtx.client.xa_switch.messages import Taken
from dtx.client.xa_switch.switch import ANY, Switch
from tests.servers.interop.c.programs import RM
from tests.support.broker import only_standalone
from tests.support.processes import wait_until
from tests.support.service import DtxService

pytestmark = only_standalone
NOTHING = messages.properties_of({})


class Thread:
    """One thread of control and its calls."""

    def __init__(self, service: DtxService, more: str = "") -> None:
        self.switch = Switch()
        self.number = 1
        self.xid = Xid(9, secrets.token_bytes(32), b"")
        self.switch.open(self.number, f"url={service.url()}{more}", RM, 0)

    def __call__(self, call: SwitchCall, flags: int = 0) -> int:
        """Make a call that names the branch."""
        return self.switch.branch(self.number, call, self.xid, RM, flags)

    def publish(self, queue: str, body: bytes) -> None:
        """``dtx_publish``."""
        messages.publish(self.switch.working(self.number)[1], "", queue, body, NOTHING)

    def get(self, queue: str, size: int = 100) -> Taken | int | None:
        """``dtx_get``."""
        return messages.get(self.switch.working(self.number)[1], queue, size)

    def settle(self, tag: int, *, ack: bool) -> None:
        """``dtx_ack`` and ``dtx_reject``."""
        messages.settle(self.switch.working(self.number)[1], tag, ack=ack, requeue=True)


@pytest.fixture
def thread(service: DtxService) -> Iterator[Thread]:
    """A thread that has opened the service."""
    one = Thread(service)
    yield one
    one.switch.thread_ended(one.number)


def committed(thread: Thread, queue: str, *bodies: bytes) -> None:
    """Publish messages in a branch and commit it."""
    thread(SwitchCall.START)
    for body in bodies:
        thread.publish(queue, body)
    thread(SwitchCall.END, TMSUCCESS)
    thread(SwitchCall.COMMIT, TMONEPHASE)


def test_messages_are_taken_kept_and_given_back(thread: Thread, queue: str, bodies: Callable[[], list[str]]) -> None:
    committed(thread, queue, b"acknowledged", b"given back", b"left")
    thread(SwitchCall.START)
    assert thread.get(queue, 3) == len(b"acknowledged")
    first, second, third = (thread.get(queue) for _ in range(3))
    assert isinstance(first, Taken)
    assert isinstance(second, Taken)
    assert isinstance(third, Taken)
    assert (first.body, first.routing_key, first.redelivered) == (b"acknowledged", queue, False)
    assert thread.get(queue) is None
    thread.settle(first.tag, ack=True)
    thread.settle(second.tag, ack=False)
    for tag in (first.tag, second.tag, 99):
        with pytest.raises(XAER_INVAL, match="no unsettled message"):
            thread.settle(tag, ack=True)
    thread(SwitchCall.END, TMSUCCESS)
    thread(SwitchCall.COMMIT, TMONEPHASE)
    found: list[str] = []

    def back() -> bool:
        found.extend(bodies())
        return len(found) == 2

    wait_until(back, what="what was not acknowledged")
    assert sorted(found) == ["given back", "left"]


def test_a_queue_that_is_not_there_dooms_the_branch(thread: Thread) -> None:
    thread(SwitchCall.START)
    for _ in range(2):  # the second time the channel is known to be closed
        with pytest.raises(XA_RBROLLBACK, match="404"):
            thread.get("no-such-queue")
    with pytest.raises(XA_RBROLLBACK, match="404"):
        thread(SwitchCall.END, TMSUCCESS)
    thread(SwitchCall.ROLLBACK)


def test_a_thread_that_is_gone_has_nothing_open(thread: Thread, queue: str) -> None:
    thread(SwitchCall.START)
    thread.publish(queue, b"lost")
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    thread.switch.thread_ended(thread.number)
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files
    with pytest.raises(XAER_PROTO, match="has not called xa_open"):
        thread(SwitchCall.END, TMSUCCESS)
    with pytest.raises(XAER_PROTO, match="call xa_start before the work"):
        thread.publish(queue, b"late")


def test_an_abandoned_connection_is_replaced(thread: Thread, queue: str, service: DtxService) -> None:
    """After an unexpected error the thread uses new connections."""
    thread(SwitchCall.START)
    thread.publish(queue, b"lost")
    thread.switch.abandon(thread.number, RM)
    thread.switch.abandon(thread.number, 77)

    def rolled_back() -> bool:
        try:
            return thread(SwitchCall.ROLLBACK) == 0
        except XAER_NOTA:
            return True
        except XAER_PROTO:  # dtx has not noticed yet
            return False

    wait_until(rolled_back, what="the end of the connection")
    committed(thread, queue, b"kept")


def test_the_only_one_that_is_associated_is_meant(thread: Thread, service: DtxService) -> None:
    assert thread.switch.use(thread.number, RM) == 0
    thread.switch.close(thread.number, RM, 0)
    with pytest.raises(XAER_PROTO):
        thread.switch.use(thread.number, RM)
    assert thread.switch.use(thread.number, ANY) == 0


def test_outcomes_are_logged_where_the_open_string_points(service: DtxService, queue: str) -> None:
    thread = Thread(service, f";coordination={service.url()};transaction-timeout=600;answer-timeout=0")
    committed(thread, queue, b"x")
    with pytest.raises(XAER_RMERR, match="out of reach"):
        thread.switch.open(thread.number, "url=amqp://guest:guest@127.0.0.1:1/", 8, 0)
    with pytest.raises(XAException, match="another string"):
        thread.switch.open(thread.number, f"url={service.url()}", RM, 0)
    thread.switch.close(thread.number, RM, 0)

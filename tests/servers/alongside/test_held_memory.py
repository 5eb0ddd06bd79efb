"""Memory for contents: incomplete contents count as well, and contents without a use are not kept."""

from collections.abc import Callable, Iterator

import pytest

from dtx.client import XaFlag
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import HEADER, header_frame, method_frame
from dtx.wire.amqp09.methods import DtxEnd, DtxGetTimeout, DtxRollback, DtxStart
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Stage
from tests.support.postgres import PostgresServer
from tests.support.processes import resident
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, body_frames

MIB = 1 << 20
HELD = 24 * MIB
LARGE = 16 * MIB
"""More than fits in the sockets between a broker, dtx and a client that does not read."""
PROPERTIES = len(b"".join(PERSISTENT.encode()))
"""The size of the properties, which count as well."""
_BASIC = methods.BasicPublish.KEY >> 16


@pytest.fixture(scope="module")
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """A dtx that may hold little."""
    with Stage(shared_rabbitmq, postgres, options=["--max-held-bytes", str(HELD)]) as made:
        made.declare("in")
        made.declare("out")
        yield made


def client(stage: Stage, *channels: int) -> RawClient:
    """A connection with selected channels."""
    made = RawClient(stage.service.url(vhost=stage.vhost)).log_in()
    for channel in channels:
        made.open(channel, select=True)
    return made


def fits(observer: RawClient, size: int) -> bool:
    """Whether a branch may hold a message of *size* bytes now. The branch is rolled back."""
    xid = new_xid()
    observer.ask(1, DtxStart(xid=xid))
    method, header = methods.BasicPublish(b"", b"out").encode(), header_frame(1, _BASIC, size, b"\x00\x00")
    body = body_frames(1, bytes(size), observer.frame_max)
    observer.send_raw(b"".join((method_frame(1, method), header, *body)))
    observer.say(1, DtxEnd(xid=xid).encode())
    taken = observer.next_method(1)[:4] != methods.ChannelClose.HEAD
    if not taken:
        observer.say(1, methods.ChannelCloseOk().encode())
        observer.open(1, select=True)
    observer.ask(1, DtxRollback(xid=xid))
    return taken


def room(observer: RawClient, size: int) -> Callable[[], bool]:
    """A check whether exactly *size* bytes are free."""
    return lambda: fits(observer, size) and not fits(observer, size + 1)


def test_memory_of_a_delivery_counts_from_its_first_byte(stage: Stage) -> None:
    """Otherwise many large deliveries at the same time would each fit, but exceed the limit together."""
    stage.fill("in", bytes(LARGE))
    with client(stage, 1) as observer, client(stage, 1) as slow:
        assert room(observer, HELD)()
        slow.say(1, methods.BasicConsume(b"in", b"tag").encode())
        while slow.read()[0] != HEADER:
            pass
        assert room(observer, HELD - LARGE - PROPERTIES)()
        slow.abort()
        stage.wait_for(room(observer, HELD), "the room that the delivery had taken")
    stage.wait_for_count("in", 1)
    assert stage.bodies("in") == [bytes(LARGE)]


def test_a_delivery_that_is_complete_counts_once(stage: Stage) -> None:
    """It is counted when it begins, and not again in a branch. After the rollback it no longer counts."""
    stage.fill("in", bytes(LARGE))
    with client(stage, 1) as observer, client(stage, 1) as consumer:
        xid = new_xid()
        consumer.ask(1, DtxStart(xid=xid))
        consumer.consume_one(1, "in")
        assert consumer.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert room(observer, HELD - LARGE - PROPERTIES)()
        assert consumer.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
        assert room(observer, HELD)()
    stage.wait_for_count("in", 1)
    assert stage.bodies("in") == [bytes(LARGE)]


def test_publishes_of_a_lost_branch_are_not_kept(stage: Stage) -> None:
    """The branch can only be rolled back. Its messages count towards no limit, so dtx does not keep them."""
    channels = (2, 3, 4)
    with client(stage, 1, *channels) as publisher:
        xid = doomed(publisher, channels)
        before = resident(stage.service.pid)
        for channel in channels:
            size = 60 * MIB
            frames = body_frames(channel, bytes(size - 1), publisher.frame_max)
            method = methods.BasicPublish(b"", b"out").frame(channel)
            publisher.send_raw(b"".join((method, header_frame(channel, _BASIC, size, b"\x00\x00"), *frames)))
        publisher.ask(1, DtxGetTimeout(xid=xid))  # its answer comes after all that was sent
        assert resident(stage.service.pid) - before < 60 * MIB
        for channel in channels:
            publisher.send_raw(b"".join(body_frames(channel, b"x", publisher.frame_max)))
            assert publisher.ask(channel, DtxEnd(xid=xid)) is XaFlag.RBROLLBACK
        publisher.ask(1, DtxRollback(xid=xid))
    assert stage.bodies("out") == []


def doomed(publisher: RawClient, channels: tuple[int, ...]) -> Xid:
    """A branch that can only be rolled back. *channels* are associated with it, and channel 1 was."""
    xid = new_xid()
    publisher.ask(1, DtxStart(xid=xid))
    for channel in channels:
        publisher.ask(channel, DtxStart(xid=xid, join=True))
    header = header_frame(1, _BASIC, HELD + 1, b"\x00\x00")
    publisher.send_raw(methods.BasicPublish(b"", b"out").frame(1) + header)
    assert publisher.refused(1).code == 506
    return xid

"""Alongside RabbitMQ, no request holds the event loop for more than 50 ms, whatever its size.

The tests use each limit up to its maximum, as those of standalone mode do.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import pytest

from dtx.server.limits import MAX_UNSETTLED
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.frames import header_frame, method_frame
from dtx.wire.amqp09.properties import Property, build
from dtx.wire.amqp09.tables import entry
from dtx.xa.codes import ReplyCode
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.loop_watch import WatchedService, a_queue, ask, fill, not_held, service, take
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import NO_PROPERTIES, RawClient, body_frames, message

__all__ = ["service"]

PATIENCE: Final = 120.0
BRANCH_MESSAGES: Final = 10_000
"""The default of --max-branch-messages."""
MANY: Final = 20_000
"""A number of deliveries, frames or consumers, which RabbitMQ does not limit."""
TX_SELECT: Final = methods.TxSelect().encode()
RECOVER: Final = methods.BasicRecover.HEAD + b"\x01"
CLOSE: Final = methods.ChannelClose(200, b"").encode()


@pytest.fixture(scope="module")
def watched(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service of its own, so that only these tests are measured."""
    database = postgres.create_database()
    with WatchedService(broker=shared_rabbitmq.url(), database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def peer(service: WatchedService) -> Iterator[RawClient]:
    """A client with channel 1."""
    with RawClient(service.url(), patience=PATIENCE) as one:
        one.log_in()
        one.open(1)
        yield one


@pytest.fixture
def queue(shared_rabbitmq: RabbitNode) -> Iterator[bytes]:
    """A queue that was declared at the broker."""
    with RawClient(shared_rabbitmq.url(), patience=PATIENCE) as direct:
        direct.log_in()
        direct.open(1)
        name = a_queue(direct, durable=True)
        yield name
        ask(direct, methods.QueueDelete(name).encode(), methods.QueueDeleteOk.KEY)


@pytest.fixture
def filled(shared_rabbitmq: RabbitNode, queue: bytes) -> bytes:
    """A queue with as many messages as a branch may consume."""
    with RawClient(shared_rabbitmq.url(), patience=PATIENCE) as direct:
        direct.log_in()
        fill(direct, queue, BRANCH_MESSAGES)
    return queue


def settled(peer: RawClient, queue: bytes) -> int:
    """The number of ready messages, after all earlier methods."""
    return int.from_bytes(
        ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)[-8:-4], "big"
    )


def select(peer: RawClient, channel: int = 1) -> None:
    ask(peer, methods.DtxSelect().encode(), methods.DtxSelectOk.KEY, channel)


def start(peer: RawClient) -> Xid:
    xid = new_xid()
    ask(peer, methods.DtxStart(xid=xid, join=False, resume=False).encode(), methods.DtxStartOk.KEY)
    return xid


def end(peer: RawClient, xid: Xid) -> None:
    ask(peer, methods.DtxEnd(xid=xid, fail=False, suspend=False).encode(), methods.DtxEndOk.KEY)


def publish_largest(peer: RawClient, queue: bytes) -> None:
    peer.send_raw(message(1, queue, b"x" * 100) * BRANCH_MESSAGES)


def consume_largest(peer: RawClient, queue: bytes) -> None:
    peer.say(1, methods.BasicConsume(queue, b"all").encode())
    take(peer, BRANCH_MESSAGES)


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["passing", "selected", "mixed"])
def test_all_frames_of_a_read_are_little_work_together(peer: RawClient, queue: bytes, mode: str) -> None:
    peer.open(2)
    if mode == "selected":
        select(peer)
    one = message(1, queue, b"")
    if mode == "mixed":
        one += methods.QueueDeclare(queue, passive=True).frame(2)
    peer.send_raw(one * MANY)
    if mode == "mixed":
        take(peer, MANY, methods.QueueDeclareOk.KEY)
    wait_until(lambda: settled(peer, queue) == MANY, seconds=PATIENCE, what="all messages, once")
    peer.say(1, methods.BasicConsume(queue, b"all", no_ack=True).encode())
    take(peer, MANY)


@pytest.mark.parametrize(
    ("how", "part"), [("passing", 1), ("passing", 8), ("selected", 1), ("selected", 8), ("branch", 8)]
)
def test_a_body_comes_in_very_many_frames(peer: RawClient, queue: bytes, how: str, part: int) -> None:
    if how != "passing":
        select(peer)
    if how == "branch":
        start(peer)
    size = part * 200_000
    frames = body_frames(1, bytes(size), part + 8)
    header = header_frame(1, 60, size, NO_PROPERTIES)
    peer.send_raw(methods.BasicPublish(b"", queue).frame(1), header, *frames)
    wait_until(lambda: settled(peer, queue) == (how != "branch"), seconds=PATIENCE, what="the message")


def test_frames_that_wait_behind_a_call_are_little_work_together(peer: RawClient, queue: bytes) -> None:
    """Frames behind a select wait for it, and are handled afterwards."""
    one = message(1, queue, b"")
    peer.send_raw(methods.DtxSelect().frame(1), one * (MANY // 2))
    ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)


@pytest.mark.parametrize("kind", ["many", "nested"])
def test_messages_of_a_branch_may_have_the_maximum_of_headers(peer: RawClient, queue: bytes, kind: str) -> None:
    select(peer)
    xid = start(peer)
    headers = b"\x01aV" * (tables.MAX_ENTRIES - 2)
    if kind == "nested":
        headers = entry(b"k", b"A", b"V" * (tables.MAX_ENTRIES - 2)) + b"\x01aV" * (tables.MAX_ENTRIES - 4)
    properties = build({Property.HEADERS: headers})
    peer.send_raw((methods.BasicPublish(b"", queue).frame(1) + header_frame(1, 60, 0, properties)) * 20)
    end(peer, xid)
    ask(peer, methods.DtxCommit(xid=xid, one_phase=True).encode(), methods.DtxCommitOk.KEY)


@pytest.mark.parametrize("end_of_it", ["commit", "rollback"])
def test_a_branch_consumes_messages_with_the_maximum_of_headers(peer: RawClient, queue: bytes, end_of_it: str) -> None:
    properties = build({Property.HEADERS: b"\x01aV" * (tables.MAX_ENTRIES - 10)})
    peer.send_raw((methods.BasicPublish(b"", queue).frame(1) + header_frame(1, 60, 0, properties)) * 50)
    settled(peer, queue)
    select(peer)
    peer.say(1, methods.BasicConsume(queue, b"all").encode())
    take(peer, 50)
    xid = start(peer)
    peer.say(1, methods.BasicAck(0, multiple=True).encode())
    end(peer, xid)
    ask(peer, methods.DtxPrepare(xid=xid).encode(), methods.DtxPrepareOk.KEY)
    conclude(peer, xid, end_of_it)


# -- branches ----------------------------------------------------------------------------------------------------------


def conclude(peer: RawClient, xid: Xid, how: str) -> None:
    if how in ("commit", "one-phase"):
        ask(peer, methods.DtxCommit(xid=xid, one_phase=how == "one-phase").encode(), methods.DtxCommitOk.KEY)
    else:
        ask(peer, methods.DtxRollback(xid=xid).encode(), methods.DtxRollbackOk.KEY)


@pytest.mark.parametrize("how", ["commit", "rollback", "one-phase"])
@pytest.mark.parametrize("kind", ["publish", "consume", "reject"])
def test_the_largest_branch_ends(peer: RawClient, request: pytest.FixtureRequest, kind: str, how: str) -> None:
    queue = request.getfixturevalue("queue" if kind == "publish" else "filled")
    select(peer)
    if kind != "publish":
        consume_largest(peer, queue)
        peer.say(1, methods.BasicCancel(b"all").encode())
        peer.wait(methods.BasicCancelOk.KEY)
    xid = start(peer)
    if kind == "publish":
        publish_largest(peer, queue)
    elif kind == "consume":
        peer.say(1, methods.BasicAck(0, multiple=True).encode())
    else:
        peer.say(1, methods.BasicNack(0, multiple=True, requeue=False).encode())
    end(peer, xid)
    if how in ("commit", "rollback"):
        ask(peer, methods.DtxPrepare(xid=xid).encode(), methods.DtxPrepareOk.KEY)
    conclude(peer, xid, how)
    left = {"publish": ("commit", "one-phase"), "consume": ("rollback",), "reject": ("rollback",)}
    wanted = BRANCH_MESSAGES if how in left[kind] else 0
    wait_until(lambda: settled(peer, queue) == wanted, seconds=PATIENCE, what=f"{wanted} messages")


@pytest.mark.parametrize("how", ["channel", "disconnect"])
@pytest.mark.parametrize("kind", ["publish", "consume", "reject", "deliveries"])
def test_a_client_leaves_the_largest_branch(peer: RawClient, filled: bytes, kind: str, how: str) -> None:
    select(peer)
    if kind != "publish":
        consume_largest(peer, filled)
    if kind != "deliveries":
        start(peer)
    if kind == "publish":
        publish_largest(peer, filled)
        peer.send_raw(methods.QueueDeclare(filled, passive=True).frame(1))
        peer.wait(methods.QueueDeclareOk.KEY)
    elif kind == "consume":
        peer.say(1, methods.BasicAck(0, multiple=True).encode())
    elif kind == "reject":
        peer.say(1, methods.BasicNack(0, multiple=True, requeue=False).encode())
    if how == "channel":
        ask(peer, CLOSE, methods.ChannelCloseOk.KEY)
        peer.open(1)
    else:
        peer.socket.close()


@pytest.mark.parametrize("how", ["ack", "nack", "reject", "recover"])
def test_very_many_deliveries_are_settled_outside_a_branch(peer: RawClient, filled: bytes, how: str) -> None:
    select(peer)
    consume_largest(peer, filled)
    peer.say(1, methods.BasicCancel(b"all").encode())
    peer.wait(methods.BasicCancelOk.KEY)
    said = {
        "ack": methods.BasicAck(0, multiple=True).encode(),
        "nack": methods.BasicNack(0, multiple=True).encode(),
        "reject": methods.BasicNack(0, multiple=True, requeue=False).encode(),
        "recover": RECOVER,
    }
    peer.say(1, said[how])
    if how == "recover":
        peer.wait(methods.BasicRecoverOk.KEY)
    wanted = 0 if how in ("ack", "reject") else BRANCH_MESSAGES
    wait_until(lambda: settled(peer, filled) == wanted, seconds=PATIENCE, what=f"{wanted} messages")


@pytest.fixture
def overfull(shared_rabbitmq: RabbitNode, queue: bytes) -> bytes:
    """A queue with one message more than a channel may have unsettled."""
    with RawClient(shared_rabbitmq.url(), patience=PATIENCE) as direct:
        direct.log_in()
        fill(direct, queue, MAX_UNSETTLED + 1)
    return queue


@pytest.mark.parametrize("how", ["ack", "close", "disconnect"])
def test_a_channel_has_as_many_unsettled_deliveries_as_may_be(peer: RawClient, overfull: bytes, how: str) -> None:
    """A branch holds one delivery, so each of the others is settled by its own method."""
    peer.open(2)
    peer.say(2, methods.BasicGet(overfull, no_ack=True).encode())
    peer.wait(methods.BasicGetOk.KEY, channel=2)
    select(peer)
    peer.say(1, methods.BasicConsume(overfull, b"all").encode())
    take(peer, MAX_UNSETTLED)
    xid = start(peer)
    peer.say(1, methods.BasicAck(MAX_UNSETTLED // 2).encode())
    end(peer, xid)
    if how == "disconnect":
        peer.socket.close()
        return
    if how == "ack":
        peer.say(1, methods.BasicAck(0, multiple=True).encode())
        assert settled(peer, overfull) == 0
    ask(peer, CLOSE, methods.ChannelCloseOk.KEY)
    peer.open(1)
    ask(peer, methods.DtxRollback(xid=xid).encode(), methods.DtxRollbackOk.KEY)
    wanted = 1 if how == "ack" else MAX_UNSETTLED
    wait_until(lambda: settled(peer, overfull) == wanted, seconds=PATIENCE, what=f"{wanted} messages")


def test_channels_have_very_many_unsettled_deliveries_and_their_client_leaves(peer: RawClient, overfull: bytes) -> None:
    for channel in range(2, 12):
        peer.open(channel)
        select(peer, channel)
    for channel in range(2, 12):
        peer.say(channel, methods.BasicConsume(overfull, b"all").encode())
    take(peer, MAX_UNSETTLED)
    peer.socket.close()


def test_a_channel_with_too_many_unsettled_deliveries_is_closed(peer: RawClient, overfull: bytes) -> None:
    select(peer)
    peer.say(1, methods.BasicConsume(overfull, b"all").encode())
    close = peer.channel_end(1)
    assert close.reply_code == ReplyCode.RESOURCE_ERROR
    assert close.reply_text == b"more than 200000 deliveries are not settled: consume with a prefetch (basic.qos)"
    peer.say(1, methods.ChannelCloseOk().encode())
    peer.open(1)
    wait_until(
        lambda: settled(peer, overfull) == MAX_UNSETTLED + 1, seconds=PATIENCE, what="all messages in the queue again"
    )


# -- channels and consumers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "disconnect"])
@pytest.mark.parametrize("mode", ["passing", "selected"])
def test_a_client_has_as_many_channels_as_may_be(peer: RawClient, mode: str, how: str) -> None:
    numbers = range(2, min(peer.offered.channel_max, 1022) + 1)
    peer.send_raw(*(methods.ChannelOpen().frame(number) for number in numbers))
    take(peer, len(numbers), methods.ChannelOpenOk.KEY)
    if mode == "selected":
        peer.send_raw(*(methods.DtxSelect().frame(number) for number in numbers))
        take(peer, len(numbers), methods.DtxSelectOk.KEY)
    if how == "close":
        peer.send_raw(*(method_frame(number, CLOSE) for number in numbers))
        take(peer, len(numbers), methods.ChannelCloseOk.KEY)
    else:
        peer.socket.close()


@pytest.mark.parametrize("how", ["close", "disconnect"])
@pytest.mark.parametrize("mode", ["passing", "selected"])
def test_a_channel_has_very_many_consumers(peer: RawClient, queue: bytes, mode: str, how: str) -> None:
    if mode == "selected":
        select(peer)
    peer.send_raw(*(methods.BasicConsume(queue, b"%d" % number, no_wait=True).frame(1) for number in range(MANY // 4)))
    ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    if how == "close":
        ask(peer, CLOSE, methods.ChannelCloseOk.KEY)
    else:
        peer.socket.close()


def test_the_broker_leaves_the_largest_branch(
    shared_rabbitmq: RabbitNode, postgres: PostgresServer, filled: bytes
) -> None:
    """The deliveries are lost with the connection to the broker: the branch can only be rolled back."""
    database = postgres.create_database()
    url = shared_rabbitmq.url()
    with Proxy("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])) as between:
        broker = url.replace(f":{url.rpartition(':')[2].partition('/')[0]}", f":{between.port}")
        with WatchedService(broker=broker, database=database) as service, not_held(service), ExitStack() as stack:
            peer = stack.enter_context(RawClient(service.url(), patience=PATIENCE))
            peer.log_in()
            peer.open(1)
            select(peer)
            consume_largest(peer, filled)
            start(peer)
            peer.say(1, methods.BasicAck(0, multiple=True).encode())
            between.cut()
            peer.end()
    postgres.drop_database(database)

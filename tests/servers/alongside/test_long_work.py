"""No request holds the event loop for more than 50 ms when dtx runs beside RabbitMQ, whatever its size.

Each limit is driven to its maximum; see the same of standalone mode.
"""

from collections.abc import Iterator
from typing import Final

import pytest

from dtx.wire.amqp09 import calls, keys, requests
from dtx.wire.amqp09.calls import DtxMethod
from dtx.wire.amqp09.frames import body_frames, header_frame, method_frame
from dtx.xa.xid import Xid
from tests.support.client import new_xid
from tests.support.peer import NO_PROPERTIES, Peer, logged_in, message
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.watched import WatchedService, a_queue, ask, not_held, take

PATIENCE: Final = 120.0
BRANCH_MESSAGES: Final = 10_000
"""The default of --max-branch-messages."""
MANY: Final = 20_000
"""Deliveries, frames and consumers, for which RabbitMQ sets no limit."""
CLOSE: Final = requests.close(keys.CHANNEL_CLOSE, 200, b"")


@pytest.fixture(scope="module")
def watched(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service of its own: nobody else is to be measured."""
    database = postgres.create_database()
    with WatchedService(broker=shared_rabbitmq.url(), database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture
def service(watched: WatchedService) -> Iterator[WatchedService]:
    """The same; the test fails if its loop was held."""
    with not_held(watched):
        yield watched


@pytest.fixture
def peer(service: WatchedService) -> Iterator[Peer]:
    """A client with channel 1."""
    with Peer(service.url(), patience=PATIENCE) as one:
        one.log_in()
        one.open(1)
        yield one


@pytest.fixture
def queue(shared_rabbitmq: RabbitNode) -> Iterator[bytes]:
    """A queue that was declared at the broker."""
    with logged_in(shared_rabbitmq.url()) as direct:
        name = a_queue(direct, durable=True)
        yield name
        ask(direct, requests.queue_delete(name), keys.QUEUE_DELETE_OK)


def settled(peer: Peer, queue: bytes) -> int:
    """Messages that are ready, once all that was said before is done."""
    return int.from_bytes(ask(peer, requests.queue_declare(queue, passive=True), keys.QUEUE_DECLARE_OK)[-8:-4], "big")


def select(peer: Peer, channel: int = 1) -> None:
    ask(peer, calls.encode_call(calls.Select()), DtxMethod.SELECT_OK, channel)


def start(peer: Peer) -> Xid:
    xid = new_xid()
    ask(peer, calls.encode_call(calls.Start(xid=xid, join=False, resume=False)), DtxMethod.START_OK)
    return xid


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["passing", "selected", "mixed"])
def test_all_frames_of_a_read_are_little_work_together(peer: Peer, queue: bytes, mode: str) -> None:
    peer.open(2)
    if mode == "selected":
        select(peer)
    one = message(1, queue, b"")
    if mode == "mixed":
        one += method_frame(2, requests.queue_declare(queue, passive=True))
    peer.send(one * MANY)
    if mode == "mixed":
        take(peer, MANY, keys.QUEUE_DECLARE_OK)
    wait_until(lambda: settled(peer, queue) == MANY, seconds=PATIENCE, what="all messages, once")
    peer.say(1, requests.consume(queue, b"all", no_ack=True))
    take(peer, MANY)


@pytest.mark.parametrize(
    ("how", "part"), [("passing", 1), ("passing", 8), ("selected", 1), ("selected", 8), ("branch", 8)]
)
def test_a_body_comes_in_very_many_frames(peer: Peer, queue: bytes, how: str, part: int) -> None:
    if how != "passing":
        select(peer)
    if how == "branch":
        start(peer)
    size = part * 200_000
    frames = body_frames(1, bytes(size), part + 8)
    header = header_frame(1, 60, size, NO_PROPERTIES)
    peer.send(method_frame(1, requests.publish(b"", queue)), header, *frames)
    wait_until(lambda: settled(peer, queue) == (how != "branch"), seconds=PATIENCE, what="the message")


def test_frames_that_wait_behind_a_call_are_little_work_together(peer: Peer, queue: bytes) -> None:
    """A select takes its time; what waits behind it is done afterwards."""
    one = message(1, queue, b"")
    peer.send(method_frame(1, calls.encode_call(calls.Select())), one * (MANY // 2))
    ask(peer, requests.queue_declare(queue, passive=True), keys.QUEUE_DECLARE_OK)


@pytest.mark.parametrize("how", ["channel", "connection", "disconnect"])
def test_a_client_leaves_the_branch_with_most_publishes(peer: Peer, queue: bytes, how: str) -> None:
    select(peer)
    start(peer)
    peer.send(message(1, queue, b"x" * 100) * BRANCH_MESSAGES)
    ask(peer, requests.queue_declare(queue, passive=True), keys.QUEUE_DECLARE_OK)
    if how == "channel":
        ask(peer, CLOSE, keys.CHANNEL_CLOSE_OK)
        peer.open(1)
    elif how == "connection":
        peer.close()
    else:
        peer.socket.close()

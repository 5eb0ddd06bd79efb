"""Messages of quorum queues with a delivery limit: rollbacks before prepare return them again and again."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import NackError

from dtx.client import XaFlag, XAResource
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.delivery_limit import publish_copies
from dtx.store.rabbitmq.service import Broker
from dtx.wire.amqp09 import properties
from tests.conftest import ServiceFactory
from tests.support.branches import a_consume, new_identity
from tests.support.client import bodies, connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode

LIMIT = 4
MakeQueue = Callable[..., str]


@pytest.fixture
def make_queue(rabbitmq: RabbitNode) -> Iterator[MakeQueue]:
    """Makes a quorum queue that drops a message after LIMIT returns, with one message."""
    made = []

    def make(**arguments: Any) -> str:
        made.append(f"quorum-{secrets.token_hex(6)}")
        with rabbitmq.channel() as channel:
            every = {"x-queue-type": "quorum", "x-delivery-limit": LIMIT, **arguments}
            channel.queue_declare(made[-1], durable=True, arguments=every)
            channel.confirm_delivery()
            channel.basic_publish("", made[-1], b"one")
        return made[-1]

    yield make
    with rabbitmq.channel() as channel:
        for queue in made:
            channel.queue_delete(queue)


def got_from(channel: BlockingChannel, queue: str) -> tuple[Any, pika.BasicProperties]:
    """The next message, which may be late: method and properties."""
    got: list[Any] = []

    def get() -> bool:
        got[:] = channel.basic_get(queue)
        return got[0] is not None

    wait_until(get, what="the message", seconds=10)
    return got[0], got[1]


def roll_back(
    channel: BlockingChannel, queue: str, meanwhile: Callable[[], None] = lambda: None
) -> pika.BasicProperties:
    """Consume the message in a branch, and roll the branch back. Returns the properties of the message."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    method, properties = got_from(channel, queue)
    channel.basic_ack(method.delivery_tag)
    xa.end(xid)
    meanwhile()
    xa.rollback(xid)
    return properties


@pytest.mark.parametrize("stays", [True, False], ids=["one connection", "a connection for each branch"])
def test_rollbacks_lose_no_message_to_the_delivery_limit(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, make_queue: MakeQueue, stays: bool
) -> None:
    """Without dtx the queue drops the message at the return LIMIT + 1."""
    service, queue = dtx_service("--management", rabbitmq.management_url), make_queue()
    found = []
    with connected(service.url()) as connection:
        for _ in range(3 * LIMIT):
            client: AbstractContextManager[Any] = nullcontext(connection) if stays else connected(service.url())
            with client as each:
                found.append(roll_back(each.channel(), queue))
    assert "x-dtx-put-back" in found[-1].headers
    wait_until(lambda: rabbitmq.count(queue) == 1, what="the message in its queue")
    assert bodies(rabbitmq, queue) == [b"one"]


def test_a_queue_with_a_dead_letter_exchange_moves_its_messages(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, make_queue: MakeQueue
) -> None:
    """Nothing is lost there: the limit works as its owner wants."""
    service, other = dtx_service("--management", rabbitmq.management_url), make_queue()
    queue = make_queue(**{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": other})
    with connected(service.url()) as connection:
        for _ in range(LIMIT + 1):
            assert "x-dtx-put-back" not in (roll_back(connection.channel(), queue).headers or {})
    wait_until(lambda: rabbitmq.count(other) == 2, what="the dead letter")
    assert bodies(rabbitmq, other) == [b"one", b"one"]
    assert rabbitmq.count(queue) == 0


@contextmanager
def committed(channel: BlockingChannel) -> Iterator[None]:
    """A branch that is committed."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    yield
    xa.end(xid)
    assert xa.commit(xid, one_phase=True) == XaFlag.OK


@pytest.mark.parametrize("settle", ["basic_reject", "basic_nack"])
def test_rejections_of_a_branch_count_like_those_of_a_channel(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, make_queue: MakeQueue, settle: str
) -> None:
    """A message is returned once, and then dead-lettered: in branches, and directly at the broker."""
    service = dtx_service("--management", rabbitmq.management_url)

    def counts(url: str, branch: Callable[[BlockingChannel], AbstractContextManager[None]]) -> tuple[Any, ...]:
        dead = make_queue()
        queue = make_queue(**{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
        found = []
        with connected(url) as connection:
            channel = connection.channel()
            for requeue in (True, False):
                with branch(channel):
                    method, properties = got_from(channel, queue)
                    found.append((properties.headers or {}).get("x-delivery-count", 0))
                    getattr(channel, settle)(method.delivery_tag, requeue=requeue)
            wait_until(lambda: rabbitmq.count(dead) == 2, what="the dead letter")
        (death,) = rabbitmq.take_all(dead)[1][1].headers["x-death"]
        return found, death["reason"], death["count"], death["queue"] == queue

    assert counts(service.url(), committed) == counts(rabbitmq.url(), nullcontext) == ([0, 1], "rejected", 1, True)


def test_a_copy_that_its_queue_refuses_returns_the_message(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, make_queue: MakeQueue
) -> None:
    service = dtx_service("--management", rabbitmq.management_url)
    queue = make_queue(**{"x-max-length": 1, "x-overflow": "reject-publish"})

    def fill() -> None:
        with rabbitmq.channel() as channel, suppress(NackError):
            channel.confirm_delivery()
            for _ in range(20):
                channel.basic_publish("", queue, b"in the way")
                time.sleep(0.1)  # the queue refuses soon after it is full

    with connected(service.url()) as connection:
        for _ in range(LIMIT // 2):
            roll_back(connection.channel(), queue)
        roll_back(connection.channel(), queue, meanwhile=fill)
    wait_until(lambda: rabbitmq.count(queue) >= 2, what="the message in its queue")
    assert bodies(rabbitmq, queue).count(b"one") == 1
    assert b"their queue refused the copies" in service.log_path.read_bytes()


async def test_a_message_that_does_not_fit_hinders_no_other(rabbitmq: RabbitNode, make_queue: MakeQueue) -> None:
    """Its headers are too large for a frame: the other messages are published."""
    queue = make_queue().encode()
    large = properties.set_header(bytes(2), b"large", bytes(200_000))
    commits = CommitConnection(
        Broker.from_url(rabbitmq.url()), "/", CommitSettings(identity=new_identity("copies"), replay="always")
    )
    try:
        await commits.ready(60)
        connection = commits._connection
        assert connection is not None
        rows = [a_consume(0, queue=queue, properties=large), a_consume(1, queue=queue)]
        assert await publish_copies(connection, rows) == [1]
    finally:
        await commits.close()

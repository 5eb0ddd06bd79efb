"""Helpers of tests that use clients: xids, queues, connections."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.channel import Channel
from pika.exceptions import AMQPConnectionError, AMQPError

from dtx.client import Xid
from tests.support.broker import Broker
from tests.support.processes import wait_until

_numbers = itertools.count(1)
_RUN = secrets.token_bytes(6)


def new_xid(bqual: bytes = b"queue") -> Xid:
    """A new xid."""
    return Xid(0x74657374, _RUN + b"\x00" + str(next(_numbers)).encode(), bqual)


@contextlib.contextmanager
def fresh_queue(node: Broker) -> Iterator[str]:
    """A durable queue of the node, declared and deleted directly at the broker."""
    name = f"client-{secrets.token_hex(6)}"
    with node.channel() as channel:
        channel.queue_declare(name, durable=True)
    yield name
    node.mend()
    with node.channel() as channel:
        channel.queue_delete(name)


def bodies(node: Broker, queue: str) -> list[bytes]:
    """Take all messages out of a queue directly at the broker; return the bodies."""
    return [body for body, _, _ in node.take_all(queue)]


def take_all(channel: BlockingChannel, queue: str, *, at_least: int = 0) -> list[bytes]:
    """Take all messages out of a queue through dtx; return the bodies in order.

    Args:
        channel: the channel to use.
        queue: the name of the queue.
        at_least: the number of messages to wait for: a broker requeues messages with a delay.
    """
    found: list[bytes] = []

    def take() -> bool:
        while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
            found.append(body)
        return len(found) >= at_least

    wait_until(take, what=f"{at_least} messages in {queue}")
    return found


@contextlib.contextmanager
def connected(url: str, tls: pika.SSLOptions | None = None) -> Iterator[BlockingConnection]:
    """A blocking connection, closed afterwards if it is still open."""
    parameters = pika.URLParameters(url)
    if tls is not None:
        parameters.ssl_options = tls
    try:
        connection = BlockingConnection(parameters)
    except ValueError as error:  # pika raises it if the server dies right after the connect
        raise AMQPConnectionError(str(error)) from error
    try:
        yield connection
    finally:
        # AttributeError: pika raises it if the server's close arrives while pika closes its channels
        with contextlib.suppress(AMQPError, AttributeError):
            connection.close()


@contextlib.asynccontextmanager
async def async_connected(url: str) -> AsyncIterator[AsyncioConnection]:
    """An asyncio connection, closed afterwards if it is still open."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[AsyncioConnection] = loop.create_future()
    closed: asyncio.Future[None] = loop.create_future()
    connection = AsyncioConnection(
        pika.URLParameters(url),
        on_open_callback=opened.set_result,
        on_open_error_callback=lambda _connection, error: opened.set_exception(error),
        on_close_callback=lambda _connection, _reason: closed.set_result(None),
        custom_ioloop=loop,
    )
    await opened
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()
        await closed


async def async_channel(connection: AsyncioConnection) -> Channel:
    """A new channel."""
    opened: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    connection.channel(on_open_callback=opened.set_result)
    return await opened

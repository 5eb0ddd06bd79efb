"""What the tests of the client helpers share."""

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
    """An xid that nobody has used."""
    return Xid(0x74657374, _RUN + b"\x00" + str(next(_numbers)).encode(), bqual)


@contextlib.contextmanager
def fresh_queue(node: Broker) -> Iterator[str]:
    """A durable queue of the node, made and deleted past dtx."""
    name = f"client-{secrets.token_hex(6)}"
    with node.channel() as channel:
        channel.queue_declare(name, durable=True)
    yield name
    node.mend()
    with node.channel() as channel:
        channel.queue_delete(name)


def bodies(node: Broker, queue: str) -> list[bytes]:
    """Take everything out of a queue, past dtx."""
    return [body for body, _, _ in node.take_all(queue)]


def take_all(channel: BlockingChannel, queue: str, *, at_least: int = 0) -> list[bytes]:
    """Take everything out of a queue, through dtx; in order.

    Args:
        channel: to take it with.
        queue: its name.
        at_least: wait for so many messages: what a broker is given back, it has a moment later.
    """
    found: list[bytes] = []

    def take() -> bool:
        while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
            found.append(body)
        return len(found) >= at_least

    wait_until(take, what=f"{at_least} messages in {queue}")
    return found


@contextlib.contextmanager
def connected(url: str) -> Iterator[BlockingConnection]:
    """A blocking connection, closed afterwards where that is still to be done."""
    try:
        connection = BlockingConnection(pika.URLParameters(url))
    except ValueError as error:  # pika's own, where the server dies as soon as the socket is connected
        raise AMQPConnectionError(str(error)) from error
    try:
        yield connection
    finally:
        # AttributeError: pika's own, where the server's close comes in while pika closes the channels one by one
        with contextlib.suppress(AMQPError, AttributeError):
            connection.close()


@contextlib.asynccontextmanager
async def async_connected(url: str) -> AsyncIterator[AsyncioConnection]:
    """An asyncio connection, closed afterwards where that is still to be done."""
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

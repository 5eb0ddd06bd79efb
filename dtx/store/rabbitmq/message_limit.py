"""The largest message that the broker takes: RabbitMQ 4 names it in the attach of an AMQP 1.0 link, nowhere else."""

import asyncio
from contextlib import closing
from typing import Final
from urllib.parse import quote

from dtx.config.values import Address
from dtx.store.rabbitmq.service import Broker
from dtx.telemetry import get_logger
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER, Connection
from dtx.wire.amqp10.endpoint import SASL, Attached, EndpointSettings, frame
from dtx.wire.amqp10.errors import AmqpError
from dtx.wire.amqp10.performatives import Role, SaslInit, Source, Target

_log = get_logger(part="commit connection")
_SECONDS: Final = 5.0
"""For the whole dialogue."""
_MOST_READ: Final = 1 << 16


async def announced_limit(broker: Broker, host: Address, vhost: str, queue: bytes) -> int | None:
    """The largest message in bytes that the broker takes; ``None`` if it does not say so.

    Args:
        broker: with the credentials of dtx.
        host: the one of its hosts to ask.
        vhost: a virtual host that dtx may open.
        queue: a queue of it that dtx may publish to.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            return await _attach(broker, host, vhost, queue)
    except (OSError, AmqpError, ValueError) as error:
        _log.info("the broker does not announce its largest message", vhost=vhost, reason=str(error) or "timed out")
        return None


async def _attach(broker: Broker, host: Address, vhost: str, queue: bytes) -> int | None:
    loop = asyncio.get_running_loop()
    engine = Connection(EndpointSettings(container_id="dtx"), loop.time(), client=True)
    engine.open(hostname=f"vhost:{vhost}")
    session = engine.new_session()
    session.begin()
    link = session.new_link("dtx message limit", Role.SENDER)
    link.attach(source=Source(), target=Target(address=f"/queues/{quote(queue, safe='')}"))
    login = SaslInit(mechanism="PLAIN", initial_response=f"\0{broker.user}\0{broker.password}".encode())
    reader, writer = await asyncio.open_connection(host.host, host.port, ssl=broker.tls)
    with closing(writer):
        writer.writelines((SASL_HEADER, frame(SASL, 0, encode(login)), *engine.data_to_send(loop.time())))
        read = b""
        while AMQP_HEADER not in read:  # what comes before it is the answer to the login
            read += await _more(reader)
        read = read[read.index(AMQP_HEADER) :]
        while True:
            for event in engine.receive(read, loop.time()):
                if isinstance(event, Attached):
                    return link.max_message_size
            if engine.over:
                raise ConnectionResetError("the broker refused the link")
            read = await _more(reader)


async def _more(reader: asyncio.StreamReader) -> bytes:
    read = await reader.read(_MOST_READ)
    if not read:
        raise ConnectionResetError("the broker ended the connection")
    return read

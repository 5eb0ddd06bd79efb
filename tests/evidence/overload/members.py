"""The kinds of clients in a crowd: idle ones, working ones, and badly behaved ones.

Each kind is a coroutine that reports when it is in place, and runs until it is cancelled. An unexpected event ends it
with an exception, which also ends the crowd.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import METHOD, Protocol
from dtx.wire.amqp09.methods import (
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxEndOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxSelect,
    DtxSelectOk,
    DtxStart,
    DtxStartOk,
)
from dtx.xa.xid import Xid
from tests.evidence.overload.links import Left, Link
from tests.support.raw import Address, message

BODY: Final = bytes(1024)
HEARTBEAT: Final = 60
"""Seconds; the offer of RabbitMQ and dtx, which most programs accept."""
NUMBERS: Final = 16
"""Number of queues that the working clients share."""
_GOT: Final = methods.BasicGetOk.HEAD
PLENTY: Final = b"overload-plenty"
"""A queue with many messages, for clients that consume and do not read or settle."""


def queue_of(number: int) -> bytes:
    """Return the queue of the active client *number*."""
    return b"overload-%d" % (number % NUMBERS)


@dataclass
class Place:
    """The parameters and callbacks of a member.

    Args:
        server: to connect to.
        source: address to connect from.
        number: of this member, within its kind.
        every: seconds between two pieces of work.
        in_place: called when the member is ready.
        count: called for each piece of work done.
    """

    server: Address
    source: str
    number: int
    every: float
    in_place: Callable[[], None]
    count: Callable[[], None]
    dice: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.number)

    async def link(self, heartbeat: int = 0) -> Link:
        """Open a connection with a channel."""
        return await (await Link.connect(self.server, self.source)).log_in(heartbeat)


async def forever(link: Link) -> None:
    """Wait until the server ends the connection, which is an error."""
    await asyncio.shield(link.ended)
    raise Left("the connection is gone")


def new_xid() -> Xid:
    """Return a new xid."""
    return Xid(1, os.urandom(16), b"overload")


async def idle(place: Place) -> None:
    """Log in, open a channel, and answer heartbeats."""
    link = await place.link(HEARTBEAT)
    place.in_place()
    await forever(link)


async def select(place: Place) -> Link:
    """Open a connection whose channel has selected dtx."""
    link = await place.link(HEARTBEAT)
    await link.ask(DtxSelect().encode(), DtxSelectOk.KEY)
    return link


async def branch(link: Link, work: Callable[[], Awaitable[None]]) -> None:
    """Do a branch in two phases, waiting for each answer."""
    xid = new_xid()
    await link.ask(DtxStart(xid=xid).encode(), DtxStartOk.KEY)
    await work()
    await link.ask(DtxEnd(xid=xid).encode(), DtxEndOk.KEY)
    await link.ask(DtxPrepare(xid=xid).encode(), DtxPrepareOk.KEY)
    await link.ask(DtxCommit(xid=xid, one_phase=False).encode(), DtxCommitOk.KEY)


async def active(place: Place) -> None:
    """Alternate between branches that publish a message and branches that consume one."""
    link = await select(place)
    queue = queue_of(place.number)

    async def publish() -> None:
        link.transport.write(message(1, queue, BODY))

    async def consume() -> None:
        link.say(methods.BasicGet(queue).encode())
        payload = await link.wait(methods.BasicGetOk.KEY, methods.BasicGetEmpty.KEY)
        if payload.startswith(_GOT):
            link.say(methods.BasicAck(methods.BasicGetOk.decode(payload).delivery_tag).encode())

    place.in_place()
    await asyncio.sleep(place.dice.random() * place.every)
    loop = asyncio.get_running_loop()
    while True:
        for work in (publish, consume):
            due = loop.time() + place.every
            await branch(link, work)
            place.count()
            await asyncio.sleep(max(0.0, due - loop.time()))


async def deaf(place: Place) -> None:
    """Consume, send a request twice a second, and never read."""
    link = await place.link()
    link.transport.pause_reading()
    link.say(methods.BasicConsume(PLENTY, b"deaf").encode())
    question = methods.QueueDeclare(PLENTY, passive=True).frame(1)
    place.in_place()
    while not link.ended.done():
        if link.transport.get_write_buffer_size() < 1 << 16:
            link.transport.write(question)
        await asyncio.sleep(0.5)
    raise Left("the connection is gone")


async def hoarder(place: Place) -> None:
    """Consume without a prefetch, read everything, and settle nothing."""
    link = await place.link()
    await link.ask(methods.BasicConsume(PLENTY, b"hoarder").encode(), methods.BasicConsumeOk.KEY)
    place.in_place()
    await forever(link)


async def slow(place: Place) -> None:
    """Send one byte per second: with an odd number handshakes, which dtx ends, with an even number publishes."""
    while place.number % 2:
        link = await Link.connect(place.server, place.source)
        place.in_place()
        for octet in Protocol.AMQP_0_9_1.value + link.server.start_ok().frame(0):
            if link.ended.done():
                place.count()
                break
            link.transport.write(bytes((octet,)))
            await asyncio.sleep(1)
        link.transport.abort()
    link = await place.link()
    place.in_place()
    while True:
        for octet in message(1, queue_of(place.number), b"slowly"):
            if link.ended.done():
                raise Left("the connection is gone")
            link.transport.write(bytes((octet,)))
            await asyncio.sleep(1)


async def deserter(place: Place) -> None:
    """Open a branch, publish in it, and reset the connection, after end or in the middle of a frame."""
    while True:
        with suppress(Left, OSError):
            link = await select(place)
            xid = new_xid()
            await link.ask(DtxStart(xid=xid).encode(), DtxStartOk.KEY)
            link.transport.write(message(1, queue_of(place.number), BODY))
            if place.dice.random() < 0.5:
                await link.ask(DtxEnd(xid=xid).encode(), DtxEndOk.KEY)
            else:
                link.transport.write(bytes((METHOD, 0, 1, 0, 0, 1)))
            link.vanish()
            place.count()
        place.in_place()
        await asyncio.sleep(place.every)


KINDS: Final = {kind.__name__: kind for kind in (idle, active, deaf, hoarder, slow, deserter)}
BADLY: Final = tuple(kind.__name__ for kind in (deaf, hoarder, slow, deserter))
"""The badly behaved kinds."""

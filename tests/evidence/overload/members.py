"""The kinds of clients that make up a crowd: those that do nothing, those that work, and those that behave badly.

Each is a coroutine that tells when it is in place and goes on until it is cancelled. What must not happen to it ends
it with an exception, and with that the crowd.
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
"""Seconds: what RabbitMQ and dtx offer, and most programs take."""
NUMBERS: Final = 16
"""Queues that those who work share."""
_GOT: Final = methods.BasicGetOk.HEAD
PLENTY: Final = b"overload-plenty"
"""A queue with many messages, for those who consume and do not read or settle."""


def queue_of(number: int) -> bytes:
    """Where the active client *number* publishes."""
    return b"overload-%d" % (number % NUMBERS)


@dataclass
class Place:
    """Where a member of the crowd stands.

    Args:
        server: to connect to.
        source: address to connect from.
        number: of this member, within its kind.
        every: seconds from one piece of work to the next.
        in_place: called once, when it has come as far as it ever will.
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
        """A connection with a channel."""
        return await (await Link.connect(self.server, self.source)).log_in(heartbeat)


async def forever(link: Link) -> None:
    """Until the server ends the connection, which it must not."""
    await asyncio.shield(link.ended)
    raise Left("the connection is gone")


def new_xid() -> Xid:
    """One that nobody has."""
    return Xid(1, os.urandom(16), b"overload")


async def idle(place: Place) -> None:
    """Logs in, opens a channel, and answers heartbeats."""
    link = await place.link(HEARTBEAT)
    place.in_place()
    await forever(link)


async def select(place: Place) -> Link:
    """A connection whose channel has selected dtx."""
    link = await place.link(HEARTBEAT)
    await link.ask(DtxSelect().encode(), DtxSelectOk.KEY)
    return link


async def branch(link: Link, work: Callable[[], Awaitable[None]]) -> None:
    """A whole branch in two phases, each answer waited for."""
    xid = new_xid()
    await link.ask(DtxStart(xid=xid).encode(), DtxStartOk.KEY)
    await work()
    await link.ask(DtxEnd(xid=xid).encode(), DtxEndOk.KEY)
    await link.ask(DtxPrepare(xid=xid).encode(), DtxPrepareOk.KEY)
    await link.ask(DtxCommit(xid=xid, one_phase=False).encode(), DtxCommitOk.KEY)


async def active(place: Place) -> None:
    """A branch that publishes a message, then one that consumes a message, and so on."""
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
    """Consumes, asks something twice a second, and never reads a thing."""
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
    """Consumes without a prefetch, reads everything and settles nothing."""
    link = await place.link()
    await link.ask(methods.BasicConsume(PLENTY, b"hoarder").encode(), methods.BasicConsumeOk.KEY)
    place.in_place()
    await forever(link)


async def slow(place: Place) -> None:
    """A publish and a question, an octet a second; within the handshake first, where that is not put up with."""
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
    """Opens a branch, publishes and consumes in it, and is gone; some have said end before, some are within a frame."""
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
"""Those that behave badly."""

"""Clients of the simulation: a connection to dtx with one selected channel, and its requests."""

import asyncio
from dataclasses import replace
from typing import Final, cast

from dtx.config.values import Address
from dtx.store.rabbitmq.service import Broker, ServiceConnection
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09 import properties as basic
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.events import ContentReceived
from dtx.wire.amqp09.frames import header_frame
from dtx.wire.amqp09.methods import (
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxGetTimeoutOk,
    DtxPrepare,
    DtxPrepareOk,
    DtxRecover,
    DtxRecoverOk,
    DtxRollback,
    DtxSelect,
    DtxSetTimeout,
    DtxStart,
)
from dtx.wire.amqp09.recovery import split_xids
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.instance import PORT
from tests.evidence.sim.ledger import Delivered
from tests.support.raw import body_frames

PATIENCE: Final = 40.0
"""Limit of seconds for one answer."""
_PERSISTENT: Final = basic.build({basic.Property.DELIVERY_MODE: b"\x02"})
GONE: Final = (UpstreamLost, UpstreamChannelClosed, OSError, TimeoutError)
"""The errors that end the work on a connection."""


class _Connection(ServiceConnection):
    """A connection that negotiates frames of *frame_max* bytes, if that is not 0."""

    def __init__(self, broker: Broker, name: str, frame_max: int) -> None:
        super().__init__(broker, name)
        self._most = frame_max

    async def open(self, vhost: str) -> None:
        """Negotiate the frame size, and open *vhost*."""
        if self._most:
            self._agreed = replace(self._agreed, frame_max=self._most)
        await super().open(vhost)


class Client:
    """A connection, and a channel on it.

    Args:
        hosts: addresses of the dtx instances, tried in turn.
        frame_max: limit of the bytes of a frame, in both directions; 0: the offer of dtx.
    """

    def __init__(self, hosts: list[str], *, frame_max: int = 0) -> None:
        self._hosts = hosts
        self._frame_max = frame_max
        self._next = 0
        self._prefetch = 0
        self._connection: ServiceConnection | None = None
        self._channel: OwnChannel | None = None
        self.deliveries: list[Delivered] = []
        self._arrived = asyncio.Event()

    @property
    def channel(self) -> OwnChannel:
        """The channel, which must be open."""
        assert self._channel is not None
        return self._channel

    async def open(self, *, select: bool = True) -> None:
        """Connect to the next host, open the channel, and select.

        Raises:
            GONE: it does not serve.
        """
        self.close()
        self._next += 1
        host = self._hosts[self._next % len(self._hosts)]
        broker = Broker(hosts=(Address(host, PORT),), user="guest", password="guest", heartbeat=10)
        connection = _Connection(broker, "sim", self._frame_max)
        async with asyncio.timeout(PATIENCE):
            await connection.login("/")
        self._connection = connection
        await self.reopen(select=select)

    async def reopen(self, *, select: bool = True) -> None:
        """Open a new channel on the same connection.

        Raises:
            GONE: the connection is gone.
        """
        assert self._connection is not None
        self.deliveries.clear()
        async with asyncio.timeout(PATIENCE):
            self._channel = await OwnChannel(self._connection).open()
        if select:
            await self.ask(DtxSelect())

    @property
    def is_open(self) -> bool:
        """Whether the connection and the channel are open."""
        return (
            self._connection is not None
            and not self._connection.is_lost
            and self._channel is not None
            and self._channel.closed is None
        )

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open."""
        return self._connection is not None and not self._connection.is_lost

    def close(self) -> None:
        """End the connection without a handshake."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            connection.end("the client closes it")

    async def ask(self, request: Method) -> Method:
        """Send a request, and return its answer.

        Raises:
            GONE: there is none.
        """
        async with asyncio.timeout(PATIENCE):
            return (await self.channel.call(request)).method

    # -- dtx

    async def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Send dtx-demarcation.start."""
        return await self._flag(DtxStart(xid=xid, join=join, resume=resume))

    async def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Send dtx-demarcation.end."""
        return await self._flag(DtxEnd(xid=xid, fail=fail, suspend=suspend))

    async def prepare(self, xid: Xid) -> XaFlag:
        """Send dtx-coordination.prepare."""
        return await self._flag(DtxPrepare(xid=xid))

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> XaFlag:
        """Send dtx-coordination.commit."""
        return await self._flag(DtxCommit(xid=xid, one_phase=one_phase))

    async def rollback(self, xid: Xid) -> XaFlag:
        """Send dtx-coordination.rollback."""
        return await self._flag(DtxRollback(xid=xid))

    async def forget(self, xid: Xid) -> None:
        """Send dtx-coordination.forget."""
        await self.ask(DtxForget(xid=xid))

    async def set_timeout(self, xid: Xid, seconds: int) -> None:
        """Send dtx-coordination.set-timeout."""
        await self.ask(DtxSetTimeout(xid=xid, timeout=seconds))

    async def get_timeout(self, xid: Xid) -> int:
        """Send dtx-coordination.get-timeout; return seconds."""
        return cast("DtxGetTimeoutOk", await self.ask(DtxGetTimeout(xid=xid))).timeout

    async def _flag(self, request: Method) -> XaFlag:
        return XaFlag(cast("DtxPrepareOk", await self.ask(request)).flags)

    async def recover(self, *, start: bool = True, end: bool = True) -> list[Xid]:
        """Send dtx-coordination.recover; return a batch. By default this call starts and ends the scan."""
        answer = await self.ask(DtxRecover(startscan=start, endscan=end))
        size = len(answer.frame(1))
        assert not self._frame_max or size <= self._frame_max, f"a frame of {size} bytes"
        (xids,) = (entry.value for entry in tables.entries(cast("DtxRecoverOk", answer).xids))
        return [Xid.from_wire(wire) for wire in split_xids(xids)]

    # -- messages

    async def declare(self, queue: bytes) -> None:
        """Declare a durable queue."""
        await self.ask(methods.QueueDeclare(queue, durable=True))

    async def get(self, queue: bytes) -> Delivered | None:
        """Return the next message, ``None`` if there is none."""
        get = methods.BasicGet(queue).frame(self.channel.number)
        async with asyncio.timeout(PATIENCE):
            answer = await self.channel.send_raw(get, methods.BasicGetOk, methods.BasicGetEmpty)
        match answer:
            case ContentReceived(method=methods.BasicGetOk(delivery_tag=tag)):
                return Delivered(tag, answer.body, queue, answer.properties)
            case _:
                return None

    async def consume(self, queue: bytes, prefetch: int) -> None:
        """Start a consumer."""
        self._prefetch = prefetch
        await self.ask(methods.BasicQos(0, prefetch))

        def arrived(message: ContentReceived) -> None:
            tag = cast("methods.BasicDeliver", message.method).delivery_tag
            self.deliveries.append(Delivered(tag, message.body, queue, message.properties))
            self._arrived.set()

        self.channel.on_delivery = arrived
        await self.ask(methods.BasicConsume(queue, b""))

    async def delivered(self, seconds: float) -> None:
        """Wait for a delivery, for at most *seconds*."""
        self._arrived.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        except TimeoutError:
            return

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        """Send basic.ack."""
        self._write(methods.BasicAck(tag, multiple).frame(self.channel.number))

    def reject(self, tag: int, *, requeue: bool) -> None:
        """Send basic.reject."""
        self._write(methods.BasicReject(tag, requeue).frame(self.channel.number))

    async def reach_broker(self) -> None:
        """Wait until the broker has everything that was sent on the channel, which must not be selected.

        Raises:
            GONE: it may have it or not.
        """
        await self.ask(methods.BasicQos(0, self._prefetch))

    def publish(self, queue: bytes, body: bytes, properties: bytes = _PERSISTENT) -> None:
        """Publish a message, by default a persistent one, to the default exchange."""
        number = self.channel.number
        frames = (
            methods.BasicPublish(b"", queue).frame(number),
            header_frame(number, 60, len(body), properties),
            *body_frames(number, body, 4096),
        )
        self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.write(data)

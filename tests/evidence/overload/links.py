"""A client's connection on an event loop, as cheap as possible in Python: thousands of them share a process."""

import asyncio
import socket
import struct
from typing import Final, Self, cast

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, HEARTBEAT, HEARTBEAT_FRAME, FrameSplitter, Protocol, method_frame
from tests.support.raw import FRAME_MAX, Address

PATIENCE: Final = 120.0
"""Limit of seconds for one answer: far above the measured times, to distinguish a hang from a delay."""
RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: the socket is closed with a reset, and unsent bytes are dropped."""


class Left(Exception):
    """The server has closed the connection or the channel; the message has its reply text."""


class Link(asyncio.Protocol):
    """One connection, with one pending request at a time.

    Args:
        server: to connect to.
    """

    __slots__ = ("_answer", "_splitter", "_wanted", "delivered", "deliveries", "ended", "server", "transport")

    def __init__(self, server: Address) -> None:
        self.server = server
        self.deliveries = 0
        """Number of received body frames."""
        self.delivered = 0
        """Tag of the last delivery."""
        self.ended = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self._splitter = FrameSplitter(FRAME_MAX)
        self._wanted: tuple[int, ...] = ()
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def connect(cls, server: Address, source: str) -> Self:
        """Connect from the address *source*, without a handshake."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(server), server.host, server.port, local_addr=(source, 0))
        return link

    async def log_in(self, heartbeat: int = 0) -> Self:
        """Do the handshake, and open a channel."""
        self.transport.write(Protocol.AMQP_0_9_1.value)
        await self.wait(methods.ConnectionStart.KEY)
        offered = methods.ConnectionTune.decode(
            await self.ask(self.server.start_ok().encode(), methods.ConnectionTune.KEY, 0)
        )
        agreed = methods.ConnectionTuneOk(channel_max=offered.channel_max, frame_max=FRAME_MAX, heartbeat=heartbeat)
        self.say(agreed.encode(), 0)
        await self.ask(self.server.open.encode(), methods.ConnectionOpenOk.KEY, 0)
        await self.ask(methods.ChannelOpen().encode(), methods.ChannelOpenOk.KEY)
        return self

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set TCP_NODELAY."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        buffer, frames = self._splitter.feed(data)
        for key, _, start, end in frames:
            if key == HEARTBEAT:
                self.transport.write(HEARTBEAT_FRAME)
            elif key in self._wanted:
                self._take(buffer[start + 7 : end - 1])
            elif key == BODY:
                self.deliveries += 1
            elif key == methods.BasicDeliver.KEY:
                self.delivered = methods.BasicDeliver.decode(buffer[start + 7 : end - 1]).delivery_tag
            elif key in (methods.ChannelClose.KEY, methods.ConnectionClose.KEY):
                closed = methods.ChannelClose.decode(buffer[start + 7 : end - 1])
                self._fail(f"{closed.reply_code} {closed.reply_text.decode(errors='replace')}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending request."""
        self._fail(f"the connection is gone: {exc or 'closed'}")
        if not self.ended.done():
            self.ended.set_result(None)

    def _take(self, payload: bytes) -> None:
        self._wanted = ()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(payload)

    def _fail(self, words: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Left(words))

    # -- what members of a crowd do

    def say(self, payload: bytes, channel: int = 1) -> None:
        """Send a method."""
        self.transport.write(method_frame(channel, payload))

    async def ask(self, payload: bytes, answer: int, channel: int = 1) -> bytes:
        """Send a method, and return the payload of its answer."""
        self.say(payload, channel)
        return await self.wait(answer)

    async def wait(self, *keys: int) -> bytes:
        """Return the payload of the next method that is one of *keys*.

        Raises:
            Left: the server closed the connection or the channel.
            TimeoutError: there was no answer.
        """
        if self.ended.done():
            raise Left("the connection is gone")
        self._wanted = keys
        self._answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(PATIENCE):
            return await self._answer

    async def close(self) -> None:
        """Close the connection in order."""
        await self.ask(methods.ConnectionClose(200, b"bye").encode(), methods.ConnectionCloseOk.KEY, 0)
        self.transport.abort()

    def vanish(self) -> None:
        """Close the socket with a reset."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.transport.abort()

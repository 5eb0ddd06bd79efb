"""Keeps the order of one client channel over its two upstream channels P and T.

On one channel, basic.get can get the message that was published before it, and a declared queue takes the next publish.
The broker handles P and T concurrently, so one must finish before the other continues. channel.flow detects that. It
changes nothing, and the broker answers it after everything that was sent before.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import METHOD

FLOW: Final = methods.ChannelFlow(active=True).encode()
_UNASKED: Final = frozenset(
    (methods.BasicDeliver.KEY, methods.BasicReturn.KEY, methods.BasicCancel.KEY, methods.ChannelFlow.KEY)
)
_DEPENDENT: Final = frozenset((methods.ExchangeDeclare.KEY >> 16, methods.QueueDeclare.KEY >> 16))


def depends_on_publishes(key: int) -> bool:
    """Whether the outcome of a method depends on what was published before it."""
    return key == methods.BasicGet.KEY or key >> 16 in _DEPENDENT


class ChannelBarrier:
    """Tracks the unfinished methods of one upstream channel.

    Args:
        send: sends the payload of a method on the channel.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._asked = 0
        self._flows: deque[asyncio.Future[bytes] | None] = deque()

    @property
    def passed(self) -> bool:
        """Whether the broker has handled everything that was sent."""
        return not self._asked

    def sent(self, key: int) -> None:
        """Count a method of the client that is sent on the channel."""
        self._asked += 1
        if key == methods.ChannelFlow.KEY:
            self._flows.append(None)

    def received(self, buffer: bytes, start: int) -> bool:
        """Count an answer on the channel; returns whether it answers a flow of dtx: the client must not get it."""
        if buffer[start] != METHOD:
            return False
        key = int.from_bytes(buffer[start + 7 : start + 11], "big")
        if key not in _UNASKED and self._asked:
            self._asked -= 1
        if key != methods.ChannelFlowOk.KEY or not self._flows:
            return False
        waiter = self._flows.popleft()
        if waiter is None:
            return False
        self._asked = 0
        if not waiter.done():
            waiter.set_result(b"")
        return True

    def wait(self) -> "asyncio.Future[bytes]":
        """A future with empty bytes: done when the broker has handled everything, or the channel is closed."""
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._flows.append(waiter)
        self._send(FLOW)
        return waiter

    def drop(self) -> None:
        """Complete all waiting futures, because the channel is closed."""
        self._asked = 0
        for waiter in self._flows:
            if waiter is not None and not waiter.done():
                waiter.set_result(b"")
        self._flows.clear()

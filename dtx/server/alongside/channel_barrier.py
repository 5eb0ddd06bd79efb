"""The order of one channel, kept over the two that a selected channel has at the broker.

On one channel a message that was published can be got by the next method, and a queue that was declared takes the next
publish. P and T are handled by the broker side by side, so one of them must have done what it was sent before the other
goes on. channel.flow shows that: it changes nothing, and is answered behind everything that was sent before it.
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
    """What one of the two channels has still to do.

    Args:
        send: sends a method on it.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._asked = 0
        self._flows: deque[asyncio.Future[bytes] | None] = deque()

    @property
    def passed(self) -> bool:
        """Whether all that it was sent is done."""
        return not self._asked

    def sent(self, key: int) -> None:
        """A method of the client went to it."""
        self._asked += 1
        if key == methods.ChannelFlow.KEY:
            self._flows.append(None)

    def received(self, buffer: bytes, start: int) -> bool:
        """A frame came from it; returns whether that is no business of the client's."""
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
        """Done, with no octets, when all that was sent is done, or the channel is no more."""
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._flows.append(waiter)
        self._send(FLOW)
        return waiter

    def drop(self) -> None:
        """The channel is no more: nobody waits any longer."""
        self._asked = 0
        for waiter in self._flows:
            if waiter is not None and not waiter.done():
                waiter.set_result(b"")
        self._flows.clear()

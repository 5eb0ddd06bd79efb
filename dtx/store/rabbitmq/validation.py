"""The upstream channel (V) on which the broker checks a publish before it is held for a branch.

dtx publishes the real method and properties with an empty body in tx mode, and rolls back. So the broker checks
permissions (topics too), exchange, user-id, CC/BCC and expiration with the client's own credentials, and enqueues
nothing. A good result is kept for some seconds.
"""

import asyncio
from collections import OrderedDict, deque
from typing import Final

from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.upstream import EventHandler, Upstream
from dtx.wire.amqp09 import methods, properties
from dtx.wire.amqp09.channel import ChannelEngine
from dtx.wire.amqp09.events import ChannelClosing, ChannelEvent, MethodReceived
from dtx.wire.amqp09.methods import IMMEDIATE, BasicPublish, ChannelClose

_FRESH: Final = 10.0
"""Seconds for which a good result is valid: within this time a revoked permission or a deleted exchange has no effect.
A publish that was checked before is published when its branch commits."""
_CACHE: Final = 1024
"""Results kept for one connection."""


_Key = tuple[bytes, bytes, bytes, int]
"""All that the broker checks of a publish: exchange, routing key, the properties that it reads, and immediate."""


class Validation(asyncio.Future[ChannelClose | None]):
    """``None`` when the broker accepts the publish, else its channel.close; cancelled when the connection is lost."""


class Validator(EventHandler):
    """The validation channel of one client connection.

    Args:
        upstream: the client's connection to the broker.
        engine: of a channel that is open and in tx mode.
    """

    def __init__(self, upstream: Upstream, engine: ChannelEngine) -> None:
        super().__init__(upstream, engine)
        self._waiting: deque[tuple[_Key, bytes, Validation]] = deque()
        self._good: OrderedDict[_Key, float] = OrderedDict()
        self._opening = False

    def validate(self, publish: BasicPublish, raw: bytes) -> Validation | None:
        """Let the broker check a publish.

        Args:
            publish: the method.
            raw: the properties.

        Returns:
            ``None`` if a good result is still valid.

        Raises:
            WireError: 502, the properties are malformed.
        """
        key = (publish.exchange, publish.routing_key, properties.checked(raw), publish.flags & IMMEDIATE)
        loop = asyncio.get_running_loop()
        until = self._good.get(key)
        if until is not None and until > loop.time():
            return None
        validation = Validation(loop=loop)
        frames = messages.probe(self.number, publish.exchange, publish.routing_key, publish.flags, raw)
        self._waiting.append((key, frames, validation))
        if not self._opening:
            self.upstream.write(frames)
        return validation

    def event(self, event: ChannelEvent) -> None:
        """Handle an event of the channel."""
        match event:
            case MethodReceived(method=methods.TxRollbackOk()) if self._waiting:
                good, _, validation = self._waiting.popleft()
                self._good[good] = asyncio.get_running_loop().time() + _FRESH
                self._good.move_to_end(good)
                while len(self._good) > _CACHE:
                    self._good.popitem(last=False)
                if not validation.done():
                    validation.set_result(None)
            case MethodReceived(method=methods.TxSelectOk()):
                self._opening = False
                self.upstream.write(b"".join(frames for _, frames, _ in self._waiting))
            case ChannelClosing():
                self._refused(event.close)
            case _:
                pass

    def _refused(self, close: ChannelClose) -> None:
        """The first publish that waits has closed the channel. The others are sent again on a new channel."""
        self._opening = True
        self.engine = self.upstream.engine.open_channel(self.number)
        self.upstream.write(methods.TxSelect().frame(self.number))
        if self._waiting:
            _, _, validation = self._waiting.popleft()
            if not validation.done():
                validation.set_result(close)

    def lost(self, reason: str) -> None:  # noqa: ARG002
        """The connection is gone."""
        for _, _, validation in self._waiting:
            validation.cancel()
        self._waiting.clear()

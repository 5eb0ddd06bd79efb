"""V: the side channel on which the broker judges a publish before it is held for a branch.

The real method and properties are published with an empty body in tx mode, and rolled back: permissions (topics too),
exchange, user-id, CC/BCC and expiration are judged by the broker itself with the client's own credentials, and nothing
is enqueued. What was judged good is remembered for a while.
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
"""Seconds for which a good judgement holds: after that a permission that was taken away, or an exchange that was
deleted, is noticed. What was judged good before is published when its branch commits."""
_CACHE: Final = 1024
"""Judgements remembered for one connection."""


_Key = tuple[bytes, bytes, bytes, int]
"""All that the broker judges a publish by: exchange, routing key, properties that it looks at, and immediate."""


class Judgement(asyncio.Future[ChannelClose | None]):
    """``None`` when the broker would take the publish, else its words; cancelled when the connection is lost."""


class Validator(EventHandler):
    """The side channel of one client connection.

    Args:
        upstream: the client's connection to the broker.
        engine: of a channel that is open and in tx mode.
    """

    def __init__(self, upstream: Upstream, engine: ChannelEngine) -> None:
        super().__init__(upstream, engine)
        self._waiting: deque[tuple[_Key, bytes, Judgement]] = deque()
        self._good: OrderedDict[_Key, float] = OrderedDict()
        self._opening = False

    def judge(self, publish: BasicPublish, raw: bytes) -> Judgement | None:
        """Ask what the broker thinks of a publish.

        Args:
            publish: the method.
            raw: the properties.

        Returns:
            ``None`` when it is known to be good.

        Raises:
            WireError: 502, the properties are malformed.
        """
        key = (publish.exchange, publish.routing_key, properties.checked(raw), publish.flags & IMMEDIATE)
        loop = asyncio.get_running_loop()
        until = self._good.get(key)
        if until is not None and until > loop.time():
            return None
        judgement = Judgement(loop=loop)
        frames = messages.probe(self.number, publish.exchange, publish.routing_key, publish.flags, raw)
        self._waiting.append((key, frames, judgement))
        if not self._opening:
            self.upstream.write(frames)
        return judgement

    def event(self, event: ChannelEvent) -> None:
        """What the broker has said on the channel."""
        match event:
            case MethodReceived(method=methods.TxRollbackOk()) if self._waiting:
                good, _, judgement = self._waiting.popleft()
                self._good[good] = asyncio.get_running_loop().time() + _FRESH
                self._good.move_to_end(good)
                while len(self._good) > _CACHE:
                    self._good.popitem(last=False)
                if not judgement.done():
                    judgement.set_result(None)
            case MethodReceived(method=methods.TxSelectOk()):
                self._opening = False
                self.upstream.write(b"".join(frames for _, frames, _ in self._waiting))
            case ChannelClosing():
                self._refused(event.close)
            case _:
                pass

    def _refused(self, close: ChannelClose) -> None:
        """The channel is closed by the first publish that waits; the others are asked again on a new one."""
        self._opening = True
        self.engine = self.upstream.engine.open_channel(self.number)
        self.upstream.write(methods.TxSelect().frame(self.number))
        if self._waiting:
            _, _, judgement = self._waiting.popleft()
            if not judgement.done():
                judgement.set_result(close)

    def lost(self, reason: str) -> None:  # noqa: ARG002
        """The connection is gone."""
        for _, _, judgement in self._waiting:
            judgement.cancel()
        self._waiting.clear()

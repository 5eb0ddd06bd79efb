"""Messages that a rollback returns to a quorum queue with a delivery limit.

RabbitMQ 4 drops a message that was returned 21 times, if the queue has no dead-letter exchange. Versions 4.0 to 4.2
count each return, later ones only the ends of channels. So dtx replaces a message that was returned often: it publishes
a copy to the queue, which begins a new count, and acknowledges the message when the queue has confirmed the copy. If
dtx dies in between, the queue has both.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from uuid import uuid4

from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.store.rabbitmq.upstream import OwnChannel, UpstreamChannelClosed, UpstreamLost
from dtx.store.work import Delivery
from dtx.telemetry import get_logger
from dtx.wire.amqp09.errors import WireError

_log = get_logger(part="delivery limit")

DEFAULT_LIMIT: Final = 20
"""The delivery limit of quorum queues since RabbitMQ 4.0."""
_FRESH: Final = 60.0
"""Seconds for which the limits of the queues are kept."""


class DeliveryLimits:
    """The delivery limits of the quorum queues of one vhost.

    Args:
        vhost: its name.
        management: returns the management API, or raises ManagementError.
    """

    def __init__(self, vhost: str, management: Callable[[], Awaitable[Management]]) -> None:
        self._vhost: Final = vhost
        self._management: Final = management
        self._known: Mapping[str, int] | None = None
        self._until = float("-inf")
        self._asking = asyncio.Lock()

    async def is_near(self, delivery: Delivery, version: tuple[int, ...]) -> bool:
        """Whether the queue may soon drop the message of *delivery*: half of its limit is used up.

        Without the management API, dtx assumes the default limit and no dead-letter exchange.

        Args:
            delivery: unsettled.
            version: of the broker.
        """
        returns = messages.returns(delivery.properties)
        if not returns:
            return False
        default = DEFAULT_LIMIT if version >= (4,) else None
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() > self._until:
                try:
                    self._known = await (await self._management()).dropping(self._vhost, default)
                except (ManagementError, LookupError, TypeError, AttributeError):
                    self._known = None
                self._until = loop.time() + _FRESH
        known = self._known
        limit = default if known is None else known.get(delivery.queue.decode("utf-8", "surrogateescape"))
        return limit is not None and returns >= limit // 2


async def publish_copy(channel: OwnChannel, delivery: Delivery) -> bool:
    """Publish the message of *delivery* to its queue once more.

    Args:
        channel: in confirm mode, not in use.
        delivery: with its content.

    Returns:
        Whether the queue has the copy. If it may have it or not, the answer is no.
    """
    frame_max = channel.upstream.engine.agreed.frame_max
    try:
        frames = list(messages.put_back_frames(channel.number, frame_max, uuid4(), [delivery.to_row(0, 0)]))
        refused = await channel.send_confirmed((frames, None))
    except (UpstreamChannelClosed, UpstreamLost, WireError) as error:
        _log.warning("a message near the delivery limit could not be replaced", reason=str(error))
        return False
    if refused or channel.returned:
        _log.warning(
            "a message near the delivery limit could not be replaced", reason="its queue did not take the copy"
        )
        channel.returned = []
        return False
    return True

"""Messages that a rollback returns to a quorum queue with a delivery limit.

RabbitMQ 4 drops a message that was returned 21 times, if the queue has no dead-letter exchange. Versions 4.0 to 4.2
count each return, later ones only rejects and the ends of channels. So dtx replaces a message that was returned often.
It publishes a copy to the queue, which begins a new count, and acknowledges the message when the queue has confirmed
the copy. If dtx, the client's channel or the connection to the broker is lost in between, the queue has both.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol
from uuid import uuid4

from dtx.log.records import WorkRow
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.management import Management, ManagementError
from dtx.store.rabbitmq.upstream import OwnChannel, Upstream, UpstreamChannelClosed, UpstreamLost
from dtx.store.work import Delivery
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import XaError

_log = get_logger(part="delivery limit")

_DEFAULT_LIMIT: Final = 20
"""The delivery limit of quorum queues since RabbitMQ 4.0."""
_FRESH: Final = 60.0
"""Seconds for which the limits of the queues are kept."""


class Replacer(Protocol):
    """Replaces messages that a queue may soon drop."""

    def may_be_near(self, deliveries: Sequence[Delivery]) -> bool:
        """Whether :meth:`replace` may replace any of *deliveries*."""

    async def replace(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Publish copies of those *deliveries* that their queues may soon drop. Returns those that have a copy."""


class DeliveryLimits:
    """The delivery limits of the queues of one vhost.

    Args:
        vhost: its name.
        management: returns the management API, or raises ManagementError.
    """

    def __init__(self, vhost: str, management: Callable[[], Awaitable[Management]]) -> None:
        self._vhost: Final = vhost
        self._management: Final = management
        self._known: Mapping[str, int | None] | None = None
        """By queue; ``None`` without an answer of the management API."""
        self._until = float("-inf")
        self._asking = asyncio.Lock()

    def is_known(self, queue: bytes) -> bool:
        """Whether the limit of *queue* is known and not old."""
        known = self._known
        return asyncio.get_running_loop().time() < self._until and (known is None or _name(queue) in known)

    async def ask(self, default: int | None) -> None:
        """Read the limits. Without an answer the last ones remain; without any, all queues have *default*."""
        with suppress(ManagementError, LookupError, TypeError, AttributeError):
            self._known = await (await self._management()).delivery_limits(self._vhost, default)
        self._until = asyncio.get_running_loop().time() + _FRESH

    async def near(self, deliveries: Sequence[Delivery], default: int | None) -> list[Delivery]:
        """Those *deliveries* of messages that have used up half of the limit of their queue.

        Args:
            deliveries: unsettled.
            default: of a queue whose limit cannot be found out, where dtx assumes that it has no dead-letter exchange.
        """
        async with self._asking:
            if not all(self.is_known(each.queue) for each in deliveries if messages.returns(each.properties)):
                await self.ask(default)
        return [each for each in deliveries if self.is_near(each, default)]

    def is_near(self, delivery: Delivery, default: int | None) -> bool:
        """Whether the message of *delivery* has used up half of the limit, as far as limits are known."""
        returns = messages.returns(delivery.properties)
        limit = default if self._known is None else self._known.get(_name(delivery.queue), default)
        return limit is not None and returns > 0 and returns >= limit // 2


def default_limit(version: tuple[int, ...]) -> int | None:
    """The delivery limit of a quorum queue without settings in this version of RabbitMQ; ``None`` for no limit."""
    return _DEFAULT_LIMIT if version >= (4,) else None


async def publish_copies(upstream: Upstream, work: Iterable[WorkRow]) -> list[int]:
    """Publish consumed messages to their queues once more, each as a new message.

    Waits until the broker has answered: a copy whose outcome is not known would double its message.

    Args:
        upstream: dtx's own connection.
        work: the messages; they are read when the channel is open.

    Returns:
        The positions of those whose queue has confirmed the copy.
    """
    channel: OwnChannel | None = None
    branch_id = uuid4()
    rows: list[WorkRow] = []
    frames: list[bytes] = []
    try:
        channel = await OwnChannel(upstream).open(methods.ConfirmSelect())
        frame_max = upstream.engine.agreed.frame_max
        for row in work:
            try:
                frames += messages.put_back_frames(channel.number, frame_max, branch_id, (row,))
            except WireError as error:
                _log.warning("a message cannot be published once more", reason=str(error))
            else:
                rows.append(row)
        without: set[int | None] = {rows[index].position for index in await channel.send_confirmed((frames, None))}
        without |= {messages.returned_position(each.properties, messages.PUT_BACK) for each in channel.returned}
    except (UpstreamChannelClosed, UpstreamLost, XaError) as error:
        _log.warning("messages could not be published once more", reason=str(error))
        return []
    finally:
        if channel is not None:
            channel.abandon()
    if without:
        _log.warning("messages could not be published once more", reason="their queue refused the copies")
    return [row.position for row in rows if row.position not in without]


def _name(queue: bytes) -> str:
    return queue.decode("utf-8", "surrogateescape")

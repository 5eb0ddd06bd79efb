"""Limits of one client connection."""

from dataclasses import dataclass, fields
from typing import Final, Self

from dtx.config import Settings
from dtx.store.work import HeldPublish
from dtx.xa.codes import ReplyCode, XaError

HEARTBEAT: Final = 60
"""Seconds offered in connection.tune, as in RabbitMQ; the client decides."""
MAX_FRAME: Final = 2 << 20
"""Bytes offered as frame-max if the settings have none: a frame is assembled in memory."""
MAX_MESSAGE: Final = 128 << 20
"""Bytes of the largest message if the settings have none; alongside a broker, the broker's limit counts as well."""
MAX_UNSENT: Final = 1 << 20
"""Bytes of answers that wait for a client that does not read; above it, dtx stops reading from the client."""
MAX_UNWRITTEN: Final = 16 << 20
"""Bytes of messages of one connection that are not durable; above it, dtx stops reading until they are. This keeps the
log busy, and is little for a few hundred connections."""
MAX_FAN_OUT: Final = 256 << 20
"""Bytes that one publish may write for all its queues together, see :attr:`HeldPublish.size`. The body of a large
message is written once, its properties once per queue."""
MAX_UNREAD_REPLIES: Final = 16 << 20
"""Bytes that wait for a client that does not read; above it, dtx drops direct replies to the client. They are not
stored, and their senders do not wait."""
MAX_CONSUMERS: Final = 10_000
"""Consumers of one channel; no other limit bounds their memory."""
MAX_UNACKED: Final = 50_000
"""Unsettled deliveries of one channel. At the limit, consumers get no messages and basic.get is refused: otherwise a
client could move a queue of any length into the memory of dtx."""
MAX_UNSETTLED: Final = 200_000
"""Unsettled deliveries of one selected channel alongside a broker. Above it dtx closes the channel (506), because it
cannot pause the broker's consumers. The limit also bounds how long one request that settles all of them takes."""


def check_fan_out(message: HeldPublish) -> None:
    """Refuse a publish that writes too many bytes.

    Args:
        message: the publish, routed to its queues.

    Raises:
        XaError: 506, more than :data:`MAX_FAN_OUT` bytes.
    """
    if message.size > MAX_FAN_OUT:
        reason = f"{message.size} bytes in {len(message.queues)} queues are too much for one publish"
        raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}, the limit is {MAX_FAN_OUT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits of a client connection in both modes; see the settings with the same names."""

    max_channels: int
    frame_max: int
    max_message_bytes: int
    handshake_timeout: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The limits from *settings*."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls)}
        return cls(**values | {"max_message_bytes": settings.max_message_bytes or MAX_MESSAGE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits(ClientLimits):
    """Limits of a client connection in standalone mode."""

    require_tickets: bool = False
    tls_login: bool = False
    anonymous_user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits(ClientLimits):
    """Limits of a client connection alongside a broker."""

    max_kept_bytes: int

"""What one client connection may use."""

from dataclasses import dataclass, fields
from typing import Final, Self

from dtx.config import Settings
from dtx.store.work import HeldPublish
from dtx.xa.codes import ReplyCode, XaError

HEARTBEAT: Final = 60
"""Seconds: what is offered in connection.tune, as RabbitMQ does; the client decides."""
MAX_FRAME: Final = 2 << 20
"""Octets: what is offered where the settings name no frame-max, since a frame is put together in memory."""
MAX_UNSENT: Final = 1 << 20
"""Octets of answers that wait for a client that does not read; beyond it, nothing is read from it either."""
MAX_UNWRITTEN: Final = 16 << 20
"""Octets of messages of one connection that are not durable yet; beyond it, nothing is read until they are. Enough to
keep the log busy, little beside a few hundred connections."""
MAX_FAN_OUT: Final = 256 << 20
"""Octets that one publish may have written for all its queues together, see :attr:`HeldPublish.size`. The body of a
large message is written once; properties of 100 KiB, for 3,000 queues, are not."""
MAX_UNREAD_REPLIES: Final = 16 << 20
"""Octets that wait for a client that does not read; beyond it, direct replies to it are dropped: they are not stored,
and who sends them does not wait for it."""
MAX_CONSUMERS: Final = 10_000
"""Consumers of one channel: each costs memory that no other limit bounds."""
MAX_UNACKED: Final = 50_000
"""Deliveries of one channel that are not settled. Consumers get no more until some are, and basic.get is refused: a
client would otherwise take a queue of any length into the memory of dtx."""
MAX_UNSETTLED: Final = 200_000
"""Unsettled deliveries of one selected channel in front of a broker. Beyond it the channel is closed (506), as dtx
cannot make the broker's consumers wait. One request may settle them all without holding the event loop for long."""


def demand_fan_out(message: HeldPublish) -> None:
    """Refuse a publish that would be too much to write.

    Raises:
        XaError: 506: more than :data:`MAX_FAN_OUT`.
    """
    if message.size > MAX_FAN_OUT:
        reason = f"{message.size} octets in {len(message.queues)} queues are too much for one publish"
        raise XaError(ReplyCode.RESOURCE_ERROR, f"{reason}, the limit is {MAX_FAN_OUT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What a client connection may use in either mode; see the settings of the same names."""

    max_channels: int
    frame_max: int
    max_message_bytes: int
    handshake_timeout: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """What *settings* say."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits(ClientLimits):
    """What a client connection may use without a broker."""

    require_tickets: bool = False
    tls_login: bool = False
    anonymous_user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits(ClientLimits):
    """What a client connection may use in front of a broker."""

    max_kept_bytes: int

"""What one client connection may use."""

from dataclasses import dataclass
from typing import Final

HEARTBEAT: Final = 60
"""Seconds: what is offered in connection.tune, as RabbitMQ does; the client decides."""
MAX_FRAME: Final = 2 << 20
"""Octets: what is offered where the settings name no frame-max, since a frame is put together in memory."""
MAX_UNSENT: Final = 1 << 20
"""Octets of answers that wait for a client that does not read; beyond it, nothing is read from it either."""
MAX_UNWRITTEN: Final = 16 << 20
"""Octets of messages of one connection that are not durable yet; beyond it, nothing is read until they are. Enough to
keep the log busy, little beside a few hundred connections."""
MAX_UNREAD_REPLIES: Final = 16 << 20
"""Octets that wait for a client that does not read; beyond it, direct replies to it are dropped: they are not stored,
and who sends them does not wait for it."""
MAX_CONSUMERS: Final = 10_000
"""Consumers of one channel: each costs memory that no other limit bounds."""
MAX_UNACKED: Final = 100_000
"""Deliveries of one channel that are not settled. Consumers get no more until some are, and basic.get is refused: a
client would otherwise take a queue of any length into the memory of dtx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one client connection may use; see the settings of the same names."""

    max_channels: int
    frame_max: int
    max_message_bytes: int
    handshake_timeout: float
    require_tickets: bool = False
    tls_login: bool = False
    anonymous_user: str | None = None

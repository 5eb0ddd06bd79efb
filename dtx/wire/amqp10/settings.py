"""What an endpoint says of itself and what it allows its peer."""

from dataclasses import dataclass
from typing import Any, Final

MIN_IDLE_SECONDS: Final = 0.1
"""Shortest idle time-out of a peer that is kept: shorter ones would make dtx send little else than empty frames."""
MAX_NAME: Final = 1024
"""Longest name of a link, characters: names are kept as long as their link is."""
MAX_TAG: Final = 32
"""Longest delivery tag, octets: "a delivery-tag can be up to 32 octets of binary data" (2.8.7)."""
MAX_SASL: Final = 8192
"""Largest frame of SASL, octets: 512 are promised, but a response may be a token."""

MAX_EARLY: Final = 1 << 20
"""Octets that a client may say before its login is decided: all that it says without an answer is the opening."""
MAX_EFFORT: Final = 50_000
"""Deliveries and links that are looked at before others get their turn, some ten milliseconds: a frame of thirty octets
may name a hundred thousand deliveries, and what is read at once may be thousands of such frames."""
DISPOSED_AT_ONCE: Final = 2_500
"""Deliveries of one disposition that the shell hears of at once; it then settles them, some microseconds each."""
FRAME_EFFORT: Final = 50
"""What a frame costs by itself, in the same measure: a thousand small ones are a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Of one connection.

    Args:
        container_id: ours.
        mechanisms: of SASL, best first; none: no SASL layer.
        max_frame_size: largest frame the peer may send, octets, at least 512.
        channel_max: highest channel the peer may use: one fewer than its sessions.
        handle_max: highest handle the peer may use on a session: one fewer than its links.
        max_links: links of all sessions together: each costs some KiB, and 256 sessions of 256 would be 65,536.
        idle_seconds: the peer is gone when it has sent nothing for so long; it is told half of that. None: it need not
            send.
        window: transfers of a session that the peer may send before it hears of more: bounds what is read ahead.
        max_message_size: octets.
        max_partial: octets of messages of which the end has not come, all links together: a peer may begin one on each.
        offered_capabilities: of the connection.
        properties: of the connection.
    """

    container_id: str
    mechanisms: tuple[str, ...] = ()
    max_frame_size: int = 131_072
    channel_max: int = 255
    handle_max: int = 255
    max_links: int = 4096
    idle_seconds: float | None = 120.0
    window: int = 2048
    max_message_size: int = 16 << 20
    max_partial: int = 64 << 20
    offered_capabilities: tuple[str, ...] = ()
    properties: dict[str, Any] | None = None

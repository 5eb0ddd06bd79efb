"""What one client connection may use."""

from dataclasses import dataclass

from dtx.server.front import ClientTransport

__all__ = ["ClientTransport", "SessionLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one client connection may use; see the settings of the same names."""

    max_channels: int
    frame_max: int
    max_message_bytes: int
    max_kept_bytes: int
    handshake_timeout: float

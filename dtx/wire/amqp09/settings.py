"""What one end of a connection allows its peer, and what it holds in memory for it."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from dtx.wire.amqp09.frames import OPENING_FRAME

MAX_BACKLOG: Final = 1 << 20
"""Bytes of frames that may wait on a held channel before nothing more is read from the peer."""
MAX_EFFORT: Final = 5000
"""Frames that are looked at before others get their turn: 5 ms where each is part of a content. The shell, which knows
what an event costs, may stop earlier."""

MOST_AT_ONCE: Final = 1000
"""Frames that are cut out of what was read before the first of them is handled: a millisecond's work."""


class PeerEnd(Enum):
    """Which of the two peers this is."""

    SERVER = "server"
    CLIENT = "client"


class Memory(Protocol):
    """What bodies are charged to while they are incomplete."""

    def charge(self, size: int) -> None:
        """*size* more bytes are held; fewer, where that is negative."""

    def has_room(self, size: int) -> bool:
        """Whether *size* more bytes are within the limit."""

    def excess(self, size: int) -> str:
        """Which limit *size* more bytes exceed, for people."""


class Unbounded:
    """Memory without a limit."""

    def charge(self, size: int) -> None:
        """Nothing is counted."""

    def has_room(self, size: int) -> bool:  # noqa: ARG002 - there always is
        """There always is."""
        return True

    def excess(self, size: int) -> str:  # noqa: ARG002 - nothing is exceeded
        """Nothing is exceeded."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Of one connection.

    Args:
        opening_frame: largest frame of the peer before tune-ok, bytes.
        max_message: largest body that the peer may send, bytes; 0 for no limit. 406 closes the channel.
        close_overtakes: a client's ``channel.close`` passes a held channel, unless frames wait on it already.
    """

    opening_frame: int = OPENING_FRAME
    max_message: int = 0
    close_overtakes: bool = True

"""The settings and limits of one end of a connection, and the memory for incomplete bodies."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from dtx.wire.amqp09.frames import OPENING_FRAME

MAX_BACKLOG: Final = 1 << 20
"""The size in bytes of the frames that wait on a held channel. Above it, the shell must stop reading from the peer."""
MAX_EFFORT: Final = 5000
"""The number of frames that one turn handles: 5 ms if each is part of a content. The shell knows the cost of an event,
and may stop earlier."""

MOST_AT_ONCE: Final = 1000
"""The number of frames that are cut at once, before the first of them is handled: about 1 ms of work."""


class PeerEnd(Enum):
    """The end of the connection that an engine serves."""

    SERVER = "server"
    CLIENT = "client"


class Memory(Protocol):
    """Counts the memory of incomplete bodies."""

    def charge(self, size: int) -> None:
        """Add *size* bytes to the memory in use; a negative size frees them."""

    def has_room(self, size: int) -> bool:
        """Return whether *size* more bytes are within the limit."""

    def excess(self, size: int) -> str:
        """Return a text for people that names the limit that *size* more bytes exceed."""


class Unbounded:
    """Memory without a limit."""

    def charge(self, size: int) -> None:
        """Count nothing."""

    def has_room(self, size: int) -> bool:  # noqa: ARG002 - there is no limit
        """Return ``True``."""
        return True

    def excess(self, size: int) -> str:  # noqa: ARG002 - there is no limit
        """Return an empty text."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of one connection.

    Args:
        opening_frame: the largest frame of the peer in bytes before tune-ok.
        max_message: the largest body in bytes that the peer may send; 0 for no limit. 406 closes the channel.
        close_overtakes: handle ``channel.close`` at once on a held channel, unless frames already wait on it.
    """

    opening_frame: int = OPENING_FRAME
    max_message: int = 0
    close_overtakes: bool = True

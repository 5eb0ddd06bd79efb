"""A client's connection as the listener sees it, and its socket as the connection sees it; the same in both modes."""

import asyncio
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

from dtx.manager import Who


class ClientTransport(Protocol):
    """The socket of the client."""

    @property
    def unsent(self) -> int:
        """Octets that wait to be sent."""

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine: its address is a loopback one."""

    @property
    def peer(self) -> str:
        """The client's address, without its port; empty where the socket is closed already."""

    @property
    def certificate_name(self) -> str | None:
        """Whom the client's certificate names, where it has shown one that an authority of ours has signed."""

    def opened(self, who: Who) -> bool:
        """The handshake is over; False where there is no room for *who*, which is to be refused then."""

    def write(self, data: bytes | memoryview) -> None:
        """Send."""

    def pause_reading(self) -> None:
        """Read no more for now."""

    def resume_reading(self) -> None:
        """Read on."""

    def close(self) -> None:
        """Close when all is sent."""

    def abort(self) -> None:
        """Close at once."""


class ClientSession(Protocol):
    """One client, from its protocol header to its end."""

    id: int
    who: Who
    """User and virtual host; empty during the handshake."""
    ended: asyncio.Future[None]
    """Done when nothing is left of it."""

    @property
    def stage(self) -> Enum:
        """Where it is in its life, for operators."""

    @property
    def channels(self) -> Mapping[int, Any]:
        """Those that are open, by number."""

    async def connect(self) -> None:
        """Begin the handshake."""

    def client_data(self, data: bytes) -> None:
        """Octets from the client."""

    def client_is_slow(self) -> None:
        """The client takes no more for now."""

    def client_has_caught_up(self) -> None:
        """The client takes data again."""

    def client_gone(self) -> None:
        """The client's socket is closed."""

    def abort(self) -> None:
        """End the client's connection at once."""

    def stop(self, frame: bytes) -> None:
        """End the connection with *frame*, a connection.close."""

"""Interfaces between the listener and the connections of clients. Both modes use them."""

import asyncio
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

from dtx.manager import Requester


class ClientTransport(Protocol):
    """The socket of the client."""

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""

    @property
    def is_local(self) -> bool:
        """Whether the client's address is a loopback address."""

    @property
    def peer(self) -> str:
        """The client's address without its port; empty if the socket is closed."""

    @property
    def certificate_name(self) -> str | None:
        """The common name in the client's verified certificate; ``None`` without such a certificate."""

    def opened(self, who: Requester) -> bool:
        """End the handshake of *who*; false if there is no room: then the caller refuses the connection."""

    def write(self, data: bytes | memoryview) -> None:
        """Send *data*; does nothing if the socket is closed."""

    def pause_reading(self) -> None:
        """Stop reading from the socket."""

    def resume_reading(self) -> None:
        """Read from the socket again."""

    def close(self) -> None:
        """Close the socket after all data is sent."""

    def abort(self) -> None:
        """Close the socket at once."""


class ClientSession(Protocol):
    """One client connection, from its protocol header to its end."""

    id: int
    who: Requester
    """User and virtual host; empty during the handshake."""
    ended: asyncio.Future[None]
    """Done when all resources of the session are released."""

    @property
    def stage(self) -> Enum:
        """The state of the session, for operators."""

    @property
    def channels(self) -> Mapping[int, Any]:
        """Open channels by number."""

    async def connect(self) -> None:
        """Start the handshake."""

    def client_data(self, data: bytes) -> None:
        """Handle bytes from the client."""

    def client_is_slow(self) -> None:
        """Handle a full send buffer of the client's socket."""

    def client_has_caught_up(self) -> None:
        """Handle the end of :meth:`client_is_slow`: the send buffer has room again."""

    def client_disconnected(self) -> None:
        """Handle the close of the client's socket."""

    def abort(self) -> None:
        """End the client's connection at once."""

    def stop(self, frame: bytes) -> None:
        """End the connection with *frame*, a connection.close of AMQP 0-9-1."""

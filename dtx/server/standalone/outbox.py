"""What goes to one client: joined, so that a turn of the event loop costs one write to its socket."""

import asyncio
from collections.abc import Callable

from dtx.server.front import ClientTransport


class Outbox:
    """Frames on their way to the client, in order.

    Args:
        transport: its socket.
        wrote: called when something was written.
    """

    __slots__ = ("_frames", "_loop", "_transport", "_wrote", "is_slow")

    def __init__(self, transport: ClientTransport, wrote: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: ClientTransport | None = transport
        self._wrote = wrote
        self._frames: list[bytes] = []
        self.is_slow = False
        """The socket takes no more for now."""

    def send(self, data: bytes) -> None:
        """Send whole frames, at the end of this turn of the loop."""
        if not self._frames:
            self._loop.call_soon(self.flush)
        self._frames.append(data)

    def flush(self) -> None:
        """Write what waits."""
        frames = self._frames
        if frames and self._transport is not None:
            self._wrote()
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        frames.clear()

    @property
    def unsent(self) -> int:
        """Octets in the socket's buffer."""
        return 0 if self._transport is None else self._transport.unsent

    def close(self) -> None:
        """Close the socket when all is sent. Idempotent."""
        self.flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Close the socket at once. Idempotent."""
        self._frames.clear()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

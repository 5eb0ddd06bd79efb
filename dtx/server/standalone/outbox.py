"""What goes to one client: joined, so that a turn of the event loop costs one write to its socket."""

import asyncio
from collections.abc import Callable

from dtx.server.front import ClientTransport
from dtx.server.standalone.limits import MAX_UNSENT


class Outbox:
    """Frames on their way to the client, in order.

    Args:
        transport: its socket.
        wrote: called when something was written.
        relieved: called when there is room again after somebody was told that there is none.
    """

    __slots__ = ("_frames", "_loop", "_octets", "_relieved", "_transport", "_turned_away", "_wrote", "is_slow")

    def __init__(self, transport: ClientTransport, wrote: Callable[[], None], relieved: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: ClientTransport | None = transport
        self._wrote = wrote
        self._relieved = relieved
        self._frames: list[bytes | memoryview] = []
        self._octets = 0
        self._turned_away = False
        self.is_slow = False
        """The socket takes no more for now."""

    @property
    def has_room(self) -> bool:
        """Whether messages may be delivered: neither the socket nor what is joined in this turn has too much."""
        if self.is_slow:
            return False
        if self._octets < MAX_UNSENT:
            return True
        self._turned_away = True
        return False

    def send(self, data: bytes | memoryview) -> None:
        """Send whole frames, at the end of this turn of the loop."""
        if not self._frames:
            self._loop.call_soon(self.flush)
        self._frames.append(data)
        self._octets += len(data)

    def flush(self) -> None:
        """Write what waits."""
        frames = self._frames
        if frames and self._transport is not None:
            self._wrote()
            self._transport.write(frames[0] if len(frames) == 1 else b"".join(frames))
        frames.clear()
        self._octets = 0
        if self._turned_away:
            self._turned_away = False
            if not self.is_slow:
                self._relieved()

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

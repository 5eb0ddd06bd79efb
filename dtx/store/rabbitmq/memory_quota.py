"""Memory that concurrent tasks share: each takes the bytes that it needs, and waits while they are not free."""

import asyncio
from collections import deque


class MemoryQuota:
    """A number of bytes, granted in the order of the requests: a large request is not overtaken.

    Args:
        limit: bytes. A larger request gets all of them, alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def share(self, size: int | None) -> "Share":
        """A share of *size* bytes, not taken yet. ``None`` means all bytes, so that the share is alone."""
        return Share(self, self._limit if size is None else min(max(size, 1), self._limit))

    async def take(self, size: int) -> None:
        """Wait until *size* bytes are free, and take them."""
        if not self._waiters and size <= self._free:
            self._free -= size
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            # The bytes may have been granted at the same moment; if not, other requests waited behind this one.
            self.give_back(0 if waiter.cancelled() else size)
            raise

    def give_back(self, size: int) -> None:
        """Free *size* bytes."""
        self._free += size
        while self._waiters:
            wanted, waiter = self._waiters[0]
            if not waiter.done():
                if wanted > self._free:
                    return
                self._free -= wanted
                waiter.set_result(None)
            self._waiters.popleft()


class Share:
    """The bytes of one task; see :meth:`MemoryQuota.share`."""

    __slots__ = ("_room", "_size", "_taken")

    def __init__(self, room: MemoryQuota, size: int) -> None:
        self._room = room
        self._size = size
        self._taken = 0

    async def take(self) -> None:
        """Wait until the bytes are free, and take them."""
        await self._room.take(self._size)
        self._taken = self._size

    def release(self) -> None:
        """Free the bytes if they are taken. Idempotent."""
        taken, self._taken = self._taken, 0
        self._room.give_back(taken)

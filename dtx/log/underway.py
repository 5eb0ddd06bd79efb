"""How many writes are on their way: for those who wait until none is."""

import asyncio


class UnderWay:
    """A count, and who waits for it to be zero."""

    __slots__ = ("_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """One more."""
        self.count += 1

    def end(self) -> None:
        """One less."""
        self.count -= 1
        if not self.count and self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def none(self) -> None:
        """Return when none is under way."""
        while self.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

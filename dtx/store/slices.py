"""Long work in slices: during a request of one client, other clients and the lease get a turn within milliseconds."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

Item = TypeVar("Item")

SLICE_SECONDS: Final = 0.005
"""Seconds of long work in one turn of the event loop, by ``time.monotonic``: uvloop's time is constant in a turn."""


_waiting: Final["WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Callable[[], None]]]"] = WeakKeyDictionary()
"""Clients whose work is not done. The first one has the current turn, or the next."""


def advance(work: Iterator[object]) -> bool:
    """Do one slice of *work*. Returns whether *work* is done.

    Args:
        work: yields at least once per millisecond.
    """
    until = time.monotonic() + SLICE_SECONDS
    for _ in work:  # noqa: SIM110 - `all` would take a call for each step
        if time.monotonic() >= until:
            return False
    return True


async def finish(work: Iterator[object]) -> None:
    """Do *work*, one slice in each turn of the event loop."""
    while not advance(work):  # noqa: ASYNC110 - nothing is waited for
        await asyncio.sleep(0)


async def in_slices(items: Iterable[Item], size: int = 1000) -> AsyncIterator[Item]:
    """All of *items*, with a pause for the event loop after every *size* of them.

    Args:
        items: are copied, and freed one by one: to free all at the end would hold the event loop as well.
        size: items in one turn of the event loop.
    """
    left = deque(items)
    del items
    number = 0
    while left:
        if number == size:
            number = 0
            await asyncio.sleep(0)
        number += 1
        yield left.popleft()


class Slices:
    """Work of one client: in order, one slice in each turn of the event loop. Clients with long work take turns.

    Args:
        failed: called with an exception that a piece of work has raised; the others continue.
    """

    __slots__ = ("_failed", "_works")

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._works: deque[Iterator[None]] = deque()

    @property
    def busy(self) -> bool:
        """Whether some work is not done."""
        return bool(self._works)

    def run(self, work: Iterator[None]) -> bool:
        """Run *work* after the work that is not done. Without any, its first slice runs at once.

        Args:
            work: yields at least once per millisecond.

        Returns:
            Whether *work* is done.
        """
        self._works.append(work)
        if len(self._works) == 1:
            self._run_slice()
        return not self._works

    def then(self, act: Callable[[], object]) -> None:
        """Call *act* after the work that is not done; at once without any."""
        if self._works:
            self._works.append(_once(act))
        else:
            act()

    def _run_slice(self) -> None:
        until = time.monotonic() + SLICE_SECONDS
        works = self._works
        while works:
            try:
                for _ in works[0]:
                    if time.monotonic() >= until:
                        _later(self._run_slice)
                        return
            except Exception as error:  # noqa: BLE001 - passed to the caller
                self._failed(error)
            works.popleft()


def _later(run: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    waiting = _waiting.setdefault(loop, deque())
    waiting.append(run)
    if len(waiting) == 1:
        loop.call_soon(_run_next, loop, waiting)


def _run_next(loop: asyncio.AbstractEventLoop, waiting: deque[Callable[[], None]]) -> None:
    try:
        waiting[0]()
    finally:
        waiting.popleft()
        if waiting:
            loop.call_soon(_run_next, loop, waiting)


def _once(act: Callable[[], object]) -> Iterator[None]:
    act()
    yield

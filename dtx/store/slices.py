"""Long work in slices: whatever one client asks for, others and the lease get their turn within milliseconds."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

Item = TypeVar("Item")

SLICE_SECONDS: Final = 0.005
"""What one turn of the event loop spends on long work, by ``time.monotonic``: in a turn uvloop's own time stands."""


_waiting: Final["WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Callable[[], None]]]"] = WeakKeyDictionary()
"""Clients whose work goes on; the first one has the next turn, or has it now."""


def advance(work: Iterator[object]) -> bool:
    """Do a slice of *work*; returns whether that was all of it.

    Args:
        work: yields at least once in a millisecond.
    """
    until = time.monotonic() + SLICE_SECONDS
    for _ in work:  # noqa: SIM110 - `all` would take a call for each step
        if time.monotonic() >= until:
            return False
    return True


async def finish(work: Iterator[object]) -> None:
    """Do *work*, a slice in each turn of the event loop."""
    while not advance(work):  # noqa: ASYNC110 - nothing is waited for
        await asyncio.sleep(0)


async def in_turns(items: Iterable[Item], size: int = 1000) -> AsyncIterator[Item]:
    """All of *items*; the event loop gets its turn now and then.

    Args:
        items: are copied, and let go one by one: to free all at the end would take as long as what is avoided here.
        size: how many come in one turn of the event loop.
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
    """Work of one client: in order, a slice in a turn of the event loop. Clients with long work take turns.

    Args:
        failed: told what a work has raised; the others go on.
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
        """Run *work* behind all that runs already; where nothing does, a first slice of it at once.

        Args:
            work: yields at least once in a millisecond.

        Returns:
            Whether that was all of it.
        """
        self._works.append(work)
        if len(self._works) == 1:
            self._go_on()
        return not self._works

    def then(self, act: Callable[[], object]) -> None:
        """Call *act* behind all that runs: at once, where nothing does."""
        if self._works:
            self._works.append(_once(act))
        else:
            act()

    def _go_on(self) -> None:
        until = time.monotonic() + SLICE_SECONDS
        works = self._works
        while works:
            try:
                for _ in works[0]:
                    if time.monotonic() >= until:
                        _later(self._go_on)
                        return
            except Exception as error:  # noqa: BLE001 - told
                self._failed(error)
            works.popleft()


def _later(go_on: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    waiting = _waiting.setdefault(loop, deque())
    waiting.append(go_on)
    if len(waiting) == 1:
        loop.call_soon(_take_turn, loop, waiting)


def _take_turn(loop: asyncio.AbstractEventLoop, waiting: deque[Callable[[], None]]) -> None:
    try:
        waiting[0]()
    finally:
        waiting.popleft()
        if waiting:
            loop.call_soon(_take_turn, loop, waiting)


def _once(act: Callable[[], object]) -> Iterator[None]:
    act()
    yield

"""When garbage is collected: a log of many branches is loaded into objects that stay, and connections come and go.

And when the memory of what is freed goes back to the system.
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dtx.telemetry import get_logger

_log = get_logger(part="memory")

_YOUNG: Final = 5_000
"""Objects made before the youngest are looked at: a busy service makes 700, Python's default, every few branches."""
_MIDDLE: Final = 2
"""Looks at the youngest that go before one at what has survived them as well. That one, at twenty thousand objects,
is 5 to 10 ms that all wait. Twice as many at a time take more than twice as long, and less often is not cheaper.
"""
_OLD: Final = 1_400
"""Of those before one at everything, if that has grown by a fourth."""


_LARGE: Final = 16 << 20
"""Bytes of a block that goes back to the system as soon as it is freed."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""


def give_back_large_blocks() -> None:
    """Let glibc keep no more than :data:`_LARGE` of what was freed at the end of a heap; elsewhere nothing is done.

    Verifying a password takes 19 MiB. glibc takes the size of a freed block as a hint that more of its kind come: it
    keeps twice as much from then on, in the heap of each thread that verified one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in the block, since what is made there stays; afterwards only among what is made later."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
        gc.enable()


FEW: Final = 300
"""Connections whose leftovers are not worth a look at everything: some megabytes."""
_SHARE: Final = 4
"""The part of those that are there (a fourth) that must have left before it is worth one."""
_LATER: Final = 2.0
"""Seconds from then to the look: of a fleet that leaves at once all are gone by then, and they cost one look."""
_REST: Final = 50
"""How many times as long as the last look took there is no other one: they have a fiftieth of all time at most."""


FREED: Final = "freed what connections left behind"


class Leftovers:
    """What connections leave behind.

    Their parts know each other, so they are not freed with the last use, but when garbage is collected. Those that
    lasted are looked at only with everything else, and with the thresholds above that is far away: a hundred thousand
    connections would have left a gigabyte by then.

    Args:
        live: how many connections there are.
        collect: looks at everything.
        clock: seconds.
        worked: seconds of processor time that this thread has had; a busy machine makes a look no longer.
    """

    def __init__(
        self,
        live: Callable[[], int],
        *,
        collect: Callable[[], object] = gc.collect,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._live = live
        self._collect = collect
        self._clock = clock
        self._worked = worked
        self._left = 0
        self._rest_until = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def add(self) -> None:
        """A connection has ended."""
        self._left += 1
        if self._timer is None and self._left >= max(FEW, self._live() // _SHARE):
            wait = max(_LATER, self._rest_until - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _look(self) -> None:
        self._timer = None
        left, self._left = self._left, 0
        began = self._worked()
        self._collect()
        took = self._worked() - began
        self._rest_until = self._clock() + _REST * took
        _log.debug(FREED, connections=left, seconds=round(took, 3))

    def close(self) -> None:
        """The service ends, and all with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

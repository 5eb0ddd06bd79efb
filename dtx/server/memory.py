"""Memory of the process: when Python collects garbage, and when freed memory returns to the system.

The defaults do not fit: the branches of the log become many long-lived objects, and connections come and go.
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
"""New objects before generation 0 is collected: a busy service makes 700, Python's default, in a few branches."""
_MIDDLE: Final = 2
"""Collections of generation 0 before one of generation 1. That one visits 20,000 objects and blocks the service for 5
to 10 ms. Twice as many objects take more than twice as long, so a higher value is not cheaper.
"""
_OLD: Final = 1_400
"""Collections of generation 1 before a full one, which also needs a quarter more long-lived objects."""


_LARGE: Final = 16 << 20
"""Bytes: larger blocks return to the system as soon as they are freed."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt(3)."""


def give_back_large_blocks() -> None:
    """Limit the freed memory that glibc keeps per heap to :data:`_LARGE` bytes; does nothing without glibc.

    A password check takes 19 MiB. By default, glibc raises its limits when a large block is freed. Then it keeps
    twice that size in the heap of each thread that checked a password.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


@contextmanager
def loading() -> Iterator[None]:
    """Disable garbage collection in the block, and exclude its objects from later collections: they are long-lived."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
        gc.enable()


FEW: Final = 300
"""Ended connections before a full collection: the garbage of fewer is a few megabytes."""
_SHARE: Final = 4
"""A full collection also needs one ended connection for each 4 live ones."""
_LATER: Final = 2.0
"""Seconds to wait before the collection: many clients that leave at the same time need one collection only."""
_REST: Final = 50
"""The pause after a collection, in multiples of its duration: collections take 2 % of the time at most."""


FREED: Final = "freed memory of ended connections"


class Leftovers:
    """Schedules full garbage collections for ended connections.

    The parts of a connection reference each other, so only the garbage collector frees them. Those of long connections
    need a full collection. With the thresholds above it comes late: 100,000 connections would leave a gigabyte.

    Args:
        live: returns the number of connections.
        collect: runs a full collection.
        clock: returns seconds.
        worked: returns the CPU seconds of this thread; other load does not change the measured duration.
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
        """Count an ended connection, and schedule a collection if it is worth one."""
        self._left += 1
        if self._timer is None and self._left >= max(FEW, self._live() // _SHARE):
            wait = max(_LATER, self._rest_until - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self._run)

    def _run(self) -> None:
        self._timer = None
        left, self._left = self._left, 0
        began = self._worked()
        self._collect()
        took = self._worked() - began
        self._rest_until = self._clock() + _REST * took
        _log.debug(FREED, connections=left, seconds=round(took, 3))

    def close(self) -> None:
        """Cancel a scheduled collection, because the service stops."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""The disk alarm: while the log's disk is nearly full, clients that publish wait, as RabbitMQ's do.

What is left then is for those who make room, or who must come to an end: acknowledgements, commits and rollbacks go on.
Free space is looked at where PostgreSQL is on this machine and dtx knows its directory. Of another PostgreSQL nobody
can tell; there the alarm is raised for some seconds each time that it refuses a write for want of space.
"""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dtx.telemetry import get_logger

LOOK_SECONDS: Final = 1.0
"""Between two looks at the disk."""

_log = get_logger(part="disk")


def _free(place: Path) -> int:
    return shutil.disk_usage(place).free


class DiskAlarm:
    """Whether there is room on the disk, and who waits for it.

    Args:
        place: a directory on the disk; ``None`` where it is another machine's.
        limit: free octets below which the alarm is raised; 0 for never.
        is_full: whether the database has just refused a write for want of space.
        free: asks the system for the free octets.
    """

    def __init__(
        self,
        place: Path | None,
        limit: int,
        is_full: Callable[[], bool] = lambda: False,
        free: Callable[[Path], int] = _free,
    ) -> None:
        self.limit: Final = limit if place is not None else 0
        self.free: int | None = None
        """Octets, at the last look; ``None`` where nobody knows."""
        self.raised = False
        self._place = place
        self._is_full = is_full
        self._ask = free
        self._waiting: dict[Callable[[], None], None] = {}

    async def watch(self) -> None:
        """Look at the disk until cancelled."""
        while True:
            if self._place is not None and self.limit:
                with suppress(OSError):  # it says so elsewhere
                    self.free = await asyncio.to_thread(self._ask, self._place)
            self.judge()
            await asyncio.sleep(LOOK_SECONDS)

    def judge(self) -> None:
        """Raise the alarm, or end it."""
        low = self._is_full() or (self.free is not None and self.free < self.limit)
        if low and not self.raised:
            _log.warning("low on disk, clients that publish wait", free=self.free, limit=self.limit)
        elif self.raised and not low:
            _log.info("there is room on the disk again", free=self.free, limit=self.limit)
        self.raised = low
        if not low:
            waiting, self._waiting = self._waiting, {}
            for go_on in waiting:
                try:
                    go_on()
                except Exception:  # noqa: BLE001 - logged; the others wait for room, too, and for nothing else
                    _log.exception("a client could not go on")

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call *go_on* when there is room again; the alarm is raised."""
        self._waiting[go_on] = None

    def leave(self, go_on: Callable[[], None]) -> None:
        """*go_on* does not wait any more. Idempotent."""
        self._waiting.pop(go_on, None)

"""Does what the indexes of queues request: a turn to dispatch, bodies, and the removal of settled messages."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dtx.log.api import LeaseLost, LogError, MessageLog
from dtx.log.changes import Slot
from dtx.store.postgres.dead_letters import DeadLetters
from dtx.store.postgres.queue import Letter, QueueIndex, Reason
from dtx.store.postgres.recorder import Recorder
from dtx.store.slices import SLICE_SECONDS
from dtx.telemetry import get_logger

FETCH_OCTETS: Final = 8 << 20
"""Bytes of bodies that one queue reads at once: a few large messages are enough to keep consumers busy."""
_RETRY_SECONDS: Final = 0.5
"""Seconds before the next attempt to read bodies."""

log = get_logger(part="store")


class Dispatcher:
    """See :class:`dtx.store.postgres.queue.Host`.

    Args:
        log_: open.
        recorder: removes settled messages.
        letters: moves dead letters.
        clock: seconds since the epoch.
    """

    def __init__(self, log_: MessageLog, recorder: Recorder, letters: DeadLetters, clock: Callable[[], float]) -> None:
        self._log = log_
        self._recorder = recorder
        self._letters = letters
        self._clock = clock
        self._waiting: deque[QueueIndex] = deque()
        self._awake = False
        """Whether a dispatch is scheduled in the event loop."""
        self._timers: dict[QueueIndex, tuple[float, asyncio.TimerHandle]] = {}
        self.touched: dict[QueueIndex, None] = {}
        """Queues that may have handed out messages since a caller last replaced this, in order."""

    def close(self) -> None:
        """Cancel the timers."""
        for _, timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def schedule(self, queue: QueueIndex) -> None:
        """Dispatch *queue* in the next turn of the event loop."""
        self._waiting.append(queue)
        self._wake_up()

    def _wake_up(self) -> None:
        if self._waiting and not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Dispatch waiting queues in their order, for one slice of time."""
        now = self._clock()
        until = time.monotonic() + SLICE_SECONDS
        try:
            while self._waiting:
                queue = self._waiting.popleft()
                at = queue.dispatch(now)
                self.touched[queue] = None
                if at is not None:
                    self._call_at(queue, at, now)
                if time.monotonic() >= until:
                    break
        finally:  # also when a queue raises: the others do not ask again
            self._awake = False
            self._wake_up()

    def _call_at(self, queue: QueueIndex, at: float, now: float) -> None:
        known = self._timers.get(queue)
        if known is not None:
            if known[0] <= at:
                return
            known[1].cancel()
        self._timers[queue] = at, asyncio.get_running_loop().call_later(max(0.0, at - now), self._wake, queue)

    def _wake(self, queue: QueueIndex) -> None:
        del self._timers[queue]
        self.schedule(queue)

    def handed_out(self, queue: QueueIndex) -> None:
        """See :class:`~dtx.store.postgres.queue.Host`."""
        self.touched[queue] = None

    def forget(self, queue: QueueIndex) -> None:
        """Forget a queue that was deleted."""
        known = self._timers.pop(queue, None)
        if known is not None:
            known[1].cancel()
        self.touched.pop(queue, None)

    def fetch(self, queue: QueueIndex, positions: list[int]) -> None:
        """See :class:`~dtx.store.postgres.queue.Host`."""
        self._recorder.spawn(self._fetch(queue, positions))

    async def _fetch(self, queue: QueueIndex, positions: list[int]) -> None:
        slots = [Slot(queue.id, position) for position in positions]
        try:
            found = await self._log.read_messages(slots, FETCH_OCTETS)
            if len(found) < len(slots):
                # The answer may have ended at its limit of bytes, or messages may have no row. Messages that were
                # purged or expired meanwhile are not ready any more, and are not reported.
                missed = queue.remove_missing(await self._missing([slot for slot in slots if slot not in found]))
                if missed:
                    log.error("messages are not in the database any more", queue=queue.name, count=missed)
        except LeaseLost:
            return
        except LogError as error:
            log.warning("messages could not be read, trying again", queue=queue.name, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
            found = {}
        queue.arrived(positions, found.values())

    async def _missing(self, slots: Sequence[Slot]) -> list[int]:
        there = await self._log.which_exist(slots)
        return [slot.position for slot in slots if slot not in there]

    def drop(self, queue: QueueIndex, positions: list[int]) -> None:
        """See :class:`~dtx.store.postgres.queue.Host`."""
        self._recorder.drop([Slot(queue.id, position) for position in positions])

    def dead_letter(self, queue: QueueIndex, letters: list[Letter], reason: Reason) -> None:
        """See :class:`~dtx.store.postgres.queue.Host`."""
        self._letters.post(queue, letters, reason)

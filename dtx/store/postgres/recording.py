"""Writing what happens outside of branches, and making sure of what is not known to be written.

Theory of operation. A change is submitted and nobody waits for it here: its future tells the caller. Where the log
cannot say whether it was written, memory and database may differ until the log is *settled*; then the database is asked
which of the slots exist, and memory follows. What nobody can take back (an acknowledgement that stands alone, a message
that was sent without acknowledgement, topology) is written again until it is there.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dtx.log.api import LeaseLost, LogConflict, LogError, LogUnavailable, MessageLog
from dtx.log.changes import Change, Define, Slot, Store
from dtx.telemetry import get_logger

DROPS_AT_ONCE: Final = 5_000
"""Messages that one record drops where nobody waits for it: some milliseconds of PostgreSQL's time."""
_PAUSE: Final = 0.25
"""Seconds before the database is asked again; the log itself has waited for its retry window by then."""

log = get_logger(part="store")


class Recorder:
    """Writes changes and topology in the order in which they come.

    Args:
        log_: open.
    """

    def __init__(self, log_: MessageLog) -> None:
        self._log = log_
        self._gone: list[Slot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[asyncio.Future[None]] = set()
        self._defines: deque[tuple[Define, asyncio.Future[None]]] = deque()
        self._defining: asyncio.Task[None] | None = None
        self.unsure: set[int] = set()
        """Durable queues that the log may not have, since writing them has failed so far: nothing is put there."""

    async def close(self) -> None:
        """Write what waits, and stop to try again."""
        self._flush()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self._defining is not None and not self.unsure:
            await asyncio.gather(self._defining, return_exceptions=True)
        for task in (*self._tasks, *((self._defining,) if self._defining is not None else ())):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _submit(self, change: Change, *, urgent: bool = True) -> "asyncio.Future[None]":
        future = self._log.submit(Store(change=change), urgent=urgent)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def spawn(self, work: Awaitable[None]) -> None:
        """Let *work* run until the store closes; what it raises is logged."""

        async def guarded() -> None:
            try:
                await work
            except LeaseLost:
                pass  # the service stops
            except Exception:
                log.exception("a task of the message store failed")

        task = asyncio.ensure_future(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def submit(self, change: Change, done: Callable[[LogError | None], None]) -> None:
        """Write *change*; *done* hears of the outcome, and is never called before this returns."""

        def finished(future: "asyncio.Future[None]") -> None:
            error = future.exception()
            if error is None or isinstance(error, LogError):
                done(error)
            else:  # pragma: no cover - the log lets nothing else out
                done(LogError(f"{type(error).__name__} in the log"))

        self._submit(change).add_done_callback(finished)

    async def settled(self) -> None:
        """Return when the log knows what it has written.

        Raises:
            LeaseLost: it never will.
        """
        while True:
            try:
                await self._log.settled()
            except LeaseLost:
                raise
            except LogError:
                await asyncio.sleep(_PAUSE)
            else:
                return

    async def existing(self, slots: Sequence[Slot]) -> set[Slot]:
        """Those of *slots* that hold a message, once the log knows; waits as long as that takes.

        Raises:
            LeaseLost.
        """
        while True:
            await self.settled()
            try:
                return await self._log.which_exist(slots)
            except LogUnavailable:
                await asyncio.sleep(_PAUSE)

    # -- what is written until it is there ----------------------------------------------------------------------------

    def drop(self, slots: Sequence[Slot]) -> None:
        """These messages are settled: their rows go soon, whatever happens, together with those of others."""
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gone += slots

    def _flush(self) -> None:
        gone, self._gone = self._gone, []
        for start in range(0, len(gone), DROPS_AT_ONCE):
            self._drop(gone[start : start + DROPS_AT_ONCE])

    def _drop(self, slots: Sequence[Slot]) -> None:
        future = self._submit(Change(drops=slots), urgent=False)

        def finished(future: "asyncio.Future[None]") -> None:
            error = future.exception()
            if error is not None and not isinstance(error, LeaseLost):
                log.warning("settled messages could not be removed, trying again", error=str(error), count=len(slots))
                self.spawn(self._again(slots))

        future.add_done_callback(finished)

    async def _again(self, slots: Sequence[Slot]) -> None:
        await asyncio.sleep(_PAUSE)
        await self.settled()
        self._drop(slots)

    async def drop_slowly(self, slots: Sequence[Slot]) -> None:
        """Remove messages, a piece at a time, so that others are written in between; whatever it takes.

        Raises:
            LeaseLost.
        """
        for start in range(0, len(slots), DROPS_AT_ONCE):
            change = Change(drops=slots[start : start + DROPS_AT_ONCE])
            while True:
                try:
                    await self._log.write(Store(change=change), urgent=False)
                except LeaseLost:
                    raise
                except LogError as error:
                    log.warning("messages could not be removed, trying again", error=str(error))
                    await asyncio.sleep(_PAUSE)
                else:
                    break

    async def drop_now(self, slots: Sequence[Slot]) -> None:
        """Remove messages, in pieces; returns when they are gone.

        Raises:
            LogError: not all of them, perhaps.
        """
        for start in range(0, len(slots), DROPS_AT_ONCE):
            await self._log.write(Store(change=Change(drops=slots[start : start + DROPS_AT_ONCE])))

    def mark(self, delivered: Sequence[tuple[int, int]]) -> None:
        """Keep up to where messages were delivered, by queue id; a mark that is lost comes again with the next."""
        self._submit(Change(delivered=delivered), urgent=False).add_done_callback(asyncio.Future.exception)

    # -- topology -----------------------------------------------------------------------------------------------------

    async def define(self, record: Define) -> None:
        """Write topology, behind all that was to be written before.

        Memory has it already and cannot go back, for others may have built on it. So a record that fails is written
        again until it is there, and none overtakes it; whoever asked hears of the failure.

        Raises:
            LogError: not written yet, as far as is known.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._defines.append((record, future))
        if self._defining is None:
            self._defining = asyncio.ensure_future(self._define_all())
        await asyncio.shield(future)

    async def _define_all(self) -> None:
        while self._defines:
            record, future = self._defines[0]
            try:
                await self._log.write(record)
            except LogError as error:
                self._failed(record, future, error)
                if isinstance(error, LeaseLost):
                    break
                if not isinstance(error, LogConflict):
                    await asyncio.sleep(_PAUSE)
                    continue
            else:
                self.unsure.difference_update(queue.id for queue in record.queues)
                if not future.done():
                    future.set_result(None)
            self._defines.popleft()
        self._defining = None

    def _failed(self, record: Define, future: "asyncio.Future[None]", error: LogError) -> None:
        log.error("topology could not be written", error=str(error))
        self.unsure.update(queue.id for queue in record.queues)
        if not future.done():
            future.set_exception(error)
            future.exception()  # the asker may have gone

"""Writes changes outside of branches, and finds the outcome of writes that are not known to have succeeded.

Theory of operation. A change is submitted, and the recorder does not wait for it: a callback or future tells the
caller. If the log does not know whether it was written, memory and database may differ until the log is *settled*.
Then the caller asks the database which of the slots exist, and corrects memory.

Some changes cannot be undone: an acknowledgement without publishes, a message that was sent without acknowledgement,
and topology. They are written again until the database has them.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Collection, Iterable, Sequence
from itertools import count
from typing import Final, NamedTuple

from dtx.log.api import InFlight, LeaseLost, LogConflict, LogError, LogUnavailable, MessageLog, OnWritten
from dtx.log.changes import BindingRow, Change, Define, ExchangeKey, Slot, Store, StoredMessage
from dtx.telemetry import get_logger

DROPS_AT_ONCE: Final = 5_000
"""Messages that one record drops: some milliseconds of PostgreSQL's time."""
_PAUSE: Final = 0.25
"""Seconds before the next request to the database; the log has waited for its retry window before."""

NO_QUEUE_YET: Final = "the database does not have the queue yet"

log = get_logger(part="store")

Thing = int | ExchangeKey | BindingRow
"""A durable object of the topology: a queue by its id, an exchange, or a binding."""


class Recorder:
    """Writes changes and topology in the order in which they come.

    Args:
        log_: open.
    """

    def __init__(self, log_: MessageLog) -> None:
        self._log = log_
        self._dropping: list[Slot] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = InFlight()
        self._numbers = count()
        self._defines: deque[_Definition] = deque()
        self._defining: asyncio.Task[None] | None = None
        self.undefined: dict[Thing, _Definition] = {}
        """Topology that the log does not have yet."""
        self.unsure: set[int] = set()
        """Durable queues whose write has failed so far: no message is put there."""
        self._refused: set[int] = set()
        """Numbers of definitions that are not written again until a caller asks: see :meth:`defined`."""

    async def close(self) -> None:
        """Write pending changes once more, then stop all retries."""
        self._flush()
        await self._under_way.none()
        for definition in list(self._defines):
            await asyncio.wait((definition.future,))
            if definition.future.exception() is not None:
                break  # it is written again for ever, and the definitions after it wait
        for task in (*self._tasks, *((self._defining,) if self._defining is not None else ())):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _post(self, change: Change, written: OnWritten, *, urgent: bool = True) -> None:
        def ended(error: LogError | None) -> None:
            self._under_way.end()
            written(error)

        self._log.post(Store(change=change), ended, urgent=urgent)
        self._under_way.begin()

    def spawn(self, work: Awaitable[None]) -> None:
        """Run *work* in a task until the store closes. Exceptions are logged."""

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

    def submit(self, change: Change, written: OnWritten) -> None:
        """Write *change*. *written* gets the outcome, and is not called before this method returns."""
        self._post(change, written)

    async def settled(self) -> None:
        """Return when the log knows the outcome of all its writes.

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
        """The *slots* that hold a message, after the log is settled. Waits as long as that takes.

        Raises:
            LeaseLost.
        """
        while True:
            await self.settled()
            try:
                return await self._log.which_exist(slots)
            except LogUnavailable:
                await asyncio.sleep(_PAUSE)

    async def messages(self, slots: Sequence[Slot]) -> dict[Slot, StoredMessage]:
        """The messages in *slots*. Waits as long as that takes.

        Raises:
            LeaseLost.
        """
        while True:
            try:
                return await self._log.read_messages(slots)
            except LogUnavailable:
                await asyncio.sleep(_PAUSE)

    # -- changes that are written again until they succeed -------------------------------------------------------------

    def drop(self, slots: Sequence[Slot]) -> None:
        """Remove the rows of settled messages soon, in groups, as often as necessary."""
        if not self._dropping:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dropping += slots

    def _flush(self) -> None:
        slots, self._dropping = self._dropping, []
        for start in range(0, len(slots), DROPS_AT_ONCE):
            self._drop(slots[start : start + DROPS_AT_ONCE])

    def _drop(self, slots: Sequence[Slot]) -> None:
        def written(error: LogError | None) -> None:
            if error is not None and not isinstance(error, LeaseLost):
                log.warning("settled messages could not be removed, trying again", error=str(error), count=len(slots))
                self.spawn(self._drop_later(slots))

        self._post(Change(drops=slots), written, urgent=False)

    async def _drop_later(self, slots: Sequence[Slot]) -> None:
        await asyncio.sleep(_PAUSE)
        await self.settled()
        self._drop(slots)

    async def drop_slowly(self, slots: Sequence[Slot]) -> None:
        """Remove messages, one piece at a time, so that other records are written in between; as often as necessary.

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
        """Remove messages, in pieces. Returns when they are removed.

        Raises:
            LogError: some of them may remain.
        """
        for start in range(0, len(slots), DROPS_AT_ONCE):
            await self._log.write(Store(change=Change(drops=slots[start : start + DROPS_AT_ONCE])))

    def mark(self, delivered: Sequence[tuple[int, int]]) -> None:
        """Write the positions up to which messages were delivered, by queue id. A later mark replaces a lost one."""
        self._post(Change(delivered=delivered), _ignore, urgent=False)

    # -- topology -----------------------------------------------------------------------------------------------------

    def define(self, record: Define) -> Awaitable[None]:
        """Write topology, after all topology that was submitted before.

        Memory has the change already and cannot undo it, because other clients may have used it. So a record that
        failed is written again until it succeeds, and no later record overtakes it. The caller is told of the failure.
        Other clients may use the topology at once, but their answers wait for it: see :meth:`defined` and
        :meth:`behind`.

        Returns:
            Done when it is written. Raises LogError when it is not written yet, as far as is known.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        definition = _Definition(next(self._numbers), record, future)
        self._defines.append(definition)
        self.undefined.update(dict.fromkeys(definition.objects, definition))
        if self._defining is None:
            self._defining = asyncio.ensure_future(self._define_all())
        return asyncio.shield(future)

    def defined(self, thing: Thing | None = None) -> Awaitable[None] | None:
        """Wait until the log has *thing*, or all topology so far.

        A definition that a constraint of the database has refused is written again only on this request: the cause may
        be gone.

        Returns:
            ``None`` if the log has it; otherwise as :meth:`define`.
        """
        if not self._defines and not self.undefined:
            return None
        if thing is None:
            return asyncio.shield(self._defines[-1].future) if self._defines else None
        definition = self.undefined.get(thing)
        if definition is None:
            return None
        if definition.number in self._refused:
            self._refused.discard(definition.number)
            return self.define(definition.record)
        return asyncio.shield(definition.future)

    def defined_queues(self, queues: Iterable[int]) -> "asyncio.Future[None] | None":
        """As :meth:`defined`, for some queues. The caller must shield it from cancellation."""
        if not self.undefined:
            return None
        found = [self.undefined[queue] for queue in queues if queue in self.undefined]
        return max(found).future if found else None  # the others are written before it

    async def topology_written(self) -> None:
        """Return when the log has all topology so far. Waits as long as that takes.

        Raises:
            LeaseLost: it never will.
        """
        last = self._defines[-1] if self._defines else None
        while last is not None and self._defines and self._defines[0].number <= last.number:
            try:
                await asyncio.shield(last.future)
            except LeaseLost:
                raise
            except LogError:
                await asyncio.sleep(_PAUSE)

    def after_definitions(self, queues: Collection[int], written: OnWritten) -> OnWritten:
        """Return a callback for a write of messages. On success it calls *written* only after the log has their queues.

        A restart does not keep a message whose queue the log does not have.

        Args:
            queues: ids of the queues that the messages are put into.
            written: gets the error, or ``None``.
        """
        future = self.defined_queues(queues)
        if future is None:
            return written

        def resolve(error: LogError | None) -> None:
            if error is not None:
                written(error)
            else:
                future.add_done_callback(lambda _: written(self._not_defined(queues)))

        return resolve

    def _not_defined(self, queues: Iterable[int]) -> LogError | None:
        return None if self.undefined.keys().isdisjoint(queues) else LogUnavailable(NO_QUEUE_YET)

    async def _define_all(self) -> None:
        while self._defines:
            definition = self._defines[0]
            try:
                await self._log.write(definition.record)
            except LogError as error:
                self._failed(definition, error)
                if isinstance(error, LeaseLost):
                    break
                if not isinstance(error, LogConflict):
                    await asyncio.sleep(_PAUSE)
                    continue
                self._refused.add(definition.number)  # later definitions do not wait for it
            else:
                self._defined(definition)
            self._defines.popleft()
        self._defining = None

    def _defined(self, definition: "_Definition") -> None:
        for thing in definition.objects:
            if self.undefined.get(thing) is definition:
                del self.undefined[thing]
        self.unsure.difference_update(definition.objects)
        if not definition.future.done():
            definition.future.set_result(None)

    def _failed(self, definition: "_Definition", error: LogError) -> None:
        log.error("topology could not be written", error=str(error))
        self.unsure.update(queue.id for queue in definition.record.queues)
        if not definition.future.done():
            definition.future.set_exception(error)
            definition.future.exception()  # mark it as read: perhaps no caller waits


def _ignore(error: LogError | None) -> None:
    """A later mark replaces a lost one."""


class _Definition(NamedTuple):
    """Topology on its way to the log."""

    number: int
    record: Define
    future: "asyncio.Future[None]"

    @property
    def objects(self) -> tuple[Thing, ...]:
        """The objects that it adds."""
        record = self.record
        queues = [queue.id for queue in record.queues]
        return (*queues, *[exchange.key for exchange in record.exchanges], *record.bindings)

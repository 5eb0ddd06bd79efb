"""The way of dead letters: out of one queue and into others, in one transaction."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from dtx.log.api import LeaseLost, LogConflict, LogError, MessageLog
from dtx.log.changes import Change, Slot, Store, StoredMessage
from dtx.store.postgres.cache import cost
from dtx.store.postgres.copies import sender_selected
from dtx.store.postgres.deadletter import Death, Reason, dead_letter, would_cycle
from dtx.store.postgres.exchanges import QueueSpec
from dtx.store.postgres.host import Letter
from dtx.store.postgres.queue import QueueIndex
from dtx.store.postgres.recording import Recorder
from dtx.store.postgres.registry import Entry, Registry
from dtx.store.postgres.topology import VirtualHost
from dtx.store.postgres.traits import traits
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import XaError

LETTERS_AT_ONCE: Final = 50
"""Dead letters in one record: they are addressed in one step, some milliseconds."""
MAX_OCTETS: Final = 32 << 20
"""Of messages that wait here in memory; of those beyond it only the position is kept, and the message read again."""
_READ_OCTETS: Final = 8 << 20
_RETRY_SECONDS: Final = 0.5

log = get_logger(part="store")

Post = tuple[QueueSpec, list[Letter], Reason]


class _Sealed(NamedTuple):
    """A dead letter.

    Args:
        exchange: that it goes to, and
        key: with what routing key.
        raw: its properties, which say how it died.
        blind: whether they have BCC.
        targets: the queues that it is routed to.
    """

    exchange: bytes
    key: bytes
    raw: bytes
    blind: bool
    targets: Sequence[Entry]


class DeadLetters:
    """Moves dead letters, one queue's after the other, in their order. What is moved leaves its queue when it is safe.

    Args:
        log_: open.
        recorder: says what became of a write of unknown outcome.
        registry: of queues.
        host: the virtual host of a name.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        log_: MessageLog,
        recorder: Recorder,
        registry: Registry,
        host: Callable[[str], VirtualHost],
        clock: Callable[[], float],
    ) -> None:
        self._log = log_
        self._recorder = recorder
        self._registry = registry
        self._host = host
        self._clock = clock
        self._posts: deque[Post] = deque()
        self._octets = 0
        self._working = False

    def post(self, queue: QueueIndex, letters: Sequence[Letter], reason: Reason) -> None:
        """They leave *queue* for its dead letter exchange."""
        entry = self._registry.find(queue.id)
        if entry is None:
            return  # the queue is gone, and its messages go with it
        self._posts.append((entry.spec, [self._admit(letter) for letter in letters], reason))
        if not self._working:
            self._working = True
            self._recorder.spawn(self._work())

    def _admit(self, letter: Letter) -> Letter:
        position, message = letter
        if message is None or self._octets > MAX_OCTETS:
            return position, None
        self._octets += cost(message)
        return letter

    async def _work(self) -> None:
        try:
            while self._posts:
                spec, letters, reason = self._posts[0]
                await self._move(spec, letters[:LETTERS_AT_ONCE], reason)
                del letters[:LETTERS_AT_ONCE]
                if not letters:
                    self._posts.popleft()
        finally:
            self._working = False

    async def _move(self, spec: QueueSpec, letters: Sequence[Letter], reason: Reason) -> None:
        left = list(letters)
        while left:
            missing = [Slot(spec.id, position) for position, message in left if message is None]
            read = await self._read(missing) if missing else {}
            count = len(left)
            if len(read) < len(missing) and read:
                # the answer has ended with so many octets, or some are gone already
                count = 1 + left.index((next(reversed(read)).position, None))
            batch = [message or read.get(Slot(spec.id, position)) for position, message in left[:count]]
            await self._write(spec, [message for message in batch if message is not None], reason)
            del left[:count]
        self._octets -= sum([cost(message) for _, message in letters if message is not None])

    async def _read(self, slots: Sequence[Slot]) -> dict[Slot, StoredMessage]:
        while True:
            try:
                return await self._log.read_messages(slots, _READ_OCTETS)
            except LeaseLost:
                raise
            except LogError as error:
                log.warning("dead letters could not be read, trying again", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _write(self, spec: QueueSpec, messages: Sequence[StoredMessage], reason: Reason) -> None:
        """Move *messages*; returns when that is durable, whatever it takes."""
        if not messages:
            return
        drops = [message.slot for message in messages]
        while True:
            # Routed anew each time: the log may have been away for long.
            moved = [pair for message in messages for pair in self.address(spec, message, reason)]
            queues = self._recorder.defined_queues({put.queue for _, put in moved})
            if queues is not None:  # what is put where the log has no queue would not survive a restart
                self._withdraw(moved)
                await self._defined(spec, queues)
                continue
            try:
                await self._log.write(Store(change=Change(puts=[put for _, put in moved], drops=drops)))
            except LeaseLost:
                raise
            except LogError as error:
                log.warning("dead letters could not be moved, trying again", queue=spec.where, error=str(error))
                if isinstance(error, LogConflict):  # pragma: no cover - slots are new
                    await asyncio.sleep(_RETRY_SECONDS)
                there = await self._recorder.existing([*drops, *(put.slot for _, put in moved)])
                if not there.isdisjoint(drops):
                    self._withdraw(moved)
                    continue
                # Neither here nor there: somebody has deleted the queue meanwhile.
                self._withdraw([pair for pair in moved if pair[1].slot not in there])
                moved = [pair for pair in moved if pair[1].slot in there]
            self._show(moved)
            return

    async def _defined(self, spec: QueueSpec, queues: "asyncio.Future[None]") -> None:
        try:
            await asyncio.shield(queues)
        except LeaseLost:
            raise
        except LogError as error:
            log.warning("dead letters wait for a queue", queue=spec.where, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)

    async def in_branch(
        self, slots: Sequence[Slot], revised: Callable[[StoredMessage], bytes]
    ) -> list[HeldPublish | None]:
        """What a branch publishes that rejects the messages in *slots*; ``None`` for one that goes nowhere.

        So a letter is stored with the vote, and is seen, or is not, with what becomes of the branch. It is routed now,
        as any publish of a branch.

        Args:
            slots: of queues that have a dead letter exchange.
            revised: the properties with which a message leaves.

        Returns:
            Of as many of them as are reasonable to have in memory at once, from the first on, and at least one.

        Raises:
            LogError: they could not be read.
        """
        wanted = slots[:LETTERS_AT_ONCE]
        found = await self._log.read_messages(wanted, _READ_OCTETS)
        if len(found) < len(wanted) and found:  # the answer has ended with so many octets, or some are gone
            wanted = wanted[: 1 + wanted.index(next(reversed(found)))]
        return [self._in_branch(found[slot], revised) if slot in found else None for slot in wanted]

    def _in_branch(self, message: StoredMessage, revised: Callable[[StoredMessage], bytes]) -> HeldPublish | None:
        entry = self._registry.find(message.queue)
        if entry is None:
            return None  # the queue is gone, and its messages go with it
        with suppress(WireError):  # malformed, as is said next
            message = message._replace(properties=revised(message))
        sealed = self._seal(entry.spec, message, Reason.REJECTED)
        if not sealed.targets:
            return None
        ids = tuple(target.spec.id for target in sealed.targets)
        return HeldPublish(sealed.exchange, sealed.key, False, sealed.raw, message.body, queues=ids, blind=sealed.blind)

    def address(self, spec: QueueSpec, message: StoredMessage, reason: Reason) -> list[tuple[Entry, StoredMessage]]:
        """Where *message* goes from the queue *spec*, and as what; nowhere when it cannot be routed, as in RabbitMQ."""
        exchange, key, raw, blind, targets = self._seal(spec, message, reason)
        letter, facts = HeldPublish(exchange, key, False, raw, message.body, blind=blind), traits(raw)
        now = self._clock()
        shared = self._registry.share(message.body, len(targets))
        found: list[tuple[Entry, StoredMessage]] = []
        for entry in targets:
            if entry.refuses and not entry.index.admit(len(message.body)):
                continue
            found.append((entry, self._registry.stored(entry, letter, facts, now, shared)))
        return found

    def _seal(self, spec: QueueSpec, message: StoredMessage, reason: Reason) -> _Sealed:
        settings = spec.settings
        now = self._clock()
        death = Death(spec.name, reason, message.exchange, message.routing_key, now)
        new_key = settings.dead_letter_routing_key
        exchange = settings.dead_letter_exchange
        assert exchange is not None, "the index posts letters of queues that have one"
        try:
            raw = dead_letter(message.properties, death, new_key=new_key is not None)
            more, seen = sender_selected(raw)
            headers = properties.read(seen).value(Property.HEADERS) or b""
            key = message.routing_key if new_key is None else new_key
            targets = self._host(spec.vhost).route(exchange, key, headers, more)
        except (WireError, XaError) as error:
            log.warning("a dead letter is malformed and was dropped", queue=spec.where, error=str(error))
            return _Sealed(exchange, b"", message.properties, False, ())
        entries = [self._registry.find(target.spec.id) for target in targets]
        found = tuple(
            entry
            for entry in entries
            if entry is not None and (reason is Reason.REJECTED or not would_cycle(raw, entry.spec.name))
        )
        return _Sealed(exchange, key, raw, seen is not raw, found)

    def _show(self, moved: Sequence[tuple[Entry, StoredMessage]]) -> None:
        self._withdraw(moved)
        now = self._clock()
        for entry, message in moved:
            entry.index.put(message, now)

    def _withdraw(self, moved: Sequence[tuple[Entry, StoredMessage]]) -> None:
        for entry, message in moved:
            if entry.refuses:
                entry.index.withdraw(len(message.body))

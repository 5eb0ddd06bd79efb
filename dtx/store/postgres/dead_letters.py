"""Dead letters: their headers as in RabbitMQ, and their move from one queue to others in one transaction.

The header ``x-death`` is an array with one table for each queue and reason, the latest first. If a message is
dead-lettered again from the same queue for the same reason, the count of that table grows, and its other fields stay.
``x-first-death-*`` never change. The expiration moves to ``x-death``, so that the message does not expire again.
RabbitMQ, "Dead Letter Exchanges".
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from dtx.log.api import LeaseLost, LogConflict, LogError, MessageLog
from dtx.log.changes import Change, Slot, Store, StoredMessage
from dtx.store.postgres.cache import cost
from dtx.store.postgres.exchanges import QueueSpec
from dtx.store.postgres.property_scan import BCC, CC, sender_selected, traits
from dtx.store.postgres.queue import Letter, QueueIndex, Reason
from dtx.store.postgres.recorder import Recorder
from dtx.store.postgres.registry import QueueEntry, Registry
from dtx.store.postgres.topology import VirtualHost
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import Entry
from dtx.xa.codes import XaError

X_DEATH: Final = b"x-death"
_FIRST: Final = b"x-first-death-"
_COUNT: Final = b"count"
_QUEUE: Final = b"queue"
_REASON: Final = b"reason"
_MAX_COUNT: Final = 2**63 - 1


class Death(NamedTuple):
    """Why and where a message became a dead letter.

    Args:
        queue: name of the queue that it leaves.
        reason: why it leaves.
        exchange, routing_key: with which it was published to that queue.
        at: seconds since the epoch.
    """

    queue: bytes
    reason: Reason
    exchange: bytes
    routing_key: bytes
    at: float


def dead_letter(raw: bytes, death: Death, *, new_key: bool) -> bytes:
    """The properties of a message for its dead letter exchange.

    Args:
        raw: its properties in the queue.
        death: an entry for ``x-death``.
        new_key: whether the queue has x-dead-letter-routing-key. The message is then routed by that key alone, without
            CC and BCC.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    view = properties.read(raw)
    headers = {entry.key: entry for entry in reversed(view.headers)}
    values: dict[bytes, tuple[bytes, bytes]] = {}
    found = headers.get(X_DEATH)
    if found is None:
        values |= {
            _FIRST + name: (b"S", value)
            for name, value in (
                (b"reason", death.reason.value.encode()),
                (b"queue", death.queue),
                (b"exchange", death.exchange),
            )
        }
    values[X_DEATH] = b"A", _deaths(found, death, _keys(headers.get(CC), death.routing_key), view.expiration)
    raw = properties.set_headers(raw, values)
    if new_key:
        raw = properties.remove_headers(raw, (CC, BCC))
    return properties.without(raw, Property.EXPIRATION)


def would_cycle(raw: bytes, queue: bytes) -> bool:
    """Whether a message is in an automatic cycle: it was in *queue* before, and was not rejected since.

    RabbitMQ drops such a message. The caller does not ask for a message that was just rejected.

    Args:
        raw: properties with the latest death.
        queue: the name of a queue that the message is routed to.

    Raises:
        WireError: 502 when *raw* is malformed.
    """
    found = properties.read(raw).header(X_DEATH)
    if found is None or found.kind != b"A":
        return False
    for item in tables.items(found.value):
        # A client has written an item that is no table: so the cycle is not automatic.
        if item.kind != b"F" or _string(item, _REASON) == Reason.REJECTED.value.encode():
            return False
        if _string(item, _QUEUE) == queue:
            return True
    return False


def _deaths(found: Entry | None, death: Death, keys: list[bytes], expiration: bytes | None) -> bytes:
    """The array ``x-death`` with *death* first. A value of a client that is no array is replaced, as in RabbitMQ."""
    others: list[bytes] = []
    same: Entry | None = None
    for item in tables.items(found.value) if found is not None and found.kind == b"A" else ():
        if item.kind != b"F" or (_string(item, _QUEUE), _string(item, _REASON)) != (
            death.queue,
            death.reason.encode(),
        ):
            others.append(item.raw)
        else:
            same = same or item
    table = _first_time(death, keys, expiration) if same is None else _once_more(same)
    return b"".join((b"F", tables.put_long(table), *others))


def _first_time(death: Death, keys: list[bytes], expiration: bytes | None) -> bytes:
    table = [
        tables.entry(_COUNT, b"l", (1).to_bytes(8, "big")),
        tables.entry(_REASON, b"S", death.reason.value.encode()),
        tables.entry(_QUEUE, b"S", death.queue),
        tables.entry(b"time", b"T", int(death.at).to_bytes(8, "big")),
        tables.entry(b"exchange", b"S", death.exchange),
        tables.entry(b"routing-keys", b"A", b"".join(b"S" + tables.put_long(key) for key in keys)),
    ]
    if expiration is not None:
        table.append(tables.entry(b"original-expiration", b"S", expiration))
    return b"".join(table)


def _once_more(item: Entry) -> bytes:
    """The table of a repeated death, with a count that is greater by one."""
    entries = tables.entries(item.value)
    count = next((entry.value for entry in entries if entry.key == _COUNT and entry.kind == b"l"), bytes(8))
    times = min(int.from_bytes(count, "big", signed=True) + 1, _MAX_COUNT)
    rest = (entry.raw for entry in entries if entry.key != _COUNT)
    return b"".join((tables.entry(_COUNT, b"l", times.to_bytes(8, "big", signed=True)), *rest))


def _string(item: Entry, key: bytes) -> bytes | None:
    """The string *key* in a table of ``x-death``, if there is one."""
    return next((entry.value for entry in tables.entries(item.value) if entry.key == key and entry.kind == b"S"), None)


def _keys(copies: Entry | None, routing_key: bytes) -> list[bytes]:
    """The routing keys of a message, including those of CC."""
    if copies is None or copies.kind != b"A":
        return [routing_key]
    return [routing_key, *(item.value for item in tables.items(copies.value) if item.kind == b"S")]


LETTERS_AT_ONCE: Final = 50
"""Dead letters in one record: they are routed in one step, some milliseconds."""
MAX_OCTETS: Final = 32 << 20
"""Bytes of messages that wait here in memory. Beyond it only positions are kept, and the messages are read again."""
_READ_OCTETS: Final = 8 << 20
_RETRY_SECONDS: Final = 0.5

log = get_logger(part="store")

Post = tuple[QueueSpec, list[Letter], Reason]


class _RoutedDeadLetter(NamedTuple):
    """A dead letter and the queues that it is put into.

    Args:
        exchange: the dead letter exchange.
        key: routing key.
        raw: properties with ``x-death``.
        blind: whether they have BCC.
        targets: the queues that it is routed to.
    """

    exchange: bytes
    key: bytes
    raw: bytes
    blind: bool
    targets: Sequence[QueueEntry]


class DeadLetters:
    """Moves dead letters, in the order in which they were posted. A message leaves its queue when the move is durable.

    Args:
        log_: open.
        recorder: determines the outcome of a write that is not known to have succeeded.
        registry: of queues.
        host: returns the virtual host of a name.
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
        """Move *letters* from *queue* to its dead letter exchange, in the background."""
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
                # the answer has ended at its limit of bytes, or some messages are already gone
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
        """Move *messages*. Returns when that is durable, as long as that takes."""
        if not messages:
            return
        drops = [message.slot for message in messages]
        while True:
            # Routed again each time: the log may have been away for long.
            moved = [pair for message in messages for pair in self.address(spec, message, reason)]
            queues = self._recorder.defined_queues({put.queue for _, put in moved})
            if queues is not None:  # a restart loses messages whose queue the log does not have
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
                # The old rows are gone: the move was written, or a queue was deleted. Only existing rows are shown.
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
        """The publishes of a branch that rejects the messages in *slots*; ``None`` for a message without a target.

        So a letter is stored with the vote, and shown only if the branch commits. It is routed now, as any publish of a
        branch.

        Args:
            slots: of queues that have a dead letter exchange.
            revised: returns the properties with which a message leaves.

        Returns:
            Publishes for the first messages: as many as are reasonable to have in memory at once, at least one.

        Raises:
            LogError: the messages could not be read.
        """
        wanted = slots[:LETTERS_AT_ONCE]
        found = await self._log.read_messages(wanted, _READ_OCTETS)
        if len(found) < len(wanted) and found:  # the answer has ended at its limit of bytes, or some are gone
            wanted = wanted[: 1 + wanted.index(next(reversed(found)))]
        return [self._in_branch(found[slot], revised) if slot in found else None for slot in wanted]

    def _in_branch(self, message: StoredMessage, revised: Callable[[StoredMessage], bytes]) -> HeldPublish | None:
        entry = self._registry.find(message.queue)
        if entry is None:
            return None  # the queue is gone, and its messages go with it
        with suppress(WireError):  # malformed: _route_letter logs it
            message = message._replace(properties=revised(message))
        routed = self._route_letter(entry.spec, message, Reason.REJECTED)
        if not routed.targets:
            return None
        ids = tuple(target.spec.id for target in routed.targets)
        return HeldPublish(routed.exchange, routed.key, False, routed.raw, message.body, queues=ids, blind=routed.blind)

    def address(
        self, spec: QueueSpec, message: StoredMessage, reason: Reason
    ) -> list[tuple[QueueEntry, StoredMessage]]:
        """The copies of *message* for the queues of its dead letter; none if it is unroutable, as in RabbitMQ.

        Queues that refuse messages have admitted their copies: see :meth:`QueueIndex.admit`.
        """
        exchange, key, raw, blind, targets = self._route_letter(spec, message, reason)
        letter, facts = HeldPublish(exchange, key, False, raw, message.body, blind=blind), traits(raw)
        now = self._clock()
        shared = self._registry.share(message.body, len(targets))
        found: list[tuple[QueueEntry, StoredMessage]] = []
        for entry in targets:
            if entry.refuses and not entry.index.admit(len(message.body)):
                continue
            found.append((entry, self._registry.stored(entry, letter, facts, now, shared)))
        return found

    def _route_letter(self, spec: QueueSpec, message: StoredMessage, reason: Reason) -> _RoutedDeadLetter:
        settings = spec.settings
        now = self._clock()
        death = Death(spec.name, reason, message.exchange, message.routing_key, now)
        new_key = settings.dead_letter_routing_key
        exchange = settings.dead_letter_exchange
        assert exchange is not None, "letters come only from queues with a dead letter exchange"
        try:
            raw = dead_letter(message.properties, death, new_key=new_key is not None)
            more, seen = sender_selected(raw)
            headers = properties.read(seen).value(Property.HEADERS) or b""
            key = message.routing_key if new_key is None else new_key
            targets = self._host(spec.vhost).route(exchange, key, headers, more)
        except (WireError, XaError) as error:
            log.warning("a dead letter is malformed and was dropped", queue=spec.where, error=str(error))
            return _RoutedDeadLetter(exchange, b"", message.properties, False, ())
        entries = [self._registry.find(target.spec.id) for target in targets]
        found = tuple(
            entry
            for entry in entries
            if entry is not None and (reason is Reason.REJECTED or not would_cycle(raw, entry.spec.name))
        )
        return _RoutedDeadLetter(exchange, key, raw, seen is not raw, found)

    def _show(self, moved: Sequence[tuple[QueueEntry, StoredMessage]]) -> None:
        self._withdraw(moved)
        now = self._clock()
        for entry, message in moved:
            entry.index.put(message, now)

    def _withdraw(self, moved: Sequence[tuple[QueueEntry, StoredMessage]]) -> None:
        for entry, message in moved:
            if entry.refuses:
                entry.index.withdraw(len(message.body))

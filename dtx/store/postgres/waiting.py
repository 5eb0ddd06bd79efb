"""What waits in one queue, and what leaves it without a consumer: the half of a queue's index below its consumers.

All that is ready is known by position alone; bodies are in memory for as many as the cache has room for. Messages leave
by themselves where there are too many (maximum length), where they are too old (time to live), and by a purge.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Final

from dtx.log.changes import StoredMessage
from dtx.store.postgres.arguments import QueueArguments
from dtx.store.postgres.bodies import FETCH_MESSAGES, Bodies
from dtx.store.postgres.cache import MessageCache
from dtx.store.postgres.consumers import Round
from dtx.store.postgres.deadletter import Reason
from dtx.store.postgres.host import Getter, Letter
from dtx.store.postgres.limits import NEVER, Limits
from dtx.store.postgres.ready import PriorityReady, Ready

LEAVE_MESSAGES: Final = 1000
"""Messages that expire, or are too many, in one step at most: what the host then has to drop in one statement."""


class Waiting:
    """The messages of one queue that are ready.

    Args:
        id: in :class:`~dtx.log.changes.Slot`.
        cache: what bodies may take, of all queues together.
        arguments: of the queue's declaration.
        now: it begins to be unused.
    """

    __slots__ = (
        "_again",
        "_bodies",
        "_detailed",
        "_getters",
        "_limits",
        "_mark",
        "_ready",
        "_round",
        "_scheduled",
        "_suspended",
        "_used_at",
        "arguments",
        "closed",
        "delivered",
        "id",
        "ready",
    )

    def __init__(
        self,
        id: int,  # noqa: A002 - the row's name for it
        cache: MessageCache,
        arguments: QueueArguments,
        now: float,
    ) -> None:
        self.id = id
        self.arguments = arguments
        self.closed = False
        self.ready = 0
        """Messages that wait: the message-count of declare-ok."""
        self.delivered = 0
        """The greatest position that was ever handed out."""
        self._used_at = now
        self._ready = PriorityReady(arguments.max_priority) if arguments.max_priority else Ready()
        self._round = Round(single=arguments.single_active)
        self._getters: list[Getter] = []  # hardly ever more than one
        self._scheduled = False
        self._suspended = 0
        """Those who give messages back in several steps: nothing is handed out before the last, for the order."""
        self._bodies = Bodies(cache, self._round, self._getters)
        # Redelivered: what was given back, and what may have been handed out before a restart.
        self._again: set[int] = set()
        self._mark = 0
        self._limits = Limits(arguments)
        # Something has to be forgotten of each message that is settled.
        self._detailed = arguments.max_priority > 0 or self._limits.weighs

    # -- the half above -----------------------------------------------------------------------------------------------

    def _hand_over(self, message: StoredMessage) -> bool:
        """Give a message that has expired on arrival to a consumer that waits; whether there was one."""
        raise NotImplementedError

    def _run(self, now: float) -> None:
        """Let consumers have what they can take."""
        raise NotImplementedError

    def _schedule(self) -> None:
        """Ask for a turn to dispatch."""
        raise NotImplementedError

    def _leave(self, letters: list[Letter], reason: Reason) -> None:
        """These go to the dead letter exchange, or away."""
        raise NotImplementedError

    # -- messages come ------------------------------------------------------------------------------------------------

    def restore(
        self,
        positions: "array[int]",
        *,
        delivered: int = 0,
        expiries: Mapping[int, float] | None = None,
        octets: Mapping[int, int] | None = None,
        priorities: Mapping[int, int] | None = None,
    ) -> None:
        """What the database has at start, before anything else happens to the queue.

        Args:
            positions: ready messages, in order.
            delivered: up to here they may have been handed out before.
            expiries: when those expire that do.
            octets: of the bodies, where :attr:`QueueArguments.max_length_bytes` is set.
            priorities: of those that have one, where the queue has priorities.
        """
        self._ready.restore(positions, priorities or {})
        self.ready += len(positions)
        self._mark = delivered
        self.delivered = max(self.delivered, delivered)
        self._limits.restore(expiries or {}, octets or {})
        self._detailed |= bool(expiries)
        if self._limits.drops and self._limits.over(self.ready):  # that they left was not written any more
            self._overflow(self._used_at)
        if self.ready:
            self._schedule()

    def put(self, message: StoredMessage, now: float) -> None:
        """A message whose row is committed, and that everybody may see."""
        if self.closed:
            return
        position = message.position
        expires_at = message.expires_at
        if self._detailed or expires_at is not None:
            self._note(position, len(message.body), expires_at)
            if expires_at is not None and expires_at <= now and self._hand_over(message):
                return
            self._limits.came(position)
        self._ready.append(position, message.priority)
        self.ready += 1
        # In a long queue that is not in memory anyway, those at the end would be the first to be let go.
        if self.ready - len(self._bodies) <= FETCH_MESSAGES:
            self._bodies.keep(message)
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        if not self._scheduled and (self._round.active or expires_at is not None):
            self._schedule()

    def reveal(
        self, position: int, now: float, *, priority: int = 0, octets: int = 0, expires_at: float | None = None
    ) -> None:
        """As :meth:`put`, of a message whose body is not in memory.

        Args:
            position: where it is.
            now: seconds since the epoch.
            priority: as in :meth:`restore_held`.
            octets: as in :meth:`restore_held`.
            expires_at: when it expires, if it does.
        """
        if self.closed:
            return
        self._note(position, octets, expires_at)
        self._limits.came(position)
        self._ready.append(position, priority)
        self.ready += 1
        if self._limits.drops and self._limits.over(self.ready):
            self._overflow(now)
        self._schedule()

    def reappear(self, messages: Iterable[StoredMessage], now: float) -> None:
        """Messages that were settled here, and whose rows are still there: the write of that failed."""
        for message in messages:
            if not self.closed:
                self._again.add(message.position)
                self.put(message, now)

    def admit(self, octets: int) -> bool:
        """Whether the queue takes one more message, with what is on its way to it (reject-publish).

        A message that was admitted counts until :meth:`withdraw`, which is called when it is put, or will not be.

        Args:
            octets: of its body.
        """
        return self._limits.admit(self.ready, octets)

    def fits(self, count: int, octets: int) -> bool:
        """Whether the queue would take *count* more messages with bodies of *octets* together (reject-publish)."""
        return self._limits.fits(self.ready, count, octets)

    def withdraw(self, octets: int) -> None:
        """The other end of :meth:`admit`."""
        self._limits.withdraw(octets)

    def _note(self, position: int, octets: int, expires_at: float | None) -> None:
        self._limits.note(position, octets, expires_at)
        self._detailed |= expires_at is not None

    # -- bodies -------------------------------------------------------------------------------------------------------

    def arrived(self, positions: Iterable[int], messages: Iterable[StoredMessage]) -> None:
        """The answer to :meth:`Host.fetch`.

        Args:
            positions: as they were asked for.
            messages: what was read of them, perhaps not all, perhaps none; the rest is asked for again. A message that
                is known to have no row must be named to :meth:`vanished` as well.
        """
        self._bodies.arrived(positions, messages)
        if not self.closed:
            self._schedule()

    def vanished(self, positions: Iterable[int]) -> int:
        """These messages have no rows: they have left meanwhile, or somebody removed them behind our back.

        Returns:
            How many of them were still waited for.
        """
        missed = [position for position in positions if self._ready.discard(position)]
        for position in missed:
            self._gone(position)
        if self.ready:
            self._schedule()
        return len(missed)

    # -- messages that leave without a consumer -----------------------------------------------------------------------

    def _overflow(self, now: float) -> None:
        """Drop from the head what is too much; but first let consumers have what they can take."""
        if self._suspended:
            return
        if self._round.active:
            self._run(now)
        self._drop_excess()

    def _drop_excess(self) -> None:
        """Drop from the head what is too much, up to a limit: there is more of it when much comes back at once."""
        letters: list[Letter] = []
        while self.ready and len(letters) < LEAVE_MESSAGES and self._limits.over(self.ready):
            position = self._ready.pop()
            letters.append((position, self._gone(position)))
        if letters:
            self._leave(letters, Reason.MAXLEN)
            if self._limits.expiries or len(letters) == LEAVE_MESSAGES:
                # What is at the head now may have expired long ago.
                self._schedule()

    def _expire(self, now: float) -> None:
        """Remove what has expired at the head, up to a limit.

        RabbitMQ: "messages which should expire will still only expire from the head of the queue"; so in one with
        priorities those of lower ones wait behind those of higher ones that do not expire.
        """
        letters: list[Letter] = []
        ready, expiries = self._ready, self._limits.expiries
        while len(letters) < LEAVE_MESSAGES:
            head = ready.head()
            if head is None or expiries.get(head, NEVER) > now:
                break
            letters.append((ready.pop(), self._gone(head)))
        if letters:
            self._leave(letters, Reason.EXPIRED)

    def _gone(self, position: int) -> StoredMessage | None:
        """What was just taken out of what is ready leaves for good; its message where that was in memory."""
        self.ready -= 1
        self._again.discard(position)
        if self._detailed:
            self._limits.went(position)
        self._forget(position)
        return self._bodies.take(position)

    def _forget(self, position: int) -> None:
        self._limits.forget(position)
        self._ready.forget(position)

    def purge(self) -> "array[int]":
        """Remove all that is ready (AMQP 0-9-1, queue.purge: "not awaiting acknowledgment").

        Returns:
            Their positions; the caller drops the slots, and calls :meth:`purged`.
        """
        positions = self._ready.drain()
        self.ready = 0
        self._limits.emptied()
        self._again.clear()  # of what is ready, all of it
        self._bodies.clear()
        return positions

    def purged(self, positions: Iterable[int]) -> None:
        """Forget what is particular about messages of :meth:`purge`: with very many, a piece at a time."""
        if self._detailed:
            for position in positions:
                self._forget(position)

"""What an index of a queue needs of the store around it, and of those who get messages."""

from typing import TYPE_CHECKING, Protocol

from dtx.log.changes import StoredMessage
from dtx.store.postgres.consumers import Delivery
from dtx.store.postgres.deadletter import Reason

if TYPE_CHECKING:
    from dtx.store.postgres.queue import QueueIndex

Letter = tuple[int, StoredMessage | None]
"""A position, and its message where that was in memory."""


class Host(Protocol):
    """The store around the indexes. Its methods only take note: none calls the index, and none raises."""

    def schedule(self, queue: "QueueIndex") -> None:
        """Call ``queue.dispatch(now)`` soon; once for any number of reasons."""

    def handed_out(self, queue: "QueueIndex") -> None:
        """Messages may have left *queue* without a dispatch that was scheduled."""

    def fetch(self, queue: "QueueIndex", positions: list[int]) -> None:
        """Read these messages, as many from the first on as are reasonable to have in memory at once, at least one.

        Then call :meth:`QueueIndex.arrived` with *positions* and what was read; also after a failure, in good time.
        """

    def drop(self, queue: "QueueIndex", positions: list[int]) -> None:
        """These messages are settled (sent without acknowledgement, expired, beyond the length): remove their rows."""

    def dead_letter(self, queue: "QueueIndex", letters: list[Letter], reason: Reason) -> None:
        """As :meth:`drop`, but they go to the dead letter exchange, in the same transaction."""


class Getter(Protocol):
    """One basic.get."""

    @property
    def no_ack(self) -> bool:
        """The message is settled when it is sent."""

    def got(self, found: tuple[Delivery, StoredMessage] | None, remaining: int) -> None:
        """The answer: get-ok, or get-empty. As :meth:`Sink.deliver` it must not call the index, and must not raise.

        Args:
            found: the message, if there is one.
            remaining: how many are ready after it.
        """

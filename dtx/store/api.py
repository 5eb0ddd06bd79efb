"""The interface of the message stores.

A store holds published messages back for branches, and takes consumed ones from their queues before the vote. In phase
two it makes the outcome of a branch visible. Each method documents the failures that it must survive and its results.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Protocol, runtime_checkable
from uuid import UUID

from dtx.log.changes import Change, Slot
from dtx.log.records import BranchRecord, Replay, Unit, WorkRow
from dtx.store.work import HeldPublish, HeldWork, Holder
from dtx.xa.value import value


class UnitOutcome(StrEnum):
    """The known outcome of a unit."""

    HAPPENED = "happened"
    NEVER = "never"
    UNKNOWN = "unknown"


class UnitProgress(StrEnum):
    """The progress of the logged work of a branch: first of the units that take consumed messages, then of unit 0."""

    UNSENT = auto()
    """Nothing of it was sent."""
    SENT = auto()
    """It was sent, perhaps by a predecessor: it may have happened."""
    REFUSED = auto()
    """The broker refused it, so its receipt, if there is one, proves nothing. The log may not have that yet."""
    APPLIED = auto()
    """It has happened. The log may not have that yet."""
    ANSWERED = auto()
    """The client has the answer to commit or rollback. The log may not have the end of the branch yet."""


@dataclass(slots=True, kw_only=True)
class PhaseTwo:
    """A decided branch, whose messages are to be published (commit) or put back (rollback).

    Args:
        branch_id: id of its row; part of every ``x-dtx-id``.
        vhost: of the branch.
        unit: number 0 as the log has it. The store replaces it by the one that it has assigned.
        progress: of *unit*: UNSENT, SENT or REFUSED.
        size: bytes of all messages of the branch.
        work: reads the work of the branch, from memory or from the log.
        assign: makes a new unit durable before it is sent, and the messages that it sends again.
        unsure: numbers of the units that have perhaps not taken the messages that are put back.
        repeated: whether messages may already be in their queues, and are sent again with the same ``x-dtx-id``. The
            store sets it as soon as it knows, whatever the result is.
    """

    branch_id: UUID
    vhost: str
    unit: Unit
    progress: UnitProgress
    size: int
    work: Callable[[], Awaitable[Sequence[WorkRow]]]
    assign: Callable[[Unit, Sequence[Replay]], Awaitable[None]]
    unsure: frozenset[int] = frozenset()
    repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A message of a unit that no queue took."""

    position: int
    code: int
    text: bytes


@value
class Applied:
    """Phase two happened.

    Args:
        proved: whether only its receipt proves that. Then it is not known which messages were returned.
        returned: mandatory messages that could not be routed.
    """

    proved: bool = False
    returned: tuple[Returned, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Phase two could not finish.

    Args:
        reason: the text of the broker's refusal, or of dtx.
        settled: positions that are finished nevertheless, and must not be done again.
        partial: whether a part may have happened, so that another attempt may repeat messages.
    """

    reason: str
    settled: tuple[int, ...] = ()
    partial: bool = False


class MessageStore(Protocol):
    """A store of messages."""

    async def open(self) -> None:
        """Open the store, so that branches can be restored. Does not wait for an absent broker."""

    async def close(self) -> None:
        """Release all resources."""


@value
class Plan:
    """The work of a branch as a change of the log's own database.

    Args:
        change: puts the published messages, which no client sees yet.
        published: their slots, in the order of publishing.
        consumed: slots of the messages that the branch holds.
        unroutable: messages that no queue takes. Their publishers are told when the branch commits (as with
            ``tx.commit``, AMQP 0-9-1, 1.9.2).
    """

    change: Change
    published: tuple[Slot, ...]
    consumed: tuple[Slot, ...]
    unroutable: tuple[HeldPublish, ...] = ()


@runtime_checkable
class LocalStore(MessageStore, Protocol):
    """A store in the log's own database: one transaction contains the work of a branch and its decision.

    The caller that requested a change writes it, together with the branch. When it is durable, the caller tells the
    store. Only then does the store show, drop or give back messages. No method waits.
    """

    def restore(self, record: BranchRecord) -> None:
        """Hide and hold the messages of a branch that the log has. Called after open, before clients connect."""

    def defined_for(self, work: HeldWork) -> Awaitable[None] | None:
        """Wait until the log has the queues that *work* publishes to.

        Returns:
            ``None`` if it has them. Otherwise an awaitable, which raises LogError if they could not be written.
        """

    def plan(self, vhost: str, work: HeldWork) -> Plan:
        """The change that makes *work* durable. May be called again when the write has failed.

        Raises:
            XaError: 541, the log does not have a queue yet.
        """

    def committing(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """The changes of a commit in addition to the branch itself: consumed messages are removed."""

    def rolling_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """The changes of a roll-back: published messages are removed."""

    def committed(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """The commit is durable: show the published messages, and drop the consumed ones."""

    def dropped(self) -> None:
        """Count a message of a committed branch that no queue takes, and that does not return to its publisher."""

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """The roll-back is durable: return consumed messages to their places in their queues, drop published ones."""


class BrokerStore(MessageStore, Protocol):
    """A store outside the log's transactions: after a failure, a request may have happened or not."""

    def expect(self, branch_id: UUID, vhost: str, unit: Unit) -> None:
        """Keep the receipt of *unit* until :meth:`logged`: the log has the unit without an outcome."""

    def next_unit(self, vhost: str) -> Unit:
        """The unit number 0 that phase two of a branch would use now. It is logged with the decision."""

    def units_to_take(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        """For each holder in *work* the unit, from number 1 on, that will take its deliveries."""

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        """Take the consumed messages of *work*; *units* have been logged. Does not raise for a fault of the broker.

        Returns:
            The outcome by number of the unit.
        """

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        """The outcome of a unit that another process may have sent. Waits until it cannot happen any more."""

    async def note_taken(
        self, branch_id: UUID, vhost: str, taken: Sequence[WorkRow], unknown: Sequence[WorkRow]
    ) -> None:
        """Note consumed messages that resolved units have taken, or may have taken."""

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """Publish the messages of a branch. Waits for the broker as long as necessary."""

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """Put the consumed messages of a branch back into their queues. Waits as long as necessary."""

    def logged(self, vhost: str, unit: Unit) -> None:
        """The log has the outcome of *unit*: its receipt is not needed any more."""

    def ended(self, branch_id: UUID) -> None:
        """The log has the end of phase two of a branch: none of its messages is sent again."""

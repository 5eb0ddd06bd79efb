"""The message store as the manager sees it.

A store holds messages back for branches, and takes consumed ones out of reach before the vote. It makes the outcome of
a branch visible in phase two. Each method documents the failures that it must survive and the answers that it may give.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Protocol, runtime_checkable
from uuid import UUID

from dtx.log.changes import Change, Slot
from dtx.log.records import BranchRecord, Unit, WorkRow
from dtx.store.work import HeldPublish, HeldWork, Holder
from dtx.xa.value import value


class UnitOutcome(StrEnum):
    """The known outcome of a unit."""

    HAPPENED = "happened"
    NEVER = "never"
    UNKNOWN = "unknown"


class UnitProgress(StrEnum):
    """How far the logged work of a branch is: first the units that take what it consumed, then unit 0."""

    UNSENT = auto()
    """Nothing of it was sent."""
    SENT = auto()
    """It may have happened: it was sent, perhaps by a predecessor."""
    REFUSED = auto()
    """The broker refused it, so its receipt, if there is one, proves nothing; the log may not know that yet."""
    APPLIED = auto()
    """It has happened; the log may not know that yet."""
    ANSWERED = auto()
    """The end of the branch was answered; only the log may not have it yet."""


@dataclass(slots=True, kw_only=True)
class PhaseTwo:
    """A decided branch, on its way into (commit) or back to (rollback) the broker.

    Args:
        branch_id: the row's id; part of every ``x-dtx-id``.
        vhost: of the branch.
        unit: number 0 as the log has it.
        progress: of *unit*, UNSENT, SENT or REFUSED.
        size: bytes of all messages of the branch.
        work: reads the work of the branch, from memory or from the log.
        assign: makes a new unit durable before it is sent.
        repeated: whether messages may be where they belong already, and are sent again with the same ``x-dtx-id``. The
            store says so as soon as it knows, and whatever it ends in.
    """

    branch_id: UUID
    vhost: str
    unit: Unit
    progress: UnitProgress
    size: int
    work: Callable[[], Awaitable[Sequence[WorkRow]]]
    assign: Callable[[Unit], Awaitable[None]]
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
        proved: whether only its receipt says so. Then it is not known which messages were returned.
        returned: mandatory publishes that could not be routed.
    """

    proved: bool = False
    returned: tuple[Returned, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Phase two could not finish.

    Args:
        reason: the broker's words.
        settled: positions that are finished nevertheless and must not be done again.
        partial: whether part of it may have happened, so that trying again may repeat messages.
    """

    reason: str
    settled: tuple[int, ...] = ()
    partial: bool = False


class MessageStore(Protocol):
    """Where messages live."""

    async def open(self) -> None:
        """Reach the store far enough that branches can be restarted; does not wait for an absent broker."""

    async def close(self) -> None:
        """Release all resources."""


@value
class Plan:
    """The work of a branch, as the log's own database keeps it.

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
    """A store in the log's own database: the work of a branch is done in the transaction that decides it.

    The caller that asked for a change writes it, together with the branch. Once it is durable the caller tells the
    store. Only then does the store show, drop or give back messages. Nothing here waits.
    """

    def restore(self, record: BranchRecord) -> None:
        """Hide and hold the messages of a branch that the log has. Called after open, before clients come."""

    def defined_for(self, work: HeldWork) -> Awaitable[None] | None:
        """When the log has the queues that *work* publishes to: ``None`` where it has them already.

        Returns:
            Done then; a LogError when that fails.
        """

    def plan(self, vhost: str, work: HeldWork) -> Plan:
        """How the log would keep *work*. May be asked again when the write has failed."""

    def committing(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """The changes of a commit in addition to the branch itself: consumed messages leave."""

    def rolling_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """The changes of a roll-back: published messages leave."""

    def committed(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """It is durable: published messages are seen, consumed ones are gone."""

    def rolled_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> None:
        """It is durable: consumed messages return to their places in their queues, published ones are gone."""


class BrokerStore(MessageStore, Protocol):
    """A store that knows nothing of the log: what it is asked for may happen, or not, behind every failure."""

    def expect(self, vhost: str, unit: Unit) -> None:
        """The log has *unit* without an outcome: what proves it must not be cleared away before it is resolved."""

    def next_unit(self, vhost: str) -> Unit:
        """The unit number 0 that phase two of a branch would use now; it is logged with the decision."""

    def taking_units(self, vhost: str, work: HeldWork) -> dict[Holder, Unit]:
        """For each holder in *work* the unit, from number 1 on, that would take its deliveries."""

    async def take(self, branch_id: UUID, vhost: str, units: Sequence[Unit], work: HeldWork) -> dict[int, UnitOutcome]:
        """Take the consumed messages of *work*; *units* have been logged. Never raises for a broker's fault."""

    async def resolve(self, vhost: str, unit: Unit) -> UnitOutcome:
        """The outcome of a unit that another process may have sent; waits until it cannot happen any more."""

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """Publish the messages of a branch; waits for the broker as long as that takes."""

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """Put the consumed messages of a branch back into their queues; waits as long as that takes."""

    def logged(self, vhost: str, unit: Unit) -> None:
        """The log has the state that the receipt of *unit* proves: the receipt is not needed any more."""

"""The message store as the manager sees it.

A store holds messages back for branches, takes consumed ones out of reach before the vote, and makes the outcome of a
branch visible in phase two. What it must survive, and what it may answer, is said at each method.
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
    """What is known of a unit after the fact."""

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
        unit: number 0 as it stands in the log.
        progress: of *unit*, UNSENT, SENT or REFUSED.
        size: octets of all messages of the branch.
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
        proved: whether only its receipt says so: nobody knows what was returned then.
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
        """Let go of everything."""


@value
class Plan:
    """How the work of a branch stands in the log's own database.

    Args:
        change: puts the published messages, where nobody sees them yet.
        published: their slots, in the order of publishing.
        consumed: slots of the messages that the branch holds.
        unroutable: what no queue takes; its publishers hear of it when the branch commits (as with ``tx.commit``,
            AMQP 0-9-1, 1.9.2).
    """

    change: Change
    published: tuple[Slot, ...]
    consumed: tuple[Slot, ...]
    unroutable: tuple[HeldPublish, ...] = ()


@runtime_checkable
class LocalStore(MessageStore, Protocol):
    """A store in the log's own database: the work of a branch is done in the transaction that decides it.

    Changes are written by whoever asked for them, together with the branch. Once they are durable the store is told,
    and only then shows, drops or gives back messages. Nothing here waits.
    """

    def restore(self, record: BranchRecord) -> None:
        """A branch that the log has: its messages are hidden and held. Called after open, before clients come."""

    def defined_for(self, work: HeldWork) -> Awaitable[None] | None:
        """When the log has the queues that *work* publishes to: ``None`` where it has them already.

        Returns:
            Done then; a LogError when that fails.
        """

    def plan(self, vhost: str, work: HeldWork) -> Plan:
        """How the log would keep *work*. May be asked again when the write has failed."""

    def committing(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """What a commit changes beside the branch itself: consumed messages leave."""

    def rolling_back(self, published: Sequence[Slot], consumed: Sequence[Slot]) -> Change:
        """What a roll-back changes: published messages leave."""

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
        """What became of a unit that somebody else may have sent; waits until it cannot happen any more."""

    async def apply(self, phase: PhaseTwo) -> Applied | Refused:
        """Publish the messages of a branch; waits for the broker as long as that takes."""

    async def put_back(self, phase: PhaseTwo) -> Applied | Refused:
        """Put the consumed messages of a branch back into their queues; waits as long as that takes."""

    def logged(self, vhost: str, unit: Unit) -> None:
        """The log has the state that the receipt of *unit* proves: the receipt is not needed any more."""

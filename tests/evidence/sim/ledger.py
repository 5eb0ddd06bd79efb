"""The knowledge of the applications and the transaction manager of the simulation; dtx must agree with it.

The ledger survives all faults, like the log of a transaction manager.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dtx.xa.xid import Xid
from tests.evidence.sim.scheduler import Process

Decision = Literal["commit", "rollback"]


class Delivered(NamedTuple):
    """A delivery to a client."""

    tag: int
    body: bytes
    queue: bytes
    properties: bytes


@dataclass(slots=True, eq=False)
class Move:
    """An operator's order to redirect a message.

    Args:
        body: of the message.
        queue: its new queue.
        done: the order was answered as done.
    """

    body: bytes
    queue: bytes
    done: bool = False


@dataclass(slots=True, eq=False)
class Branch:
    """One branch.

    Args:
        xid: its name.
        owner: the process that works on it; after its death the transaction manager completes the branch.
        publishes: body and queue of each message.
        consumes: body and source queue of each message.
        prepared: the answer to prepare was xa-ok.
        decision: of the transaction manager; final. ``None`` for a one-phase commit without an answer.
        one_phase: a one-phase commit was requested: then dtx decides.
        answered: a commit or rollback was answered as done.
        finished: no further request is necessary.
    """

    xid: Xid
    owner: Process
    publishes: list[tuple[bytes, bytes]] = field(default_factory=list)
    consumes: list[tuple[bytes, bytes]] = field(default_factory=list)
    deliveries: list[Delivered] = field(default_factory=list)
    """The deliveries that it consumes."""
    prepared: bool = False
    decision: Decision | None = None
    one_phase: bool = False
    answered: bool = False
    finished: bool = False
    working: bool = True
    brief: bool = False
    """It has a timeout of one second."""
    ordered: list[str] = field(default_factory=list)
    """The orders of operators; each was carried out or not."""
    given_up: list[bytes] = field(default_factory=list)
    """Messages that operators have ordered to discard."""
    moves: list[Move] = field(default_factory=list)
    """Messages that operators have ordered to redirect."""
    requests: int = 0
    """Number of requests to commit or roll back it."""
    forgets: bool = False
    """Its transaction manager has requested forget for the heuristic outcome."""

    def consume(self, delivered: Delivered) -> None:
        """Record that the branch consumes a message."""
        self.consumes.append((delivered.body, delivered.queue))
        self.deliveries.append(delivered)

    @property
    def may_be_forgotten(self) -> bool:
        """Whether a transaction manager or an operator has requested forget."""
        return self.forgets or "forget" in self.ordered

    @property
    def is_abandoned(self) -> bool:
        """Whether its application has left it or is dead."""
        return not self.working or not self.owner.alive


@dataclass(slots=True)
class Ledger:
    """All branches, and all messages outside of them."""

    branches: dict[Xid, Branch] = field(default_factory=dict)
    seeds: dict[bytes, bytes] = field(default_factory=dict)
    """The initial messages: by body, the queue."""
    strays: set[bytes] = field(default_factory=set)
    """Messages published outside of any branch, whose arrival is not known."""
    settled: list[Delivered] = field(default_factory=list)
    """Deliveries outside of any branch that were settled for good: the broker certainly has the settlement."""
    perhaps_settled: list[Delivered] = field(default_factory=list)
    """As :attr:`settled`, but the broker may not have the settlement."""
    imitated: set[bytes] = field(default_factory=set)
    """Messages whose headers an application has used for another message: dtx may deliver all copies of these."""
    violations: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def wrong(self, text: str) -> None:
        """Record a violation."""
        self.violations.append(text)

    @property
    def unfinished(self) -> list[Branch]:
        """Branches that need further requests."""
        return [branch for branch in self.branches.values() if not branch.finished]

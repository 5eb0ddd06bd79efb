"""What the applications and the transaction manager of the simulation know: the truth that dtx has to agree with.

The ledger survives everything, as the log of a transaction manager does.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from dtx.xa.xid import Xid
from tests.evidence.sim.scheduler import Process

Decision = Literal["commit", "rollback"]


@dataclass(slots=True, eq=False)
class Move:
    """An operator's order to send a message elsewhere.

    Args:
        body: of the message.
        queue: where it goes instead.
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
        owner: the process that works on it; when that is dead the branch is the transaction manager's to finish.
        publishes: body and queue of each message.
        consumes: bodies, in the queues that they came from.
        prepared: the answer to prepare was xa-ok.
        decision: what the transaction manager has decided; for good. ``None`` for a one-phase commit without answer.
        one_phase: a one-phase commit was asked for: then dtx decides.
        answered: a commit or rollback was answered as done.
        finished: nobody asks any more.
        asked: whether anything was asked that could have put it into the log.
    """

    xid: Xid
    owner: Process
    publishes: list[tuple[bytes, bytes]] = field(default_factory=list)
    consumes: list[tuple[bytes, bytes]] = field(default_factory=list)
    prepared: bool = False
    decision: Decision | None = None
    one_phase: bool = False
    answered: bool = False
    finished: bool = False
    working: bool = True
    brief: bool = False
    """It has a timeout of a second."""
    ordered: list[str] = field(default_factory=list)
    """What operators have ordered; each of it was done, or not."""
    given_up: list[bytes] = field(default_factory=list)
    """Messages that operators have ordered to discard."""
    moves: list[Move] = field(default_factory=list)
    """Messages that operators have ordered to go elsewhere."""
    forgets: bool = False
    """Its transaction manager has asked to forget the heuristic outcome."""

    @property
    def may_be_forgotten(self) -> bool:
        """Whether somebody has asked for that."""
        return self.forgets or "forget" in self.ordered

    @property
    def is_abandoned(self) -> bool:
        """Whether its application is through with it, or dead."""
        return not self.working or not self.owner.alive


@dataclass(slots=True)
class Ledger:
    """All branches, and all messages that were there before."""

    branches: dict[Xid, Branch] = field(default_factory=dict)
    seeds: dict[bytes, bytes] = field(default_factory=dict)
    """By body, the queue."""
    strays: set[bytes] = field(default_factory=set)
    """Messages published outside of any branch, by somebody who cannot know whether they arrived."""
    violations: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def wrong(self, text: str) -> None:
        """Something has happened that must never happen."""
        self.violations.append(text)

    @property
    def unfinished(self) -> list[Branch]:
        """Branches that somebody has still to ask about."""
        return [branch for branch in self.branches.values() if not branch.finished]

"""A shell around one branch. The broker and the log are sets in memory, and every effect can fail."""

from collections import Counter
from dataclasses import dataclass, field

from dtx.xa.branch import Branch, step
from dtx.xa.codes import XaError
from dtx.xa.model import (
    Answer,
    Apply,
    Complete,
    Effect,
    Ending,
    Event,
    Happened,
    Note,
    Operation,
    Persist,
    PutBack,
    Refuse,
    Release,
    Request,
    State,
    Take,
    Vote,
)
from tests.unit.xa.reference import BAD_LUCK
from tests.unit.xa.support import XID

RESUMED = {
    State.TAKING: Operation.PREPARE,
    State.TAKING_ONE_PHASE: Operation.ONE_PHASE,
    State.COMMITTING: Operation.COMMIT,
    State.ROLLING_BACK: Operation.ROLLBACK,
}
"""The operation that a restart requests, for each state that continues on its own."""


class CrashError(Exception):
    """The process died between two effects."""


class WriteFailedError(Exception):
    """The log did not accept a write."""


@dataclass
class Row:
    """The branch in the log, and what really happened to its messages at the broker."""

    state: State
    publishes: set[str]
    consumes: set[str]
    taken: set[str] = field(default_factory=set)
    applied: bool = False
    trusted: bool = True


@dataclass
class Rig:
    """Everything around the core.

    Args:
        ready: copies of messages that the broker would deliver.
        held: delivered to the branch, not acknowledged yet. unsent: published in the branch, in memory.
        gone: consumed for good. dropped: published, then discarded. repeated: there may be several copies.
        answers: the peer's answers. luck: see the reference.
        fail_write: number of the next write that fails, 0 for none. crash_after: effects until the crash, or ``None``.
    """

    branch: Branch = field(default_factory=lambda: Branch(xid=XID, owner="alice"))
    ready: Counter[str] = field(default_factory=Counter)
    held: set[str] = field(default_factory=set)
    unsent: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    row: Row | None = None
    answers: list[str] = field(default_factory=list)
    luck: str = "well"
    fail_write: int = 0
    crash_after: int | None = None
    writes: int = 0

    @property
    def vote(self) -> Vote:
        if self.row is not None:
            return Vote.of(len(self.row.publishes), len(self.row.consumes))
        return Vote.of(len(self.unsent), len(self.held))

    @property
    def done(self) -> bool:
        """Whether the log has a branch whose messages are published."""
        return self.row is not None and self.row.applied

    def run(self, event: Event, now: float) -> str:
        """Step, and run the effects until none is left.

        Returns:
            The answer, empty when there was none.

        Raises:
            CrashError: the process has died (see :meth:`restart`).
        """
        self.answers, self.writes = [], 0
        following: Event | None = event
        try:
            while following is not None:
                branch, effects = step(self.branch, following, now)
                following = None
                for effect in effects:
                    if self.crash_after is not None:
                        if self.crash_after == 0:
                            raise CrashError
                        self.crash_after -= 1
                    following = self._do(effect)
                    if isinstance(effect, Persist):
                        self.branch = branch
                self.branch = branch
        except (XaError, WriteFailedError) as error:
            self.answers.append(str(error.code.value) if isinstance(error, XaError) else "541")
        assert len(self.answers) <= 2
        return self.answers[0] if self.answers else ""

    def restart(self, *, trusted: bool) -> None:
        """Continue with the content of the log. Everything in memory is lost."""
        self.crash_after, self.fail_write, self.luck = None, 0, "well"
        self.ready.update(self.held)
        self.dropped |= self.unsent
        self.held, self.unsent = set(), set()
        self.branch = Branch(xid=XID, owner="alice", state=State.UNKNOWN if self.row is None else self.row.state)
        if self.row is not None and self.branch.state in RESUMED:
            self.row.trusted = trusted
            self.run(Request(operation=RESUMED[self.branch.state], vote=self.vote), 0)

    def copies(self, message: str) -> int:
        """The number of copies of *message*, in all places."""
        logged = 0
        if self.row is not None:
            logged += message in self.row.taken
            logged += message in self.row.publishes and not self.row.applied
        places = (self.held, self.unsent, self.gone, self.dropped)
        return self.ready[message] + logged + sum(message in place for place in places)

    def _do(self, effect: Effect) -> Event | None:
        match effect:
            case Persist() | Complete() | Note():
                self._write(effect)
            case Answer(flag=flag):
                self.answers.append(flag.wire_name)
            case Refuse(code=code):
                self.answers.append(str(code.value))
            case Release():
                self.ready.update(self.held)
                self.dropped |= self.unsent
                self.held, self.unsent = set(), set()
            case Take():
                return self._take()
            case Apply():
                return self._apply()
            case PutBack():
                return self._put_back()
            case _:
                pass  # notes for operators, and the tombstone
        return None

    def _write(self, effect: Persist | Complete | Note) -> None:
        self.writes += 1
        if self.writes == self.fail_write:
            raise WriteFailedError
        match effect:
            case Persist(state=state):
                if self.row is None:
                    self.row = Row(state, self.unsent, set(self.held))
                    self.unsent = set()
                self.row.state = state
            case Complete(ending=ending):
                assert self.row is not None
                if ending is Ending.COMMITTED:
                    assert self.row.applied or not self.row.publishes, "committed but not published"
                    assert self.row.taken == self.row.consumes, "committed but not consumed"
                    self.gone |= self.row.taken
                else:
                    assert not self.row.taken, "rolled back but not put back"
                    assert not self.row.applied
                    self.dropped |= self.row.publishes
                self.row = None
            case Note():
                pass

    def _take(self) -> Event | None:
        row = self.row
        assert row is not None
        if not row.trusted:
            # It is unknown what was taken. All of it is put back, which may repeat messages.
            self.repeated |= row.consumes
            row.taken = set(row.consumes)
            return Happened(operation=Operation.TAKEN_IN_PART, vote=self.vote)
        if self.luck == "partly":
            self._acknowledge(set(sorted(self.held)[::2]))
        elif self.luck != "not":
            self._acknowledge(set(self.held))
        if self.luck == "silence":
            self.answers.append("541")
            return None
        operation = Operation.TAKEN_IN_PART
        if not row.taken:
            operation = Operation.NOT_TAKEN
        elif row.taken == row.consumes and self.luck != "partly":
            operation = Operation.TAKEN
        return Happened(operation=operation, vote=self.vote)

    def _acknowledge(self, messages: set[str]) -> None:
        assert self.row is not None
        self.held -= messages
        self.row.taken |= messages

    def _apply(self) -> Event:
        assert self.row is not None
        if self.luck in BAD_LUCK:
            return Happened(operation=Operation.STUCK, vote=self.vote, reason="no exchange 'x'")
        if not self.row.applied:
            self.ready.update(self.row.publishes)
            self.row.applied = True
        return Happened(operation=Operation.APPLIED, vote=self.vote)

    def _put_back(self) -> Event:
        assert self.row is not None
        if self.luck in BAD_LUCK:
            return Happened(operation=Operation.STUCK, vote=self.vote, reason="no queue 'q'")
        self.ready.update(self.row.taken)
        self.row.taken = set()
        return Happened(operation=Operation.PUT_BACK, vote=self.vote)

"""The core in a small shell, compared with the reference: any order of calls, channels, failures and crashes."""

from collections import Counter
from copy import deepcopy
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dtx.xa.branch import Branch, is_legal
from dtx.xa.model import (
    Association,
    ChannelLost,
    Demarcation,
    Event,
    Happened,
    Operation,
    Request,
    SetTimeout,
    State,
)
from tests.unit.xa.reference import Reference
from tests.unit.xa.rig import CrashError, Rig
from tests.unit.xa.support import COORDINATIONS, XID

CHANNELS: Final = st.integers(1, 3)
LUCK: Final = st.sampled_from(["well"] * 4 + ["not", "partly", "silence", "stuck"])
FAILS: Final = st.sampled_from([0] * 6 + [1, 2, 3])
"""The write of the log that fails; in most cases none."""
CRASHES: Final = st.sampled_from([None] * 8 + [0, 1, 2, 3, 4, 5])
"""The number of effects before the process dies; in most cases it does not."""
STAGES: Final = {
    State.TAKING: "taking",
    State.TAKING_ONE_PHASE: "taking",
    State.PREPARED: "ready",
    State.COMMITTING: "going",
    State.ROLLING_BACK: "undoing",
}
CALLS: Final = {
    "start": Operation.START,
    "join": Operation.JOIN,
    "resume": Operation.RESUME,
    "end": Operation.END,
    "fail": Operation.FAIL,
    "suspend": Operation.SUSPEND,
}


class OneXid(RuleBasedStateMachine):
    """Three channels and a transaction manager that use one xid."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(ready=Counter({f"first {number}": 1 for number in range(6)}))
        self.reference = Reference(visible=set(self.rig.ready))
        self.messages = sorted(self.rig.ready)
        self.now = 0.0
        self.promised = False

    # -- channels

    @precondition(lambda self: self.reference.stage == "nobody")
    @rule(
        channel=CHANNELS,
        timeout=st.sampled_from([0, 10, 60]),
        publishes=st.integers(0, 2),
        consumes=st.integers(0, 3),
        ends=st.sampled_from([True, True, False]),
    )
    def work(self, channel: int, timeout: int, publishes: int, consumes: int, ends: bool) -> None:
        """The usual beginning. The rules below make all other orders of these calls."""
        self._call("start", channel, timeout)
        for _ in range(publishes):
            self._publish()
        for _ in range(consumes):
            self._consume()
        if ends:
            self._call("end", channel)

    @precondition(lambda self: self.reference.stage == "open")
    @rule(call=st.sampled_from(["join", "resume", "end", "end", "fail", "suspend"]), channel=CHANNELS)
    def call(self, call: str, channel: int) -> None:
        self._call(call, channel)

    @precondition(lambda self: self.reference.on)
    @rule(publishes=st.integers(0, 1), consumes=st.integers(0, 1))
    def work_more(self, publishes: int, consumes: int) -> None:
        if publishes:
            self._publish()
        if consumes:
            self._consume()

    # -- the transaction manager

    @precondition(lambda self: self.reference.stage != "nobody" and not self.reference.on | self.reference.parked)
    @rule(
        operation=st.sampled_from([Operation.PREPARE, Operation.ONE_PHASE, Operation.COMMIT, Operation.ROLLBACK]),
        luck=LUCK,
        fail=FAILS,
        crash=CRASHES,
        trusted=st.booleans(),
    )
    def complete(self, operation: Operation, luck: str, fail: int, crash: int | None, trusted: bool) -> None:
        if operation in (Operation.COMMIT, Operation.ROLLBACK):
            self.promised = False
        answer = self._request(operation, luck, fail, crash, trusted)
        if operation is Operation.PREPARE and answer == "xa-ok":
            self.promised = True

    @rule(what=st.sampled_from([*sorted(CALLS), *sorted(COORDINATIONS), "set-timeout"]), number=CHANNELS)
    def ask_anything(self, what: str, number: int) -> None:
        """Most of these calls are out of order."""
        if what in CALLS:
            self._call(what, number)
        elif what == "set-timeout":
            seconds = 10 * (number - 1)
            expected = self.reference.set_timeout(seconds, self.now)
            assert self._ask(SetTimeout(seconds=seconds)) == expected
        elif what == Operation.FORGET:
            assert self._ask(Request(operation=Operation.FORGET, vote=self.rig.vote)) == self.reference.forget()
        else:
            self.complete(Operation(what), "well", 0, None, trusted=True)

    # -- other events

    @precondition(lambda self: self.reference.deadline is not None)
    @rule(seconds=st.sampled_from([1, 5, 30]), fail=st.booleans())
    def time_passes(self, seconds: int, fail: bool) -> None:
        self.now += seconds
        deadline = self.rig.branch.deadline
        if deadline is not None and self.now >= deadline:
            self.rig.fail_write = int(fail)
            answer = self._ask(Happened(operation=Operation.TIMEOUT, vote=self.rig.vote))
            self.rig.fail_write = 0
            if answer == "541":
                return  # the timer fires again
        self.reference.time_passes(self.now)

    @precondition(lambda self: self.reference.stage == "open")
    @rule(what=st.sampled_from(["lost", "lost", "doom", "expire"]), channel=CHANNELS)
    def trouble(self, what: str, channel: int) -> None:
        match what:
            case "lost":
                self.reference.lose_channel(channel)
                self._ask(ChannelLost(channel=channel))
            case "doom":
                self.reference.make_rollback_only()
                assert self._ask(Happened(operation=Operation.DOOM)) == ""
            case _:
                self.reference.expire()
                if is_legal(self.rig.branch, Operation.EXPIRE):
                    self._ask(Happened(operation=Operation.EXPIRE))

    @precondition(lambda self: self.reference.stage != "nobody")
    @rule(trusted=st.booleans(), crash=st.sampled_from([True, False, False, False]))
    def crash(self, trusted: bool, crash: bool) -> None:
        if crash:
            self._restart(trusted)

    # -- invariants

    @invariant()
    def no_message_is_lost_and_none_is_repeated_without_need(self) -> None:
        for message in self.messages:
            copies = self.rig.copies(message)
            assert copies == 1 or (copies > 1 and message in self.rig.repeated), (message, copies)

    @invariant()
    def a_promise_is_kept(self) -> None:
        """Rule obligation1: "may be either committed or rolled back regardless of failures"."""
        if self.promised:
            assert self.rig.row is not None
            assert self.rig.row.state is State.PREPARED

    @invariant()
    def the_log_has_what_the_branch_says(self) -> None:
        logged = self.rig.branch.state in STAGES
        assert (self.rig.row is not None) == logged
        if self.rig.row is not None:
            assert self.rig.row.state is self.rig.branch.state

    @invariant()
    def the_branch_is_where_the_reference_says(self) -> None:
        branch, reference = self.rig.branch, self.reference
        assert branch.state is self._expected_state()
        on = {channel for channel, how in branch.associations.items() if how is Association.ASSOCIATED}
        parked = {channel for channel, how in branch.associations.items() if how is Association.SUSPENDED}
        assert (on, parked) == (reference.on, reference.parked)
        if branch.state is not State.UNKNOWN:
            assert (branch.timeout, branch.deadline) == (reference.timeout, reference.deadline)

    @invariant()
    def the_messages_are_where_the_reference_says(self) -> None:
        assert self.rig.gone == self.reference.finished
        half_way = self.reference.stage == "undoing" or self.rig.done
        if not half_way:
            assert set(+self.rig.ready) == self.reference.visible

    # -- helpers

    def _call(self, call: str, channel: int, timeout: int = 60) -> None:
        reference = self.reference
        if call == "start" and reference.stage == "nobody":
            self.rig.branch = Branch(xid=XID, owner="alice", timeout=timeout)
        match call:
            case "start":
                expected = reference.start(channel, timeout, self.now)
            case "join":
                expected = reference.join(channel)
            case "resume":
                expected = reference.resume(channel)
            case _:
                expected = reference.end(channel, call)
        assert self._ask(Demarcation(operation=CALLS[call], channel=channel)) == expected

    def _publish(self) -> None:
        message = f"message {len(self.messages)}"
        self.messages.append(message)
        self.rig.unsent.add(message)
        self.reference.published.add(message)

    def _consume(self) -> None:
        ready = sorted(+self.rig.ready)
        if not ready:
            return
        message = ready[0]
        if message in self.rig.repeated:
            self.rig.ready[message] = 0  # the copies are equal and are removed together
            self.rig.repeated.discard(message)
        else:
            self.rig.ready[message] -= 1
        self.rig.held.add(message)
        self.reference.visible.discard(message)
        self.reference.consumed.add(message)

    def _expected_state(self) -> State:
        reference = self.reference
        match reference.stage:
            case "nobody":
                return State.UNKNOWN
            case "open" if reference.doom == "xa-rbtimeout":
                return State.TIMED_OUT
            case "open" if reference.doom:
                return State.ROLLBACK_ONLY
            case "open":
                return State.ACTIVE if reference.on | reference.parked else State.IDLE
            case "taking":
                return State.TAKING_ONE_PHASE if reference.one_phase else State.TAKING
            case stage:
                return next(state for state, name in STAGES.items() if name == stage)

    def _ask(self, event: Event) -> str:
        return self.rig.run(event, self.now)

    def _request(self, operation: Operation, luck: str, fail: int, crash: int | None, trusted: bool) -> str:
        rig = self.rig
        if rig.row is not None and rig.row.taken and luck in ("not", "partly"):
            luck = "well"  # the first attempt took it, and the broker is asked
        rig.luck, rig.fail_write, rig.crash_after = luck, fail, crash
        before = deepcopy(self.reference)
        expected = self._expect(self.reference, operation, luck)
        try:
            answer = self._ask(Request(operation=operation, vote=rig.vote))
        except CrashError:
            # After xa-ok, only the removal of a committed branch from the log may be missing.
            assert "xa-ok" not in rig.answers or (rig.branch.state is State.COMMITTING and rig.done)
            self._restart(trusted)
            return ""
        rig.crash_after = None
        failed_at = rig.writes if fail and rig.writes == fail else 0
        rig.luck, rig.fail_write = "well", 0
        if failed_at and rig.done:
            self.reference = before
            assert self._expect(before, operation, "stuck") == "541"
            assert answer == "xa-ok", "it is committed, but still in the log"
        elif failed_at == 1:
            self.reference = before
            assert answer == "541"
        elif failed_at:
            self.reference = before
            assert answer == self._expect(before, operation, self._luck_of_a_later_write(operation))
        else:
            assert answer == expected
        return answer

    def _luck_of_a_later_write(self, operation: Operation) -> str:
        """The result of a failed write after an earlier successful write of the same operation."""
        match self.rig.branch.state:
            case State.TAKING | State.TAKING_ONE_PHASE:
                return "silence"
            case State.ROLLING_BACK if operation is not Operation.ROLLBACK:
                return "partly, then stuck"
            case _:
                return "stuck"

    @staticmethod
    def _expect(reference: Reference, operation: Operation, luck: str) -> str:
        match operation:
            case Operation.PREPARE:
                return reference.prepare(luck)
            case Operation.ONE_PHASE:
                return reference.one_phase_commit(luck)
            case Operation.COMMIT:
                return reference.commit(luck)
            case _:
                return reference.rollback(luck)

    def _restart(self, trusted: bool) -> None:
        """Set the reference to the state in the log. The invariants check the messages."""
        rig = self.rig
        rig.restart(trusted=trusted)
        reference = Reference(visible=set(+rig.ready), finished=set(rig.gone))
        if rig.row is not None:
            reference.stage = STAGES[rig.row.state]
            reference.one_phase = rig.row.state is State.TAKING_ONE_PHASE
            reference.published, reference.consumed = set(rig.row.publishes), set(rig.row.consumes)
        self.reference = reference


OneXid.TestCase.settings = settings(max_examples=500, stateful_step_count=50, deadline=None)
TestOneXid = OneXid.TestCase

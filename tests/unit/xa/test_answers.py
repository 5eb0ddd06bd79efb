"""The answer to every call in every state, as the protocol's texts define it."""

from itertools import product
from typing import Final

import pytest

from dtx.xa.codes import Heuristic
from dtx.xa.model import Association, ChannelId, Operation, State, Vote
from tests.unit.xa.support import HERE, THERE, answer_to, branch_in, event_of

# One column for each state.
# ok, rdonly, rb, rbtime: flags; h: the recorded heuristic outcome; "-": no such branch exists.
STATES: Final = """
  unknown active idle rollback-only timed-out taking taking-one-phase prepared committing rolling-back heuristic
"""

# call           association of this channel
DEMARCATION: Final = """
start            none            ok   530  530  530 530    530 530 530 530 530 530
start            associated      -    530  -    530 530    -   -   -   -   -   -
start            suspended       -    530  -    530 530    -   -   -   -   -   -
join             none            404  ok   ok   rb  rb     503 503 503 503 503 503
join             associated      -    503  -    503 503    -   -   -   -   -   -
join             suspended       -    503  -    503 503    -   -   -   -   -   -
resume           none            404  503  503  503 503    503 503 503 503 503 503
resume           associated      -    503  -    503 503    -   -   -   -   -   -
resume           suspended       -    ok   -    rb  rb     -   -   -   -   -   -
end              none            404  503  503  503 503    503 503 503 503 503 503
end              associated      -    ok   -    rb  rbtime -   -   -   -   -   -
end              suspended       -    ok   -    rb  rbtime -   -   -   -   -   -
end-fail         none            404  503  503  503 503    503 503 503 503 503 503
end-fail         associated      -    rb   -    rb  rbtime -   -   -   -   -   -
end-fail         suspended       -    rb   -    rb  rbtime -   -   -   -   -   -
end-suspend      none            404  503  503  503 503    503 503 503 503 503 503
end-suspend      associated      -    ok   -    rb  rbtime -   -   -   -   -   -
end-suspend      suspended       -    503  -    503 503    -   -   -   -   -   -
"""

# call           the branch holds
COORDINATION: Final = """
prepare          nothing         404  -    rdonly rb rbtime -  -   503 -   -   503
prepare          published       404  -    ok   rb  rbtime  -   -   503 503 503 503
prepare          consumed        404  -    ok   rb  rbtime  ok  503 503 503 503 503
prepare          both            404  -    ok   rb  rbtime  ok  503 503 503 503 503
commit           nothing         404  -    503  503 503     -   -   ok  -   -   h
commit           published       404  -    503  503 503     -   -   ok  ok  503 h
commit           consumed        404  -    503  503 503     503 503 ok  ok  503 h
commit           both            404  -    503  503 503     503 503 ok  ok  503 h
commit-one-phase nothing         404  -    ok   rb  rbtime  -   -   503 -   -   h
commit-one-phase published       404  -    ok   rb  rbtime  -   -   503 ok  503 h
commit-one-phase consumed        404  -    ok   rb  rbtime  503 ok  503 ok  503 h
commit-one-phase both            404  -    ok   rb  rbtime  503 ok  503 ok  503 h
rollback         nothing         404  -    ok   ok  rbtime  -   -   ok  -   -   h
rollback         published       404  -    ok   ok  rbtime  -   -   ok  503 ok  h
rollback         consumed        404  -    ok   ok  rbtime  ok  ok  ok  503 ok  h
rollback         both            404  -    ok   ok  rbtime  ok  ok  ok  503 ok  h
forget           nothing         404  -    503  503 503     -   -   503 -   -   ok
forget           published       404  -    503  503 503     -   -   503 503 503 ok
forget           consumed        404  -    503  503 503     503 503 503 503 503 ok
forget           both            404  -    503  503 503     503 503 503 503 503 ok
get-timeout      both            404  -    ok   ok  ok      ok  ok  ok  ok  ok  ok
set-timeout      both            404  -    ok   ok  ok      ok  ok  ok  ok  ok  ok
"""

# A prepare or one-phase commit in a state that takes consumed messages, when not all of them could be taken.
NOT_TAKEN: Final = """
prepare          consumed        -    -    rb   -   -       rb  -   -   -   -   -
prepare          both            -    -    rb   -   -       rb  -   -   -   -   -
commit-one-phase consumed        -    -    rb   -   -       -   rb  -   -   -   -
commit-one-phase both            -    -    rb   -   -       -   rb  -   -   -   -
"""

WORDS: Final = {"ok": "xa-ok", "rdonly": "xa-rdonly", "rb": "xa-rbrollback", "rbtime": "xa-rbtimeout"}
OPEN: Final = (State.ACTIVE, State.ROLLBACK_ONLY, State.TIMED_OUT)
"""The states in which a channel can be associated or suspended."""
COMPLETIONS: Final = (
    Operation.PREPARE,
    Operation.COMMIT,
    Operation.ONE_PHASE,
    Operation.ROLLBACK,
    Operation.FORGET,
)


def _cells(table: str) -> list[tuple[Operation, str, State, str]]:
    states = [State(name) for name in STATES.split()]
    found = []
    for line in filter(str.strip, table.splitlines()):
        operation, how, *answers = line.split()
        assert len(answers) == len(states), line
        found += [
            (Operation(operation), how, state, WORDS.get(answer, answer))
            for state, answer in zip(states, answers, strict=True)
            if answer != "-"
        ]
    return found


@pytest.mark.parametrize(("operation", "here", "state", "expected"), _cells(DEMARCATION))
def test_demarcation_is_answered_as_specified(operation: Operation, here: str, state: State, expected: str) -> None:
    for there in Association if state in OPEN else (Association.NONE,):
        associations: dict[ChannelId, Association] = {HERE: Association(here), THERE: there}
        kept = {channel: how for channel, how in associations.items() if how is not Association.NONE}
        _, answer = answer_to(branch_in(state, kept), event_of(operation))
        assert answer == expected, there


@pytest.mark.parametrize(("operation", "vote", "state", "expected"), _cells(COORDINATION))
def test_coordination_is_answered_as_specified(operation: Operation, vote: str, state: State, expected: str) -> None:
    before = branch_in(state, outcome=Heuristic.MIXED if state is State.HEURISTIC else None)
    _, answer = answer_to(before, event_of(operation, Vote(vote)))
    assert answer == ("xa-heurmix" if expected == "h" else expected)


@pytest.mark.parametrize("taken", [Operation.NOT_TAKEN, Operation.TAKEN_IN_PART])
@pytest.mark.parametrize(("operation", "vote", "state", "expected"), _cells(NOT_TAKEN))
def test_messages_that_cannot_be_taken_roll_the_branch_back(
    operation: Operation, vote: str, state: State, expected: str, taken: Operation
) -> None:
    """Prepare: "The broker marked the transaction branch rollback-only for an unspecified reason"."""
    after, answer = answer_to(branch_in(state), event_of(operation, Vote(vote)), taken)
    assert answer == expected
    assert after.state is (State.UNKNOWN if taken is Operation.NOT_TAKEN else State.ROLLING_BACK)


@pytest.mark.parametrize("state", OPEN)
@pytest.mark.parametrize("operation", COMPLETIONS)
def test_completion_of_an_associated_branch_is_refused(operation: Operation, state: State) -> None:
    """Rule notdisassociated: "still associated with a channel … 503 (command invalid)"."""
    for how, vote in product((Association.ASSOCIATED, Association.SUSPENDED), Vote):
        before = branch_in(state, {THERE: how})
        assert answer_to(before, event_of(operation, vote)) == (before, "503")


@pytest.mark.parametrize("state", OPEN)
@pytest.mark.parametrize("operation", [Operation.GET_TIMEOUT, Operation.SET_TIMEOUT])
def test_timeouts_can_be_read_and_set_while_associated(operation: Operation, state: State) -> None:
    before = branch_in(state, {THERE: Association.ASSOCIATED})
    assert answer_to(before, event_of(operation))[1] == "xa-ok"


@pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK])
@pytest.mark.parametrize(
    ("outcome", "flag"),
    [
        (Heuristic.COMMITTED, "xa-heurcom"),
        (Heuristic.ROLLED_BACK, "xa-heurrb"),
        (Heuristic.MIXED, "xa-heurmix"),
        (Heuristic.HAZARD, "xa-heurhaz"),
        (None, "xa-heurhaz"),
    ],
)
def test_a_heuristic_outcome_is_reported_on_every_call(
    operation: Operation, outcome: Heuristic | None, flag: str
) -> None:
    """Forget: "called to forget about a heuristically completed transaction branch"; no other call does it."""
    before = branch_in(State.HEURISTIC, outcome=outcome)
    after, first = answer_to(before, event_of(operation, Vote.BOTH))
    again, second = answer_to(after, event_of(operation, Vote.BOTH))
    assert (first, second) == (flag, flag)
    assert again == before

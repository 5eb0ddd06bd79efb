"""The transition table, compared with a second one that was derived from the protocol's rules, not from the code."""

from itertools import product
from pathlib import Path
from typing import Final

import pytest

from dtx.xa.branch import is_legal, step
from dtx.xa.codes import Heuristic, XaError
from dtx.xa.model import (
    DECISIONS,
    Association,
    ChannelId,
    Operation,
    State,
    Vote,
)
from dtx.xa.table import ASSOCIATIONS, DOOMED, IN_DOUBT, LOGGED, TIMED, TRANSITIONS, WITH_OUTCOME
from tests.unit.xa.support import DEMARCATIONS, HERE, THERE, branch_in, event_of, words

VOTES: Final = {
    "any": tuple(Vote),
    "joined": (Vote.ASSOCIATED,),
    "free": (Vote.NOTHING, Vote.PUBLISHED, Vote.CONSUMED, Vote.BOTH, Vote.LOCAL),
    "broker": (Vote.NOTHING, Vote.PUBLISHED, Vote.CONSUMED, Vote.BOTH),
    "local": (Vote.LOCAL,),
    "nothing": (Vote.NOTHING,),
    "published": (Vote.PUBLISHED,),
    "consumed": (Vote.CONSUMED,),
    "+published": (Vote.PUBLISHED, Vote.BOTH),
    "+consumed": (Vote.CONSUMED, Vote.BOTH),
    "-published": (Vote.NOTHING, Vote.CONSUMED),
    "-consumed": (Vote.NOTHING, Vote.PUBLISHED),
}
"""``joined``: a channel is associated or suspended; ``free``: none is. The others name what a free branch holds:
``local`` if it is in the log's own database, ``broker`` if not."""

EXPECTED: Final = Path(__file__).with_name("rows.txt")

Key = tuple[State, Operation, Vote]


def _read(text: str) -> dict[Key, tuple[State, str]]:
    rows: dict[Key, tuple[State, str]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        state, operation, votes, to, effects = (cell.strip() for cell in line.split("|"))
        for vote in VOTES[votes]:
            key = State(state), Operation(operation), vote
            assert key not in rows, f"{key} occurs twice"
            rows[key] = State(to), effects
    return rows


ROWS: Final = _read(EXPECTED.read_text(encoding="utf-8"))


def _expected_code(state: State, operation: Operation) -> int:
    if state is State.UNKNOWN:
        return 404
    return 530 if operation is Operation.START else 503


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("state", State)
def test_every_combination_is_in_the_table_or_refused(state: State, operation: Operation) -> None:
    for vote in Vote:
        rule = TRANSITIONS.get((state, operation, vote))
        said = None if rule is None else (rule.to, words(rule.effects))
        assert said == ROWS.get((state, operation, vote)), vote


def test_no_row_exists_for_an_impossible_combination() -> None:
    assert len(ROWS) == len(TRANSITIONS)


def _associations_before(operation: Operation, vote: Vote) -> dict[ChannelId, Association]:
    others: dict[ChannelId, Association] = {THERE: Association.SUSPENDED} if vote is Vote.ASSOCIATED else {}
    match operation:
        case Operation.START | Operation.JOIN:
            return others
        case Operation.RESUME:
            return {HERE: Association.SUSPENDED, **others}
        case Operation.END | Operation.FAIL | Operation.SUSPEND | Operation.CHANNEL_LOST:
            return {HERE: Association.ASSOCIATED, **others}
        case _:
            return others


def _reachable(key: Key) -> bool:
    """Whether the step can see this vote. A channel that has just been associated counts as associated."""
    state, operation, vote = key
    ties = {Operation.START, Operation.JOIN, Operation.RESUME, Operation.SUSPEND}
    if operation in ties and state not in DOOMED:
        return vote is Vote.ASSOCIATED
    if operation in DEMARCATIONS | {Operation.CHANNEL_LOST, Operation.SET_TIMEOUT}:
        return vote in (Vote.ASSOCIATED, Vote.NOTHING)
    return True


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("state", State)
def test_a_step_follows_its_row_or_does_nothing(state: State, operation: Operation) -> None:
    """Rule commandInvalid: "in an improper context (see class grammar) … reply code 503"."""
    for vote in Vote:
        key = state, operation, vote
        if not _reachable(key):
            continue
        # The answer of a branch with a heuristic outcome is the outcome, which the step fills in.
        before = branch_in(state, _associations_before(operation, vote), outcome=Heuristic.COMMITTED)
        flag = "xa-heurmix" if operation in DECISIONS else "xa-heurcom"
        event = event_of(operation, vote)
        if key not in ROWS:
            with pytest.raises(XaError) as caught:
                step(before, event, 0)
            assert caught.value.code == _expected_code(state, operation), vote
            continue
        after, effects = step(before, event, 0)
        to, said = ROWS[key]
        assert after.state is to, vote
        if operation is Operation.STUCK:
            continue  # filled in by the step, see the tests of the branch
        if to is State.HEURISTIC and "answer" not in said:
            said = f"{said}, answer {flag}" if said else f"answer {flag}"
        assert words(effects) == said, vote


@pytest.mark.parametrize("state", State)
def test_is_legal_reports_whether_a_row_exists(state: State) -> None:
    for operation, vote in product(sorted(set(Operation) - DEMARCATIONS), Vote):
        branch = branch_in(state, _associations_before(Operation.JOIN, vote))
        assert is_legal(branch, operation, vote) == ((state, operation, vote) in ROWS), (operation, vote)


def test_the_sets_of_states_are_those_of_the_design() -> None:
    assert {*LOGGED} == {
        State.TAKING,
        State.TAKING_ONE_PHASE,
        State.PREPARED,
        State.COMMITTING,
        State.ROLLING_BACK,
        State.HEURISTIC_COMMITTING,
        State.HEURISTIC_ROLLING_BACK,
        State.HEURISTIC,
    }
    assert {*WITH_OUTCOME} == {State.HEURISTIC_COMMITTING, State.HEURISTIC_ROLLING_BACK, State.HEURISTIC}
    assert {*IN_DOUBT} == {*LOGGED} - {State.TAKING, State.TAKING_ONE_PHASE}
    assert {*TIMED} == {State.ACTIVE, State.IDLE}
    assert {*DOOMED} == {State.ROLLBACK_ONLY, State.TIMED_OUT}


def test_the_association_table_is_that_of_x_open() -> None:
    """X/Open XA table 6-2: T0 not associated, T1 associated, T2 association suspended."""
    none, associated, suspended = Association
    expected = {
        (none, Operation.START): associated,
        (none, Operation.JOIN): associated,
        (suspended, Operation.RESUME): associated,
        (associated, Operation.END): none,
        (suspended, Operation.END): none,
        (associated, Operation.FAIL): none,
        (suspended, Operation.FAIL): none,
        (associated, Operation.SUSPEND): suspended,
    }
    assert expected == ASSOCIATIONS

"""Rules for every row of the transition table: the order of effects is the durability contract."""

from itertools import product
from typing import Final

import pytest

from dtx.xa.codes import XaFlag
from dtx.xa.model import (
    REQUESTS,
    Answer,
    Apply,
    Complete,
    Effect,
    Ending,
    Note,
    Operation,
    Persist,
    PutBack,
    Release,
    Remember,
    State,
    Take,
    Vote,
)
from dtx.xa.table import DOOMED, LOGGED, TRANSITIONS, WITH_OUTCOME
from tests.unit.xa.support import COORDINATIONS

RULES: Final = sorted(TRANSITIONS.items())
DURABLE: Final = (Persist, Complete, Note)
SLOW: Final = (Take, Apply, PutBack)
END: Final = {
    State.COMMITTING: State.UNKNOWN,
    State.ROLLING_BACK: State.UNKNOWN,
    State.HEURISTIC_COMMITTING: State.HEURISTIC,
    State.HEURISTIC_ROLLING_BACK: State.HEURISTIC,
}
"""The state after phase two."""


def _place(effects: tuple[Effect, ...], kinds: tuple[type[Effect], ...]) -> list[int]:
    return [place for place, effect in enumerate(effects) if isinstance(effect, kinds)]


def test_durable_data_is_written_once_and_first() -> None:
    """When a write fails, nothing has been answered or released that the branch still needs."""
    for key, rule in RULES:
        if key[:2] != (State.COMMITTING, Operation.APPLIED):
            assert _place(rule.effects, DURABLE) in ([], [0]), key


def test_a_commit_is_answered_when_durable_and_published() -> None:
    """All that xa-ok promises is done by then. The removal from the log is not part of the promise."""
    for key, rule in RULES:
        if key[:2] == (State.COMMITTING, Operation.APPLIED):
            assert rule.effects == (Answer(flag=XaFlag.OK), Complete(ending=Ending.COMMITTED)), key


def test_a_logged_state_is_entered_only_by_its_own_write() -> None:
    """Rule obligation1: "either committed or rolled back regardless of failures"."""
    for key, rule in RULES:
        written = [effect.state for effect in rule.effects if isinstance(effect, Persist)]
        if (rule.to in LOGGED and rule.to is not key[0]) or key[1] is Operation.DISCARD:
            assert written == [rule.to], key  # a discard is written in each state
        else:
            assert written == [], key


def test_the_log_is_left_only_by_a_completion() -> None:
    """Rule obligation2: "The knowledge of xid cannot be erased before commit or rollback complete the branch."."""
    for key, rule in RULES:
        completed = bool(_place(rule.effects, (Complete,)))
        if key == (State.IDLE, Operation.ONE_PHASE, Vote.LOCAL):
            assert completed, "one transaction enters and leaves the log"
            continue
        assert completed == (key[0] in LOGGED and rule.to not in LOGGED), key


def test_a_request_is_answered_once() -> None:
    for key, rule in RULES:
        answers = len(_place(rule.effects, (Answer,)))
        slow = _place(rule.effects, SLOW)
        assert slow in ([], [len(rule.effects) - 1]), "an effect with a later result is the last of its row"
        if key[1] in REQUESTS:
            filled_in_by_the_step = key[0] is State.HEURISTIC and key[1] is not Operation.FORGET and not rule.effects
            assert answers + len(slow) == (0 if filled_in_by_the_step else 1), key
        else:
            assert answers <= 1, key


def test_a_tombstone_is_left_before_the_answer_that_it_repeats() -> None:
    for key, rule in RULES:
        remembered = [effect.flag for effect in rule.effects if isinstance(effect, Remember)]
        answered = [effect.flag for effect in rule.effects if isinstance(effect, Answer)]
        if remembered:
            assert answered == remembered, key
            assert max(_place(rule.effects, (Remember,))) < min(_place(rule.effects, (Answer,))), key
            assert key[1] is not Operation.ROLLBACK, key


def test_a_slow_effect_runs_only_in_its_own_state() -> None:
    for key, rule in RULES:
        for effect in rule.effects:
            match effect:
                case Take():
                    assert rule.to in (State.TAKING, State.TAKING_ONE_PHASE), key
                case Apply():
                    assert rule.to in (State.COMMITTING, State.HEURISTIC_COMMITTING), key
                case PutBack():
                    assert rule.to in (State.ROLLING_BACK, State.HEURISTIC_ROLLING_BACK), key
                case _:
                    pass


def test_only_a_vote_a_decision_or_nothing_follows_prepared() -> None:
    """A timeout never completes a prepared branch."""
    for key, rule in RULES:
        if key[0] is State.PREPARED and rule.to is not State.PREPARED:
            operators = (Operation.HEURISTIC_COMMIT, Operation.HEURISTIC_ROLLBACK)
            assert key[1] in (Operation.COMMIT, Operation.ROLLBACK, *operators), key
            if key[1] in operators:
                assert rule.to in WITH_OUTCOME, key


def test_a_decision_is_never_turned_round() -> None:
    """A discard of messages makes the end heuristic, and the answer tells so."""
    for key, rule in RULES:
        given_up = key[1] in (Operation.DISCARD, Operation.DISCARD_LAST)
        if key[0] in (State.COMMITTING, State.HEURISTIC_COMMITTING):
            wanted = {key[0], State.HEURISTIC_COMMITTING, State.HEURISTIC} if given_up else {key[0], END[key[0]]}
            assert rule.to in wanted, key
            assert Complete(ending=Ending.ROLLED_BACK) not in rule.effects, key
        if key[0] in (State.ROLLING_BACK, State.HEURISTIC_ROLLING_BACK):
            wanted = {key[0], State.HEURISTIC_ROLLING_BACK, State.HEURISTIC} if given_up else {key[0], END[key[0]]}
            assert rule.to in wanted, key
            assert Complete(ending=Ending.COMMITTED) not in rule.effects, key


def test_a_heuristic_outcome_leaves_the_log_by_forget_alone() -> None:
    """A heuristic outcome stays until forget."""
    for key, rule in RULES:
        if key[0] in WITH_OUTCOME and rule.to not in WITH_OUTCOME:
            assert (key[0], key[1]) == (State.HEURISTIC, Operation.FORGET), key


def test_a_doomed_branch_can_only_be_rolled_back() -> None:
    for key, rule in RULES:
        if key[0] in DOOMED:
            assert rule.to in (key[0], State.UNKNOWN), key


def test_a_dropped_branchs_work_is_released_first() -> None:
    """Rollback: "Any produced messages are discarded and any consumed messages are re-enqueued."."""
    for key, rule in RULES:
        dropped = key[0] not in LOGGED and key[0] is not State.UNKNOWN and rule.to is State.UNKNOWN
        done = key == (State.IDLE, Operation.ONE_PHASE, Vote.LOCAL)
        if dropped and key[2] is not Vote.NOTHING and not done:
            assert rule.effects[0] == Release(), key


@pytest.mark.parametrize("operation", [Operation.TIMEOUT, Operation.EXPIRE, Operation.DOOM, Operation.CHANNEL_LOST])
@pytest.mark.parametrize("state", sorted(LOGGED))
def test_no_timer_and_no_lost_channel_touches_a_logged_branch(state: State, operation: Operation) -> None:
    """A vote is kept until the transaction manager decides."""
    assert not [key for key in TRANSITIONS if key[:2] == (state, operation)]


def test_work_is_completed_only_while_no_channel_is_associated() -> None:
    """Rule notdisassociated: "still associated with a channel … 503 (command invalid)"."""
    assert not [key for key in TRANSITIONS if key[1] in COORDINATIONS and key[2] is Vote.ASSOCIATED]


def test_every_waiting_state_has_a_row_for_every_result() -> None:
    for state, results in {
        State.TAKING: (Operation.TAKEN, Operation.NOT_TAKEN, Operation.TAKEN_IN_PART),
        State.TAKING_ONE_PHASE: (Operation.TAKEN, Operation.NOT_TAKEN, Operation.TAKEN_IN_PART),
        State.COMMITTING: (Operation.APPLIED, Operation.STUCK),
        State.ROLLING_BACK: (Operation.PUT_BACK, Operation.STUCK),
        State.HEURISTIC_COMMITTING: (Operation.APPLIED, Operation.STUCK),
        State.HEURISTIC_ROLLING_BACK: (Operation.PUT_BACK, Operation.STUCK),
    }.items():
        for result, vote in product(results, (Vote.CONSUMED, Vote.BOTH)):
            assert (state, result, vote) in TRANSITIONS, (state, result, vote)


def test_every_state_is_reached_and_left() -> None:
    assert {rule.to for key, rule in RULES if rule.to is not key[0]} == set(State)
    assert {key[0] for key, rule in RULES if rule.to is not key[0]} == set(State)

"""The branch as a value: channels, deadlines, and the texts of its errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtx.xa.branch import Branch, step
from dtx.xa.codes import XaError
from dtx.xa.model import (
    Association,
    ChannelId,
    ChannelLost,
    Demarcation,
    Event,
    Happened,
    Operation,
    SetTimeout,
    State,
    Vote,
)
from tests.unit.xa.support import HERE, THERE, XID, branch_in, event_of, words

ON, PARKED = Association.ASSOCIATED, Association.SUSPENDED


def on(operation: Operation, channel: ChannelId = HERE) -> Event:
    return Demarcation(operation=operation, channel=channel)


def test_an_unknown_branch_has_nothing() -> None:
    branch = Branch(xid=XID, owner="alice")
    assert (branch.state, dict(branch.associations), branch.timeout, branch.deadline) == (State.UNKNOWN, {}, 0, None)
    assert branch.association(HERE) is Association.NONE


def test_a_step_keeps_all_unchanged_fields() -> None:
    before = branch_in(State.IDLE, timeout=60, deadline=60.0)
    after, _ = step(before, on(Operation.JOIN), 5)
    assert after == branch_in(State.ACTIVE, {HERE: ON}, timeout=60, deadline=60.0)
    assert before == branch_in(State.IDLE, timeout=60, deadline=60.0)


def test_a_branch_is_idle_after_its_last_channel_ended() -> None:
    branch = branch_in(State.ACTIVE, {HERE: ON, THERE: PARKED})
    branch, _ = step(branch, on(Operation.END), 0)
    assert branch.state is State.ACTIVE
    branch, _ = step(branch, on(Operation.END, THERE), 0)
    assert (branch.state, dict(branch.associations)) == (State.IDLE, {})


def test_any_object_can_identify_a_channel() -> None:
    branch, _ = step(Branch(xid=XID, owner="alice"), on(Operation.START, (7, 1)), 0)
    branch, _ = step(branch, on(Operation.JOIN, (7, 2)), 0)
    assert dict(branch.associations) == {(7, 1): ON, (7, 2): ON}


@pytest.mark.parametrize(
    ("publishes", "consumes", "vote"),
    [(0, 0, Vote.NOTHING), (2, 0, Vote.PUBLISHED), (0, 3, Vote.CONSUMED), (2, 3, Vote.BOTH)],
)
def test_a_vote_follows_the_work_of_the_branch(publishes: int, consumes: int, vote: Vote) -> None:
    assert Vote.of(publishes, consumes) is vote


# -- doomed branches


@pytest.mark.parametrize("state", [State.ROLLBACK_ONLY, State.TIMED_OUT])
@pytest.mark.parametrize("operation", [Operation.RESUME, Operation.END, Operation.FAIL])
def test_any_answer_frees_a_suspended_channel_of_doomed_branches(operation: Operation, state: State) -> None:
    """X/Open XA table 6-2: a return of [RB] leaves no association."""
    branch, effects = step(branch_in(state, {HERE: PARKED, THERE: ON}), on(operation), 0)
    assert dict(branch.associations) == {THERE: ON}
    assert words(effects) in ("answer xa-rbrollback", "answer xa-rbtimeout")


@pytest.mark.parametrize("state", [State.ROLLBACK_ONLY, State.TIMED_OUT])
@pytest.mark.parametrize("operation", [Operation.RESUME, Operation.END, Operation.FAIL])
def test_the_last_channel_of_a_doomed_branch_releases_its_work(operation: Operation, state: State) -> None:
    _, effects = step(branch_in(state, {HERE: PARKED}), on(operation), 0)
    assert words(effects).startswith("release, answer")


@pytest.mark.parametrize("how", [ON, PARKED])
def test_a_channel_that_dies_dooms_the_branch(how: Association) -> None:
    branch, effects = step(branch_in(State.ACTIVE, {HERE: how, THERE: ON}), ChannelLost(channel=HERE), 0)
    assert (branch.state, dict(branch.associations), effects) == (State.ROLLBACK_ONLY, {THERE: ON}, ())
    branch, effects = step(branch, ChannelLost(channel=THERE), 0)
    assert (branch.state, dict(branch.associations), words(effects)) == (State.ROLLBACK_ONLY, {}, "release")


@pytest.mark.parametrize("state", State)
def test_a_channel_that_dies_without_an_association_changes_nothing(state: State) -> None:
    branch = branch_in(state)
    assert step(branch, ChannelLost(channel=HERE), 0) == (branch, ())


def test_a_timed_out_branch_stays_so_without_its_channel() -> None:
    branch, _ = step(branch_in(State.TIMED_OUT, {HERE: ON}), ChannelLost(channel=HERE), 0)
    assert branch.state is State.TIMED_OUT


# -- time


def test_the_clock_runs_from_the_start_of_the_branch() -> None:
    branch, _ = step(Branch(xid=XID, owner="alice", timeout=60), on(Operation.START), 1000)
    assert branch.deadline == 1060


def test_without_a_timeout_there_is_no_deadline() -> None:
    branch, _ = step(Branch(xid=XID, owner="alice"), on(Operation.START), 1000)
    assert branch.deadline is None


@pytest.mark.parametrize("operation", [Operation.JOIN, Operation.END, Operation.SUSPEND])
def test_only_a_start_or_a_new_timeout_sets_the_clock(operation: Operation) -> None:
    channel = THERE if operation is Operation.JOIN else HERE
    branch, _ = step(branch_in(State.ACTIVE, {HERE: ON}, timeout=60, deadline=60), on(operation, channel), 50)
    assert branch.deadline == 60


@pytest.mark.parametrize("vote", [Vote.PUBLISHED, Vote.CONSUMED])
@pytest.mark.parametrize("operation", [Operation.PREPARE, Operation.ONE_PHASE])
def test_the_clock_stops_for_good_when_the_branch_is_logged(operation: Operation, vote: Vote) -> None:
    branch, _ = step(branch_in(State.IDLE, timeout=60, deadline=60), event_of(operation, vote), 10)
    assert branch.deadline is None
    branch, _ = step(branch, SetTimeout(seconds=5), 10)
    assert (branch.timeout, branch.deadline) == (5, None)


@pytest.mark.parametrize("state", sorted(set(State) - {State.UNKNOWN, State.ACTIVE, State.IDLE}))
def test_a_timeout_set_too_late_is_readable_without_effect(state: State) -> None:
    branch, effects = step(branch_in(state, timeout=60), SetTimeout(seconds=5), 10)
    assert (branch.timeout, branch.deadline, words(effects)) == (5, None, "answer xa-ok")
    with pytest.raises(XaError):
        step(branch, Happened(operation=Operation.TIMEOUT), 99)


def test_a_timeout_is_written_before_the_work_is_let_go() -> None:
    """A failed write leaves the branch unchanged, with its work. It can be prepared or timed out again."""
    _, effects = step(branch_in(State.IDLE, timeout=60, deadline=60), Happened(operation=Operation.TIMEOUT), 60)
    assert words(effects) == "note timed-out, release"


# -- texts


@pytest.mark.parametrize(
    ("branch", "operation", "words_of_it"),
    [
        (branch_in(State.UNKNOWN), Operation.COMMIT, "404: unknown xid 1:6774:62"),
        (branch_in(State.IDLE), Operation.COMMIT, "503: commit is illegal in state idle (xid 1:6774:62)"),
        (branch_in(State.IDLE), Operation.END, "503: end is illegal in state idle (xid 1:6774:62)"),
        (
            branch_in(State.IDLE),
            Operation.START,
            "530: already known, in state idle; start it with join or resume (xid 1:6774:62)",
        ),
        (
            branch_in(State.ACTIVE, {HERE: ON, THERE: PARKED}),
            Operation.PREPARE,
            "503: prepare is illegal while 2 channel(s) are associated or suspended (xid 1:6774:62)",
        ),
        (
            branch_in(State.ACTIVE, {THERE: ON}),
            Operation.END,
            "503: end is illegal: the branch is not associated with this channel (xid 1:6774:62)",
        ),
        (
            branch_in(State.ACTIVE, {HERE: ON}),
            Operation.RESUME,
            "503: resume is illegal: the branch is associated on this channel (xid 1:6774:62)",
        ),
        (
            branch_in(State.ACTIVE, {HERE: PARKED}),
            Operation.JOIN,
            "503: join is illegal: the branch is suspended on this channel (xid 1:6774:62)",
        ),
        (
            branch_in(State.ACTIVE, {HERE: ON}),
            Operation.EXPIRE,
            "503: expire is illegal in state active (xid 1:6774:62)",
        ),
    ],
)
def test_a_refusal_names_the_operation_and_the_xid(branch: Branch, operation: Operation, words_of_it: str) -> None:
    with pytest.raises(XaError) as caught:
        step(branch, event_of(operation), 0)
    assert str(caught.value) == words_of_it


@given(
    st.sampled_from(State),
    st.sampled_from(Operation),
    st.sampled_from(Vote),
    st.dictionaries(st.sampled_from([HERE, THERE]), st.sampled_from([ON, PARKED])),
)
def test_any_event_is_a_step_or_an_xa_error(
    state: State, operation: Operation, vote: Vote, associations: dict[ChannelId, Association]
) -> None:
    before = branch_in(state, associations, timeout=60, deadline=60)
    copy = dict(associations)
    try:
        after, _ = step(before, event_of(operation, vote), 1)
    except XaError as error:
        assert error.code in (404, 503, 530)  # noqa: PT017 one of these, no other
    else:
        assert after.deadline is None or after.state in (State.ACTIVE, State.IDLE, before.state)
    assert dict(associations) == copy, "a step never changes its arguments"

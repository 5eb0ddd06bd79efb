"""Every rule of the dtx classes that the core implements, with the rule's name and words.

The layers above implement the rules about select, tickets, recovery scans and failures of the log, with their tests.
"""

import pytest

from dtx.xa.branch import Branch, step
from dtx.xa.codes import Heuristic, ReplyCode, XaError, XaFlag
from dtx.xa.model import (
    DECISIONS,
    Answer,
    Apply,
    Association,
    ChannelId,
    Demarcation,
    Effect,
    Ending,
    Happened,
    Note,
    NoteStuck,
    Operation,
    Persist,
    PutBack,
    Refuse,
    Release,
    Request,
    SetTimeout,
    State,
    Take,
    Vote,
    end_operation,
    start_operation,
)
from dtx.xa.table import WITH_OUTCOME
from tests.unit.xa.support import HERE, THERE, XID, branch_in, event_of

OK = Answer(flag=XaFlag.OK)
KNOWN = [state for state in State if state is not State.UNKNOWN]


def demarcate(branch: Branch, operation: Operation, channel: ChannelId = HERE) -> tuple[Branch, tuple[Effect, ...]]:
    return step(branch, Demarcation(operation=operation, channel=channel), 0)


def request(branch: Branch, operation: Operation, vote: Vote = Vote.BOTH) -> tuple[Branch, tuple[Effect, ...]]:
    return step(branch, Request(operation=operation, vote=vote), 0)


def code_of(branch: Branch, operation: Operation, vote: Vote = Vote.BOTH) -> ReplyCode:
    with pytest.raises(XaError) as caught:
        step(branch, event_of(operation, vote), 0)
    return caught.value.code


class TestStart:
    def test_command_invalid(self) -> None:
        """commandInvalid: "in an improper context (see class grammar) … reply code 503 (command invalid)"."""
        for state in (State.TAKING, State.TAKING_ONE_PHASE, State.PREPARED, State.COMMITTING, State.ROLLING_BACK):
            assert code_of(branch_in(state), Operation.JOIN) == 503
            assert code_of(branch_in(state), Operation.RESUME) == 503

    @pytest.mark.parametrize("state", KNOWN)
    def test_already_associated(self, state: State) -> None:
        """alreadyAssociated: "neither join nor resume … previously been seen … 530 (not allowed)"."""
        assert code_of(branch_in(state), Operation.START) == 530

    def test_join_and_resume(self) -> None:
        """joinAndresume: "If join and resume are specified … 503 (command invalid)"."""
        with pytest.raises(XaError, match="503: start is illegal with both join and resume"):
            start_operation(join=True, resume=True)

    def test_one_bit_or_none_selects_the_kind_of_start(self) -> None:
        """Field join: "joining a transaction previously seen"; resume: "resuming a suspended transaction branch"."""
        assert start_operation(join=False, resume=False) is Operation.START
        assert start_operation(join=True, resume=False) is Operation.JOIN
        assert start_operation(join=False, resume=True) is Operation.RESUME

    def test_unknown_xid(self) -> None:
        """Field xid, unknownXid: "If Xid is already known by the broker then … 530 (not allowed)"."""
        known, _ = demarcate(branch_in(State.UNKNOWN), Operation.START)
        assert code_of(known, Operation.START) == 530

    def test_join_is_supported(self) -> None:
        """Rule unsupported: "If the broker does not support join … 540": it does."""
        branch, _ = demarcate(branch_in(State.UNKNOWN), Operation.START)
        branch, effects = demarcate(branch, Operation.JOIN, THERE)
        assert effects == (OK,)
        assert {branch.association(HERE), branch.association(THERE)} == {Association.ASSOCIATED}

    def test_joining_or_resuming_an_unknown_branch_is_not_found(self) -> None:
        """Field join: "joining a transaction previously seen"."""
        assert code_of(branch_in(State.UNKNOWN), Operation.JOIN) == 404
        assert code_of(branch_in(State.UNKNOWN), Operation.RESUME) == 404

    @pytest.mark.parametrize("state", [State.ROLLBACK_ONLY, State.TIMED_OUT])
    def test_rollback_only(self, state: State) -> None:
        """start-ok: "xa-rbrollback: The broker marked the transaction branch rollback-only"."""
        branch, effects = demarcate(branch_in(state), Operation.JOIN)
        assert effects == (Answer(flag=XaFlag.RBROLLBACK),)
        assert branch.association(HERE) is Association.NONE


class TestEnd:
    def test_command_invalid(self) -> None:
        """commandInvalid: "in an improper context (see class grammar) … reply code 503 (command invalid)"."""
        started = branch_in(State.ACTIVE, {THERE: Association.ASSOCIATED})
        assert code_of(started, Operation.END) == 503

    def test_suspend_and_fail(self) -> None:
        """suspendAndfail: "If suspend and fail are specified … 503 (command invalid)"."""
        with pytest.raises(XaError, match="503: end is illegal with both fail and suspend"):
            end_operation(fail=True, suspend=True)

    def test_one_bit_or_none_selects_the_kind_of_end(self) -> None:
        """Field fail: "the portion of work has failed"; suspend: "temporarily suspended in an incomplete state"."""
        assert end_operation(fail=False, suspend=False) is Operation.END
        assert end_operation(fail=True, suspend=False) is Operation.FAIL
        assert end_operation(fail=False, suspend=True) is Operation.SUSPEND

    def test_success(self) -> None:
        """success: "If neither fail nor suspend are specified then the portion of work has completed successfully"."""
        branch, effects = demarcate(branch_in(State.ACTIVE, {HERE: Association.ASSOCIATED}), Operation.END)
        assert (branch.state, effects) == (State.IDLE, (OK,))

    @pytest.mark.parametrize("operation", [Operation.END, Operation.FAIL, Operation.SUSPEND])
    def test_unknown_xid(self, operation: Operation) -> None:
        """unknownXid: "has not been started or has already been ended … 404 (not found)"."""
        assert code_of(branch_in(State.UNKNOWN), operation) == 404

    def test_failure(self) -> None:
        """failure: "If fail is specified then the transaction should be marked as rollback-only"."""
        branch, effects = demarcate(branch_in(State.ACTIVE, {HERE: Association.ASSOCIATED}), Operation.FAIL)
        assert branch.state is State.ROLLBACK_ONLY
        assert effects == (Release(), Answer(flag=XaFlag.RBROLLBACK))

    def test_resume(self) -> None:
        """resume: "in a suspended state and must be resumed via the start method with resume specified"."""
        branch, effects = demarcate(branch_in(State.ACTIVE, {HERE: Association.ASSOCIATED}), Operation.SUSPEND)
        assert (branch.association(HERE), effects) == (Association.SUSPENDED, (OK,))
        assert code_of(branch, Operation.JOIN) == 503
        assert code_of(branch, Operation.START) == 530
        branch, effects = demarcate(branch, Operation.RESUME)
        assert (branch.association(HERE), effects) == (Association.ASSOCIATED, (OK,))

    def test_timed_out(self) -> None:
        """end-ok: "xa-rbtimeout: The work represented by this transaction branch took too long"."""
        branch, effects = demarcate(branch_in(State.TIMED_OUT, {HERE: Association.ASSOCIATED}), Operation.END)
        assert (branch.state, effects) == (State.TIMED_OUT, (Release(), Answer(flag=XaFlag.RBTIMEOUT)))


class TestPrepare:
    @pytest.mark.parametrize("operation", [Operation.COMMIT, Operation.ROLLBACK])
    @pytest.mark.parametrize("vote", [Vote.PUBLISHED, Vote.CONSUMED, Vote.BOTH])
    def test_obligation_1(self, operation: Operation, vote: Vote) -> None:
        """obligation1: "it is guaranteed that the transaction branch may be either committed or rolled back"."""
        branch, effects = request(branch_in(State.IDLE), Operation.PREPARE, vote)
        if effects[-1] == Take():
            branch, effects = step(branch, Happened(operation=Operation.TAKEN, vote=vote), 0)
        assert effects == (Persist(state=State.PREPARED), OK)
        branch, effects = request(branch, operation, vote)
        assert branch.state in (State.COMMITTING, State.ROLLING_BACK, State.UNKNOWN)

    @pytest.mark.parametrize("operation", sorted(set(Operation) - {Operation.COMMIT, Operation.ROLLBACK}))
    def test_obligation_2(self, operation: Operation) -> None:
        """obligation2: "The knowledge of xid cannot be erased before commit or rollback complete the branch"."""
        before = branch_in(State.PREPARED)
        try:
            after, _ = step(before, event_of(operation, Vote.BOTH), 1e9)
        except XaError:
            return
        assert after.state is State.PREPARED or (operation in DECISIONS and after.state in WITH_OUTCOME)

    def test_internal_error(self) -> None:
        """internalError: "The specified Xid may or may not have been prepared": a repeated prepare continues."""
        assert request(branch_in(State.TAKING), Operation.PREPARE) == (branch_in(State.TAKING), (Take(),))

    def test_command_invalid(self) -> None:
        """commandInvalid: "in an improper context (see class grammar) … reply code 503 (command invalid)"."""
        for state in (State.PREPARED, State.COMMITTING, State.ROLLING_BACK, State.HEURISTIC):
            assert code_of(branch_in(state), Operation.PREPARE) == 503

    def test_read_only(self) -> None:
        """prepare-ok: "xa-rdonly: The transaction branch was read-only and has been committed"."""
        branch, effects = request(branch_in(State.IDLE), Operation.PREPARE, Vote.NOTHING)
        assert branch.state is State.UNKNOWN
        assert effects == (Note(ending=Ending.READ_ONLY), Answer(flag=XaFlag.RDONLY))


class TestCommit:
    def test_internal_error(self) -> None:
        """internalError: "If an error occurs in committing … 541 (internal error)"."""
        event = Happened(operation=Operation.STUCK, vote=Vote.PUBLISHED, reason="no exchange 'x'")
        branch, effects = step(branch_in(State.COMMITTING), event, 0)
        assert effects == (
            NoteStuck(reason="no exchange 'x'"),
            Refuse(
                code=ReplyCode.INTERNAL_ERROR,
                reason="committing could not finish: no exchange 'x' (xid 1:6774:62)",
            ),
        )
        assert branch.state is State.COMMITTING

    def test_a_commit_that_failed_may_be_asked_for_again(self) -> None:
        """The decision stays: the state after a 541 is the state before it."""
        assert request(branch_in(State.COMMITTING), Operation.COMMIT)[1] == (Apply(),)

    def test_command_invalid(self) -> None:
        """commandInvalid: "two-phase-commit = C:PREPARE S:PREPARE-OK C:COMMIT S:COMMIT-OK"."""
        assert code_of(branch_in(State.IDLE), Operation.COMMIT) == 503
        assert code_of(branch_in(State.ROLLING_BACK), Operation.COMMIT) == 503

    def test_one_phase_of_a_prepared_branch_is_refused(self) -> None:
        """commandInvalid: "one-phase-commit = C:COMMIT S:COMMIT-OK"."""
        assert code_of(branch_in(State.PREPARED), Operation.ONE_PHASE) == 503

    def test_one_phase(self) -> None:
        """Field one-phase: "When set then one-phase commit optimization is used"."""
        branch, effects = request(branch_in(State.IDLE), Operation.ONE_PHASE, Vote.PUBLISHED)
        assert effects == (Persist(state=State.COMMITTING), Apply())
        assert step(branch, Happened(operation=Operation.APPLIED, vote=Vote.PUBLISHED), 0)[1][0] == OK

    def test_rollback_of_a_committing_branch_is_refused(self) -> None:
        """commandInvalid: "in an improper context (see class grammar) … reply code 503 (command invalid)"."""
        assert code_of(branch_in(State.COMMITTING), Operation.ROLLBACK) == 503


class TestRollback:
    def test_internal_error(self) -> None:
        """internalError: "If an error occurs in rolling back … 541 (internal error)"."""
        event = Happened(operation=Operation.STUCK, vote=Vote.CONSUMED, reason="no queue 'q'")
        branch, effects = step(branch_in(State.ROLLING_BACK), event, 0)
        assert isinstance(effects[-1], Refuse)
        assert effects[-1].code == 541
        assert branch.state is State.ROLLING_BACK

    def test_consumed_messages_are_re_enqueued(self) -> None:
        """Rollback: "Any produced messages are discarded and any consumed messages are re-enqueued"."""
        assert request(branch_in(State.IDLE), Operation.ROLLBACK)[1] == (Release(), OK)
        branch, effects = request(branch_in(State.PREPARED), Operation.ROLLBACK)
        assert effects == (Persist(state=State.ROLLING_BACK), PutBack())
        assert step(branch, Happened(operation=Operation.PUT_BACK, vote=Vote.BOTH), 0)[1][-1] == OK

    def test_timed_out(self) -> None:
        """rollback-ok: "xa-rbtimeout: The work represented by this transaction branch took too long"."""
        assert request(branch_in(State.TIMED_OUT), Operation.ROLLBACK)[1][-1] == Answer(flag=XaFlag.RBTIMEOUT)


class TestForget:
    def test_discards_knowledge(self) -> None:
        """Forget: "called to forget about a heuristically completed transaction branch"."""
        before = branch_in(State.HEURISTIC, outcome=Heuristic.COMMITTED)
        assert request(before, Operation.FORGET)[0].state is State.UNKNOWN

    @pytest.mark.parametrize("state", sorted({*KNOWN} - {State.HEURISTIC}))
    def test_command_invalid(self, state: State) -> None:
        """commandInvalid: "in an improper context (see class grammar) … reply code 503 (command invalid)"."""
        assert code_of(branch_in(state), Operation.FORGET) == 503


COMPLETIONS = [Operation.PREPARE, Operation.COMMIT, Operation.ONE_PHASE, Operation.ROLLBACK, Operation.FORGET]


@pytest.mark.parametrize("operation", [*COMPLETIONS, Operation.GET_TIMEOUT, Operation.SET_TIMEOUT])
def test_unknown_xid(operation: Operation) -> None:
    """unknownXid: "has not been started or has already been ended … 404 (not found)"."""
    assert code_of(branch_in(State.UNKNOWN), operation) == 404


@pytest.mark.parametrize("how", [Association.ASSOCIATED, Association.SUSPENDED])
@pytest.mark.parametrize("operation", COMPLETIONS)
def test_not_disassociated(operation: Operation, how: Association) -> None:
    """notdisassociated: "when Xid is still associated with a channel … 503 (command invalid)"."""
    assert code_of(branch_in(State.ACTIVE, {THERE: how}), operation) == 503


class TestTimeout:
    def test_the_default_until_set(self) -> None:
        """get-timeout: "If setTimeout was not used prior … the return value is the default timeout"."""
        branch, _ = demarcate(Branch(xid=XID, owner="alice", timeout=60), Operation.START)
        assert branch.timeout == 60

    def test_effective(self) -> None:
        """effective: "this timeout value is effective until this method is reinvoked with a different value"."""
        branch = branch_in(State.IDLE, timeout=60)
        branch, effects = step(branch, SetTimeout(seconds=5), 100)
        assert (branch.timeout, branch.deadline, effects) == (5, 105, (OK,))
        branch, _ = step(branch, SetTimeout(seconds=7), 101)
        assert (branch.timeout, branch.deadline) == (7, 108)

    def test_none(self) -> None:
        """reset: "A value of zero resets the timeout value to the default value", which may be none."""
        branch, _ = step(branch_in(State.IDLE, timeout=60, deadline=60), SetTimeout(seconds=0), 1)
        assert (branch.timeout, branch.deadline) == (0, None)

    def test_get_timeout(self) -> None:
        """get-timeout-ok: "The current transaction timeout value in seconds"."""
        branch = branch_in(State.PREPARED, timeout=60)
        assert step(branch, Request(operation=Operation.GET_TIMEOUT), 0) == (branch, (OK,))

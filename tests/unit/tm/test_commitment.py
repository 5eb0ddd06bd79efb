"""The meaning of each answer of a resource in each phase, by the table of ``dtx.client.tm.commitment``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtx.client import (
    XA_HEURCOM,
    XA_HEURHAZ,
    XA_HEURMIX,
    XA_HEURRB,
    XA_RBROLLBACK,
    XA_RBTIMEOUT,
    XAER_INVAL,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    XAException,
    XaFlag,
    Xid,
)
from dtx.client.tm import (
    Decision,
    HeuristicCommit,
    HeuristicHazard,
    HeuristicMixed,
    HeuristicRollback,
    LogFailed,
    Outcome,
    OutcomeUnknown,
    RolledBack,
    TransactionError,
    steps,
)
from dtx.client.tm.commitment import CommitPlan, EnlistedBranch, commit, rollback
from dtx.client.tm.databases import SqliteLog
from dtx.client.tm.steps import CommitPoint, access, drive

GTRID = b"n.0123456789ab.a.1"


class FakeSession:
    """A session with prepared answers.

    Args:
        answers: answers by operation, one after the other; other operations succeed.
    """

    one_phase_repeatable = True

    def __init__(self, asked: list[str], name: str, answers: dict[str, list[Any]]) -> None:
        self._asked, self._name, self._answers = asked, name, answers
        self.broken = False

    def __getattr__(self, operation: str) -> Any:
        def ask(*_: Xid) -> Any:
            if operation == "usable":
                return not self.broken
            self._asked.append(f"{operation} {self._name}")
            answers = self._answers.get(operation)
            answer = answers.pop(0) if answers else (XaFlag.OK if operation == "prepare" else None)
            if isinstance(answer, XAException):
                self.broken = self.broken or isinstance(answer, XAER_RMFAIL)
                raise answer
            return answer

        return ask


class FakeResource:
    """Opens sessions that share the answers."""

    def __init__(self, asked: list[str], name: str, answers: dict[str, list[Any]]) -> None:
        self.name, self._asked, self._answers = name, asked, answers

    def open(self) -> FakeSession:
        self._asked.append(f"connect {self.name}")
        return FakeSession(self._asked, self.name, self._answers)

    def release(self, session: FakeSession) -> None:
        self._asked.append(f"release {self.name}")


class Stage:
    """A transaction with resources ``a`` and ``b``. The answers are those of b."""

    def __init__(self, directory: Path) -> None:
        self.log = SqliteLog(directory / "tm.db")
        self.asked: list[str] = []

    def plan(self, *, a: bool = True, **answers: list[Any]) -> CommitPlan:
        branches = []
        for name, given in (("a", {}), ("b", answers)) if a else (("b", answers),):
            resource = FakeResource(self.asked, name, given)
            session = FakeSession(self.asked, name, given)
            branches.append(EnlistedBranch(resource, session, Xid(1, GTRID, name.encode())))
        log = access(lambda call: call(self.log))
        return CommitPlan(gtrid=GTRID, format_id=1, node="n", branches=branches, log=log)

    def commit(self, **answers: Any) -> Outcome:
        return drive(commit(self.plan(**answers)))

    def rollback(self, **answers: Any) -> Outcome:
        return drive(rollback(self.plan(**answers)))

    @property
    def finished(self) -> bool:
        self.log.flush()
        row = self.log.read(GTRID)
        assert row is not None
        return row.finished is not None


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.log.close()


# -- the order --------------------------------------------------------------------------------------------------------


def test_every_branch_is_prepared_before_any_is_committed(stage: Stage) -> None:
    assert stage.commit() == Outcome(decision=Decision.COMMIT)
    assert stage.asked == ["end a", "end b", "prepare a", "prepare b", "commit a", "commit b"]
    assert stage.finished


def test_no_branch_commits_before_the_decision_is_durable(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_batch: object) -> None:
        raise LogFailed("no space left on device")

    monkeypatch.setattr(stage.log, "write", failing)
    with pytest.raises(OutcomeUnknown):
        stage.commit()
    assert stage.asked == ["end a", "end b", "prepare a", "prepare b"]


def test_a_branch_rolled_back_by_others_is_not_committed(stage: Stage) -> None:
    stage.log.fence(stage.plan().row([]))
    with pytest.raises(RolledBack):
        stage.commit()
    assert stage.asked[-2:] == ["rollback a", "rollback b"]


def test_all_read_only_is_a_commit_without_a_decision(stage: Stage) -> None:
    plan = stage.plan(prepare=[XaFlag.RDONLY])
    plan.branches[0].session._answers["prepare"] = [XaFlag.RDONLY]
    drive(commit(plan))
    assert stage.asked == ["end a", "end b", "prepare a", "commit_one_phase b"]
    assert stage.log.read(GTRID) is None


# -- the first phase --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["end", "prepare"])
@pytest.mark.parametrize(
    "error", [XA_RBROLLBACK, XA_RBTIMEOUT, XAER_RMERR, XAER_RMFAIL, XAER_NOTA, XAER_PROTO, XAER_INVAL]
)
def test_any_error_before_the_vote_rolls_all_branches_back(
    stage: Stage, operation: str, error: type[XAException]
) -> None:
    """X/Open xa_prepare: XAER_RMERR "may or may not have been prepared": so that one is rolled back, too."""
    with pytest.raises(RolledBack) as raised:
        stage.commit(**{operation: [error("no")]})
    assert isinstance(raised.value.causes[0], error)
    assert "rollback a" in stage.asked
    assert "rollback b" in stage.asked
    assert not any(asked.startswith("commit") for asked in stage.asked)
    assert stage.log.read(GTRID) is None


# -- the second phase -------------------------------------------------------------------------------------------------

DAMAGE = [
    (XA_HEURRB("x"), HeuristicMixed, "rolled-back", True),
    (XA_HEURMIX("x"), HeuristicMixed, "mixed", True),
    (XA_HEURHAZ("x"), HeuristicHazard, "hazard", True),
    (XA_RBROLLBACK("x"), HeuristicMixed, "rolled-back", False),
    (XAER_NOTA("unknown xid"), HeuristicHazard, "hazard", False),
    (XAER_NOTA("NOT_FOUND - ended=rolled-back; at=T; no more"), HeuristicMixed, "rolled-back", False),
    (XAER_NOTA("NOT_FOUND - ended=forgotten; at=T; no more"), HeuristicHazard, "hazard", False),
]


@pytest.mark.parametrize(("answer", "raised", "outcome", "forgets"), DAMAGE, ids=lambda value: str(value)[:40])
def test_a_heuristic_commit_is_recorded_forgotten_and_raised(
    stage: Stage, answer: XAException, raised: type[TransactionError], outcome: str, forgets: bool
) -> None:
    with pytest.raises(raised) as error:
        stage.commit(commit=[answer])
    assert type(error.value) is raised
    ((report, _, forgotten),) = stage.log.heuristics()
    assert (report.resource, report.outcome.value, report.damaging) == ("b", outcome, True)
    assert forgotten is not None
    assert (stage.asked[-1] == "forget b") is forgets
    assert stage.finished


def test_a_lone_branch_rolled_back_is_a_heuristic_rollback(stage: Stage) -> None:
    plan = stage.plan(commit=[XA_HEURRB("x")])
    plan.branches[0].session._answers["prepare"] = [XaFlag.RDONLY]
    plan = CommitPlan(gtrid=GTRID, format_id=1, node="n", branches=plan.branches[1:], log=plan.log, one_phase=False)
    with pytest.raises(HeuristicRollback):
        drive(commit(plan))


def test_a_heuristic_commit_that_was_requested_is_success(stage: Stage) -> None:
    outcome = stage.commit(commit=[XA_HEURCOM("x")])
    assert [report.damaging for report in outcome.reports] == [False]
    assert stage.asked[-1] == "forget b"
    assert stage.finished


@pytest.mark.parametrize("error", [XAER_RMERR, XAER_PROTO, XAER_INVAL])
def test_a_refused_commit_is_left_to_recovery(stage: Stage, error: type[XAException]) -> None:
    assert stage.commit(commit=[error("no")]).unfinished == ("b",)
    assert not stage.finished


def test_after_a_lost_answer_a_new_connection_asks_again(stage: Stage) -> None:
    assert stage.commit(commit=[XAER_RMFAIL("gone")]).unfinished == ()
    assert stage.asked[-4:] == ["commit b", "connect b", "commit b", "release b"]
    assert stage.finished


def test_a_branch_missing_after_a_lost_answer_was_committed(stage: Stage) -> None:
    assert stage.commit(commit=[XAER_RMFAIL("gone"), XAER_NOTA("unknown xid")]).reports == ()
    assert stage.finished


def test_a_branch_rolled_back_after_a_lost_answer_is_damage(stage: Stage) -> None:
    with pytest.raises(HeuristicMixed):
        stage.commit(commit=[XAER_RMFAIL("gone"), XAER_NOTA("NOT_FOUND - ended=rolled-back; at=T; no more")])


def test_an_unreachable_branch_is_left_to_recovery(stage: Stage) -> None:
    assert stage.commit(commit=[XAER_RMFAIL("gone"), XAER_RMFAIL("gone")]).unfinished == ("b",)
    assert not stage.finished


def test_a_branch_already_committed_by_recovery_is_no_hazard(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = stage.log.decide

    def and_recovery(row: Any) -> Decision:
        stands = decide(row)
        stage.log.count_recovery(row.gtrid)
        return stands

    monkeypatch.setattr(stage.log, "decide", and_recovery)
    assert stage.commit(commit=[XAER_NOTA("unknown xid")]).reports == ()


def test_nothing_is_forgotten_that_the_log_could_not_record(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_report: object) -> None:
        raise LogFailed("no space left on device")

    monkeypatch.setattr(stage.log, "record", failing)
    with pytest.raises(HeuristicMixed):
        stage.commit(commit=[XA_HEURRB("x")])
    assert "forget b" not in stage.asked
    assert not stage.finished


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (XA_HEURCOM("x"), HeuristicMixed),
        (XA_HEURMIX("x"), HeuristicMixed),
        (XA_HEURHAZ("x"), HeuristicHazard),
        (XAER_NOTA("NOT_FOUND - ended=committed; at=T; no more"), HeuristicMixed),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_roll_back_that_was_not_one_is_damage(
    stage: Stage, answer: XAException, raised: type[TransactionError]
) -> None:
    with pytest.raises(raised):
        stage.rollback(rollback=[answer])


@pytest.mark.parametrize("answer", [XA_HEURRB("x"), XA_RBTIMEOUT("x"), XAER_NOTA("unknown xid")])
def test_a_branch_already_rolled_back_counts_as_rolled_back(stage: Stage, answer: XAException) -> None:
    outcome = stage.rollback(rollback=[answer])
    assert outcome.unfinished == ()
    assert not any(report.damaging for report in outcome.reports)


def test_a_lone_branch_committed_instead_is_a_heuristic_commit(stage: Stage) -> None:
    with pytest.raises(HeuristicCommit):
        stage.rollback(a=False, rollback=[XA_HEURCOM("x")])


# -- unexpected errors -----------------------------------------------------------------------------------------------


def test_an_unexpected_driver_error_does_not_delay_other_branches(stage: Stage) -> None:
    """The result of its call is unknown: XAER_RMFAIL. The other branches are still committed."""
    plan = stage.plan()

    def broken(_xid: Xid) -> None:
        raise ZeroDivisionError("a bug of the driver's")

    plan.branches[0].session.commit = broken
    outcome = drive(commit(plan))
    assert outcome.unfinished == ("a",)
    assert "commit b" in stage.asked
    assert not stage.finished


def test_an_unexpected_error_while_connecting_means_unreachable(stage: Stage) -> None:
    plan = stage.plan(commit=[XAER_RMFAIL("gone")])

    def broken() -> None:
        raise ZeroDivisionError("a bug of the driver's")

    plan.branches[1].resource.open = broken
    assert drive(commit(plan)).unfinished == ("b",)


def test_a_log_that_raises_an_unexpected_error_has_failed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = stage.log.decide

    def broken(_row: object) -> None:
        monkeypatch.setattr(stage.log, "decide", decide)
        raise ZeroDivisionError("a bug of the log's")

    monkeypatch.setattr(stage.log, "decide", broken)
    with pytest.raises(RolledBack, match="a bug of the log's"):  # the fence shows that nothing was written
        stage.commit()
    assert stage.asked[-2:] == ["rollback a", "rollback b"]


def test_a_point_of_a_test_is_left_as_it_is(stage: Stage) -> None:
    class Broken(Exception):
        pass

    def broken(_point: CommitPoint) -> None:
        raise Broken

    steps.arm(broken)
    try:
        with pytest.raises(Broken):
            stage.commit()
    finally:
        steps.arm(None)


# -- one phase --------------------------------------------------------------------------------------------------------


def alone(stage: Stage, *answers: XAException) -> Outcome:
    return stage.commit(a=False, commit_one_phase=list(answers))


@pytest.mark.parametrize(
    ("answers", "raised"),
    [
        ((XA_RBROLLBACK("x"),), RolledBack),
        ((XAER_RMERR("403"),), RolledBack),
        ((XAER_PROTO("503"),), RolledBack),
        ((XAER_NOTA("unknown xid"),), OutcomeUnknown),
        ((XAER_RMFAIL("gone"), XAER_RMFAIL("gone")), OutcomeUnknown),
        ((XAER_RMFAIL("gone"), XAER_NOTA("unknown xid")), OutcomeUnknown),
        ((XAER_RMFAIL("gone"), XAER_NOTA("NOT_FOUND - ended=rolled-back; at=T; no more")), RolledBack),
        ((XA_HEURRB("x"),), HeuristicRollback),
        ((XA_HEURHAZ("x"),), HeuristicHazard),
    ],
    ids=str,
)
def test_a_possibly_failed_one_phase_commit_is_raised(
    stage: Stage, answers: tuple[XAException, ...], raised: type[TransactionError]
) -> None:
    with pytest.raises(raised):
        alone(stage, *answers)


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (XA_HEURCOM("x"),),
        (XAER_RMFAIL("gone"),),
        (XAER_RMFAIL("gone"), XAER_NOTA("NOT_FOUND - ended=committed; at=T; no more")),
    ],
    ids=str,
)
def test_a_one_phase_commit_that_is_one_is_found_out(stage: Stage, answers: tuple[XAException, ...]) -> None:
    assert alone(stage, *answers).one_phase

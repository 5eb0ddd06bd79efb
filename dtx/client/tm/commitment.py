"""The two-phase commit, without any I/O: the order of the calls to the resources, and the meaning of their answers.

X/Open CAE C193 leaves the interpretation of the answers of the second phase to the transaction manager. The table shows
their meaning here. It names Narayana and Bitronix where these differ:

    answer          to commit                                          to rollback
    XA_HEURCOM      as decided; recorded, forgotten                    damage; recorded, forgotten
    XA_HEURRB       damage; recorded, forgotten                        as decided; recorded, forgotten
    XA_HEURMIX/HAZ  damage; recorded, forgotten                        the same
    XA_RB*          damage: rolled back after its vote                 done
    XAER_NOTA       done, if it was asked before and the answer was    done: what is not known is rolled back
                    lost, or by recovery; else a hazard (Narayana
                    does the same; Bitronix takes it as done)
    XAER_RMFAIL     asked again on a new connection, once; then left   the same
                    to recovery
    XAER_RMERR      left to recovery. X/Open reads it as "rolled       left to recovery
                    back"; for dtx the call was refused (403), and
                    the branch is unchanged
    PROTO, INVAL    left to recovery                                   left to recovery

For a branch that ended recently, dtx adds the outcome to XAER_NOTA. This outcome takes precedence over the table.

A branch that is alone commits in one phase. Its resource manager decides, and the log has no record of it (Narayana and
Atomikos write nothing either). If the program dies in that call, recovery finds a branch without a decision. Recovery
fences the branch and rolls it back, as every orphan. The resource may answer that it is committing the branch, or has
committed it. Then the program had asked for the commit before. Only an operator can also commit an undecided branch,
and the commit of an operator has different answers. Recovery therefore reports no damage and undoes nothing. It
withdraws the fence, and the log has no record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dtx.client.errors import (
    XA_HEURCOM,
    XA_HEURMIX,
    XA_HEURRB,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMFAIL,
    XAException,
    XAHeuristic,
    XARollback,
)
from dtx.client.tm.decisions import Decision, DecisionRow, now
from dtx.client.tm.errors import (
    HeuristicReport,
    OutcomeUnknown,
    RolledBack,
    TransactionError,
    heuristic_error,
)
from dtx.client.tm.steps import Access, CommitPoint, Work, ask, reach
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.model import State
from dtx.xa.xid import Xid

_COMMITTING: Final = frozenset({State.COMMITTING, State.TAKING_ONE_PHASE})
"""States of a branch that dtx was told to commit, and has not committed yet."""


@dataclass(slots=True)
class EnlistedBranch:
    """One resource's part in a transaction."""

    resource: Any
    session: Any
    xid: Xid
    live: bool = True
    """Whether the resource manager may still have the branch."""

    @property
    def name(self) -> str:
        """The bqual: the name of the resource. If the resource has several branches, ``/`` and a number follow."""
        return self.xid.bqual.decode("ascii", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a transaction.

    Args:
        decision: the decision.
        unfinished: branches whose resources do not have the decision yet. Recovery tells them.
        reports: heuristic outcomes, none of them damaging.
        one_phase: whether one resource decided alone.
    """

    decision: Decision
    unfinished: tuple[str, ...] = ()
    reports: tuple[HeuristicReport, ...] = ()
    one_phase: bool = False


@dataclass(slots=True)
class Completion:
    """The results of the second phase.

    Args:
        log: a function that calls the log. The log gets the heuristic outcomes.
        forget: whether heuristic outcomes are forgotten after they are recorded.
    """

    log: Access
    forget: bool
    reports: list[HeuristicReport] = field(default_factory=list)
    unfinished: dict[str, XAException | TransactionError] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    """Branches that recovery tried to roll back, but that their resources commit or have committed in one phase."""

    @property
    def damage(self) -> list[HeuristicReport]:
        """The reports of branches whose end contradicts the decision, or may contradict it."""
        return [report for report in self.reports if report.damaging]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPlan:
    """The data for the completion of a transaction.

    Args:
        gtrid: the id of the transaction.
        format_id: the format id of its xids.
        node: the node that began it.
        branches: the branches of all enlisted resources.
        log: a function that calls the log.
        forget: whether heuristic outcomes are forgotten after they are recorded.
        one_phase: whether a branch that is alone is committed without the log.
    """

    gtrid: bytes
    format_id: int
    node: str
    branches: Sequence[EnlistedBranch]
    log: Access
    forget: bool = True
    one_phase: bool = True

    def row(self, voted: Sequence[EnlistedBranch]) -> DecisionRow:
        """Return the log entry for the decision to commit."""
        return DecisionRow(
            gtrid=self.gtrid,
            format_id=self.format_id,
            node=self.node,
            decision=Decision.COMMIT,
            at=now(),
            resources=tuple(branch.name for branch in voted),
        )


def commit(plan: CommitPlan) -> Work[Outcome]:
    """Commit the transaction.

    Raises:
        RolledBack, HeuristicOutcome, OutcomeUnknown: the transaction did not simply commit.
    """
    for branch in plan.branches:
        answer = yield from ask(branch.session, "end", branch.xid)
        if isinstance(answer, XAException):
            return (yield from _give_up(plan, branch, answer))
        reach(CommitPoint.ENDED)
    voted: list[EnlistedBranch] = []
    for position, branch in enumerate(plan.branches, start=1):
        if plan.one_phase and not voted and position == len(plan.branches):
            # It is alone, or all others were read-only: its own commit is the decision. The log is not needed.
            return (yield from _commit_one_phase(plan, branch))
        answer = yield from ask(branch.session, "prepare", branch.xid)
        if isinstance(answer, XAException):
            return (yield from _give_up(plan, branch, answer))
        if answer is XaFlag.RDONLY:
            branch.live = False
        else:
            voted.append(branch)
        reach(CommitPoint.PREPARED)
    if not voted:
        return Outcome(decision=Decision.COMMIT)
    reach(CommitPoint.VOTED)
    return (yield from decide(plan, voted))


def decide(plan: CommitPlan, voted: Sequence[EnlistedBranch]) -> Work[Outcome]:
    """Make the decision durable after all votes, and tell the branches.

    Args:
        plan: the transaction.
        voted: its branches that are prepared.

    Raises:
        RolledBack, HeuristicOutcome, OutcomeUnknown: the transaction did not simply commit.
    """
    row = plan.row(voted)
    logged = yield from plan.log(lambda log: log.decide(row))
    reason = "recovery treated the transaction as dead and rolled it back"
    if isinstance(logged, TransactionError):
        reason = f"the decision to commit could not be written: {logged}"
        # The decision may be in the log or not. The fence returns which, and prevents a write that is still pending.
        logged = yield from plan.log(lambda log: log.fence(row))
    if isinstance(logged, TransactionError):
        raise OutcomeUnknown(
            f"the log of decisions is out of reach, so it is not known whether the transaction commits; recovery will "
            f"complete it ({logged})",
            gtrid=plan.gtrid,
        )
    if logged is Decision.ROLLBACK:
        completion = yield from complete_all(plan, Decision.ROLLBACK)
        yield from plan.log(lambda log: log.finish(plan.gtrid))
        _raise_damage("rolled back", plan, completion)
        raise RolledBack(reason, gtrid=plan.gtrid)
    reach(CommitPoint.DECIDED)
    completion = yield from complete_all(plan, Decision.COMMIT)
    reach(CommitPoint.COMPLETED)
    if not completion.unfinished:
        yield from plan.log(lambda log: log.finish(plan.gtrid))
        reach(CommitPoint.FINISHED)
    _raise_damage("committed", plan, completion)
    return Outcome(decision=Decision.COMMIT, unfinished=tuple(completion.unfinished), reports=tuple(completion.reports))


def rollback(plan: CommitPlan) -> Work[Outcome]:
    """Roll the transaction back.

    Raises:
        HeuristicOutcome: a branch was completed contrary to the decision.
    """
    completion = yield from complete_all(plan, Decision.ROLLBACK)
    _raise_damage("rolled back", plan, completion)
    return Outcome(
        decision=Decision.ROLLBACK, unfinished=tuple(completion.unfinished), reports=tuple(completion.reports)
    )


def _give_up(plan: CommitPlan, branch: EnlistedBranch, cause: XAException) -> Work[Outcome]:
    """Roll all branches back because one cannot commit."""
    completion = yield from complete_all(plan, Decision.ROLLBACK)
    _raise_damage("rolled back", plan, completion)
    raise RolledBack(f"{branch.resource.name} cannot commit: {cause}", gtrid=plan.gtrid, causes=(cause,)) from cause


def complete_all(plan: CommitPlan, decision: Decision) -> Work[Completion]:
    """Tell every remaining branch the decision. An unreachable branch does not stop the others."""
    completion = Completion(plan.log, plan.forget)
    for branch in plan.branches:
        if branch.live:
            yield from complete(branch, decision, completion)
            reach(CommitPoint.COMMITTED if decision is Decision.COMMIT else CommitPoint.ROLLED_BACK)
    return completion


def complete(
    branch: EnlistedBranch, decision: Decision, completion: Completion, *, recovering: bool = False
) -> Work[bool]:
    """Tell one branch the decision.

    Args:
        branch: the branch.
        decision: the decision.
        completion: the object that collects the results.
        recovering: whether the branch may have got the decision before.

    Returns:
        Whether the branch is complete.
    """
    session, uncertain, orphaned = branch.session, recovering, recovering and decision is Decision.ROLLBACK
    answer = yield from ask(session, decision.value, branch.xid)
    fresh = None
    if isinstance(answer, XAER_RMFAIL):
        uncertain = True
        if (yield from ask(session, "usable")) is not True:
            fresh = yield from ask(branch.resource, "open")
            if isinstance(fresh, XAException):
                answer, fresh = fresh, None
            else:
                session = fresh
                answer = yield from ask(session, decision.value, branch.xid)
    if orphaned and _decided_alone(answer):
        completion.alone.add(branch.name)
        done = True
    else:
        done = yield from _understand(branch, session, decision, answer, uncertain, completion)
    if fresh is not None:
        yield from ask(branch.resource, "release", fresh)
    if done:
        branch.live = False
    return done


def _understand(
    branch: EnlistedBranch, session: Any, decision: Decision, answer: object, uncertain: bool, completion: Completion
) -> Work[bool]:
    """Interpret *answer*. Return whether the branch is complete."""
    if not isinstance(answer, XAException):
        return True
    outcome: Heuristic | None
    match answer:
        case XAHeuristic():
            outcome = _HEURISTIC.get(type(answer), Heuristic.HAZARD)
        case XARollback():
            outcome = Heuristic.ROLLED_BACK if decision is Decision.COMMIT else None
        case XAER_NOTA():
            outcome = yield from _unknown(branch, decision, answer, uncertain, completion.log)
        case _:
            completion.unfinished[branch.name] = answer
            return False
    if outcome is None:
        return True
    report = HeuristicReport(
        gtrid=branch.xid.gtrid,
        resource=branch.name,
        outcome=outcome,
        decision=decision.value,
        reason=str(answer),
    )
    completion.reports.append(report)
    written = yield from completion.log(lambda log: log.record(report))
    if isinstance(written, TransactionError):
        # Never forget an outcome that is not recorded: the resource keeps it, and recovery finds it there.
        completion.unfinished[branch.name] = written
        return False
    reach(CommitPoint.HEURISTIC_RECORDED)
    if completion.forget:
        forgotten: object = None
        if isinstance(answer, XAHeuristic):
            forgotten = yield from ask(session, "forget", branch.xid)
        if isinstance(forgotten, XAException) and not isinstance(forgotten, XAER_NOTA):
            completion.unfinished[branch.name] = forgotten
            return False
        reach(CommitPoint.HEURISTIC_FORGOTTEN)
        yield from completion.log(lambda log: log.forgotten(report.gtrid, report.resource))
    return True


_HEURISTIC: Final[dict[type[XAException], Heuristic]] = {
    XA_HEURCOM: Heuristic.COMMITTED,
    XA_HEURRB: Heuristic.ROLLED_BACK,
    XA_HEURMIX: Heuristic.MIXED,
}


def _unknown(
    branch: EnlistedBranch, decision: Decision, answer: XAER_NOTA, uncertain: bool, log: Access
) -> Work[Heuristic | None]:
    """Interpret XAER_NOTA. Return the end of the branch if it contradicts the decision, otherwise ``None``."""
    ended = ended_as(answer)
    if ended is not None:
        agreeing = Heuristic.COMMITTED if decision is Decision.COMMIT else Heuristic.ROLLED_BACK
        return None if ended is agreeing else ended
    if uncertain or decision is Decision.ROLLBACK:
        return None
    row = yield from log(lambda log: log.read(branch.xid.gtrid))
    if isinstance(row, DecisionRow) and (row.finished is not None or row.recoveries):
        return None  # recovery in another process has completed the branch before
    return Heuristic.HAZARD


def _decided_alone(answer: object) -> bool:
    """Return whether a resource answers to the roll-back of an orphan that it commits, or has committed, the branch."""
    match answer:
        case XAER_PROTO():
            return answer.facts.get("state") in _COMMITTING
        case XAER_NOTA():
            return ended_as(answer) is Heuristic.COMMITTED
        case _:
            return False


def ended_as(answer: XAER_NOTA) -> Heuristic | None:
    """Return the end of the branch that dtx names in *answer*; ``None`` if it names none."""
    match answer.facts.get("ended"):
        case None:
            return None
        case "committed" | "read-only":
            return Heuristic.COMMITTED
        case "rolled-back":
            return Heuristic.ROLLED_BACK
        case _:
            return Heuristic.HAZARD


def _commit_one_phase(plan: CommitPlan, branch: EnlistedBranch) -> Work[Outcome]:
    reach(CommitPoint.ONE_PHASE_BEFORE)
    answer = yield from ask(branch.session, "commit_one_phase", branch.xid)
    if isinstance(answer, XAER_RMFAIL) and branch.session.one_phase_repeatable:
        fresh = yield from ask(branch.resource, "open")
        if not isinstance(fresh, XAException):
            answer = yield from ask(fresh, "commit_one_phase", branch.xid)
            yield from ask(branch.resource, "release", fresh)
    reach(CommitPoint.ONE_PHASE_AFTER)
    done = Outcome(decision=Decision.COMMIT, one_phase=True)
    match answer:
        case None:
            branch.live = False
            return done
        case XARollback():
            branch.live = False
            raise RolledBack(f"{branch.resource.name} rolled back: {answer}", gtrid=plan.gtrid, causes=(answer,))
        case XAHeuristic():
            completion = Completion(plan.log, plan.forget)
            yield from _understand(branch, branch.session, Decision.COMMIT, answer, False, completion)
            _raise_damage("committed", plan, completion)
            return done
        case XAER_NOTA() if ended_as(answer) is Heuristic.COMMITTED:
            branch.live = False
            return done
        case XAER_NOTA() if ended_as(answer) is Heuristic.ROLLED_BACK:
            branch.live = False
            raise RolledBack(f"{branch.resource.name} rolled back: {answer}", gtrid=plan.gtrid, causes=(answer,))
        case XAER_NOTA() | XAER_RMFAIL():
            raise OutcomeUnknown(
                f"{branch.resource.name}, the only resource with work, did not report whether it committed: {answer}",
                gtrid=plan.gtrid,
                causes=(answer,),
            )
        case XAException():
            return (yield from _give_up(plan, branch, answer))
        case _:
            raise AssertionError(f"a session answered commit_one_phase with {answer!r}")


def _raise_damage(decided: str, plan: CommitPlan, completion: Completion) -> None:
    if completion.damage:
        message = f"the transaction is {decided}, but a branch was completed otherwise"
        raise heuristic_error(message, plan.gtrid, completion.damage, len(plan.branches))

"""The two-phase commit, without any I/O: which resource is asked what, in which order, and what its answer means.

X/Open CAE C193 leaves the second phase's answers to the transaction manager. What they mean here, and in Narayana and
Bitronix where these differ:

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
                    back"; dtx says by it that the call was refused
                    (403), and the branch is as it was
    PROTO, INVAL    left to recovery                                   left to recovery

dtx says with XAER_NOTA how a branch ended that ended lately; that is believed before all of the above.

A branch that is alone commits in one phase: its resource manager decides, and no log of ours knows (Narayana and
Atomikos write nothing either). If the program dies in that call, recovery finds a branch without a decision, fences it
and rolls it back as every orphan. A resource that answers that it is committing it, or has committed it, was asked by
the program before: nobody else commits a branch about which nothing was decided, but an operator, whose doings have
answers of their own. So it is neither damage nor undone: the fence is withdrawn, and the log says nothing.
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
    """Whether the resource manager may have something of it still."""

    @property
    def name(self) -> str:
        """Its bqual: the name of the resource, and a number after ``/`` where it has several branches."""
        return self.xid.bqual.decode("ascii", "backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a transaction ended.

    Args:
        decision: what was decided.
        unfinished: resources that could not be told yet; recovery tells them.
        reports: heuristic outcomes, none of them damaging.
        one_phase: whether one resource decided alone.
    """

    decision: Decision
    unfinished: tuple[str, ...] = ()
    reports: tuple[HeuristicReport, ...] = ()
    one_phase: bool = False


@dataclass(slots=True)
class Completion:
    """What telling the branches has come to.

    Args:
        log: calls the log, which gets heuristic outcomes.
        forget: whether heuristic outcomes are forgotten once they are recorded.
    """

    log: Access
    forget: bool
    reports: list[HeuristicReport] = field(default_factory=list)
    unfinished: dict[str, XAException | TransactionError] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    """Branches that recovery wanted to roll back, and their resources commit or have committed, in one phase."""

    @property
    def damage(self) -> list[HeuristicReport]:
        """The reports of branches that ended, or may have ended, otherwise than was decided."""
        return [report for report in self.reports if report.damaging]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPlan:
    """A transaction that is to be completed.

    Args:
        gtrid: its id.
        format_id: of its xids.
        node: whose it is.
        branches: of all enlisted resources.
        log: calls the log.
        forget: whether heuristic outcomes are forgotten once they are recorded.
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
        """The decision to commit."""
        return DecisionRow(
            gtrid=self.gtrid,
            format_id=self.format_id,
            node=self.node,
            decision=Decision.COMMIT,
            at=now(),
            resources=tuple(branch.name for branch in voted),
        )


def commit(plan: CommitPlan) -> Work[Outcome]:
    """Commit.

    Raises:
        RolledBack, HeuristicOutcome, OutcomeUnknown: it ended otherwise.
    """
    for branch in plan.branches:
        answer = yield from ask(branch.session, "end", branch.xid)
        if isinstance(answer, XAException):
            return (yield from _give_up(plan, branch, answer))
        reach(CommitPoint.ENDED)
    voted: list[EnlistedBranch] = []
    for position, branch in enumerate(plan.branches, start=1):
        if plan.one_phase and not voted and position == len(plan.branches):
            # Alone, or all others were read-only: its own commit is the decision, and nothing need be logged.
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
    """All have voted: make the decision durable, and tell the branches.

    Args:
        plan: the transaction.
        voted: its branches that are prepared.

    Raises:
        RolledBack, HeuristicOutcome, OutcomeUnknown: it ended otherwise.
    """
    row = plan.row(voted)
    stands = yield from plan.log(lambda log: log.decide(row))
    reason = "recovery took the transaction for dead and rolled it back"
    if isinstance(stands, TransactionError):
        reason = f"the decision to commit could not be written: {stands}"
        # It may be written or not. The fence says which, and keeps a write that is under way from coming in later.
        stands = yield from plan.log(lambda log: log.fence(row))
    if isinstance(stands, TransactionError):
        raise OutcomeUnknown(
            f"the log of decisions is out of reach, so it is not known whether the transaction commits; recovery will "
            f"complete it ({stands})",
            gtrid=plan.gtrid,
        )
    if stands is Decision.ROLLBACK:
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
    """Roll back.

    Raises:
        HeuristicOutcome: it ended otherwise.
    """
    completion = yield from complete_all(plan, Decision.ROLLBACK)
    _raise_damage("rolled back", plan, completion)
    return Outcome(
        decision=Decision.ROLLBACK, unfinished=tuple(completion.unfinished), reports=tuple(completion.reports)
    )


def _give_up(plan: CommitPlan, branch: EnlistedBranch, cause: XAException) -> Work[Outcome]:
    """A branch cannot be prepared: none is committed."""
    completion = yield from complete_all(plan, Decision.ROLLBACK)
    _raise_damage("rolled back", plan, completion)
    raise RolledBack(f"{branch.resource.name} cannot commit: {cause}", gtrid=plan.gtrid, causes=(cause,)) from cause


def complete_all(plan: CommitPlan, decision: Decision) -> Work[Completion]:
    """Tell every branch that is left what was decided. One that cannot be told does not keep the others waiting."""
    completion = Completion(plan.log, plan.forget)
    for branch in plan.branches:
        if branch.live:
            yield from complete(branch, decision, completion)
            reach(CommitPoint.COMMITTED if decision is Decision.COMMIT else CommitPoint.ROLLED_BACK)
    return completion


def complete(
    branch: EnlistedBranch, decision: Decision, completion: Completion, *, recovering: bool = False
) -> Work[bool]:
    """Tell one branch what was decided.

    Args:
        branch: which.
        decision: what.
        completion: gets what comes of it.
        recovering: whether somebody may have told it before.

    Returns:
        Whether it is done with.
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
    """What *answer* means; whether the branch is done with."""
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
        # Never forget what nobody has written down: the resource keeps it, and recovery finds it there.
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
    """The resource does not know the branch: how it ended, where that is not as decided."""
    ended = ended_as(answer)
    if ended is not None:
        agreeing = Heuristic.COMMITTED if decision is Decision.COMMIT else Heuristic.ROLLED_BACK
        return None if ended is agreeing else ended
    if uncertain or decision is Decision.ROLLBACK:
        return None
    row = yield from log(lambda log: log.read(branch.xid.gtrid))
    if isinstance(row, DecisionRow) and (row.finished is not None or row.recoveries):
        return None  # recovery was quicker, in another process
    return Heuristic.HAZARD


def _decided_alone(answer: object) -> bool:
    """Whether a resource that is asked to roll an orphan back was asked to commit it in one phase, and does or did."""
    match answer:
        case XAER_PROTO():
            return answer.facts.get("state") in _COMMITTING
        case XAER_NOTA():
            return ended_as(answer) is Heuristic.COMMITTED
        case _:
            return False


def ended_as(answer: XAER_NOTA) -> Heuristic | None:
    """How dtx remembers that the branch ended; ``None``: it does not say."""
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
                f"{branch.resource.name}, the only resource with work, did not say whether it committed: {answer}",
                gtrid=plan.gtrid,
                causes=(answer,),
            )
        case XAException():
            return (yield from _give_up(plan, branch, answer))
        case _:
            raise AssertionError(f"a session answered commit_one_phase with {answer!r}")


def _raise_damage(decided: str, plan: CommitPlan, completion: Completion) -> None:
    if completion.damage:
        message = f"the transaction is {decided}, but somebody decided otherwise about a branch"
        raise heuristic_error(message, plan.gtrid, completion.damage, len(plan.branches))

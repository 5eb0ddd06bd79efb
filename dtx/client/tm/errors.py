"""The exceptions of transactions that did not simply commit, and of the transaction manager itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dtx.client.errors import XAException
from dtx.xa.codes import Heuristic


@dataclass(frozen=True, slots=True, kw_only=True)
class HeuristicReport:
    """A branch that was completed without this transaction manager, or may have been.

    Args:
        gtrid: the global transaction.
        resource: the name of the resource whose branch it is.
        outcome: the end of the branch; ``HAZARD`` where the end is not known.
        decision: the decision about the transaction, ``commit`` or ``rollback``.
        reason: the text from the resource.
    """

    gtrid: bytes
    resource: str
    outcome: Heuristic
    decision: str
    reason: str

    @property
    def damaging(self) -> bool:
        """Whether the end of the branch contradicts the decision, or may contradict it."""
        agreeing = Heuristic.COMMITTED if self.decision == "commit" else Heuristic.ROLLED_BACK
        return self.outcome is not agreeing

    def __str__(self) -> str:
        return f"{self.resource}: {self.outcome.value} where {self.decision} was decided ({self.reason})"


class TransactionError(Exception):
    """The base of all exceptions of a transaction manager.

    Args:
        message: the description of the error.
        gtrid: the global transaction; empty where there is none.
        causes: the errors that the resources raised.
        reports: the heuristic outcomes of the branches. The log contains them, too.
    """

    known: ClassVar[bool] = True
    """Whether the outcome is known. If not, recovery completes the transaction. Do not simply repeat the work then."""

    def __init__(
        self,
        message: str,
        *,
        gtrid: bytes = b"",
        causes: Sequence[XAException] = (),
        reports: Sequence[HeuristicReport] = (),
    ) -> None:
        super().__init__(message)
        self.gtrid = gtrid
        self.causes = tuple(causes)
        self.reports = tuple(reports)


class RolledBack(TransactionError):
    """The transaction could not be committed. None of its work took effect. The program may try it again."""


class TimedOut(RolledBack):
    """The transaction took longer than its time-out and is rolled back."""


class OutcomeUnknown(TransactionError):
    """The program does not know the outcome: the log, or the only resource, was unreachable at that moment."""

    known = False


class HeuristicOutcome(TransactionError):
    """Branches were completed contrary to the decision. The log records this. An operator must repair the data."""


class HeuristicRollback(HeuristicOutcome):
    """The decision was commit, and every branch is rolled back."""


class HeuristicCommit(HeuristicOutcome):
    """The decision was rollback, and every branch is committed."""


class HeuristicMixed(HeuristicOutcome):
    """Some of the transaction is committed, and some of it is rolled back."""


class HeuristicHazard(HeuristicOutcome):
    """Some of the transaction may be committed while other parts are rolled back.

    A resource no longer knows its branch.
    """

    known = False


class LogFailed(TransactionError):
    """The log of decisions cannot be used."""


class Misuse(TransactionError):
    """The call is not allowed in this state.

    Examples: there is no current transaction, the transaction is over, or the resource is not registered.
    """


def heuristic_error(message: str, gtrid: bytes, reports: Sequence[HeuristicReport], branches: int) -> HeuristicOutcome:
    """Return the exception for the damaging *reports* of a transaction.

    Args:
        message: the beginning of the message; the text of the reports follows it.
        gtrid: the global transaction.
        reports: the damaging reports.
        branches: the number of branches of the transaction.
    """
    outcomes = {report.outcome for report in reports}
    kind: type[HeuristicOutcome] = HeuristicMixed
    if len(reports) == branches and outcomes == {Heuristic.ROLLED_BACK}:
        kind = HeuristicRollback
    elif len(reports) == branches and outcomes == {Heuristic.COMMITTED}:
        kind = HeuristicCommit
    elif outcomes == {Heuristic.HAZARD}:
        kind = HeuristicHazard
    words = "; ".join(map(str, reports))
    return kind(f"{message}: {words}", gtrid=gtrid, reports=reports)

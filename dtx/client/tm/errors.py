"""How a transaction can end that was not simply committed; and what the transaction manager itself cannot do."""

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
        outcome: how the branch ended; ``HAZARD`` where that is not known.
        decision: what was decided about the transaction, ``commit`` or ``rollback``.
        reason: the resource's words.
    """

    gtrid: bytes
    resource: str
    outcome: Heuristic
    decision: str
    reason: str

    @property
    def damaging(self) -> bool:
        """Whether the branch ended, or may have ended, otherwise than was decided."""
        agreeing = Heuristic.COMMITTED if self.decision == "commit" else Heuristic.ROLLED_BACK
        return self.outcome is not agreeing

    def __str__(self) -> str:
        return f"{self.resource}: {self.outcome.value} where {self.decision} was decided ({self.reason})"


class TransactionError(Exception):
    """The base of everything that a transaction manager raises.

    Args:
        message: what happened.
        gtrid: the global transaction, where there is one.
        causes: what the resources answered.
        reports: heuristic outcomes of its branches, which are in the log too.
    """

    known: ClassVar[bool] = True
    """Whether the outcome is known. Where it is not, recovery brings it about; the work must not simply be repeated."""

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
    """The transaction could not be committed. Nothing of it has happened; it may be tried again."""


class TimedOut(RolledBack):
    """The transaction took longer than its time-out, and is rolled back."""


class OutcomeUnknown(TransactionError):
    """Whether it is committed is not known here: the log, or the only resource, was out of reach at that moment."""

    known = False


class HeuristicOutcome(TransactionError):
    """Somebody completed branches otherwise than was decided. The log has it; people have to mend it."""


class HeuristicRollback(HeuristicOutcome):
    """Commit was decided, and every branch is rolled back."""


class HeuristicCommit(HeuristicOutcome):
    """Rollback was decided, and every branch is committed."""


class HeuristicMixed(HeuristicOutcome):
    """Some of it is committed and some is rolled back."""


class HeuristicHazard(HeuristicOutcome):
    """Some of it may be committed while other parts are rolled back: a resource does not know its branch any more."""

    known = False


class LogFailed(TransactionError):
    """The log of decisions cannot be used."""


class Misuse(TransactionError):
    """The call is wrong in this state: no transaction is under way, it is over, the resource is not registered."""


def heuristic_error(message: str, gtrid: bytes, reports: Sequence[HeuristicReport], branches: int) -> HeuristicOutcome:
    """The exception that stands for damaging *reports* of a transaction that has so many branches."""
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

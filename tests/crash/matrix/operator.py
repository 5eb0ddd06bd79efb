"""An operator who decides a prepared branch."""

from dtx.client import Xid
from tests.crash.matrix.cases import Decision
from tests.crash.matrix.stages import MatrixStage


def decide(stage: MatrixStage, xid: Xid, decision: Decision) -> None:
    """Commit or roll back *xid*, unless that has happened already."""
    raise NotImplementedError

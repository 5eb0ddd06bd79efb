"""Cells: a case is played once to find the failpoints that it reaches, and again for each with a death there.

Theory of operation. Between two cells only dtx is restarted, so the end of one cell is the restart for the next one. A
cell consists of several processes of dtx. In a case about a restart, the first one dies at the case's point. The next
one dies at the cell's point, or stops there while PostgreSQL or RabbitMQ is killed. The last one has no failpoint, and
completes everything.
"""

import contextlib
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from dtx.failpoint import Point
from tests.evidence.matrix.audit import Verdict, audit
from tests.evidence.matrix.cases import Condition, Kind, Row
from tests.evidence.matrix.stages import MatrixStage
from tests.evidence.matrix.transaction import INSISTING, UNANSWERED, Step, Transaction

LINGER: Final = 2.5
"""Seconds after the end in which points are still reached: receipts are drained, the lease is renewed."""
_PAUSE: Final = 0.05
_LATE: Final = 12.0
"""Seconds to wait for a point that is reached after the end."""
MOST: Final = 4
"""Default limit of cells for one point in a row."""
TIMED: Final = frozenset(
    {
        Point.LEASE_RENEW_BEFORE,
        Point.LEASE_RENEW_AFTER,
        Point.DRAIN_BEFORE,
        Point.DRAIN_PURGED,
        Point.DRAIN_AFTER,
        Point.LOG_STORED_BEFORE,
        Point.LOG_STORED_AFTER,
        Point.ADOPT_BEFORE,
        Point.ADOPT_MOVED,
        Point.ADOPT_AFTER,
        Point.ADOPT_LOADED,
    }
)
"""Points that are reached periodically, or by occasional writes: one cell is enough."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A place of death: one occurrence of a failpoint in a process.

    Args:
        point: the failpoint.
        number: the occurrence, counted from 1.
    """

    point: Point
    number: int

    @property
    def at(self) -> str:
        """The argument of ``python -m dtx.failpoint``."""
        return f"{self.point.label}#{self.number}"

    @classmethod
    def read(cls, at: str) -> "Cell":
        """Parse that argument."""
        label, _, number = at.partition("#")
        return cls(Point.named(label), int(number))


@dataclass
class Result:
    """The result of one run.

    Args:
        reached: whether the point was reached; otherwise nothing was killed.
        verdict: of the audit.
        seconds: duration.
    """

    reached: bool
    verdict: Verdict
    seconds: float


@dataclass
class Trace:
    """The points that a process of dtx reached, in order, without a death.

    Args:
        start: up to READY, the same for all cases without a first process.
        rest: from READY to its end.
        verdict: of the audit.
    """

    start: list[Point]
    rest: list[Point]
    verdict: Verdict

    def cells(self, *, start: bool, most: int = MOST) -> list[Cell]:
        """Return the cells to play.

        Args:
            start: include points that are reached before READY.
            most: limit of cells for one point.
        """
        times: Counter[Point] = Counter()
        tried: Counter[Point] = Counter()
        found = []
        for position, point in enumerate((*self.start, *self.rest)):
            times[point] += 1
            if position < len(self.start) and not start:
                continue
            if tried[point] < (1 if point in TIMED else most):
                tried[point] += 1
                found.append(Cell(point, times[point]))
        return found


def learn(stage: MatrixStage, row: Row) -> Trace:
    """Play *row* without a death, except that of the first process."""
    transaction = _begin(stage, row)
    service = stage.dtx
    service.trace_file.unlink(missing_ok=True)
    if not service.start_armed("--trace", str(service.trace_file)):
        raise AssertionError("dtx does not start")
    started = _points(stage)
    _proceed_to_the_end(stage, transaction)
    time.sleep(LINGER)  # no event shows that no further point will be reached
    everything = _points(stage)
    verdict = audit(stage, transaction)
    return Trace(everything[: len(started)], everything[len(started) :], verdict)


def play(stage: MatrixStage, row: Row, cell: Cell) -> Result:
    """Play *row* with a death at *cell*."""
    began = time.monotonic()
    transaction = _begin(stage, row)
    reached = (_die if row.condition.kills_dtx else _hold)(stage, transaction, row.condition, cell)
    _proceed_to_the_end(stage, transaction)
    verdict = audit(stage, transaction)
    return Result(reached, verdict, time.monotonic() - began)


def _begin(stage: MatrixStage, row: Row) -> Transaction:
    transaction = Transaction(row.case, stage, next(stage.numbers))
    for member in (stage.dtx, stage.other):
        if member is not None and not member.running:
            member.start()
    transaction.fill()
    stage.dtx.kill9()
    if row.case.kind is Kind.NOTHING and stage.node is not None:
        stage.forget_markers()
    if row.case.killed_at is not None:
        reached = _die_at(stage, transaction, row.case.killed_at)
        assert reached, f"{row.name}: the first process did not die at its point"
    return transaction


def _die(stage: MatrixStage, transaction: Transaction, _condition: Condition, cell: Cell) -> bool:
    return _die_at(stage, transaction, cell.at)


def _die_at(stage: MatrixStage, transaction: Transaction, at: str) -> bool:
    """Run one process up to that point; return whether it was reached."""
    service = stage.dtx
    if service.start_armed("--at", at, "--do", "die"):
        deadline = time.monotonic() + INSISTING
        while service.running and transaction.step is not Step.ENDED and time.monotonic() < deadline:
            try:
                transaction.proceed()
            except UNANSWERED:
                time.sleep(_PAUSE)
        if not service.wait_end(_LATE):
            service.kill9()
            return False
    return service.died


def _hold(stage: MatrixStage, transaction: Transaction, condition: Condition, cell: Cell) -> bool:
    """Stop dtx at that point, kill another process, and continue dtx. Return whether the point was reached."""
    service = stage.dtx
    service.hold_file.unlink(missing_ok=True)
    service.arming = ("--at", cell.at, "--do", "hold", "--hold-file", str(service.hold_file))
    service.start(wait=False)
    service.arming = ()
    given_up = threading.Event()
    killing = stage.background(lambda: _kill_other(stage, condition, given_up))
    try:
        service.wait_ready()
    except RuntimeError:
        if service.running:
            raise
        # A database or a broker that dies during the start of dtx may end it; the last step starts it again.
    else:
        _proceed_while_running(stage, transaction)
        with contextlib.suppress(TimeoutError):
            killing.result(_LATE)
    given_up.set()
    reached = bool(killing.result(120))
    if not service.running and transaction.step is not Step.NEW:
        transaction.faults.append(f"dtx ended by itself: {service.wait()}")
    return reached


def _kill_other(stage: MatrixStage, condition: Condition, given_up: threading.Event) -> bool:
    """Kill the other process while dtx is stopped at its point, and start it again."""
    held = stage.dtx.hold_file
    while not held.exists():
        if given_up.wait(0.005) or not stage.dtx.running:
            return False
    try:
        if condition is Condition.POSTGRES:
            stage.postgres.kill9()
            stage.postgres.wait_ready()
        else:
            assert stage.node is not None
            stage.node.kill9()
    finally:
        held.unlink()
    if stage.node is not None and not stage.node.running:
        stage.node.start()
    return True


def _proceed_while_running(stage: MatrixStage, transaction: Transaction) -> None:
    deadline = time.monotonic() + INSISTING
    while stage.dtx.running and transaction.step is not Step.ENDED and time.monotonic() < deadline:
        try:
            transaction.proceed()
        except UNANSWERED:
            time.sleep(_PAUSE)


def _proceed_to_the_end(stage: MatrixStage, transaction: Transaction) -> None:
    """Run the last process of dtx, or two if the case stops dtx."""
    for _ in range(2):
        if not stage.dtx.running:
            stage.dtx.start()
        _proceed_while_running(stage, transaction)
    if not stage.dtx.running:
        transaction.faults.append(f"dtx ended by itself: {stage.dtx.wait()}")
        stage.dtx.start()
    transaction.see_to_the_end()


def _points(stage: MatrixStage) -> list[Point]:
    with contextlib.suppress(FileNotFoundError):
        return [Point.named(line) for line in stage.dtx.trace_file.read_text().splitlines()]
    return []

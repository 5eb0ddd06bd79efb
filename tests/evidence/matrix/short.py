"""The matrix as tests: parameters for the cells, and shared stages."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Self

import pytest

from tests.evidence.matrix import rotation
from tests.evidence.matrix.cases import Condition, Decision, Kind, Mode, Row, all_rows
from tests.evidence.matrix.cells import Cell, play
from tests.evidence.matrix.stages import MatrixStage, Servers
from tests.support.postgres import PostgresServer


def of_rotation(mode: Mode) -> Iterator[tuple[Row, Cell]]:
    """Yield each point once, grouped by stage."""
    chosen = ((row, Cell(point, 1)) for point, row in rotation.read().items() if row.case.mode == mode)
    return iter(sorted(chosen, key=lambda found: list(Condition).index(found[0].condition)))


def row(mode: Mode, condition: Condition, kind: Kind, decision: Decision = Decision.COMMIT) -> Row:
    """Return the row of a case without a first process."""
    wanted = (mode, condition, kind, decision, None)
    for found in all_rows():
        case = found.case
        if (case.mode, found.condition, case.kind, case.decision, case.killed_at) == wanted:
            return found
    raise LookupError(f"the matrix has no row {wanted}")


def parameters(cells: Iterable[tuple[Row, Cell]]) -> pytest.MarkDecorator:
    """Return the parameters with one test for each cell."""
    named = [pytest.param(row, cell, id=f"{cell.at} - {row.condition} - {row.case.name}") for row, cell in cells]
    return pytest.mark.parametrize(("row", "cell"), named)


class Stages:
    """Keeps the stage of the last cell, and makes another one if a cell needs it. Use as a context manager.

    Args:
        postgres: a server.
        request: for the broker, if a cell needs one.
    """

    def __init__(self, postgres: PostgresServer, request: pytest.FixtureRequest) -> None:
        self._servers = Servers(postgres, lambda: request.getfixturevalue("shared_rabbitmq"))
        self._stack = contextlib.ExitStack()
        self._stage: MatrixStage | None = None

    def __enter__(self) -> Self:
        self._stack.enter_context(self._servers)
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self._leave()

    def _leave(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            try:
                assert list(stage.finish_bystanders()) == []
            finally:
                stage.__exit__()

    def play(self, row: Row, cell: Cell) -> None:
        """Play a cell, and check all guarantees."""
        mode, condition = row.case.mode, row.condition
        if self._stage is None or (self._stage.mode, self._stage.condition) != (mode, condition):
            self._leave()
            self._stage = MatrixStage(condition, mode, self._servers)
            self._stage.__enter__()
        result = play(self._stage, row, cell)
        assert result.verdict.broken(may_repeat=row.may_repeat) == []
        assert result.reached, f"{row.name} no longer reaches {cell.at}: python -m tests.evidence.matrix --learn"

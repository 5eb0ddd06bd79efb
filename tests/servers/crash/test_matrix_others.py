"""The short kill matrix: PostgreSQL and RabbitMQ die at the most important failpoints."""

from collections.abc import Iterator

import pytest

from dtx.failpoint import Point
from tests.evidence.matrix.cases import Condition, Kind, Mode, Row
from tests.evidence.matrix.cells import Cell
from tests.evidence.matrix.short import Stages, parameters, row
from tests.support.postgres import PostgresServer

_ALONGSIDE: Mode = "alongside"
_STANDALONE: Mode = "standalone"
_POSTGRES = [
    (row(_ALONGSIDE, Condition.POSTGRES, Kind.BOTH), Point.LOG_SENT, 2),
    (row(_ALONGSIDE, Condition.POSTGRES, Kind.BOTH), Point.UNIT_SENT, 1),
    (row(_STANDALONE, Condition.POSTGRES, Kind.BOTH), Point.LOG_SENT, 2),
    (row(_STANDALONE, Condition.POSTGRES, Kind.ONE_PHASE), Point.LOG_SENT, 1),
    (row(_STANDALONE, Condition.POSTGRES, Kind.LOCAL), Point.LOG_SENT, 1),
]
_BROKER = [
    (row(_ALONGSIDE, Condition.BROKER, Kind.BOTH), Point.TAKING_SENT, 1),
    (row(_ALONGSIDE, Condition.BROKER, Kind.BOTH), Point.UNIT_SENT, 1),
]


@pytest.fixture(scope="module")
def stages(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Stages]:
    with Stages(postgres, request) as stages:
        yield stages


@parameters((row, Cell(point, number)) for row, point, number in _POSTGRES)
def test_every_promise_is_kept_when_postgresql_dies_at(stages: Stages, row: Row, cell: Cell) -> None:
    """Guarantees: "exactly once when dtx, PostgreSQL, clients or the network die"."""
    stages.play(row, cell)


@parameters((row, Cell(point, number)) for row, point, number in _BROKER)
def test_nothing_is_lost_when_rabbitmq_dies_at(stages: Stages, row: Row, cell: Cell) -> None:
    """Guarantees: "if a broker node dies … messages of that branch may be repeated (never lost)"."""
    stages.play(row, cell)

"""The short kill matrix alongside a broker: dtx dies once at each failpoint."""

from collections.abc import Iterator

import pytest

from tests.evidence.matrix.cases import Row
from tests.evidence.matrix.cells import Cell
from tests.evidence.matrix.short import Stages, of_rotation, parameters
from tests.support.postgres import PostgresServer


@pytest.fixture(scope="module")
def stages(postgres: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Stages]:
    with Stages(postgres, request) as stages:
        yield stages


@parameters(of_rotation("alongside"))
def test_every_promise_is_kept_when_dtx_dies_at(stages: Stages, row: Row, cell: Cell) -> None:
    """Guarantees: "exactly once when dtx, PostgreSQL, clients or the network die"; "nothing is lost"."""
    stages.play(row, cell)

"""A program is killed at each point of its transaction manager; after recovery all resources agree."""

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from dtx.client.tm import Decision, RolledBack
from dtx.client.tm.steps import CommitPoint
from tests.evidence.tm.campaign import play, preforker, program
from tests.support.broker import MODES, Mode
from tests.support.postgres import PostgresServer
from tests.support.prefork import Preforker
from tests.support.processes import unmeasured
from tests.support.rabbitmq import RabbitNode
from tests.support.tm import ALL, World, new_id, two_phase_server
from tests.support.tm_child import UNDONE

COMMIT_POINTS = [
    (CommitPoint.BEGUN, 1, False),
    (CommitPoint.BEGUN, 4, False),
    (CommitPoint.ENDED, 2, False),
    (CommitPoint.PREPARED, 1, False),
    (CommitPoint.PREPARED, 3, False),
    (CommitPoint.VOTED, 1, False),
    (CommitPoint.DECIDED, 1, True),
    (CommitPoint.COMMITTED, 1, True),
    (CommitPoint.COMMITTED, 3, True),
    (CommitPoint.COMPLETED, 1, True),
    (CommitPoint.FINISHED, 1, True),
]
"""Point, the occurrence number, whether the transaction is then committed."""
RECOVERY_POINTS = [
    (CommitPoint.VOTED, CommitPoint.RECOVERY_SCANNED, 1, False),
    (CommitPoint.VOTED, CommitPoint.RECOVERY_FENCED, 1, False),
    (CommitPoint.VOTED, CommitPoint.RECOVERY_COMPLETED, 2, False),
    (CommitPoint.DECIDED, CommitPoint.RECOVERY_TAKEN_UP, 1, True),
    (CommitPoint.DECIDED, CommitPoint.RECOVERY_COMPLETED, 2, True),
    (CommitPoint.DECIDED, CommitPoint.RECOVERY_FINISHED, 1, True),
]
"""Where the program dies, where its recovery dies, the occurrence number, whether the transaction is committed."""


class Dies(Protocol):
    """The type of the fixture ``dies``."""

    def __call__(self, point: CommitPoint, number: int = ..., **order: Any) -> None:
        """Run the program until it dies at *point*."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL server with prepared transactions enabled."""
    with two_phase_server() as running:
        yield running


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """Where both dtx store their messages."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def standing_world(
    mode: Mode, server: PostgresServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    """The world of all tests of a mode."""
    node: RabbitNode | None = request.getfixturevalue("shared_rabbitmq") if mode == "alongside" else None
    with World(server, tmp_path_factory.mktemp("tm"), node) as world:
        yield world


@pytest.fixture
def world(standing_world: World, mode: Mode, request: pytest.FixtureRequest) -> World:
    """The same, emptied."""
    if mode == "alongside":
        request.getfixturevalue("rabbitmq")  # mended
    standing_world.clear()
    return standing_world


@pytest.fixture(scope="module")
def copies() -> Iterator[Preforker]:
    """Makes copies of the program, without coverage because they are killed."""
    with unmeasured(), preforker() as made:
        yield made


@pytest.fixture
def dies(copies: Preforker, world: World) -> Dies:
    """Runs the program until it dies at the given occurrence of a point."""

    def run(point: CommitPoint, number: int = 1, **order: Any) -> None:
        ended = program(copies, world, fates=[(point, number)], **order)
        assert ended.died_at is point, f"it did not reach {point.name}: {ended}"

    return run


@pytest.fixture(scope="module")
def log_database(server: PostgresServer) -> Iterator[str]:
    """A database for a log of decisions."""
    database = server.create_database()
    yield database
    server.drop_database(database)


def agreed(world: World, **options: Any) -> set[str]:
    """Recover, and check that nothing is in doubt; returns the ids that all resources have."""
    with world.manager(**options) as tm:
        report = tm.recover()
        assert report.clean, report
        assert not report.heuristics
        again = tm.recover()
        assert (again.committed, again.rolled_back, again.waiting) == ([], [], {}), "the second recovery still had work"
        assert tm.log.unfinished("n") == []
    assert world.in_doubt() == []
    found = [world.rows("db1"), world.rows("db2")]
    for name in ("q1", "q2"):
        messages = world.messages(name)
        assert len(messages) == len(set(messages)), "a message is there twice"
        found.append(set(messages))
    assert all(ids == found[0] for ids in found), f"the resources do not agree: {found}"
    return found[0]


@pytest.mark.parametrize(("point", "number", "committed"), COMMIT_POINTS)
def test_a_program_that_dies_leaves_nothing_half_done(
    world: World, dies: Dies, point: CommitPoint, number: int, committed: bool
) -> None:
    id_ = new_id()
    dies(point, number, ids=[id_])
    assert agreed(world) == ({id_} if committed else set())


@pytest.mark.parametrize(
    ("point", "number", "committed"),
    [
        (CommitPoint.PREPARED, 3, False),
        (CommitPoint.VOTED, 1, False),
        (CommitPoint.DECIDED, 1, True),
        (CommitPoint.COMMITTED, 2, True),
    ],
)
def test_a_program_with_asyncio_that_dies_leaves_nothing_half_done(
    world: World, dies: Dies, point: CommitPoint, number: int, committed: bool
) -> None:
    """The next program, also with asyncio, dies during recovery."""
    id_ = new_id()
    dies(point, number, ids=[id_], asyncio=True)
    in_recovery = CommitPoint.RECOVERY_TAKEN_UP if committed else CommitPoint.RECOVERY_FENCED
    dies(in_recovery, recover=True, asyncio=True)
    assert agreed(world) == ({id_} if committed else set())


@pytest.mark.parametrize("asyncio", [False, True])
@pytest.mark.parametrize(
    ("point", "in_recovery", "committed"),
    [
        (CommitPoint.VOTED, CommitPoint.RECOVERY_FENCED, False),
        (CommitPoint.DECIDED, CommitPoint.RECOVERY_TAKEN_UP, True),
        (CommitPoint.COMMITTED, CommitPoint.RECOVERY_FINISHED, True),
    ],
)
def test_a_program_with_its_log_in_postgresql_completes_everything(
    world: World,
    dies: Dies,
    log_database: str,
    point: CommitPoint,
    in_recovery: CommitPoint,
    committed: bool,
    asyncio: bool,
) -> None:
    """The next program dies during recovery."""
    id_ = new_id()
    dies(point, ids=[id_], log=log_database, asyncio=asyncio)
    dies(in_recovery, recover=True, log=log_database, asyncio=asyncio)
    assert agreed(world, log=log_database) == ({id_} if committed else set())


@pytest.mark.parametrize(("point", "in_recovery", "number", "committed"), RECOVERY_POINTS)
def test_a_recovery_that_dies_is_done_by_the_next_one(
    world: World, dies: Dies, point: CommitPoint, in_recovery: CommitPoint, number: int, committed: bool
) -> None:
    id_ = new_id()
    dies(point, ids=[id_])
    dies(in_recovery, number, recover=True)
    assert agreed(world) == ({id_} if committed else set())


@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupted_rollback_is_a_rollback(world: World, dies: Dies, number: int) -> None:
    dies(CommitPoint.ROLLED_BACK, number, ids=[f"{UNDONE}-{new_id()}"])
    assert agreed(world) == set()


@pytest.mark.parametrize("alone", ["db1", "q1"])
@pytest.mark.parametrize(
    ("point", "committed"), [(CommitPoint.ONE_PHASE_BEFORE, False), (CommitPoint.ONE_PHASE_AFTER, True)]
)
def test_a_one_phase_commit_leaves_nothing_in_doubt(
    world: World, dies: Dies, point: CommitPoint, committed: bool, alone: str
) -> None:
    id_ = f"{alone}-{new_id()}"
    dies(point, ids=[id_])
    with world.manager() as tm:
        assert not tm.recover().committed
    there = world.rows("db1") if alone == "db1" else set(world.messages("q1"))
    assert there == ({id_} if committed else set())
    assert world.in_doubt() == []


@pytest.mark.parametrize("point", [CommitPoint.HEURISTIC_RECORDED, CommitPoint.HEURISTIC_FORGOTTEN])
def test_a_heuristic_outcome_is_recorded_before_it_is_forgotten(world: World, dies: Dies, point: CommitPoint) -> None:
    id_ = new_id()
    dies(CommitPoint.DECIDED, ids=[id_])
    world.decide("q1", "rollback")
    dies(point, recover=True)
    with world.manager() as tm:
        assert tm.recover().clean
        ((report, _, forgotten),) = tm.log.heuristics()
        assert (report.resource, report.outcome.value, report.decision) == ("q1", "rolled-back", "commit")
        assert report.damaging
        assert forgotten is not None
        assert tm.log.unfinished("n") == []
    assert world.in_doubt() == []
    assert world.rows("db1") == world.rows("db2") == set(world.messages("q2")) == {id_}
    assert world.messages("q1") == []


def test_every_point_is_one_that_a_program_dies_at_here() -> None:
    tried = {point for point, _, _ in COMMIT_POINTS} | {point for _, point, _, _ in RECOVERY_POINTS}
    tried |= {CommitPoint.ROLLED_BACK, CommitPoint.ONE_PHASE_BEFORE, CommitPoint.ONE_PHASE_AFTER}
    tried |= {CommitPoint.HEURISTIC_RECORDED, CommitPoint.HEURISTIC_FORGOTTEN}
    assert tried == set(CommitPoint)


def test_a_decision_taken_for_an_orphan_cannot_commit_afterwards(world: World) -> None:
    """The primary key of the log decides: the second writer finds the decision of the first."""
    with world.manager() as tm, world.manager() as other:
        tx = tm.begin()
        for name in ALL:
            handle: Any = tx.enlist(name)
            if name.startswith("db"):
                handle.execute("INSERT INTO entry VALUES ('late', 1)")
            else:
                handle.basic_publish("", "q", b"late")
        parts = tx.gtrid
        row = tm.plan(parts, []).row([])
        assert other.log.fence(row) is Decision.ROLLBACK
        with pytest.raises(RolledBack, match="treated the transaction as dead"):
            tx.commit()
    assert agreed(world) == set()


def test_programs_that_die_repeatedly_leave_the_resources_in_agreement(world: World, copies: Preforker) -> None:
    """A short run; ``make evidence PARTS=tm`` runs thousands of transactions."""
    tally = play(copies, world, 48, seed=7, programs=2)
    assert tally.wrong == []
    assert tally.begun == 48
    assert tally.in_doubt == 0
    assert tally.deaths.total() > 0

"""Today's dtx opens the database of an older dtx, which left branches in doubt: see ``older/write.py``."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pika.exceptions import ProbableAuthenticationError

from dtx.client import (
    XA_HEURCOM,
    XA_HEURHAZ,
    XA_HEURMIX,
    XA_HEURRB,
    XAER_DUPID,
    XAER_NOTA,
    XAER_RMERR,
    XAER_RMFAIL,
    Coordinator,
    XaFlag,
    XAHeuristic,
    XAResource,
)
from dtx.db import migrate
from tests.servers.crash.older.write import CASES, COPIES, CUT, GONE, READY, VHOSTS, Case, Left, OlderScene
from tests.support.broker import Mode, only_standalone
from tests.support.client import connected, take_all
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode

DUMP = Path(__file__).parent / "older" / "older.sql"
HEURISTICS: dict[Left, type[XAHeuristic]] = {
    Left.HEURISTIC_COMMITTED: XA_HEURCOM,
    Left.HEURISTIC_COMMITTING: XA_HEURCOM,
    Left.HEURISTIC_ROLLED_BACK: XA_HEURRB,
    Left.HEURISTIC_ROLLING_BACK: XA_HEURRB,
    Left.HEURISTIC_MIXED: XA_HEURMIX,
    Left.HEURISTIC_HAZARD: XA_HEURHAZ,
}
ENDED = {
    Left.TAKING: "rolled-back",
    Left.COMMITTING: "committed",
    Left.ROLLING_BACK: "rolled-back",
    Left.COMMITTED: "committed",
    Left.ROLLED_BACK: "rolled-back",
    Left.FORGOTTEN: "forgotten",
}
"""How branches have ended, at the latest after the recovery by today's dtx."""


@pytest.fixture
def older(postgres: PostgresServer, mode: Mode, request: pytest.FixtureRequest) -> Iterator[OlderScene]:
    """Today's dtx on the restored database; alongside, with a fresh broker whose queues are empty."""
    node: RabbitNode | None = request.getfixturevalue("rabbitmq") if mode == "alongside" else None
    database = postgres.create_database()
    with contextlib.ExitStack() as stack:
        stack.callback(postgres.drop_database, database)
        with postgres.connection(database) as connection:
            connection.execute(DUMP.read_bytes())
        assert migrate.current(database) == "0014"
        if node is not None:
            prepare(node, stack)
        scene = OlderScene(postgres, database, node)
        left = {case.id: logged(case.left) for case in scene.cases if case.left not in ENDED or case.left in CUT}
        assert scene.states() == left
        yield stack.enter_context(scene)


def logged(left: Left) -> str:
    """The state in the log."""
    return "committing" if left is Left.STUCK else left.partition(",")[0]


def prepare(node: RabbitNode, stack: contextlib.ExitStack) -> None:
    """Create virtual hosts, a user and queues."""
    for vhost in VHOSTS["alongside"]:
        stack.callback(node.delete_vhost, node.add_vhost(vhost))
    node.add_user("alice", vhost=VHOSTS["alongside"][0])
    stack.callback(node.delete_user, "alice")
    stack.callback(node.mend)
    for number, vhost in enumerate(VHOSTS["alongside"]):
        with node.channel(vhost) as channel:
            for case in CASES["alongside"]:
                if case.host == number:
                    channel.queue_declare(case.source, durable=True)
                    channel.queue_declare(case.target, durable=True)


@contextlib.contextmanager
def coordinator(scene: OlderScene, case: Case) -> Iterator[Coordinator]:
    """The transaction manager's connection, as the owner of *case*."""
    url = scene.service.url(case.user, vhost=scene.vhosts[case.host])
    with connected(url) as connection, Coordinator(connection) as found:
        yield found


def decide(scene: OlderScene, case: Case) -> str:
    """Complete the branch and check the XA codes; returns how it ended."""
    with coordinator(scene, case) as manager:
        if case.left in ENDED:
            return ENDED[case.left]
        if case.left in HEURISTICS:
            for ask in (manager.commit, manager.rollback):
                with pytest.raises(HEURISTICS[case.left]):
                    ask(case.id)
            manager.forget(case.id)
            return "forgotten"
        if case.left is Left.STUCK:
            with pytest.raises(XAER_RMFAIL, match=f"no exchange '{GONE}'"):
                manager.commit(case.id)
            with scene.broker.channel(scene.vhost) as channel:
                channel.exchange_declare(GONE, "fanout", durable=True)
        commits = case.left is Left.STUCK or case.name.endswith("-1")
        assert (manager.commit if commits else manager.rollback)(case.id) is XaFlag.OK
        return "committed" if commits else "rolled-back"


def published(scene: OlderScene, case: Case, ended: str) -> bool:
    """Whether the messages are in the queue; a fresh broker has none that were committed before."""
    if case.left in (Left.HEURISTIC_COMMITTED, Left.COMMITTED):
        return scene.mode == "standalone"
    return case.left is Left.HEURISTIC_COMMITTING or ended == "committed"


def put_back(scene: OlderScene, case: Case, ended: str) -> bool:
    """Whether the consumed messages are in the queue again."""
    if case.left in (Left.HEURISTIC_ROLLED_BACK, Left.ROLLED_BACK):
        return scene.mode == "standalone"
    return case.left is Left.HEURISTIC_ROLLING_BACK or ended == "rolled-back"


def test_todays_dtx_completes_branches_of_an_older_one(older: OlderScene) -> None:
    """The promise: "prepared means durable"; each message is there once, and each XA code is correct."""
    for case in older.cases:
        if case.left in CUT:
            older.wait_for_state(case.id, "heuristic" if case.left in HEURISTICS else None)
    for user, host in (("guest", 0), ("alice", 0), ("guest", 1)):
        theirs = [case for case in older.cases if (case.user, case.host) == (user, host)]
        with coordinator(older, theirs[0]) as manager:
            doubtful = [str(case.id) for case in theirs if case.left not in ENDED]
            assert sorted(map(str, manager.recover())) == sorted(doubtful)
    endings = {case: decide(older, case) for case in older.cases}
    older.service.restart()
    for case, ended in endings.items():
        with coordinator(older, case) as manager:
            assert list(manager.recover()) == []
            for ask in (manager.commit, manager.rollback):
                with pytest.raises(XAER_NOTA) as refusal:
                    ask(case.id)
                assert refusal.value.facts.get("ended") == ended, case
        with connected(older.service.url(vhost=older.vhosts[case.host])) as connection:
            channel = connection.channel()
            back = case.consumed if put_back(older, case, ended) else []
            assert take_all(channel, case.source) == back, case
            there = list(case.publishes) if published(older, case, ended) else []
            assert take_all(channel, case.target) == there, case


def test_heuristic_outcomes_of_an_older_dtx_stay_until_forget(older: OlderScene) -> None:
    """Never guess: "is reported to the TM, and stays until forget"."""
    heuristic = [case for case in older.cases if case.left in HEURISTICS]
    for _ in range(2):
        for case in heuristic:
            older.wait_for_state(case.id, "heuristic")
            with coordinator(older, case) as manager, pytest.raises(HEURISTICS[case.left]):
                manager.rollback(case.id)
        older.service.restart()


@only_standalone
def test_users_and_queues_of_an_older_dtx_are_unchanged(older: OlderScene) -> None:
    (mine,) = [case for case in older.cases if case.name == "alice-1"]
    guests = older.cases[0]
    with coordinator(older, mine) as alice, pytest.raises(XAER_RMERR, match="another user's"):
        alice.commit(guests.id)
    with pytest.raises(ProbableAuthenticationError), connected(older.service.url("alice", "wrong")):
        pass
    with connected(older.service.url()) as connection:
        channel = connection.channel()
        with pytest.raises(XAER_DUPID):
            XAResource(channel).start(guests.id)
        channel = connection.channel()
        channel.exchange_declare(COPIES, passive=True)
        for queue in ("ready", "ready too"):
            found = [channel.basic_get(queue, auto_ack=True) for _ in READY]
            assert [body for _, _, body in found] == list(READY)
            assert {str(properties.headers) for _, properties, _ in found} == {"{'n': 1, 'text': 'é'}"}
            assert channel.basic_get(queue)[0] is None

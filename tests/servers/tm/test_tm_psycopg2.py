"""psycopg2, another driver with the two-phase methods of PEP 249; skipped if it is not installed."""

from functools import partial
from typing import Any

import pytest

from dtx.client.tm import DtxResource, Pep249Resource, RolledBack
from dtx.client.tm.steps import CommitPoint
from tests.support.tm import World, left_at

psycopg2 = pytest.importorskip("psycopg2", reason="psycopg2 is not installed: pip install psycopg2-binary")


def resources(world: World) -> list[Any]:
    """Both databases through psycopg2, and a dtx."""
    found: list[Any] = [Pep249Resource(name, partial(psycopg2.connect, url)) for name, url in world.databases.items()]
    return [*found, DtxResource("q1", world.services["q1"].url())]


def insert(tx: Any, name: str, id_: str) -> None:
    with tx.enlist(name).cursor() as cursor:
        cursor.execute("INSERT INTO entry VALUES (%s, 1)", (id_,))


def test_a_transaction_commits_everywhere_or_nowhere(world: World) -> None:
    with world.manager(resources=resources(world)) as tm:
        with tm.transaction() as tx:
            for name in ("db1", "db2"):
                insert(tx, name, "one")
            tx.enlist("q1").basic_publish("", "q", b"one")
        failed = tm.begin()
        for name in ("db1", "db2"):
            insert(failed, name, "two")
        failed.enlist("q1").basic_publish("", "q", b"two")
        with pytest.raises(psycopg2.Error):
            insert(failed, "db2", "one")
        with pytest.raises(RolledBack):
            failed.commit()
        with tm.transaction() as tx:  # one resource
            insert(tx, "db1", "three")
        assert tx.outcome is not None
        assert tx.outcome.one_phase
    assert world.rows("db1") == {"one", "three"}
    assert world.rows("db2") == {"one"}
    assert world.messages("q1") == ["one"]
    assert world.in_doubt() == []


@pytest.mark.parametrize(
    ("point", "committed"), [(CommitPoint.VOTED, False), (CommitPoint.DECIDED, True), (CommitPoint.COMMITTED, True)]
)
def test_branches_of_a_dead_process_are_recovered(world: World, point: CommitPoint, committed: bool) -> None:
    """Recovery through psycopg2, whose errors have ``pgcode``, works; a second recovery finds nothing to do."""
    with world.manager() as tm:  # through psycopg
        left_at(tm, point, "db1", "db2", "q1")
    with world.manager(resources=resources(world)) as tm:
        report = tm.recover()
        assert report.clean
        assert len(report.committed if committed else report.rolled_back) == 3
        assert tm.recover().clean
    assert len(world.rows("db1")) == len(world.rows("db2")) == len(world.messages("q1")) == int(committed)
    assert world.in_doubt() == []

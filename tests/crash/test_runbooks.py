"""README's runbooks, each in the situation that it is for: every command is run, and ends as it is said to."""

import json
import os
import shutil
import signal
from pathlib import Path

import psycopg
import pytest

from dtx.client import XA_HEURMIX, XA_HEURRB, XAER_NOTA
from dtx.log.operators import OperatorLog
from tests.integration.admin.conftest import orphan
from tests.integration.admin.test_cli_bulk import prepared
from tests.integration.admin.test_orders import stuck
from tests.support.broker import StandaloneBroker
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.heirs import Pair
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.runbooks import Runbook, runbooks
from tests.support.service import ADMIN

STUCK = "A branch is stuck, or its outcome is a hazard"
LOST = "The transaction manager has lost its log"
RESTORED = "PostgreSQL was restored from a backup"


@pytest.fixture(params=["standalone", "alongside"])
def scene(request: pytest.FixtureRequest, postgres: PostgresServer) -> Scene:
    if request.param == "standalone":
        return StandaloneStage(postgres, options=ADMIN)
    return Stage(request.getfixturevalue("rabbitmq"), postgres, options=ADMIN)


def words(scene: Scene) -> dict[str, tuple[str, ...]]:
    """What everybody has in a file of settings."""
    admin = ("--admin-listen", scene.service.admin_url.removeprefix("http://"))
    one = ("--vhost", scene.vhost)
    each = dict.fromkeys(("commit", "rollback", "forget", "retry", "redirect", "discard"), (*admin, *one))
    return {**each, "bulk": admin, "show": one, "export": one}


def grow_old(scene: Scene) -> None:
    """As if the branches had been started an hour ago."""
    with psycopg.connect(scene.database) as connection:
        connection.execute("UPDATE dtx.branch SET started_at = started_at - interval '1 hour'")


def test_every_runbook_is_run_here() -> None:
    assert list(runbooks()) == ["A branch stays prepared", STUCK, LOST, "The active dtx has failed", RESTORED]


def test_a_branch_stays_prepared(scene: Stage | StandaloneStage) -> None:
    with scene:
        xid = orphan(scene)
        grow_old(scene)
        book = Runbook("A branch stays prepared", scene.service, words(scene))
        assert str(xid) in book.next("branches").stdout
        assert "prepared" in book.next("show", xid).stdout
        assert "its transaction manager is told xa-heurrb" in book.next("rollback XID --dry-run", xid).stdout
        assert "done: xa-heurrb" in book.next("rollback", xid).stdout
        assert str(xid) in book.next("branches --state heuristic").stdout
        with scene.coordinator() as coordinator, pytest.raises(XA_HEURRB):
            coordinator.commit(xid)
        book.next("forget", xid)
        book.finish()
        assert (scene.bodies("in"), scene.states()) == ([b"consumed"], {})


def test_a_branch_is_stuck(rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    with Stage(rabbitmq, postgres, options=ADMIN) as stage:
        mended, moved, dropped = (stuck(stage) for _ in range(3))
        book = Runbook(STUCK, stage.service, words(stage))
        assert "NOT_FOUND - no exchange 'gone'" in book.next("branches --stuck").stdout
        assert "publish to exchange gone" in book.next("show", mended).stdout
        with stage.broker.channel(stage.vhost) as channel:
            channel.exchange_declare("gone", "fanout", durable=True)
            channel.queue_bind("spare", "gone")
        assert "done: xa-ok" in book.next("retry", mended).stdout
        with stage.broker.channel(stage.vhost) as channel:
            channel.exchange_delete("gone")
        assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])
        book.next("redirect", moved)
        assert "done: xa-ok" in book.next("retry", moved).stdout
        assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])
        assert "2 messages in kept" in book.next("export", dropped).stderr
        assert "its transaction manager is told xa-heurmix" in book.next("discard", dropped).stdout
        assert "done: xa-heurmix" in book.next("retry", dropped).stdout
        with stage.coordinator() as coordinator, pytest.raises(XA_HEURMIX):
            coordinator.commit(dropped)
        book.next("forget", dropped)
        book.next("export XID --archived", dropped)
        book.finish()
        kept = stage.service.directory / "kept", stage.service.directory / "archived"
        assert [sorted(path.read_bytes() for path in each.glob("*.body")) for each in kept] == [[b"a", b"b"], [b"b"]]
        assert stage.states() == {}


def test_the_transaction_manager_has_lost_its_log(scene: Stage | StandaloneStage) -> None:
    with scene:
        decided, *others = prepared(scene, [b"one", b"two", b"three"])
        stranger = orphan(scene)
        book = Runbook(LOST, scene.service, words(scene))
        listed = [json.loads(line)["xid"] for line in book.next("branches").stdout.splitlines()]
        assert listed == [str(xid) for xid in (decided, *others)]
        book.next("commit", decided)
        assert "of 2 branches" in book.next("bulk rollback --format-id 77 --state prepared --dry-run").stderr
        assert book.next("bulk rollback").stdout == "2 of 2 done\n"
        assert book.next("bulk forget").stdout == "3 of 3 done\n"
        book.finish()
        assert (scene.states(), scene.bodies("out")) == ({stranger: "prepared"}, [b"one"])


def test_the_active_dtx_has_failed(postgres: PostgresServer) -> None:
    with StandaloneStage(postgres) as stage:
        pair = Pair(stage)
        xid = orphan(stage)
        pair.active.kill9()
        pair.succeed()
        OperatorLog(stage.database, "dtx").begin(
            actor="olga", role="operator", address="", action="commit", subject=str(xid), reason="", detail=""
        )
        book = Runbook("The active dtx has failed", pair.standby, {})
        assert f":{pair.standby.pid} (epoch" in book.next("doctor").stdout
        assert book.next("branches --stuck").stdout == "no branch is in doubt\n"
        assert "not known" in book.next("audit").stdout
        book.finish()
        pair.active.start(wait=False)
        stage.wait_for(lambda: "1 dtx stands by" in pair.standby.run("doctor").stdout, "a new standby")
        assert stage.states() == {xid: "prepared"}
        pair.standby.signal(signal.SIGTERM)  # to hand over on purpose
        pair.active.wait_ready()
        assert pair.standby.wait(60) == 0


@pytest.mark.parametrize("mode", ["standalone", "alongside"])
def test_postgresql_was_restored_from_a_backup(
    request: pytest.FixtureRequest, own_postgres: PostgresServer, mode: str, tmp_path: Path
) -> None:
    scene: Stage | StandaloneStage = (
        StandaloneStage(own_postgres, options=ADMIN)
        if mode == "standalone"
        else Stage(request.getfixturevalue("rabbitmq"), own_postgres, options=ADMIN)
    )
    with scene:
        committed, open_still = prepared(scene, [b"committed after T", b"open"])
        consumed = orphan(scene)
        assert scene.service.stop() == 0
        backup(own_postgres, tmp_path)
        scene.service.start()
        with scene.coordinator() as coordinator:
            coordinator.commit(committed)
            coordinator.commit(consumed)
        (late,) = prepared(scene, [b"prepared after T"])
        scene.service.kill9()
        restore(own_postgres, tmp_path)

        left = scene.another_service(start=False)
        book = Runbook(RESTORED, left, words(scene))
        assert "(the newest)" in book.next("migrate current").stdout
        command = book.skip("serve").split()
        port = command[command.index("--listen") + 1]
        assert port == "127.0.0.1:5999"
        left.options = (*left.options, *command[command.index("--replay") :])
        left.start()
        scene.service = left
        if isinstance(scene, StandaloneStage):
            scene.broker = StandaloneBroker(left)
        book = Runbook(RESTORED, left, words(scene))
        book.skip("migrate")
        book.skip("serve")
        listed = [json.loads(line) for line in book.next("branches").stdout.splitlines()]
        found = {each["xid"]: each["state"] for each in listed}
        assert found == dict.fromkeys(map(str, (committed, open_still, consumed)), "prepared")
        before = scene.count("out")
        book.next("commit", consumed)
        if mode == "standalone":
            assert (before, scene.count("in")) == (0, 0)
            left.run("commit", str(committed), "--reason", "x", "--yes", *words(scene)["commit"])
        else:
            assert before == 2  # the broker did not go back
        book.next("bulk rollback")
        book.next("bulk forget")
        book.finish()
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == []
            with pytest.raises(XAER_NOTA):
                coordinator.commit(late)
        bodies = sorted(scene.bodies("out"))
        # alongside, what the branch that also consumed has published comes twice, and nothing else does
        assert bodies == [b"committed after T", b"published"] + [b"published"] * (mode == "alongside")


def backup(server: PostgresServer, directory: Path) -> None:
    """As it is at this moment, T."""
    server.stop()
    shutil.copytree(server.data_dir / "postgres", directory / "backup", symlinks=True)
    server.start()


def restore(server: PostgresServer, directory: Path) -> None:
    """Back to T."""
    server.stop()
    place = server.data_dir / "postgres"
    status = place.stat()
    shutil.rmtree(place)
    shutil.copytree(directory / "backup", place, symlinks=True)
    for path in (place, *place.rglob("*")):
        os.chown(path, status.st_uid, status.st_gid, follow_symlinks=False)
    server.start()

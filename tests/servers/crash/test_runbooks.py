"""docs/operations/runbooks: every command is run in its situation and ends as the page describes."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import psycopg
import pytest

from dtx.auth.operators import OperatorLog
from dtx.client import XA_HEURHAZ, XA_HEURMIX, XA_HEURRB, XAER_NOTA, XAER_RMFAIL, XaFlag
from dtx.embedded.cluster import find_programs
from tests.servers.admin.conftest import orphan
from tests.servers.admin.test_cli_bulk import prepared
from tests.servers.admin.test_orders import stuck
from tests.support.broker import StandaloneBroker
from tests.support.crash import Scene, Stage, StandaloneStage, work
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.runbooks import Runbook, runbooks
from tests.support.service import ADMIN
from tests.support.standby_pair import Pair

STUCK = "A branch is stuck, or its outcome is a hazard"
LOST = "The transaction manager has lost its log"
RESTORED = "PostgreSQL was restored from a backup"


@pytest.fixture(params=["standalone", "alongside"])
def scene(request: pytest.FixtureRequest, postgres: PostgresServer) -> Scene:
    if request.param == "standalone":
        return StandaloneStage(postgres, options=ADMIN)
    return Stage(request.getfixturevalue("rabbitmq"), postgres, options=ADMIN)


def words(scene: Scene) -> dict[str, tuple[str, ...]]:
    """Options of each command that operators usually keep in a settings file."""
    admin = ("--admin-listen", scene.service.admin_url.removeprefix("http://"))
    one = ("--vhost", scene.vhost)
    each = dict.fromkeys(("commit", "rollback", "forget", "retry", "redirect", "discard"), (*admin, *one))
    return {**each, "bulk": admin, "show": one, "export": one}


def grow_old(scene: Scene) -> None:
    """Make the branches one hour older."""
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
        assert "the transaction manager gets xa-heurrb" in book.next("rollback XID --dry-run", xid).stdout
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
        assert "the transaction manager gets xa-heurmix" in book.next("discard", dropped).stdout
        assert "done: xa-heurmix" in book.next("retry", dropped).stdout
        with stage.coordinator() as coordinator, pytest.raises(XA_HEURMIX):
            coordinator.commit(dropped)
        book.next("forget", dropped)
        book.next("export XID --archived", dropped)
        book.finish()
        kept = stage.service.directory / "kept", stage.service.directory / "archived"
        assert [sorted(path.read_bytes() for path in each.glob("*.body")) for each in kept] == [[b"a", b"b"], [b"b"]]
        assert stage.states() == {}


def test_a_refusal_after_partial_delivery_is_a_hazard(rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    """A full queue refuses at tx.commit, when the other queues may have taken their messages: a hazard."""
    with Stage(rabbitmq, postgres, replay="receipts", options=ADMIN) as stage:
        stage.declare("out")
        stage.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
        stage.fill("full", b"in the way")
        with stage.connected() as connection:
            xa, xid = work(connection.channel(), publish={"out": [b"a"], "full": [b"b"]})
            assert xa.prepare(xid) is XaFlag.OK
        with stage.coordinator() as coordinator, pytest.raises(XAER_RMFAIL, match="partial tx completion"):
            coordinator.commit(xid)
        book = Runbook(STUCK, stage.service, words(stage))
        assert "partial tx completion" in book.next("branches --stuck").stdout
        book.next("show", xid)
        assert book.next("retry", xid, check=False).returncode == 1
        book.skip("redirect")
        book.skip("retry")
        book.next("export", xid)
        assert "the transaction manager gets xa-heurhaz" in book.next("discard", xid).stdout
        assert "done: xa-heurhaz" in book.next("retry", xid).stdout
        with stage.coordinator() as coordinator, pytest.raises(XA_HEURHAZ):
            coordinator.commit(xid)
        book.next("forget", xid)
        book.next("export XID --archived", xid)
        book.finish()
        kept = [json.loads(path.read_text()) for path in sorted((stage.service.directory / "kept").glob("*.json"))]
        found = {
            properties.headers["x-dtx-id"] for _, properties, _ in stage.take("out") if properties.headers is not None
        }
        assert found == {f"{kept[0]['branch']}/{kept[0]['position']}"}  # once or several times
        assert stage.bodies("full") == [b"in the way"]
        archived = stage.service.directory / "archived"
        assert [path.read_bytes() for path in archived.glob("*.body")] == [b"b"]
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
        assert book.next("branches --stuck").stdout == "no branch in doubt matches the filter\n"
        assert "not known" in book.next("audit").stdout
        book.finish()
        pair.active.start(wait=False)
        stage.wait_for(lambda: "1 dtx stands by" in pair.standby.run("doctor").stdout, "a new standby")
        assert stage.states() == {xid: "prepared"}
        pair.standby.signal(signal.SIGTERM)  # a planned handover
        pair.active.wait_ready()
        assert pair.standby.wait(60) == 0


@pytest.mark.parametrize("mode", ["standalone", "alongside"])
def test_postgresql_was_restored_from_a_backup(
    request: pytest.FixtureRequest, own_postgres: PostgresServer, mode: str
) -> None:
    scene: Stage | StandaloneStage = (
        StandaloneStage(own_postgres, options=ADMIN)
        if mode == "standalone"
        else Stage(request.getfixturevalue("rabbitmq"), own_postgres, options=ADMIN)
    )
    archive = Archive(own_postgres)
    with scene:
        archive.back_up()
        committed, open_still = prepared(scene, [b"committed after T", b"open"])
        consumed = orphan(scene)
        moment = archive.now()
        with scene.coordinator() as coordinator:
            coordinator.commit(committed)
            coordinator.commit(consumed)
        (late,) = prepared(scene, [b"prepared after T"])
        scene.service.kill9()
        archive.restore(moment)

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
            assert before == 2  # the broker was not restored
        book.next("bulk rollback")
        book.next("bulk forget")
        book.finish()
        with scene.coordinator() as coordinator:
            assert list(coordinator.recover()) == []
            with pytest.raises(XAER_NOTA):
                coordinator.commit(late)
        bodies = sorted(scene.bodies("out"))
        # alongside, only the message published by the branch that also consumed is there twice
        assert bodies == [b"committed after T", b"published"] + [b"published"] * (mode == "alongside")


class Archive:
    """A base backup and the WAL written after it, with the settings of the runbook.

    Args:
        server: it is restarted with archiving.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._cluster = server.data_dir / "postgres"
        self._owner = self._cluster.stat()
        self._place = server.data_dir.parent / "backup"
        (self._place / "wal").mkdir(parents=True)
        self._give(self._place)
        settings = dict(line.split(" = ", 1) for line in runbooks("ini")[RESTORED])
        assert list(settings) == [
            "archive_mode", "archive_command", "restore_command", "recovery_target_time", "recovery_target_action",
        ]  # fmt: skip
        self._settings = {name: self._here(value) for name, value in settings.items()}
        server.configure(**{name: self._settings[name].strip("'") for name in ("archive_mode", "archive_command")})

    def _here(self, value: str) -> str:
        return value.replace("/backup", str(self._place))

    def _give(self, place: Path) -> None:
        for path in (place, *place.rglob("*")):
            os.chown(path, self._owner.st_uid, self._owner.st_gid, follow_symlinks=False)

    def back_up(self) -> None:
        """Make the base backup while dtx and PostgreSQL run."""
        program = find_programs().directory / "pg_basebackup"
        words = ("--dbname", self._server.url, "--pgdata", str(self._place / "base"), "--wal-method", "none")
        subprocess.run([program, *words, "--checkpoint", "fast", "--no-sync"], check=True, capture_output=True)

    def now(self) -> str:
        """The current time of PostgreSQL's clock."""
        with self._server.connection() as connection:
            found = connection.execute("SELECT clock_timestamp()").fetchone()
        assert found is not None
        return str(found[0])

    def restore(self, moment: str) -> None:
        """Delete the data directory and restore it from the archive as of *moment*."""
        with self._server.connection() as connection:
            found = connection.execute("SELECT pg_walfile_name(pg_switch_wal())").fetchone()
            assert found is not None
            archived = self._place / "wal" / str(found[0])
            wait_until(lambda: archived.exists() and archived.stat().st_size == 16 << 20, what="the last file of WAL")
        self._server.stop()
        shutil.rmtree(self._cluster)
        shutil.copytree(self._place / "base", self._cluster, symlinks=True)
        (self._cluster / "recovery.signal").touch()
        recovery = {**self._settings, "recovery_target_time": f"'{moment}'"}
        with (self._cluster / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in recovery.items())
        self._give(self._cluster)
        self._server.start()
        with self._server.connection() as connection:
            asked = "SELECT pg_is_in_recovery()"
            wait_until(lambda: connection.execute(asked).fetchone() == (False,), what="the end of the recovery")

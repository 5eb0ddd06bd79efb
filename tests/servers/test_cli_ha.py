"""``dtx doctor`` about a dtx and its standby."""

import json
import socket

import pytest

from dtx.cli import run
from tests.support.crash import StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.processes import short_directory
from tests.support.service import DtxService
from tests.support.standby_pair import Pair


def checks(stage: StandaloneStage, *words: str) -> dict[str, tuple[str, str]]:
    said = stage.service.run("doctor", "--json", *words).stdout
    return {found["check"]: (found["status"], found["sentence"]) for found in map(json.loads, said.splitlines())}


def test_doctor_lists_the_active_dtx_and_its_standbys(postgres: PostgresServer) -> None:
    with StandaloneStage(postgres) as stage:
        alone = checks(stage)
        assert alone["ha.standby"][0] == "ok"  # one dtx is a valid setup
        assert "start a second one with the same --database and --rm dtx" in alone["ha.standby"][1]
        pair = Pair(stage)
        found = checks(stage)
        assert found["lease"] == ("ok", found["lease"][1])
        assert f":{stage.service.pid} (epoch " in found["lease"][1]
        assert found["ha.standby"] == ("ok", "1 dtx stands by")
        assert found["clock"][0] == "ok"
        pair.active.kill9()
        pair.succeed()
        after = checks(stage)
        assert f":{pair.standby.pid} (epoch " in after["lease"][1]
        assert "there is no standby" in after["ha.standby"][1]


def test_systemd_does_not_wait_for_a_standby(postgres: PostgresServer) -> None:
    """A standby reports READY=1, since systemd ends a unit of Type=notify that is not ready after 90 seconds."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        short_directory("notify") as directory,
        StandaloneStage(postgres) as stage,
    ):
        systemd.bind(str(directory / "notify"))
        systemd.settimeout(30)
        environment = {"NOTIFY_SOCKET": str(directory / "notify")}
        with DtxService(database=stage.database, env=environment, start=False) as standby:
            standby.start(wait=False)
            holder = f"{socket.gethostname()}:{stage.service.pid}"
            assert systemd.recv(199).decode() == f"READY=1\nSTATUS=standing by, {holder} is active"
            stage.service.stop()
            assert systemd.recv(199).startswith(b"READY=1\nSTATUS=serving at 127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ((), "ok", "a standby serves within 17s after a kill"),
        (("--lease-ttl", "2"), "warning", "--lease-ttl 2s leaves 0.667s for a renewal"),
        (("--lease-ttl", "5m"), "warning", "a standby serves within 5m 2s after a kill: that is long"),
        (("--broker", "amqp://127.0.0.1:9/"), "ok", "units that were open in the broker within another 30s"),
        (("--broker", "amqp://127.0.0.1:9/", "--upstream-heartbeat", "60"), "warning", "or --upstream-heartbeat"),
    ],
)
def test_doctor_weighs_lease_and_heartbeats(
    migrated_postgres_url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: str, sentence: str
) -> None:
    run(["doctor", "--json", "--database", migrated_postgres_url, *words])
    found = {each["check"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["ha.lease"]["status"] == status
    assert sentence in found["ha.lease"]["sentence"]

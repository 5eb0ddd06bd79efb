"""Operators' decisions at the command line: through the API of a running dtx, or without a running dtx."""

import asyncio
import json
import re
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
import trustme

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.cli import run
from dtx.client import XA_HEURMIX, XA_HEURRB, Xid
from dtx.config import Settings
from dtx.server.offline_orders import active_offline
from tests.servers.admin.conftest import orphan
from tests.servers.admin.test_orders import stuck
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService


def words_of(scene: Scene) -> list[str]:
    """The options that a command needs without a running dtx."""
    words = ["--vhost", scene.vhost]
    return [*words, "--broker", scene.service.broker or "", *scene.options[:2]] if isinstance(scene, Stage) else words


def refused(scene: Scene, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must fail with one line on stderr and nothing on stdout."""
    done = scene.service.run(*words, check=False)
    assert done.returncode != 0, done.stdout
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done


@pytest.mark.parametrize("running", [True, False], ids=["a dtx is asked", "no dtx runs"])
def test_a_branch_is_decided_at_the_command_line(scene: Scene, running: bool) -> None:
    xid = orphan(scene)
    words = [str(xid), *words_of(scene)]
    if running:
        words += ["--admin-listen", scene.service.admin_url.removeprefix("http://")]
    else:
        assert scene.service.stop() == 0
    said = scene.service.run("rollback", *words, "--dry-run").stdout
    assert "the transaction manager gets xa-heurrb" in said
    assert scene.states() == {xid: "prepared"}
    order = ("--reason", "the site is lost", "--json", "--yes")
    done = json.loads(scene.service.run("rollback", *words, *order).stdout)
    assert (done["answer"], done["state"]) == ("xa-heurrb", "heuristic")
    trail = OperatorLog(scene.database, "dtx").audit_lines()
    dry, decided = trail[-2], trail[-3]
    assert (dry.action, dry.result, decided.result) == ("rollback", "dry run", "xa-heurrb")
    assert (decided.subject, decided.reason) == (f"{scene.vhost} {xid}", "the site is lost")
    if not running:
        scene.service.start()
    with scene.coordinator() as coordinator, pytest.raises(XA_HEURRB):
        coordinator.commit(xid)
    assert scene.bodies("in") == [b"consumed"]


def test_a_command_asks_before_it_decides_and_wants_a_reason(scene: Scene) -> None:
    xid = orphan(scene)
    words = [str(xid), "--vhost", scene.vhost, "--api", scene.service.admin_url]
    assert scene.service.run("commit", *words, check=False).returncode == 2
    for more in ((), ("--json",)):
        unanswered = scene.service.run("commit", *words, "--reason", "x", *more, check=False)  # there is no terminal
        assert (unanswered.returncode, scene.states()) == (2, {xid: "prepared"})
        assert "stdin is no terminal, so dtx cannot ask: use --yes" in unanswered.stderr
    assert "done: xa-heurcom" in scene.service.run("commit", *words, "--reason", "x", "--yes").stdout


def test_a_changed_branch_is_left_alone(scene: Scene) -> None:
    """An order names the version of the branch, so that two operators cannot both decide."""
    xid = orphan(scene)
    words = [str(xid), "--vhost", scene.vhost, "--api", scene.service.admin_url, "--reason", "x", "--yes"]
    said = refused(scene, "commit", *words, "--version", "7").stderr
    assert "the branch has changed: it has version" in said
    assert scene.states() == {xid: "prepared"}


def test_no_order_is_carried_out_beside_an_active_dtx(scene: Scene) -> None:
    """Orders are refused while another dtx has the lease. The message names it and says what to do."""
    xid = orphan(scene)
    port = free_port()
    words = [str(xid), *words_of(scene), "--admin-listen", f"127.0.0.1:{port}", "--reason", "x", "--yes"]
    said = refused(scene, "rollback", *words).stderr
    assert f"the API at http://127.0.0.1:{port} does not answer" in said
    assert re.search(rf":{scene.service.pid} has the lease of dtx \(epoch \d+\) for another \d", said)
    assert "name its API with --api" in said
    assert scene.states() == {xid: "prepared"}


def test_the_lease_of_a_killed_local_dtx_is_taken_immediately(alone: StandaloneStage) -> None:
    service = alone.another_service(
        "--lease-ttl", "600", "--journal-retention", "777d", "--audit-retention", "778d", start=False
    )
    xid = orphan(alone)
    alone.service.kill9()
    service.start()
    service.kill9()
    done = service.run("commit", str(xid), "--reason", "the machine is lost", "--yes")
    assert "done: xa-heurcom" in done.stdout
    with psycopg.connect(alone.database) as connection:  # otherwise the command deletes lines that the service keeps
        assert connection.execute("SELECT retention_days, audit_days FROM dtx.lease").fetchone() == (777, 778)


async def test_a_dtx_started_meanwhile_is_a_standby(alone: StandaloneStage) -> None:
    """A command without a service takes the lease itself, and releases it."""
    xid = orphan(alone)
    alone.service.kill9()

    def beside() -> None:
        alone.service.start(wait=False)
        alone.wait_for(lambda: "standing by" in alone.service.log_path.read_text(), "a dtx that stands by")
        said = refused(alone, "commit", str(xid), "--reason", "x", "--yes", "--admin-listen", "127.0.0.1:9").stderr
        assert "(operator command) has the lease" in said

    async with active_offline(Settings.load({"lease_ttl": "60"}), alone.database):
        await asyncio.to_thread(beside)
    alone.service.wait_ready()
    assert alone.states() == {xid: "prepared"}


@pytest.fixture
def stage(rabbitmq: RabbitNode, postgres: PostgresServer) -> Stage:
    return Stage(rabbitmq, postgres, options=ADMIN)


def test_a_decision_without_the_broker_is_completed_by_the_service(stage: Stage) -> None:
    """The service does later what needs the broker."""
    with stage:
        xid = orphan(stage)
        assert stage.service.stop() == 0
        nowhere = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
        words = ("rollback", str(xid), "--vhost", stage.vhost, "--reason", "x", "--yes", "--broker", nowhere)
        said = stage.service.run(*words).stdout
        assert "the decision is durable: the branch is heuristic-rolling-back" in said
        assert "the service completes it when both run again (no broker answers at" in said
        assert (stage.states(), stage.count("in")) == ({xid: "heuristic-rolling-back"}, 0)
        stage.service.start()
        stage.wait_for_state(xid, "heuristic")
        assert stage.bodies("in") == [b"consumed"]
        with stage.coordinator() as coordinator, pytest.raises(XA_HEURRB):
            coordinator.commit(xid)


def test_without_naming_the_broker_nothing_is_decided_about_its_messages(stage: Stage) -> None:
    with stage:
        xid = orphan(stage)
        assert stage.service.stop() == 0
        said = refused(stage, "commit", str(xid), "--vhost", stage.vhost, "--reason", "x", "--yes").stderr
        assert "1 branches in the log have their messages in a broker" in said
        assert stage.states() == {xid: "prepared"}


def test_the_command_line_redirects_and_retries_a_stuck_message(stage: Stage) -> None:
    with stage:
        xid = stuck(stage)
        where = (str(xid), "--vhost", stage.vhost, "--api", stage.service.admin_url)
        order = ("--reason", "gone is gone", "--yes")
        for wrong in (("--queue", "q", "--exchange", "e"), ()):
            assert stage.service.run("redirect", *where, "1", *wrong, *order, check=False).returncode == 2
        said = refused(stage, "redirect", str(xid), "7", *where[1:], "--exchange", "", "--routing-key", "x", *order)
        assert "redirect takes the position of a message that is not finished" in said.stderr
        redirect = ("redirect", str(xid), "1", *where[1:], "--exchange", "", "--routing-key", "spare")
        assert "publish  moved" in stage.service.run(*redirect, "--dry-run").stdout
        assert "done: xa-ok" in stage.service.run(*redirect, *order).stdout
        stage.service.run("retry", *where, *order)
        assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])


@pytest.mark.parametrize("running", [True, False], ids=["a dtx is asked", "no dtx runs"])
def test_the_command_line_exports_and_discards_a_stuck_message(stage: Stage, running: bool, tmp_path: Path) -> None:
    with stage:
        xid = stuck(stage)
        words = [str(xid), *words_of(stage)]
        if running:
            words += ["--admin-listen", stage.service.admin_url.removeprefix("http://")]
        else:
            assert stage.service.stop() == 0
        export = ("export", str(xid), "--vhost", stage.vhost, "--position", "1", "--to", str(tmp_path / "kept"))
        stage.service.run(*export)
        assert (tmp_path / "kept" / "000001.body").read_bytes() == b"b"
        order = ("--reason", "sent by hand", "--yes")
        said = stage.service.run("discard", words[0], "1", *words[1:], *order).stdout
        assert "the transaction manager gets xa-heurmix" in said
        if not running:
            stage.service.start()
        else:
            stage.service.run("retry", *words, *order)
        stage.wait_for_state(xid, "heuristic")
        with stage.coordinator() as coordinator:
            with pytest.raises(XA_HEURMIX):
                coordinator.commit(xid)
            coordinator.forget(xid)
        archived = ("export", str(xid), "--vhost", stage.vhost, "--archived")
        (kept,) = [json.loads(line) for line in stage.service.run(*archived).stdout.splitlines()]
        assert (kept["fate"], kept["body"]) == ("discarded", "Yg==")


def test_a_token_comes_from_file_or_environment(alone: StandaloneStage, tmp_path: Path) -> None:
    """A token is never an argument, so the process list shows no secret."""
    xid = orphan(alone)
    trail = OperatorLog(alone.database, "dtx")
    file = tmp_path / "token"
    file.write_text(trail.make_token("olga", OperatorRole.OPERATOR, "test") + "\nnot this line\n")
    viewer = trail.make_token("vera", OperatorRole.VIEWER, "test")
    far = DtxService(database=None, env={"DTX_TOKEN": viewer}, start=False)
    with far:
        where = ("--api", alone.service.admin_url)
        order = (str(xid), "--reason", "x", "--yes")
        assert str(xid) in far.run("branches", *where).stdout
        said = far.run("commit", *order, *where, check=False)
        assert (said.returncode, "token:vera is a viewer, but this needs an operator" in said.stderr) == (1, True)
        assert "done: xa-heurcom" in far.run("commit", *order, *where, "--token-file", str(file)).stdout
        assert far.run("commit", *order, *where, "--token", viewer, check=False).returncode == 2
    with DtxService(database=None, start=False) as nobody:
        said = nobody.run("branches", *where, check=False)
        assert (said.returncode, "a token for" in said.stderr) == (2, True)
    assert {line.actor for line in trail.audit_lines()} == {"token:olga", "token:vera"}


def test_the_api_is_asked_over_tls(
    postgres: PostgresServer, certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ("--admin-tls-cert", str(certificates / "server.pem"), "--admin-tls-key", str(certificates / "server.key"))
    with StandaloneStage(postgres, options=(*ADMIN, *pair)) as stage:
        xid = orphan(stage)
        words = ["branches", "--json", "--database", stage.database, "--api", stage.service.admin_url]
        assert run([*words, "--api-ca", str(certificates / "ca.pem")]) == 0
        assert str(xid) in capsys.readouterr().out
        assert run(words) == 1
        assert "certificate verify failed" in capsys.readouterr().err


def test_a_command_trusts_the_certificate_of_its_own_settings(
    postgres: PostgresServer, certificates: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The service has no other name for a command on its machine than its address."""
    other = trustme.CA().issue_cert("127.0.0.1")
    other.cert_chain_pems[0].write_to_path(tmp_path / "other.pem")
    pair = ("--admin-tls-cert", str(certificates / "server.pem"), "--admin-tls-key", str(certificates / "server.key"))
    with StandaloneStage(postgres, options=(*ADMIN, *pair)) as stage:
        where = ["--database", stage.database, "--admin-listen", stage.service.admin_url.removeprefix("https://")]
        for certificate, status in ((certificates / "server.pem", 0), (tmp_path / "other.pem", 1)):
            trust = ["--admin-tls-cert", str(certificate), "--admin-tls-key", str(certificates / "server.key")]
            assert run(["token", "add", f"token{status}", "--role", "viewer", *where, *trust]) == status
        assert "certificate verify failed" in capfd.readouterr().err


class _Elsewhere(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        self.send_response(302)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_token_does_not_follow_a_redirect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DTX_TOKEN", "dtx_secret")
    with HTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = run(["audit", "--api", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert (code, capsys.readouterr().err) == (1, "dtx: the API answered 302 Found\n")
    assert [path.partition("?")[0] for path, _ in _Elsewhere.seen] == ["/dtx/v1/audit"]


@pytest.mark.parametrize("way", ["database", "api"])
def test_tokens_are_made_listed_and_revoked(
    alone: StandaloneStage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    where = ["--database", alone.database]
    if way == "api":
        monkeypatch.setenv(
            "DTX_TOKEN", OperatorLog(alone.database, "dtx").make_token("boss", OperatorRole.COORDINATOR, "test")
        )
        where = ["--api", alone.service.admin_url]
    else:
        alone.service.kill9()
    assert run(["token", "add", "olga/2", "--role", "operator", "--expires", "30d", *where]) == 0
    secret = capsys.readouterr().out.strip()
    assert run(["token", "add", "olga/2", "--role", "viewer", *where]) == 1
    assert "there is a token named 'olga/2' already" in capsys.readouterr().err
    assert run(["tokens", "list", "--json", *where]) == 0
    listed = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (listed["olga/2"]["role"], listed["olga/2"]["expires_at"] is None) == ("operator", False)
    assert run(["tokens", "list", *where]) == 0
    assert "olga/2" in capsys.readouterr().out
    assert secret not in json.dumps(listed)
    assert run(["token", "remove", "olga/2", *where]) == 0
    assert run(["token", "remove", "olga/2", *where]) == 1
    assert OperatorLog(alone.database, "dtx").find_token(secret) is None


def test_an_order_for_a_missing_branch_fails_in_one_sentence(alone: StandaloneStage) -> None:
    words = ("--reason", "x", "--yes")
    assert "unknown xid" in refused(alone, "commit", str(Xid(1, b"a")), *words, "--api", alone.service.admin_url).stderr
    alone.service.kill9()
    assert "unknown xid" in refused(alone, "commit", str(Xid(1, b"a")), *words).stderr
    assert alone.service.run("commit", "nonsense", *words, check=False).returncode == 2

"""Operators' decisions at the command line: by the API of a running dtx, or without one."""

import json

import pytest

from dtx.client import XA_HEURRB
from tests.integration.admin.conftest import orphan
from tests.support.crash import Scene, Stage


def words_of(scene: Scene) -> list[str]:
    """What a command must know to do without a running dtx."""
    words = ["--vhost", scene.vhost]
    return [*words, "--broker", scene.service.broker or "", *scene.options[:2]] if isinstance(scene, Stage) else words


@pytest.mark.parametrize("running", [True, False], ids=["a dtx is asked", "no dtx runs"])
def test_a_branch_is_decided_at_the_command_line(scene: Scene, running: bool) -> None:
    xid = orphan(scene)
    words = [str(xid), *words_of(scene)]
    if running:
        words += ["--api", scene.service.admin_url]
    else:
        assert scene.service.stop() == 0
    said = scene.service.run("rollback", *words, "--dry-run").stdout
    assert "its transaction manager is told xa-heurrb" in said
    assert scene.states() == {xid: "prepared"}
    done = json.loads(scene.service.run("rollback", *words, "--reason", "the site is lost", "--json").stdout)
    assert (done["answer"], done["state"]) == ("xa-heurrb", "heuristic")
    if not running:
        scene.service.start()
    with scene.coordinator() as coordinator, pytest.raises(XA_HEURRB):
        coordinator.commit(xid)
    assert scene.bodies("in") == [b"consumed"]


def test_a_command_asks_before_it_decides_and_wants_a_reason(scene: Scene) -> None:
    xid = orphan(scene)
    words = [str(xid), "--vhost", scene.vhost, "--api", scene.service.admin_url]
    assert scene.service.run("commit", *words, check=False).returncode == 2
    unanswered = scene.service.run("commit", *words, "--reason", "x", check=False)  # nobody is at the terminal
    assert (unanswered.returncode, scene.states()) == (130, {xid: "prepared"})
    assert "done: xa-heurcom" in scene.service.run("commit", *words, "--reason", "x", "--yes").stdout


def test_no_order_is_carried_out_beside_an_active_dtx(scene: Scene) -> None:
    """Refused while an active lease exists."""
    xid = orphan(scene)
    words = [str(xid), *words_of(scene), "--api", "http://127.0.0.1:9", "--reason", "x", "--yes"]
    refused = scene.service.run("rollback", *words, check=False)
    assert (refused.returncode, "a dtx has the lease" in refused.stderr) == (1, True)
    assert scene.states() == {xid: "prepared"}

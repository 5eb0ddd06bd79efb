"""Operators' decisions over HTTP, in both modes: carried out, reported, kept until forget, archived and audited."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from dtx.auth.roles import OperatorRole
from dtx.client import XA_HEURCOM, XA_HEURMIX, XA_HEURRB, XAER_NOTA, XAER_RMFAIL, XaFlag, Xid
from tests.servers.admin.conftest import orphan, somebody
from tests.support.crash import PERSISTENT, Scene, Stage, work
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN


def test_an_orphan_is_found_inspected_rolled_back_and_forgotten(scene: Scene) -> None:
    """A branch is found, inspected, rolled back with a reason after a dry run, answered xa-heurrb, and forgotten."""
    xid = orphan(scene)
    operator = somebody(scene, OperatorRole.OPERATOR)
    (found,) = operator.get("/dtx/v1/branches", state="prepared", queue="in", exchange="")["branches"]
    assert operator.get("/dtx/v1/branches", queue="out")["branches"][0]["id"] == found["id"]
    assert (found["xid"], found["queues"], found["exchanges"]) == (str(xid), ["in"], [""])
    assert found["destinations"] == ["out"]
    seen = operator.branch(xid, scene.vhost)
    assert {message["kind"]: message["bytes"] for message in seen["messages"]} == {"publish": 9, "consume": 8}
    dry = operator.order("rollback", xid, vhost=scene.vhost, dry_run=True).body
    forecast = dry["forecast"]
    assert (forecast["becomes"], forecast["later_answer"], forecast["archived"]) == ("heuristic", "xa-heurrb", 1)
    assert forecast["told"] == forecast["later_answer"]
    assert {step["kind"]: step["fate"] for step in forecast["messages"]} == {
        "publish": "dropped",
        "consume": "put-back",
    }
    assert scene.states() == {xid: "prepared"}
    done = operator.order("rollback", xid, vhost=scene.vhost, version=found["version"]).body
    assert (done["answer"], done["state"], done["forecast"]) == ("xa-heurrb", "heuristic", forecast)
    assert scene.bodies("in") == [b"consumed"]
    with scene.coordinator() as coordinator:
        assert list(coordinator.recover()) == [xid]
        for ask in (coordinator.commit, coordinator.rollback):
            with pytest.raises(XA_HEURRB):
                ask(xid)
    assert operator.order("forget", xid, vhost=scene.vhost).body["answer"] == "xa-ok"
    with scene.coordinator() as coordinator, pytest.raises(XAER_NOTA, match="forgotten"):
        coordinator.commit(xid)
    (listed,) = operator.get("/dtx/v1/archive", xid=str(xid))["messages"]
    kept = operator.get(f"/dtx/v1/archive/{listed['branch']}/{listed['position']}")
    assert (kept["fate"], kept["body"], kept["routing_key"]) == ("dropped", "cHVibGlzaGVk", "out")
    assert scene.count("out") == 0
    trail = somebody(scene, OperatorRole.COORDINATOR).get("/dtx/v1/audit")["lines"]
    assert [(line["action"], line["result"]) for line in trail] == [
        ("view", "viewed"),
        ("forget", "xa-ok"),
        ("rollback", "xa-heurrb"),
        ("rollback", "dry run"),
    ]
    assert {(line["reason"], line["address"]) for line in trail[1:]} == {("the site is lost", "127.0.0.1")}


def test_a_heuristic_commit_is_effective_immediately_and_survives_a_kill(scene: Scene) -> None:
    xid = orphan(scene)
    operator = somebody(scene, OperatorRole.OPERATOR)
    assert operator.order("commit", xid, vhost=scene.vhost).body["answer"] == "xa-heurcom"
    scene.service.restart()
    assert scene.bodies("out") == [b"published"]
    assert scene.bodies("in") == []
    with scene.coordinator() as coordinator:
        with pytest.raises(XA_HEURCOM):
            coordinator.rollback(xid)
        coordinator.forget(xid)
    history = scene.history(xid)
    assert (history[0], history[-2:]) == ("prepared", ["heuristic", "forgotten"])


def test_of_two_concurrent_orders_one_gets_a_conflict(scene: Scene) -> None:
    """Two operators decide one branch at the same time: one of them gets a conflict (412)."""
    xid = orphan(scene)
    operators = [somebody(scene, OperatorRole.OPERATOR) for _ in range(2)]
    version = operators[0].branch(xid, scene.vhost)["branch"]["version"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(
                lambda operator, action: operator.order(action, xid, vhost=scene.vhost, version=version),
                operators,
                ("commit", "rollback"),
            )
        )
    assert sorted(answer.status for answer in answers) == [200, 412]
    (conflict,) = [answer for answer in answers if answer.status == 412]
    assert "the branch has changed" in conflict.body["detail"]
    assert scene.count("out") + scene.count("in") == 1


def test_a_viewer_reads_and_cannot_decide(scene: Scene) -> None:
    """A viewer who tries to decide gets 403."""
    xid = orphan(scene)
    viewer = somebody(scene, OperatorRole.VIEWER)
    assert viewer.branch(xid, scene.vhost)["branch"]["state"] == "prepared"
    for answer in (
        viewer.order("commit", xid, vhost=scene.vhost),
        viewer.order("rollback", xid, vhost=scene.vhost, dry_run=True),
        viewer.ask("GET", f"/dtx/v1/branches/{xid}/messages/0", vhost=scene.vhost),
        viewer.ask("GET", "/dtx/v1/audit"),
    ):
        assert (answer.status, answer.headers["content-type"]) == (403, "application/problem+json")
    assert scene.states() == {xid: "prepared"}
    trail = somebody(scene, OperatorRole.COORDINATOR).get("/dtx/v1/audit")["lines"]
    assert {line["action"]: line["result"][:4] for line in trail} == dict.fromkeys(
        ("commit", "rollback", "view"), "403:"
    )


def test_a_bulk_order_matches_its_dry_run_or_does_nothing(alone: Scene) -> None:
    first, second = orphan(alone), orphan(alone)
    coordinator = somebody(alone, OperatorRole.COORDINATOR)
    order = {"action": "rollback", "filter": {"state": ["prepared"]}, "reason": "the site is lost"}
    said = coordinator.ask("POST", "/dtx/v1/bulk", order).body
    assert {result["xid"] for result in said["results"]} == {str(first), str(second)}
    third = orphan(alone)
    changed = coordinator.ask("POST", "/dtx/v1/bulk", {**order, "dry_run": False, "confirm": said["confirm"]})
    assert (changed.status, changed.body["detail"]) == (
        412,
        "the branches have changed since the dry run: run the dry run again",
    )
    assert set(alone.states().values()) == {"prepared"}
    said = coordinator.ask("POST", "/dtx/v1/bulk", order).body
    done = coordinator.ask("POST", "/dtx/v1/bulk", {**order, "dry_run": False, "confirm": said["confirm"]}).body
    assert {result["answer"] for result in done["results"]} == {"xa-heurrb"}
    assert alone.states() == dict.fromkeys((first, second, third), "heuristic")
    assert somebody(alone, OperatorRole.OPERATOR).ask("POST", "/dtx/v1/bulk", order).status == 403


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"action": "commit"}, 409, "the order is not the one of the dry run"),
        ({"filter": {"state": ["prepared"], "owner": "guest"}}, 409, "the order is not the one of the dry run"),
        ({"confirm": None}, 428, "a dry run is needed first"),
    ],
    ids=["action", "filter", "confirm"],
)
def test_a_bulk_order_without_its_dry_run_is_refused(
    alone: Scene, change: dict[str, object], status: int, words: str
) -> None:
    xid = orphan(alone)
    coordinator = somebody(alone, OperatorRole.COORDINATOR)
    order = {"action": "rollback", "filter": {"state": ["prepared"]}, "reason": "the site is lost"}
    said = coordinator.ask("POST", "/dtx/v1/bulk", order).body
    refused = coordinator.ask("POST", "/dtx/v1/bulk", {**order, "dry_run": False, "confirm": said["confirm"], **change})
    assert (refused.status, refused.body["detail"].startswith(words)) == (status, True)
    assert alone.states() == {xid: "prepared"}


@pytest.fixture
def stage(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Stage:
    return Stage(shared_rabbitmq, postgres, options=ADMIN)


def stuck(stage: Stage) -> Xid:
    """A committed branch with a message for an exchange that was deleted."""
    for queue in ("out", "spare"):
        stage.declare(queue)
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_declare("gone", "direct")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = work(channel, publish={"out": [b"a"]}, end=False)
        channel.basic_publish("gone", "k", b"b", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    with stage.node.channel(stage.vhost) as direct:
        direct.exchange_delete("gone")
    with stage.coordinator() as coordinator, pytest.raises(XAER_RMFAIL, match="no exchange 'gone'"):
        coordinator.commit(xid)
    return xid


def found_stuck(operator: Operator, xid: Xid) -> str:
    """The broker's message why the branch is stuck."""
    (found,) = operator.get("/dtx/v1/branches", stuck=True)["branches"]
    assert found["xid"] == str(xid)
    return str(found["stuck"])


def test_a_stuck_message_is_exported_and_sent_elsewhere(stage: Stage) -> None:
    with stage:
        xid = stuck(stage)
        operator = somebody(stage, OperatorRole.OPERATOR)
        assert "NOT_FOUND - no exchange 'gone'" in found_stuck(operator, xid)
        message = operator.get(f"/dtx/v1/branches/{xid}/messages/1", vhost=stage.vhost)
        assert (message["exchange"], message["body"]) == ("gone", "Yg==")
        moved = operator.order("redirect", xid, vhost=stage.vhost, position=1, exchange="", routing_key="spare")
        assert moved.body["state"] == "committing"
        stage.service.restart()
        stage.wait_for(lambda: stage.states() == {}, "the commit being finished")
        assert (stage.bodies("out"), stage.bodies("spare")) == ([b"a"], [b"b"])
        assert stage.history(xid)[-1] == "committed"


def test_discarding_a_stuck_message_makes_the_outcome_mixed(stage: Stage) -> None:
    """A mixed outcome records the fate of each message."""
    with stage:
        xid = stuck(stage)
        operator = somebody(stage, OperatorRole.OPERATOR)
        answer = operator.order("discard", xid, vhost=stage.vhost, positions=[1]).body
        assert (answer["state"], answer["forecast"]["outcome"]) == ("heuristic-committing", "mixed")
        assert operator.order("retry", xid, vhost=stage.vhost).body["answer"] == "xa-heurmix"
        fates = [message["fate"] for message in operator.branch(xid, stage.vhost)["messages"]]
        assert fates == ["published", "discarded"]
        assert stage.bodies("out") == [b"a"]
        with stage.coordinator() as coordinator:
            with pytest.raises(XA_HEURMIX):
                coordinator.commit(xid)
            coordinator.forget(xid)
        (kept,) = operator.get("/dtx/v1/archive", xid=str(xid))["messages"]
        assert operator.get(f"/dtx/v1/archive/{kept['branch']}/1")["body"] == "Yg=="


def test_a_decision_interrupted_by_a_kill_is_completed_once(stage: Stage) -> None:
    """The decision is durable before its work begins, and a restart continues the work."""
    with stage:
        xid = orphan(stage)
        operator = somebody(stage, OperatorRole.OPERATOR)
        stage.proxy.stall("down")
        answer = stage.background(lambda: operator.order("commit", xid, vhost=stage.vhost))
        stage.wait_for_state(xid, "heuristic-committing")
        stage.wait_for_count("out", 1)
        stage.service.kill9()
        with pytest.raises(OSError):
            answer.result(30)
        stage.proxy.cut()
        stage.proxy.resume()
        stage.service.start()
        stage.wait_for_state(xid, "heuristic")
        with stage.coordinator() as coordinator, pytest.raises(XA_HEURCOM):
            coordinator.rollback(xid)
        assert stage.bodies("out") == [b"published"]

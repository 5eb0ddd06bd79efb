"""Policies on real servers: they decide old branches as an operator would, and no other branches."""

from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

from dtx.auth.roles import OperatorRole
from dtx.client import XA_HEURRB, XaFlag, Xid
from tests.servers.admin.conftest import somebody
from tests.support.broker import MODES
from tests.support.crash import Scene, Stage, StandaloneStage, work
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

MEANT, NOT_MEANT = 4711, 4712


def policy(vhost: str) -> tuple[str, ...]:
    """The options of the service."""
    return "--policy", f"orphans rollback format={MEANT} vhost={vhost} after=2s", "--alert-after", "1s", *ADMIN


@pytest.fixture(params=MODES)
def policed(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[Scene]:
    """Dtx in either mode, with a policy."""
    with ExitStack() as stack:
        if request.param == "standalone":
            yield stack.enter_context(StandaloneStage(postgres, options=policy("/")))
        else:
            node = request.getfixturevalue("shared_rabbitmq")
            stage = stack.enter_context(Stage(node, postgres, start=False))
            stage.service = stage.another_service(*policy(stage.vhost), through_proxy=True)
            yield stage


def orphan(scene: Scene, format_id: int) -> Xid:
    """A prepared branch that published to *out* and consumed from *in*."""
    scene.fill("in", b"consumed")
    with scene.connected() as connection:
        xa, xid = work(
            connection.channel(),
            publish={"out": [b"published"]},
            consume={"in": 1},
            xid=Xid(format_id, b"orphan of %d" % format_id),
        )
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def test_a_policy_rolls_back_only_old_branches_of_its_kind(policed: Scene) -> None:
    for queue in ("in", "out"):
        policed.declare(queue)
    other = orphan(policed, NOT_MEANT)
    xid = orphan(policed, MEANT)
    policed.wait_for_state(xid, "heuristic")
    assert policed.states() == {xid: "heuristic", other: "prepared"}
    assert (policed.bodies("in"), policed.count("out")) == ([b"consumed"], 0)
    with policed.coordinator() as coordinator, pytest.raises(XA_HEURRB):
        coordinator.commit(xid)
    boss = somebody(policed, OperatorRole.COORDINATOR)
    detail = boss.branch(xid, policed.vhost)
    assert detail["decided_by"] == "policy:orphans"
    assert "policy orphans: prepared for" in detail["decided_because"]
    (line,) = boss.get("/dtx/v1/audit", actor="policy:orphans")["lines"]
    assert (line["action"], line["result"], line["reason"]) == ("rollback", "xa-heurrb", detail["decided_because"])
    policed.wait_for(lambda: "branch has been prepared for long" in policed.service.log_path.read_text(), "an alert")
    text = boss.get("/metrics").decode()
    assert 'dtx_policy_actions_total{action="rollback",result="done"} 1.0' in text
    assert boss.ask("GET", "/readyz").status == 200


def test_a_vote_with_a_wrong_time_is_not_decided_early(policed: Scene) -> None:
    """A clock that jumps must not make all branches due. The row says 1970, as if a clock had been wrong."""
    for queue in ("in", "out"):
        policed.declare(queue)
    xid = orphan(policed, NOT_MEANT)
    with psycopg.connect(policed.database) as connection:
        connection.execute("UPDATE dtx.branch SET prepared_at = 'epoch'")
        ((before,),) = connection.execute("SELECT extract(epoch FROM clock_timestamp())").fetchall()
    policed.service.kill9()
    # The restarted dtx has a policy of 4 s, and decides nothing in the 4 s after its first check.
    late = f"late commit format={NOT_MEANT} vhost={policed.vhost} after=4s"
    policed.service.options = (*policed.service.options, "--policy", late)
    policed.service.start()
    policed.wait_for_state(xid, "heuristic")
    with psycopg.connect(policed.database) as connection:
        ((after,),) = connection.execute("SELECT extract(epoch FROM at) FROM dtx.heuristic_outcome").fetchall()
    assert after - before >= 4
    assert policed.bodies("out") == [b"published"]

"""The metrics at /metrics show the current state and what has happened, in both modes."""

import socket

from prometheus_client.parser import text_string_to_metric_families

from dtx.auth.roles import OperatorRole
from dtx.client import XAResource
from tests.servers.admin.conftest import orphan, somebody
from tests.support.client import new_xid
from tests.support.crash import Scene, Stage, StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService

Numbers = dict[tuple[str, frozenset[tuple[str, str]]], float]


def numbers(operator: Operator) -> Numbers:
    """All samples at /metrics, by name and labels."""
    text = operator.get("/metrics").decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def number(found: Numbers, name: str, /, **labels: str) -> float:
    """The sample with this name and these labels."""
    return found[name, frozenset(labels.items())]


def test_gauges_of_branches_memory_connections_and_lease_are_current(scene: Scene) -> None:
    viewer = somebody(scene, OperatorRole.VIEWER)
    orphan(scene)
    with scene.connected() as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(new_xid())
        channel.basic_publish("", "out", bytes(5000))
        channel.queue_declare("out", durable=True, passive=True)  # its answer shows that dtx has the publish
        found = numbers(viewer)
        assert number(found, "dtx_held_bytes") >= 5000
        assert number(found, "dtx_branches", state="active") == 1
        assert number(found, "dtx_connections") == number(found, "dtx_selected_channels") == 1
        assert number(found, "dtx_usage", scope="vhost", name=scene.vhost, resource="branches") == 2
    assert number(found, "dtx_branches", state="prepared") == 1
    assert number(found, "dtx_branches", state="heuristic") == 0
    assert number(found, "dtx_in_doubt_bytes") >= 17
    assert 0 <= number(found, "dtx_in_doubt_oldest_seconds") < 60
    assert number(found, "dtx_lease_held") == 1
    assert number(found, "dtx_lease_epoch") >= 1
    assert number(found, "dtx_held_bytes_limit") == 1 << 30
    assert number(found, "process_resident_memory_bytes") > 1 << 20
    connections = 0 if isinstance(scene, StandaloneStage) else 1
    assert any(name.startswith("rabbitmq_") for name, _ in found) == isinstance(scene, StandaloneStage)
    assert bool(viewer.get("/metrics/detailed?family=queue_consumer_count")) == isinstance(scene, StandaloneStage)
    assert number(found, "dtx_commit_connections", state="up") == connections
    assert number(found, "dtx_commit_channels") == 16 * connections
    assert number(found, "dtx_commit_connection_units", state="waiting") == 0
    scene.wait_for(lambda: number(numbers(viewer), "dtx_held_bytes") == 0, "what the lost branch held")


def test_each_event_is_counted_once(scene: Scene) -> None:
    viewer, operator = somebody(scene, OperatorRole.VIEWER), somebody(scene, OperatorRole.OPERATOR)
    one, other = orphan(scene), orphan(scene)
    with scene.coordinator() as coordinator:
        coordinator.commit(other)
    assert scene.history(other)[-1] == "committed"
    assert operator.order("rollback", one, vhost=scene.vhost).status == 200
    assert operator.order("forget", one, vhost=scene.vhost).status == 200
    found = numbers(viewer)
    lines = {event: number(found, "dtx_journal_lines_total", event=event) for event in ("prepared", "committed")}
    assert lines == {"prepared": 2, "committed": 1}
    assert number(found, "dtx_journal_lines_total", event="heuristic") == 1
    assert number(found, "dtx_journal_lines_total", event="forgotten") == 1
    assert number(found, "dtx_heuristic_outcomes_total", outcome="rolled-back") == 1
    assert number(found, "dtx_heuristic_outcomes_total", outcome="mixed") == 0
    assert number(found, "dtx_operator_orders_total", action="rollback") == 1
    assert number(found, "dtx_operations_total", operation="commit", answer="xa-ok") == 1
    assert number(found, "dtx_operation_seconds_count", operation="prepare") == 2


def test_a_unit_without_answer_is_counted_by_its_outcome(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> None:
    """After a restart dtx finds out from receipts which earlier units were committed."""
    with Stage(shared_rabbitmq, postgres, options=ADMIN) as stage:
        xid = orphan(stage)
        with stage.coordinator() as coordinator:
            assert list(coordinator.recover()) == [xid]
            stage.proxy.stall("down")
            answer = stage.background(lambda: coordinator.commit(xid))
            stage.wait_for_count("out", 1)
            stage.service.kill9()
            assert answer.exception(30) is not None
        stage.proxy.cut()
        stage.proxy.resume()
        stage.service.start()
        stage.wait_for_end()
        found = numbers(somebody(stage, OperatorRole.VIEWER))
        assert number(found, "dtx_unit_findings_total", found="happened") == 1
        assert number(found, "dtx_units_total", result="applied") == 1
        assert number(found, "dtx_replays_failed_total") == 0


def test_a_standby_has_no_branches_and_no_lease(alone: StandaloneStage) -> None:
    orphan(alone)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with DtxService(database=alone.database, options=("--admin-listen", address), start=False) as standby:
        standby.start(wait=False)
        alone.wait_for(lambda: "standing by" in standby.log_path.read_text(), "the standby")
        viewer = somebody(alone, OperatorRole.VIEWER)
        found = numbers(Operator(f"http://{address}", token=viewer.token))
    assert number(found, "dtx_lease_held") == number(found, "dtx_branches", state="prepared") == 0
    assert number(numbers(viewer), "dtx_lease_held") == 1

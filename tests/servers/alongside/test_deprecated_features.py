"""A broker that permits no deprecated feature: dtx uses none, and declares no queue that RabbitMQ 4.3 refuses."""

from collections.abc import Iterator

import pytest
from pika.exceptions import ConnectionClosedByBroker

from dtx.cli.doctor import Status
from dtx.cli.doctor.broker import check_broker
from dtx.client import XaFlag
from dtx.config import Settings
from tests.servers.amqp10.raw import Raw
from tests.support.crash import Stage, work
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode

DEPRECATED = (
    "amqp_address_v1",
    "global_qos",
    "management_metrics_collection",
    "queue_master_locator",
    "ram_node_type",
    "transient_nonexcl_queues",
)


@pytest.fixture(scope="module")
def modern(needs_rabbitmq4: None) -> Iterator[RabbitNode]:
    """A node of version 4 without deprecated features."""
    config = {f"deprecated_features.permit.{name}": "false" for name in DEPRECATED}
    with RabbitNode(config=config, version="4", in_memory=True) as node:
        yield node


def test_the_broker_refuses_a_transient_queue_that_is_not_exclusive(modern: RabbitNode) -> None:
    """Otherwise the other test proves nothing."""
    with pytest.raises(ConnectionClosedByBroker, match="transient_nonexcl_queues"), modern.channel() as channel:
        channel.queue_declare("refused")


def test_dtx_needs_no_deprecated_feature(modern: RabbitNode, postgres: PostgresServer) -> None:
    with Stage(modern, postgres) as stage:
        settings = Settings.model_validate(
            {"broker": modern.url(vhost=stage.vhost), "management": modern.management_url}
        )
        assert {check.name: check.sentence for check in check_broker(settings) if check.status is not Status.OK} == {}
        for queue in ("in", "out"):
            stage.declare(queue)
        stage.fill("in", b"one", b"two")
        with stage.connected() as connection:
            first, committed = work(connection.channel(), publish={"out": [b"a"]}, consume={"in": 1})
            second, returned = work(connection.channel(), publish={"out": [b"b"]}, consume={"in": 1})
            assert first.prepare(committed) is second.prepare(returned) is XaFlag.OK
            with Raw(stage.service, hostname=f"vhost:{stage.vhost}") as raw:
                raw.receiver(raw.begin(), None, dynamic=True)
                queues = modern.api("GET", f"/api/queues/{stage.vhost}?columns=name,durable,exclusive")
            assert {(queue["durable"], queue["exclusive"]) for queue in queues} == {(True, False), (False, True)}
        stage.service.kill9()
        stage.service.start()
        with stage.coordinator() as coordinator:
            assert coordinator.commit(committed) is coordinator.rollback(returned) is XaFlag.OK
        assert (stage.bodies("in"), stage.bodies("out")) == ([b"two"], [b"a"])

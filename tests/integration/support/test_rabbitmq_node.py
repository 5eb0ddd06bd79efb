"""The tests' own RabbitMQ does what they rely on."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pika
import pytest
import yaml

from tests.support.rabbitmq import RabbitApiError, RabbitNode


def test_a_durable_message_survives_the_death_of_the_node(rabbitmq: RabbitNode, vhost: str) -> None:
    with rabbitmq.channel(vhost) as channel:
        channel.queue_declare("q", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"body", pika.BasicProperties(delivery_mode=2))
    rabbitmq.keep_definitions()
    rabbitmq.restart()
    assert rabbitmq.count("q", vhost) == 1
    assert [body for body, _, _ in rabbitmq.take_all("q", vhost)] == [b"body"]
    assert rabbitmq.count("q", vhost) == 0


def test_a_user_has_the_permissions_it_was_given(rabbitmq: RabbitNode, vhost: str) -> None:
    rabbitmq.add_user("reader", "secret/@", vhost=vhost, write="^$", configure="^$")
    with rabbitmq.channel(vhost, user="reader") as channel, pytest.raises(pika.exceptions.ChannelClosedByBroker):
        channel.queue_declare("q")
    rabbitmq.delete_user("reader")
    with pytest.raises(RabbitApiError, match="404"):
        rabbitmq.api("GET", "/api/users/reader")


@pytest.mark.parametrize("alarm", [RabbitNode.memory_alarm, RabbitNode.disk_alarm], ids=["memory", "disk"])
def test_an_alarm_blocks_publishers_until_it_is_cleared(
    rabbitmq: RabbitNode, vhost: str, alarm: Callable[..., None]
) -> None:
    alarm(rabbitmq, on=True)
    blocked: list[bool] = []
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.url(vhost=vhost)))
    connection.add_on_connection_blocked_callback(lambda *_: blocked.append(True))
    connection.channel().basic_publish("", "nowhere", b"")
    deadline = time.monotonic() + 20
    while not blocked and time.monotonic() < deadline:
        connection.process_data_events(time_limit=0.2)
    alarm(rabbitmq, on=False)
    connection.close()
    assert blocked == [True]


def test_a_node_that_was_paused_or_killed_is_mended(rabbitmq: RabbitNode) -> None:
    rabbitmq.pause()
    rabbitmq.mend()
    assert rabbitmq.api("GET", "/api/overview")
    rabbitmq.kill9()
    assert not rabbitmq.running
    rabbitmq.mend()
    assert rabbitmq.running


def test_the_broker_understands_its_configuration_in_docker_compose() -> None:
    """The service user needs the tag impersonator to republish a user-id that a client has set."""
    compose = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())
    lines = compose["configs"]["rabbitmq"]["content"].splitlines()
    config = dict(line.split(" = ") for line in lines if not line.startswith("#"))
    with RabbitNode(config=config) as node:
        tags = node.api("GET", "/api/users/guest")["tags"]
    assert set(tags) == {"administrator", "impersonator"}


def test_a_node_listens_for_tls_with_a_certificate_that_is_verified(certificates: Path) -> None:
    with RabbitNode(tls=certificates) as node:
        context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        parameters = pika.URLParameters(node.url(tls=True))
        parameters.ssl_options = pika.SSLOptions(context, "127.0.0.1")
        connection = pika.BlockingConnection(parameters)
        connection.channel().queue_declare("q")
        connection.close()
        assert node.count("q") == 0

"""The broker is away: what goes on, and what says so."""

import pika
import pytest
from pika.exceptions import AMQPConnectionError

from dtx.client import XAER_RMFAIL, Coordinator, XAResource
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import bodies, connected, new_xid
from tests.support.rabbitmq import RabbitNode


def test_a_connection_that_only_coordinates_outlives_the_broker(
    dtx_service: ServiceFactory, own_rabbitmq: RabbitNode
) -> None:
    """While the broker is away, commits wait and resume, and branches that only published can be prepared."""
    service = dtx_service("--unit-deadline", "1", broker=own_rabbitmq.url())
    xid = new_xid()
    with own_rabbitmq.channel() as direct:
        direct.queue_declare("waiting", durable=True)
    with connected(service.url()) as coordination:
        coordinator = Coordinator(coordination)
        assert list(coordinator.recover()) == []
        with connected(service.url()) as application:
            channel = application.channel()
            xa = XAResource(channel)
            xa.start(xid)
            channel.basic_publish("", "waiting", b"patient", pika.BasicProperties(delivery_mode=2))
            xa.end(xid)
        own_rabbitmq.kill9()
        assert coordinator.prepare(xid) is XaFlag.OK
        assert list(coordinator.recover()) == [xid]
        with pytest.raises(XAER_RMFAIL):
            coordinator.commit(xid)  # told after --unit-deadline that it goes on
        own_rabbitmq.start()
        while list(coordinator.recover()):
            coordination.process_data_events(0.1)
        assert bodies(own_rabbitmq, "waiting") == [b"patient"]


def test_a_connection_that_did_more_is_closed_when_the_broker_dies(
    dtx_service: ServiceFactory, own_rabbitmq: RabbitNode
) -> None:
    """An application learns of its broker's death as it would without dtx."""
    service = dtx_service(broker=own_rabbitmq.url())
    with connected(service.url()) as connection:
        connection.channel().queue_declare("any", durable=True)
        own_rabbitmq.kill9()
        with pytest.raises(AMQPConnectionError):
            connection.process_data_events(10)

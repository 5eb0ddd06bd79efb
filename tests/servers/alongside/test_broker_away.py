"""The broker is away: what still works, and which connections are closed."""

from collections.abc import Callable

import pika
import pytest
from pika.exceptions import AMQPConnectionError

from dtx.client import XAER_RMFAIL, Coordinator, XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxEnd, DtxStart, DtxStartOk
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import bodies, connected, new_xid
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import ConnectionEnded, message, session


def test_a_coordinating_connection_survives_the_broker(dtx_service: ServiceFactory, own_rabbitmq: RabbitNode) -> None:
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
            coordinator.commit(xid)  # the answer after --unit-deadline; the commit goes on
        own_rabbitmq.start()
        while list(coordinator.recover()):
            coordination.process_data_events(0.1)
        assert bodies(own_rabbitmq, "waiting") == [b"patient"]


def test_a_used_connection_is_closed_when_the_broker_dies(
    dtx_service: ServiceFactory, own_rabbitmq: RabbitNode
) -> None:
    """The connection of an application is closed, as without dtx."""
    service = dtx_service(broker=own_rabbitmq.url())
    with connected(service.url()) as connection:
        connection.channel().queue_declare("any", durable=True)
        own_rabbitmq.kill9()
        with pytest.raises(AMQPConnectionError):
            connection.process_data_events(10)


def test_nothing_is_sent_after_the_end_of_a_connection(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, proxy: Callable[[str, int], Proxy]
) -> None:
    """A dtx.end that waits for the broker's check of a publish gets no answer when the broker is lost.

    The client gets 320 for the lost broker, and not 503 for a mistake.
    """
    network = proxy("127.0.0.1", rabbitmq.port)
    service = dtx_service(broker=rabbitmq.url().replace(f":{rabbitmq.port}", f":{network.port}"))
    xid = new_xid()
    with session(service.url()) as client:
        client.open(1, select=True)
        network.stall("down")
        sent = network.bytes["up"]
        start, end = (call.frame(1) for call in (DtxStart(xid=xid), DtxEnd(xid=xid)))
        client.send_raw(start + message(1, b"any") + end)
        network.wait_for_bytes("up", sent + len(methods.BasicPublish(b"", b"any").encode()))
        client.read_method(1, DtxStartOk.KEY)
        network.cut()
        with pytest.raises(ConnectionEnded, match="320 "):
            client.read()
        with pytest.raises(ConnectionEnded, match="the server"):
            client.read()  # the client sends no close-ok, so only the end of the socket follows

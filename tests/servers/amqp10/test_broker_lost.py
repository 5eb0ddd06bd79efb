"""The broker of a client of AMQP 1.0 dies."""

from dtx.client import Coordinator
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Closed
from dtx.wire.amqp10.performatives import ACCEPTED, TransactionalState
from tests.conftest import ServiceFactory
from tests.servers.amqp10.raw import Raw, body
from tests.support.client import connected, new_xid
from tests.support.rabbitmq import RabbitNode


def test_a_client_is_notified_of_the_brokers_death(dtx_service: ServiceFactory, own_rabbitmq: RabbitNode) -> None:
    """A prepared branch is committed when the broker is back."""
    service = dtx_service(broker=own_rabbitmq.url())
    xid = new_xid()
    with own_rabbitmq.channel() as direct:
        direct.queue_declare("q", durable=True)
    with Raw(service) as raw, connected(service.url()) as coordination:
        manager = Coordinator(coordination)
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, "q")
        durable = message.head(message.Header(durable=True)) + message.data(b"voted")
        txn_id = raw.declare(session, control, xid.to_wire())
        state = TransactionalState(txn_id=txn_id)
        assert isinstance(raw.outcome(session, sender.send(b"t", durable, state=state)), TransactionalState)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        manager.prepare(xid)
        lost = raw.declare(session, control)
        raw.post(sender, b"lost", lost)
        own_rabbitmq.kill9()
        raw.until(lambda: any(isinstance(event, Closed) for event in raw.events))
        (closed,) = [event for event in raw.events if isinstance(event, Closed)]
        assert closed.error is not None
        assert closed.error.condition == "amqp:connection:forced"
        assert "the connection to the broker is gone" in str(closed.error.description)
        own_rabbitmq.start()
        manager.commit(xid)
    with Raw(service) as raw:
        session = raw.opened().begin()
        raw.receiver(session, "q", credit=2)
        assert body(raw.take()) == b"voted"

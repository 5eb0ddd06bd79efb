"""Messages that AMQP 1.0 allows and AMQP 0-9 does not: each is kept or refused, and nothing else is affected."""

import secrets

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import ACCEPTED, Accepted, Rejected, Role, Source, Target, TransactionalState
from dtx.wire.amqp10.values import Float, Timestamp, Value
from tests.servers.amqp10.raw import Raw
from tests.support.broker import Mode
from tests.support.service import DtxService

VALUES = {
    "no number": Float("nan"),
    "infinite": float("-inf"),
    "after the last year": Timestamp(2**63 - 1),
    "before the first second": Timestamp(-1),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("transaction", [False, True])
def test_values_that_the_other_protocol_does_not_have_are_kept(
    service: DtxService, channel: BlockingChannel, queue: str, value: Value, transaction: bool
) -> None:
    """A broker closes the whole connection because of NaN, and pika does because of a year that it cannot handle."""
    payload = message.head(message.Header(), None, {"x-opt-value": value})
    payload += message.bare(message.Properties(), {"value": value, "plain": "p"}, message.data(b"one"))
    with Raw(service) as raw:
        session = raw.opened().begin()
        to = raw.sender(session, queue)
        for _ in range(2):
            if transaction:
                control = raw.control(session, name=secrets.token_hex(4))
                txn_id = raw.declare(session, control)
                number = to.send(b"one", payload, state=TransactionalState(txn_id=txn_id))
                state = raw.outcome(session, number)
                assert isinstance(state, TransactionalState)
                assert isinstance(state.outcome, Accepted)
                assert raw.discharge(session, control, txn_id) == ACCEPTED
            else:
                assert raw.outcome(session, to.send(b"one", payload)) == ACCEPTED
        _, properties, body = channel.basic_get(queue, auto_ack=True)
        assert (properties.headers["plain"], "value" in properties.headers, body) == ("p", False, b"one")
        raw.receiver(session, queue)
        found = raw.take()
        said = message.read(found.payload)
        assert repr(said.application_properties["value"]) == repr(value)
        assert repr(said.message_annotations["x-opt-value"]) == repr(value)
        session.dispose(Role.RECEIVER, [found.delivery_id], ACCEPTED, settled=True)
        raw.close()


@pytest.mark.parametrize("address", ["/queues/%ff", "/exchanges/%ff", "/exchanges/amq.topic/%ff%fe"])
def test_names_that_are_no_text_cost_nothing_else(service: DtxService, mode: Mode, queue: str, address: str) -> None:
    """A broker closes the whole connection: "Malformed UTF-8 in shortstr". Without a broker, dtx accepts any bytes."""
    with Raw(service) as raw:
        session = raw.opened().begin()
        good = raw.sender(session, queue, name="good")
        for role in Role:
            link = session.new_link(f"bad {role}", role)
            ours, theirs = (Source(), Target(address=address)), (Source(address=address), Target())
            source, target = ours if role is Role.SENDER else theirs
            link.attach(source=source, target=target)
            raw.flush()
        to = raw.sender(session, None, name="anonymous")
        payload = message.bare(message.Properties(to=address), {}, message.data(b"lost"))
        outcome = raw.outcome(session, to.send(b"one", payload))
        if mode == "alongside":
            assert isinstance(outcome, Rejected)
            assert outcome.error is not None
            assert outcome.error.condition == "amqp:invalid-field"
        assert raw.outcome(session, raw.post(good, b"fine")) == ACCEPTED
        raw.close()


@pytest.mark.parametrize("subject", ["s" * 256, "\u00e9" * 128])
def test_a_subject_too_long_for_a_routing_key_is_refused(
    service: DtxService, channel: BlockingChannel, queue: str, subject: str
) -> None:
    channel.queue_bind(queue, "amq.topic", "#")
    with Raw(service) as raw:
        session = raw.opened().begin()
        to = raw.sender(session, "/exchanges/amq.topic")
        for length, expected in ((None, Rejected), (255, Accepted)):
            said = message.Properties(subject=subject.encode()[:length].decode(errors="ignore"))
            outcome = raw.outcome(session, to.send(b"one", message.bare(said, {}, message.data(b"one"))))
            assert isinstance(outcome, expected), outcome
        method, _, _ = channel.basic_get(queue, auto_ack=True)
        assert method is not None
        assert len(method.routing_key.encode()) in {254, 255}
        assert channel.basic_get(queue)[0] is None

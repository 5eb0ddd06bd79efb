"""A transaction commits without a posting only if its client has received that the posting failed."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.performatives import ACCEPTED, Discharge, Rejected, TransactionalState
from tests.servers.amqp10.raw import Raw
from tests.support.broker import only_alongside
from tests.support.client import take_all
from tests.support.service import DtxService


@pytest.fixture
def raw(service: DtxService) -> Iterator[Raw]:
    """A connection that sends exactly what a test wants."""
    with Raw(service) as open_connection:
        yield open_connection.opened()


def condition(state: object) -> str:
    """The error condition of a rejected outcome."""
    assert isinstance(state, Rejected), state
    assert state.error is not None
    return state.error.condition


@pytest.mark.parametrize("settled", [False, True])
def test_a_posting_to_a_detached_link_dooms_the_transaction(
    raw: Raw, channel: BlockingChannel, queue: str, settled: bool
) -> None:
    """4.4.1, 4.4.4.1: the posting gets no outcome, and is lost."""
    session = raw.begin()
    control, sender = raw.control(session), raw.sender(session, queue)
    txn_id = raw.declare(session, control)
    raw.post(sender, b"one", txn_id)
    fields = {"handle": sender.handle, "message_format": 0, "settled": settled}
    state = TransactionalState(txn_id=txn_id)
    for number, tag in ((77, bytes(33)), (78, b"78")):  # the first ends the link: a tag has at most 32 bytes
        named = {"delivery_id": number, "delivery_tag": tag, "state": state}
        raw.engine.send_transfer(session.channel, fields | named, memoryview(message.data(b"two")))
    discharge = control.send(b"request", message.value(Discharge(txn_id=txn_id)))
    assert condition(raw.outcome(session, discharge)) == "amqp:transaction:rollback"
    assert take_all(channel, queue) == []


@only_alongside
def test_a_posting_refused_after_its_link_ended_dooms_the_transaction(
    raw: Raw, channel: BlockingChannel, queue: str
) -> None:
    """The refusal of the broker arrives when the link has ended, so the client cannot receive it."""
    session = raw.begin()
    control, sender, anywhere = raw.control(session), raw.sender(session, queue), raw.sender(session, None, "anywhere")
    txn_id = raw.declare(session, control)
    raw.post(sender, b"one", txn_id)
    lost = message.bare(message.Properties(to="/queues/no-such-queue"), {}, message.data(b"two"))
    anywhere.send(b"lost", lost, state=TransactionalState(txn_id=txn_id))
    anywhere.detach()
    discharge = control.send(b"request", message.value(Discharge(txn_id=txn_id)))
    assert condition(raw.outcome(session, discharge)) == "amqp:transaction:rollback"
    assert take_all(channel, queue) == []


@only_alongside
@pytest.mark.parametrize("by_client", [False, True])
def test_a_posting_without_its_awaited_outcome_dooms_the_transaction(
    raw: Raw, channel: BlockingChannel, queue: str, by_client: bool
) -> None:
    """4.4.1: "must inform the controller of the presumptive terminal outcome before it can successfully discharge".

    A client that detaches the link itself does not want the outcome.
    """
    session = raw.begin()
    control, anywhere = raw.control(session), raw.sender(session, None, "anywhere")
    txn_id = raw.declare(session, control)
    one = message.bare(message.Properties(to=f"/queues/{queue}"), {}, message.data(b"one"))
    anywhere.send(b"one", one, state=TransactionalState(txn_id=txn_id))
    if by_client:
        anywhere.detach()
    else:  # a tag has at most 32 bytes
        fields = {"handle": anywhere.handle, "message_format": 0, "delivery_id": 77, "delivery_tag": bytes(33)}
        raw.engine.send_transfer(session.channel, fields | {"settled": True}, memoryview(message.data(b"two")))
    outcome = raw.outcome(session, control.send(b"request", message.value(Discharge(txn_id=txn_id))))
    if by_client:
        assert outcome == ACCEPTED
        assert take_all(channel, queue, at_least=1) == [b"one"]
    else:
        assert condition(outcome) == "amqp:transaction:rollback"
        assert take_all(channel, queue) == []

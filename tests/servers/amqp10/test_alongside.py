"""Clients of AMQP 1.0 alongside a broker: its permissions and its queues."""

import secrets
from collections.abc import Iterator

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.endpoint import Attached, Closed
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    DeliveryState,
    Error,
    Rejected,
    Role,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.performatives import Coordinator as ToCoordinator
from dtx.wire.amqp10.session import Session
from tests.servers.amqp10.raw import Raw, body
from tests.support.broker import only_alongside
from tests.support.client import connected, new_xid, take_all
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

pytestmark = only_alongside

CLERK = "clerk-1.0"


@pytest.fixture
def clerk(rabbitmq: RabbitNode) -> Iterator[str]:
    """A user who may use names that begin with ``mine``, write to ``amq.topic``, and use no lock."""
    rabbitmq.add_user(CLERK, configure="^mine", write="^(mine|amq.topic)", read="^mine")
    yield CLERK
    rabbitmq.delete_user(CLERK)


@pytest.fixture
def mine(channel: BlockingChannel) -> Iterator[str]:
    """A queue that the clerk may use."""
    name = f"mine-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.connection.channel().queue_delete(name)


def ready(channel: BlockingChannel, queue: str) -> int:
    """The number of ready messages."""
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def refused(raw: Raw, session: Session, role: Role, address: str | None, *, credit: int = 0) -> str:
    """The error condition with which a link is refused."""
    link = session.new_link(f"{role}-{address}", role)
    target = Target(address=address) if address else ToCoordinator(capabilities=())
    link.attach(
        source=Source(address=address) if role is Role.RECEIVER else Source(outcomes=("amqp:rejected:list",)),
        target=Target() if role is Role.RECEIVER else target,
    )
    if credit:
        link.grant(credit)
    error = raw.detached(link)
    assert error is not None
    return error.condition


def condition(state: DeliveryState | None) -> str:
    """The error condition of a rejected message, in a transaction or not."""
    outcome = state.outcome if isinstance(state, TransactionalState) else state
    assert isinstance(outcome, Rejected), state
    assert isinstance(outcome.error, Error)
    return outcome.error.condition


def test_permissions_are_those_of_the_broker(service: DtxService, clerk: str, mine: str, queue: str) -> None:
    """Refusals of the broker are reported at the attach if dtx knows them then, else when the link gets credit."""
    with Raw(service, user=clerk, password=clerk) as raw:
        session = raw.opened().begin()
        raw.receiver(session, mine, name="may")
        assert refused(raw, session, Role.SENDER, "/exchanges/amq.fanout/any") == "amqp:unauthorized-access"
        assert refused(raw, session, Role.SENDER, "/exchanges/no-such-exchange/any") == "amqp:not-found"
        assert refused(raw, session, Role.RECEIVER, queue, credit=1) == "amqp:unauthorized-access"
        assert refused(raw, session, Role.SENDER, None) == "amqp:unauthorized-access"  # no lock, so no transactions


def test_a_wrong_vhost_is_refused_with_the_brokers_words(service: DtxService, rabbitmq: RabbitNode) -> None:
    vhost = rabbitmq.add_vhost()
    rabbitmq.add_user(CLERK)
    with Raw(service, user=CLERK, password=CLERK, hostname=f"vhost:{vhost}") as raw:
        raw.until(lambda: any(isinstance(event, Closed) for event in raw.events))
        (error,) = [event.error for event in raw.events if isinstance(event, Closed)]
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert vhost in str(error.description)
    with Raw(service, hostname=f"vhost:{vhost}") as raw:
        session = raw.opened().begin()
        raw.receiver(session, None, dynamic=True)
    rabbitmq.delete_user(CLERK)
    rabbitmq.delete_vhost(vhost)


def test_a_refused_message_affects_no_other(
    service: DtxService, rabbitmq: RabbitNode, clerk: str, channel: BlockingChannel, queue: str
) -> None:
    """The broker checks topic permissions for each message, and a refused publish closes its whole channel."""
    rabbitmq.set_topic_permissions(clerk, "amq.topic", write="^ok")
    channel.queue_bind(queue, "amq.topic", "#")
    with Raw(service, user=clerk, password=clerk) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, "/exchanges/amq.topic")

        def send(subject: str) -> int | None:
            said = message.Properties(subject=subject)
            return sender.send(b"t", message.bare(said, {}, message.data(subject.encode())))

        numbers = [send(subject) for subject in ("ok.1", "bad.2", "ok.3")]
        states = [raw.outcome(session, number) for number in numbers]
    assert (states[0], states[2]) == (ACCEPTED, ACCEPTED)
    assert condition(states[1]) == "amqp:unauthorized-access"
    assert take_all(channel, queue) == [b"ok.1", b"ok.3"]


def test_of_equal_messages_those_that_no_queue_takes_are_released(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    """A broker's return has no delivery number. dtx finds the message by its subject and other fields."""
    channel.queue_bind(queue, "amq.direct", queue)
    with Raw(service) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, "/exchanges/amq.direct")
        subjects = [queue, "nowhere"] * 20
        numbers = [
            sender.send(b"t", message.bare(message.Properties(subject=subject), {}, message.data(b"same")))
            for subject in subjects
        ]
        states = [raw.outcome(session, number) for number in numbers]
    assert states == [ACCEPTED, RELEASED] * 20
    assert take_all(channel, queue) == [b"same"] * 20


def test_a_full_queue_rejects_a_message_without_a_transaction(service: DtxService, channel: BlockingChannel) -> None:
    full = f"full-{secrets.token_hex(6)}"
    channel.queue_declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    with Raw(service) as raw:
        session = raw.opened().begin()
        sender = raw.sender(session, full)
        assert raw.outcome(session, raw.post(sender, b"first")) == ACCEPTED
        assert condition(raw.outcome(session, raw.post(sender, b"second"))) == "amqp:resource-limit-exceeded"
    channel.queue_delete(full)


def test_a_message_for_a_deleted_queue_is_refused_in_transactions(service: DtxService) -> None:
    """The broker routes when the branch commits, but dtx finds out earlier that the queue does not exist."""
    with Raw(service) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, None)
        txn_id = raw.declare(session, control)
        said = message.Properties(to="/queues/no-such-queue")
        state = TransactionalState(txn_id=txn_id)
        number = sender.send(b"t", message.bare(said, {}, message.data(b"lost")), state=state)
        assert condition(raw.outcome(session, number)) == "amqp:not-found"
        assert raw.discharge(session, control, txn_id) == ACCEPTED


def test_a_reply_goes_to_the_queue_of_another_connection(service: DtxService) -> None:
    """Only its own connection may consume from it."""
    with Raw(service) as asking, Raw(service) as answering:
        near, far = asking.opened().begin(), answering.opened().begin()
        _, source = asking.receiver(near, None, dynamic=True)
        assert isinstance(source.address, str)
        assert refused(answering, far, Role.RECEIVER, source.address) == "amqp:resource-locked"
        control, sender = answering.control(far), answering.sender(far, source.address)
        txn_id = answering.declare(far, control)
        answering.post(sender, b"in a transaction", txn_id, settled=True)
        assert answering.discharge(far, control, txn_id) == ACCEPTED
        assert body(asking.take()) == b"in a transaction"


def test_settled_messages_before_a_close_are_stored(service: DtxService, channel: BlockingChannel, queue: str) -> None:
    with Raw(service) as raw:
        session = raw.opened().begin()
        senders = [raw.sender(session, queue), raw.sender(session, None, name="anonymous")]
        for number in range(100):
            raw.post(senders[0], b"%d" % number, settled=True)
            said = message.Properties(to=f"/queues/{queue}")
            senders[1].send(b"t", message.bare(said, {}, message.data(b"%d" % number)), settled=True)
        raw.close()
    found = take_all(channel, queue, at_least=200)
    assert sorted(found) == sorted([b"%d" % number for number in range(100)] * 2)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_link_takes_no_more_than_its_credit(service: DtxService, channel: BlockingChannel, kind: str) -> None:
    """2.6.7: a settled delivery gives no credit, unlike with the prefetch of a broker."""
    name = f"credit-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
    channel.confirm_delivery()
    for number in range(60):
        channel.basic_publish("", name, b"%d" % number)
    with Raw(service) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, name, credit=40)
        taken = [raw.take() for _ in range(40)]
        for delivery in taken[:30]:
            session.dispose(Role.RECEIVER, [delivery.delivery_id], ACCEPTED, settled=True)
        link.grant(1)  # settlements and credit may arrive together or separately
        last = raw.take()
        assert [int(body(delivery)) for delivery in (*taken, last)] == list(range(41))
        wait_until(lambda: ready(channel, name) == 60 - 41)
        link.grant(50, drain=True)
        rest = [raw.take() for _ in range(60 - 41)]
        assert int(body(rest[-1])) == 59
        raw.until(lambda: link.credit == 0)
        session.dispose(Role.RECEIVER, [delivery.delivery_id for delivery in rest], ACCEPTED, settled=True)
        raw.detach(session, link)
        wait_until(lambda: ready(channel, name) == 11)  # ten of the first 40, and the one after them
    channel.queue_delete(name)


def test_a_branch_survives_its_client(service: DtxService, channel: BlockingChannel, queue: str) -> None:
    """The consumed messages stay on the connection to the broker until the vote."""
    xid = new_xid()
    channel.basic_publish("", queue, b"old", BasicProperties(delivery_mode=2))
    with Raw(service) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, queue)
        raw.receiver(session, queue)
        got = raw.take()
        txn_id = raw.declare(session, control, xid.to_wire())
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
        raw.post(sender, b"new", txn_id)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        raw.close()
    assert take_all(channel, queue) == []
    with connected(service.url()) as connection:
        manager = Coordinator(connection)
        manager.prepare(xid)
        manager.commit(xid)
    assert take_all(channel, queue) == [b"new"]


def test_a_rollback_ends_though_the_links_own_queue_is_gone(service: DtxService, channel: BlockingChannel) -> None:
    """The queue of a subscription is exclusive: its messages are deleted with it."""
    xid = new_xid()
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, "/exchanges/amq.topic/gone.%23")
        channel.basic_publish("amq.topic", "gone.key", b"mine")
        got = raw.take()
        txn_id = raw.declare(session, control, xid.to_wire())
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=True)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        with connected(service.url()) as connection:
            Coordinator(connection).prepare(xid)
        raw.close()
    with connected(service.url()) as connection:
        Coordinator(connection).rollback(xid)


def test_rolling_back_an_idle_branch_returns_its_consumed_messages(
    service: DtxService, channel: BlockingChannel, queue: str
) -> None:
    xid = new_xid()
    channel.basic_publish("", queue, b"old")
    with Raw(service) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        raw.receiver(session, queue)
        got = raw.take()
        txn_id = raw.declare(session, control, xid.to_wire())
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [got.delivery_id], state, settled=False)
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    with connected(service.url()) as connection:
        Coordinator(connection).rollback(xid)
    wait_until(lambda: ready(channel, queue) == 1)


def test_immediate_changes_of_credit_are_harmless(service: DtxService, channel: BlockingChannel, queue: str) -> None:
    """RabbitMQ 3.10 closes the whole connection (541) if a cancel arrives before it has answered the consume."""
    for number in range(20):
        channel.basic_publish("", queue, b"%d" % number)
    with Raw(service) as raw:
        session = raw.opened().begin()
        for number in range(100):
            link = session.new_link(f"hasty {number}", Role.RECEIVER)
            link.attach(source=Source(address=queue), target=Target())
            raw.expect(Attached)
            link.grant(1)
            raw.flush()
            match number % 3:
                case 0:
                    link.grant(0)
                case 1:
                    link.grant(1, drain=True)
                case _:
                    pass
            link.detach()
        raw.until(lambda: all(session.link(handle) is None for handle in range(100)))
        link, _ = raw.receiver(session, queue, credit=20, name="patient")
        found = [raw.take() for _ in range(20)]
        session.dispose(Role.RECEIVER, [one.delivery_id for one in found], ACCEPTED, settled=True)
        raw.detach(session, link)
        raw.close()
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.consumer_count == 0)
    assert channel.queue_declare(queue, passive=True).method.message_count == 0

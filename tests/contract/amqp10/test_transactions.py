"""Local transactions of AMQP 1.0."""

from pika.adapters.blocking_connection import BlockingChannel

from tests.support.client import take_all
from tests.support.proton import Client, Delivery, Message


def test_a_posting_is_visible_after_the_discharge(client: Client, channel: BlockingChannel, queue: str) -> None:
    """4.4.1: "the message does not become available … until after the transaction has been … discharged"."""
    sender = client.sender(queue)
    transaction, outcome = client.declare()
    client.send(transaction, sender, "one", "two")
    assert take_all(channel, queue) == []
    assert client.end(transaction, outcome) == "committed"
    assert take_all(channel, queue) == [b"one", b"two"]


def test_a_posting_of_a_failed_transaction_is_never_delivered(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    sender = client.sender(queue)
    transaction, outcome = client.declare()
    client.send(transaction, sender, "one")
    assert client.end(transaction, outcome, fail=True) == "aborted"
    assert take_all(channel, queue) == []


def test_a_retired_message_leaves_its_queue_at_the_discharge(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_publish("", queue, b"one")
    transaction, outcome = client.declare()
    receiver = client.receiver(queue)
    _, delivery = client.take(receiver)
    transaction.accept(delivery)
    assert client.end(transaction, outcome) == "committed"
    client.await_settled(delivery)
    assert delivery.remote_state == Delivery.ACCEPTED
    receiver.close()
    assert take_all(channel, queue) == []


def test_a_rolled_back_retirement_leaves_the_delivery_with_the_client(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    """4.4.2: "the deliveries will still be "live" and will remain acquired by the controller"."""
    channel.basic_publish("", queue, b"one")
    receiver = client.receiver(queue)
    _, delivery = client.take(receiver)
    transaction, outcome = client.declare()
    transaction.update(delivery, Delivery.ACCEPTED)
    assert client.end(transaction, outcome, fail=True) == "aborted"
    assert take_all(channel, queue) == []
    delivery.update(Delivery.ACCEPTED)
    client.await_settled(delivery)
    receiver.close()
    assert take_all(channel, queue) == []


def test_a_settled_retirement_that_is_rolled_back_releases_the_message(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    """4.4.4.2: "the controller can no longer influence the state … the resource MUST apply the default outcome"."""
    channel.basic_publish("", queue, b"one")
    receiver = client.receiver(queue)
    _, delivery = client.take(receiver)
    transaction, outcome = client.declare()
    transaction.update(delivery, Delivery.ACCEPTED)
    delivery.settle()
    assert client.end(transaction, outcome, fail=True) == "aborted"
    assert take_all(channel, queue, at_least=1) == [b"one"]


def test_other_outcomes_are_applied_by_the_discharge(client: Client, channel: BlockingChannel, queue: str) -> None:
    channel.basic_publish("", queue, b"one")
    receiver = client.receiver(queue)
    _, delivery = client.take(receiver)
    transaction, outcome = client.declare()
    transaction.update(delivery, Delivery.RELEASED)
    assert take_all(channel, queue) == []
    assert client.end(transaction, outcome) == "committed"
    assert take_all(channel, queue, at_least=1) == [b"one"]


def test_transactions_share_a_session_and_do_not_mix(client: Client, channel: BlockingChannel, queue: str) -> None:
    sender = client.sender(queue)
    first, first_outcome = client.declare()
    second, second_outcome = client.declare()
    client.send(first, sender, "first")
    client.send(second, sender, "second")
    sender.send(Message(body="outside"))
    assert client.end(second, second_outcome) == "committed"
    assert client.end(first, first_outcome, fail=True) == "aborted"
    assert take_all(channel, queue) == [b"outside", b"second"]


def test_a_client_that_leaves_has_committed_nothing(client: Client, channel: BlockingChannel, queue: str) -> None:
    channel.basic_publish("", queue, b"one")
    sender, receiver = client.sender(queue), client.receiver(queue)
    _, delivery = client.take(receiver)
    transaction, _ = client.declare()
    client.send(transaction, sender, "two")
    transaction.update(delivery, Delivery.ACCEPTED)
    client.blocking.close()
    assert take_all(channel, queue, at_least=1) == [b"one"]

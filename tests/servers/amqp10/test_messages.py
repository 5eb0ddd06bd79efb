"""Messages between clients of AMQP 1.0 and 0-9-1."""

import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from proton.utils import LinkDetached, SendException

from tests.support.broker import only_standalone
from tests.support.client import take_all
from tests.support.processes import wait_until
from tests.support.proton import AtMostOnce, Client, Delivery, Message


def test_each_protocol_reads_messages_of_the_other(client: Client, channel: BlockingChannel, queue: str) -> None:
    sent = Message(body="hello", durable=True, subject="order", id="m1", properties={"count": 1}, reply_to="/queues/r")
    assert client.sender(queue).send(sent).remote_state == Delivery.ACCEPTED
    _, properties, body = channel.basic_get(queue, auto_ack=True)
    assert body == b"hello"
    assert (properties.type, properties.message_id, properties.delivery_mode) == ("order", "m1", 2)
    assert (properties.headers["count"], properties.reply_to) == (1, "r")

    channel.basic_publish("", queue, b"back", BasicProperties(headers={"n": 7}, message_id="m2", delivery_mode=2))
    got = client.receiver(f"/queues/{queue}").receive()
    assert (bytes(got.body), got.id, got.properties, got.durable) == (b"back", "m2", {"n": 7}, True)


def test_a_message_comes_out_as_it_went_in(client: Client, queue: str) -> None:
    sent = Message(body={"a": [1, "b", None]}, subject="s", user_id=b"guest", properties={"x": 1.5}, content_type="c")
    client.sender(queue).send(sent)
    got = client.receiver(queue).receive()
    assert (got.body, got.subject, got.user_id, got.properties, got.content_type) == (
        {"a": [1, "b", None]}, "s", b"guest", {"x": 1.5}, "c",
    )  # fmt: skip


def test_the_routing_key_comes_from_the_address_or_the_subject(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    channel.queue_bind(queue, "amq.topic", "a.*")
    client.sender("/exchanges/amq.topic/a.b").send(Message(body="by address"))
    client.sender("/exchanges/amq.topic").send(Message(body="by subject", subject="a.c"))
    client.sender(None).send(Message(body="by to", address=f"/queues/{queue}"))
    assert take_all(channel, queue) == [b"by address", b"by subject", b"by to"]


def test_a_message_that_no_queue_takes_is_released(client: Client) -> None:
    with pytest.raises(SendException) as refusal:
        client.sender("/exchanges/amq.direct/nowhere").send(Message(body="lost"))
    assert refusal.value.state == Delivery.RELEASED


def test_a_link_to_a_missing_queue_is_refused(client: Client) -> None:
    with pytest.raises(LinkDetached, match="amqp:not-found"):
        client.sender("/queues/no-such-queue")
    with pytest.raises(LinkDetached, match="amqp:not-found"):
        client.receiver("/queues/no-such-queue")


@pytest.mark.parametrize(
    ("outcome", "left"),
    [(Delivery.ACCEPTED, []), (Delivery.RELEASED, [b"one"]), (Delivery.MODIFIED, [b"one"]), (Delivery.REJECTED, [])],
)
def test_an_outcome_settles_a_delivery(
    client: Client, channel: BlockingChannel, queue: str, outcome: int, left: list[bytes]
) -> None:
    channel.basic_publish("", queue, b"one")
    receiver = client.receiver(queue)
    receiver.receive()
    receiver.settle(outcome)
    receiver.close()
    assert take_all(channel, queue, at_least=len(left)) == left


def test_a_rejected_message_is_dead_lettered(client: Client, channel: BlockingChannel, queue: str) -> None:
    dead = f"{queue}-dead"
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    channel.queue_declare(dead, durable=True, arguments=letters)
    client.sender(dead).send(Message(body="bad"))
    receiver = client.receiver(dead)
    receiver.receive()
    receiver.reject()
    got = client.receiver(queue).receive()
    assert got.body == "bad"
    assert got.annotations["x-death"][0]["reason"] == "rejected"
    channel.queue_delete(dead)


def test_unsettled_messages_return_when_link_or_connection_ends(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_publish("", queue, b"one")
    receiver = client.receiver(queue)
    receiver.receive()
    receiver.close()
    again = client.receiver(queue)
    assert not again.receive().first_acquirer
    client.blocking.close()
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 1)


def test_credit_limits_the_deliveries(client: Client, channel: BlockingChannel, queue: str) -> None:
    for number in range(5):
        channel.basic_publish("", queue, str(number).encode())
    receiver = client.receiver(queue, credit=2)
    client.wait(lambda: len(receiver.fetcher.incoming) == 2)
    assert channel.queue_declare(queue, passive=True).method.message_count == 3
    receiver.link.drain(10)
    client.wait(lambda: len(receiver.fetcher.incoming) == 5 and not receiver.link.credit)
    assert [bytes(message.body) for message, _ in receiver.fetcher.incoming] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_dynamic_node_is_a_queue_for_replies(client: Client, channel: BlockingChannel) -> None:
    receiver = client.receiver(None, dynamic=True)
    address = receiver.link.remote_source.address
    client.sender(address).send(Message(body="reply"))
    assert receiver.receive().body == "reply"
    channel.basic_publish("", address.removeprefix("/queues/"), b"from 0-9")
    assert bytes(receiver.receive().body) == b"from 0-9"


def test_a_message_larger_than_a_frame_is_put_together(client: Client, queue: str) -> None:
    body = "x" * 1_000_000
    client.sender(queue).send(Message(body=body))
    assert client.receiver(queue).receive().body == body


@only_standalone
def test_a_full_queue_rejects_and_dooms_a_transaction(client: Client, channel: BlockingChannel, queue: str) -> None:
    full = f"{queue}-full"
    channel.queue_declare(full, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    sender = client.sender(full)
    sender.send(Message(body="first"))
    with pytest.raises(SendException) as refusal:
        sender.send(Message(body="second"))
    assert refusal.value.state == Delivery.REJECTED
    transaction, outcome = client.declare()
    client.send(transaction, sender, "third")
    assert client.end(transaction, outcome) == "commit failed"
    assert take_all(channel, full) == [b"first"]
    channel.queue_delete(full)


def test_a_link_is_notified_of_the_deletion_of_its_queue(client: Client, channel: BlockingChannel) -> None:
    name = channel.queue_declare("").method.queue
    receiver = client.receiver(name)
    channel.queue_delete(name)
    with pytest.raises(LinkDetached, match="amqp:resource-deleted"):
        receiver.receive()


def test_a_settled_link_needs_no_dispositions(client: Client, channel: BlockingChannel, queue: str) -> None:
    for number in range(3):
        channel.basic_publish("", queue, str(number).encode())
    receiver = client.receiver(queue, credit=2, options=AtMostOnce())
    client.wait(lambda: len(receiver.fetcher.incoming) == 2)
    receiver.close()
    wait_until(lambda: take_all(channel, queue) == [b"2"])


def test_receivers_share_a_queue_with_consumers_of_the_other_protocol(
    client: Client, channel: BlockingChannel, queue: str
) -> None:
    receiver = client.receiver(queue, credit=10)
    channel.basic_publish("", queue, b"first")
    assert bytes(receiver.receive().body) == b"first"  # its credit has arrived
    got: list[bytes] = []
    channel.basic_consume(queue, lambda *args: got.append(args[3]), auto_ack=True)
    for number in range(8):
        channel.basic_publish("", queue, str(number).encode())
    client.wait(lambda: len(receiver.fetcher.incoming) == 4)
    while len(got) < 4:
        channel.connection.process_data_events(1)
    theirs = [bytes(message.body) for message, _ in receiver.fetcher.incoming]
    assert sorted(got + theirs) == [str(number).encode() for number in range(8)]

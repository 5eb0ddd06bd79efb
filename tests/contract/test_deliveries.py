"""Deliveries in standalone mode and RabbitMQ: round-robin, priorities and prefetch of consumers, and requeueing.

RabbitMQ, "Consumer Prefetch", "Consumer Priorities", "Negative Acknowledgements", "Exclusive Consumers".
"""

from typing import Any

import pytest
from pika.exceptions import ChannelClosedByBroker

from tests.support.dialogue import Dialogue, Got, unique


def bodies(found: list[Got]) -> list[str]:
    return [got.body for got in found]


def take(talk: Dialogue, queue: str, count: int) -> list[Got]:
    """Get *count* messages by basic.get, without acknowledging them."""
    return [talk.take(queue) for _ in range(count)]


# -- requeueing --------------------------------------------------------------------------------------------------------


def test_a_requeued_message_has_its_old_place(talk: Dialogue) -> None:
    """RabbitMQ: requeued messages are "placed to … original position in its queue, if possible"."""
    queue = talk.queue()
    talk.publish(queue, *"123456")
    found = take(talk, queue, 4)
    talk.channel.basic_ack(found[1].method.delivery_tag)
    talk.channel.basic_nack(found[2].method.delivery_tag)
    talk.channel.basic_reject(found[0].method.delivery_tag)
    again = take(talk, queue, 4)
    assert bodies(again) == ["1", "3", "5", "6"]
    assert [got.method.redelivered for got in again] == [True, True, False, False]
    talk.channel.basic_nack(0, multiple=True)
    again = take(talk, queue, 5)
    assert bodies(again) == ["1", "3", "4", "5", "6"]
    assert all(got.method.redelivered for got in again)


def test_a_multiple_nack_covers_unsettled_deliveries_up_to_its_tag(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, *"12345")
    found = take(talk, queue, 5)
    talk.channel.basic_ack(found[1].method.delivery_tag)
    talk.channel.basic_nack(found[3].method.delivery_tag, multiple=True)
    assert talk.drain(queue) == ["1", "3", "4"]
    talk.channel.basic_reject(found[4].method.delivery_tag, requeue=True)
    assert talk.drain(queue) == ["5"]


def test_recover_requeues_messages_of_several_queues(talk: Dialogue) -> None:
    first, second = talk.queue(), talk.queue()
    talk.publish(first, "1", "2")
    talk.publish(second, "3")
    take(talk, first, 2)
    take(talk, second, 1)
    talk.channel.basic_recover(requeue=True)
    again = [*take(talk, first, 2), *take(talk, second, 1)]
    assert bodies(again) == ["1", "2", "3"]
    assert all(got.method.redelivered for got in again)


def test_a_message_that_is_published_again_is_not_redelivered(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, "1")
    (first,) = take(talk, queue, 1)
    talk.channel.basic_nack(first.method.delivery_tag)
    (again,) = take(talk, queue, 1)
    talk.publish(queue, again.body)
    talk.channel.basic_ack(again.method.delivery_tag)
    assert not talk.take(queue).method.redelivered


def test_no_header_counts_deliveries(talk: Dialogue) -> None:
    """RabbitMQ: only quorum queues set x-delivery-count."""
    queue = talk.queue()
    talk.publish(queue, "1", headers={"mine": 1})
    for _ in range(3):
        got = talk.take(queue)
        assert got.headers == {"mine": 1}
        talk.channel.basic_nack(got.method.delivery_tag)


def test_another_consumer_gets_a_requeued_message(talk: Dialogue) -> None:
    queue = talk.queue()
    first: list[Got] = []
    second: list[Got] = []
    holding, waiting = talk.another(), talk.another()
    holding.basic_qos(prefetch_count=1)
    talk.collect(first, queue, channel=holding)
    talk.publish(queue, "1")
    talk.until(lambda: len(first) == 1, "a delivery")
    talk.collect(second, queue, channel=waiting)
    holding.close()
    talk.until(lambda: len(second) == 1, "the delivery again")
    assert (second[0].body, second[0].method.redelivered) == ("1", True)


def test_settling_twice_closes_the_channel(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, "1")
    channel = talk.another()
    method, _, _ = channel.basic_get(queue)
    for settle in (channel.basic_ack, channel.basic_reject):
        settle(method.delivery_tag)
    assert talk.closed(channel) == 406


# -- turns -------------------------------------------------------------------------------------------------------------


def test_consumers_take_turns(talk: Dialogue) -> None:
    queue = talk.queue()
    found: list[Got] = []
    for _ in range(3):
        talk.collect(found, queue, auto_ack=True)
    for number in range(9):
        talk.publish(queue, str(number))
    talk.until(lambda: len(found) == 9, "nine deliveries")
    tags = [got.method.consumer_tag for got in sorted(found, key=lambda got: got.body)]
    assert tags[:3] == tags[3:6] == tags[6:]
    assert len(set(tags)) == 3


def test_the_highest_priority_is_served_while_it_has_room(talk: Dialogue) -> None:
    queue = talk.queue()
    found: list[Got] = []
    tags = []
    for priority in (-5, None, 10):
        talk.channel.basic_qos(prefetch_count=2)
        arguments: dict[str, Any] = {} if priority is None else {"x-priority": priority}
        tags.append(talk.collect(found, queue, arguments=arguments))
    low, middle, high = tags
    for number in range(5):
        talk.publish(queue, str(number))
        talk.until(lambda: len(found) > number, "one more delivery")  # noqa: B023 - called only in this round
    assert [got.method.consumer_tag for got in found] == [high, high, middle, middle, low]
    talk.channel.basic_ack(found[1].method.delivery_tag)
    talk.publish(queue, "high again")
    talk.until(lambda: len(found) == 6, "the sixth delivery")
    assert found[5].method.consumer_tag == high


def test_a_get_takes_nothing_from_a_consumer_that_waited(talk: Dialogue) -> None:
    """A message waits only while no consumer can take it."""
    queue = talk.queue()
    found: list[Got] = []
    talk.collect(found, queue)
    for number in range(20):
        talk.channel.basic_publish("", queue, str(number).encode())
        assert talk.get(queue) is None
    talk.until(lambda: len(found) == 20, "all deliveries")


def test_unacknowledged_messages_are_not_counted_purged_or_deleted(talk: Dialogue) -> None:
    queue = talk.queue()
    found: list[Got] = []
    talk.collect(found, queue)
    talk.channel.basic_publish("", queue, b"counted")
    assert talk.count(queue) == 0
    talk.channel.basic_publish("", queue, b"purged")
    assert talk.channel.queue_purge(queue).method.message_count == 0
    talk.channel.basic_publish("", queue, b"deleted")
    assert talk.channel.queue_delete(queue).method.message_count == 0
    talk.until(lambda: len(found) == 3, "all deliveries")


@pytest.mark.parametrize("value", ["high", True, None])
def test_a_priority_of_a_consumer_is_a_number(talk: Dialogue, value: object) -> None:
    queue = talk.queue()
    arguments = {"x-priority": value}
    assert talk.refused(lambda channel: channel.basic_consume(queue, lambda *_: None, arguments=arguments)) == 406


# -- single active consumer --------------------------------------------------------------------------------------------


def test_one_consumer_is_active_and_others_wait_for_its_end(talk: Dialogue) -> None:
    """RabbitMQ, Consumers: "only one consumer at a time consuming from a queue"; another "in case" it ends."""
    queue = talk.queue(single_active_consumer=True)
    found: list[Got] = []
    channels = [talk.another() for _ in range(3)]
    for channel in channels:
        channel.basic_qos(prefetch_count=1)
    tags = [talk.collect(found, queue, channel=channel) for channel in channels]
    talk.publish(queue, "1", "2", "3")
    talk.until(lambda: len(found) == 1, "the first delivery")
    assert talk.count(queue) == 2
    channels[0].basic_ack(found[0].method.delivery_tag)
    talk.until(lambda: len(found) == 2, "the second delivery")
    with pytest.raises(ChannelClosedByBroker):  # closes the channel; close() of pika would cancel the consumer first
        channels[0].queue_declare(unique(), passive=True)
    talk.until(lambda: len(found) == 3, "the second message for the next consumer")
    channels[2].basic_cancel(tags[2])  # a waiting consumer
    channels[1].basic_ack(found[2].method.delivery_tag)
    talk.until(lambda: len(found) == 4, "the last delivery")
    assert [got.method.consumer_tag for got in found] == [tags[0], tags[0], tags[1], tags[1]]
    assert [got.body for got in found] == ["1", "2", "2", "3"]


def test_the_next_consumer_gets_messages_of_the_active_one(talk: Dialogue) -> None:
    queue = talk.queue(single_active_consumer=True)
    first: list[Got] = []
    second: list[Got] = []
    channels = [talk.another() for _ in range(2)]
    for found, channel in zip((first, second), channels, strict=True):
        talk.collect(found, queue, channel=channel)
    talk.publish(queue, "1", "2")
    talk.until(lambda: len(first) == 2, "both deliveries")
    channels[0].close()
    talk.until(lambda: len(second) == 2, "both deliveries again")
    assert [(got.body, got.method.redelivered) for got in second] == [("1", True), ("2", True)]
    assert talk.get(queue) is None


def test_an_exclusive_consumer_has_no_place_where_one_is_active(talk: Dialogue) -> None:
    queue = talk.queue(single_active_consumer=True)
    assert talk.refused(lambda channel: channel.basic_consume(queue, lambda *_: None, exclusive=True)) == 403


def test_a_queue_with_one_active_consumer_may_be_got_from(talk: Dialogue) -> None:
    queue = talk.queue(single_active_consumer=True)
    talk.publish(queue, "1")
    assert talk.take(queue).body == "1"


def test_the_next_consumer_by_priority_is_activated(talk: Dialogue) -> None:
    queue = talk.queue(single_active_consumer=True)
    found: list[Got] = []
    tags = [
        talk.collect(found, queue, auto_ack=True, arguments={"x-priority": priority}) for priority in (1, 2, 9, 9, 3)
    ]
    talk.publish(queue, "1")
    talk.until(lambda: len(found) == 1, "the first delivery")
    talk.channel.basic_cancel(tags[0])
    talk.publish(queue, "2")
    talk.until(lambda: len(found) == 2, "the second delivery")
    assert [got.method.consumer_tag for got in found] == [tags[0], tags[2]]


# -- prefetch ----------------------------------------------------------------------------------------------------------


def test_a_prefetch_applies_separately_to_each_new_consumer(talk: Dialogue) -> None:
    """RabbitMQ: global false is "applied separately to each new consumer on the channel"."""
    queue, other = talk.queue(), talk.queue()
    talk.publish(queue, *"1234567")
    talk.publish(other, *"abc")
    found: dict[str, list[Got]] = {"one": [], "two": [], "all": []}
    talk.channel.basic_qos(prefetch_count=1)
    talk.collect(found["one"], queue)
    talk.channel.basic_qos(prefetch_count=2)
    talk.collect(found["two"], queue)
    talk.channel.basic_qos(prefetch_count=0)
    talk.collect(found["all"], other)
    talk.until(lambda: [len(got) for got in found.values()] == [1, 2, 3], "deliveries")
    assert talk.count(queue) == 4
    talk.channel.basic_ack(found["one"][0].method.delivery_tag)
    talk.until(lambda: len(found["one"]) == 2, "one more")
    assert (len(found["two"]), talk.count(queue)) == (2, 3)


def test_of_both_prefetches_the_smaller_counts(talk: Dialogue) -> None:
    """RabbitMQ: "neither … limit … will be exceeded"."""
    queue = talk.queue()
    talk.publish(queue, *"123456")
    found: list[Got] = []
    talk.channel.basic_qos(prefetch_count=2)
    talk.channel.basic_qos(prefetch_count=3, global_qos=True)
    talk.collect(found, queue)
    talk.collect(found, queue)
    talk.until(lambda: len(found) == 3, "three deliveries")
    assert talk.count(queue) == 3
    talk.channel.basic_qos(prefetch_count=4, global_qos=True)
    talk.until(lambda: len(found) == 4, "a fourth delivery")
    assert talk.count(queue) == 2


def test_a_channels_prefetch_stops_consumers_that_do_not_acknowledge(talk: Dialogue) -> None:
    """RabbitMQ checks the limit of the channel before each delivery and counts deliveries that need an ack."""
    queue, free = talk.queue(), talk.queue()
    talk.channel.basic_qos(prefetch_count=1, global_qos=True)
    held: list[Got] = []
    found: list[Got] = []
    talk.collect(found, free, auto_ack=True)
    talk.publish(free, "1", "2")
    talk.until(lambda: len(found) == 2, "what is not counted")
    talk.collect(held, queue)
    talk.publish(queue, "held")
    talk.until(lambda: len(held) == 1, "a delivery to acknowledge")
    talk.publish(free, "3", "4")
    assert talk.count(free) == 2
    talk.channel.basic_ack(held[0].method.delivery_tag)
    talk.until(lambda: len(found) == 4, "the rest")


def test_messages_from_get_do_not_count_for_prefetch(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, *"12345")
    talk.channel.basic_qos(prefetch_count=1)
    assert bodies(take(talk, queue, 3)) == ["1", "2", "3"]
    found: list[Got] = []
    talk.collect(found, queue)
    talk.until(lambda: len(found) == 1, "a delivery")
    assert talk.count(queue) == 1


def test_get_counts_the_remaining_messages(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, *"123")
    assert [talk.take(queue).method.message_count for _ in range(3)] == [2, 1, 0]
    assert talk.get(queue) is None


# -- returns -----------------------------------------------------------------------------------------------------------


def test_only_an_unroutable_mandatory_message_is_returned_before_its_confirm(
    talk: Dialogue,
) -> None:
    taken = talk.queue()
    assert talk.publish("nowhere", "1", mandatory=True, headers={"CC": [taken]}) == [True]
    assert talk.drain(taken) == ["1"]
    returned = talk.returned("nowhere", "2", headers={"CC": ["nowhere else"], "BCC": ["blind"]})
    assert (returned.body, returned.method.reply_code, returned.method.routing_key) == ("2", 312, "nowhere")
    assert returned.headers == {"CC": ["nowhere else"]}


def test_a_message_for_the_alternate_exchange_is_not_returned(talk: Dialogue) -> None:
    grave = talk.grave()
    exchange = talk.exchange("direct", alternate_exchange=grave)
    talk.channel.queue_bind(talk.queue(), exchange, "bound")
    assert talk.publish("unbound", "1", exchange=exchange, mandatory=True) == [True]
    (got,) = talk.receive(grave)
    assert (got.method.exchange, got.method.routing_key) == (exchange, "unbound")


def test_a_message_for_an_exchange_without_queues_is_returned(talk: Dialogue) -> None:
    source, end = talk.exchange("fanout"), talk.exchange("fanout")
    talk.channel.exchange_bind(end, source)
    assert talk.returned("", "1", exchange=source).method.exchange == source

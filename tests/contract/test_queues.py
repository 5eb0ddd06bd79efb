"""Queues of standalone mode and RabbitMQ: their limits, their lifetime and the order of their messages.

Each test runs against both. RabbitMQ, "Time-To-Live and Expiration", "Queue Length Limit", "Queues".
"""

import time
from typing import Any, Final

import pytest

from tests.support.dialogue import Dialogue, Got, unique

EXPIRES: Final = 2000
"""The lifetime of an unused queue, in milliseconds."""


def passed(talk: Dialogue, milliseconds: int) -> None:
    """Wait until a message published now with this time to live has expired."""
    grave = talk.grave()
    watched = talk.queue(dead_letter_exchange=grave, message_ttl=milliseconds)
    talk.publish(watched, "sand")
    talk.receive(grave)


# -- time to live ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ttl", "expiration"), [(30, None), (None, "30"), (30, "600000"), (600_000, "30")])
def test_the_smaller_time_to_live_counts(talk: Dialogue, ttl: int | None, expiration: str | None) -> None:
    """RabbitMQ: "the lower value between the two will be chosen"."""
    grave = talk.grave()
    arguments: dict[str, Any] = {} if ttl is None else {"message_ttl": ttl}
    queue = talk.queue(dead_letter_exchange=grave, **arguments)
    talk.publish(queue, "short", expiration=expiration)
    assert talk.receive(grave)[0].deaths[0]["reason"] == "expired"
    assert talk.count(queue) == 0


def test_messages_expire_at_the_head_alone(talk: Dialogue) -> None:
    """RabbitMQ: "queued messages will be … behind non-expired ones until the latter are consumed or expired"."""
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave)
    talk.publish(queue, "stays")
    talk.publish(queue, "waits", expiration="1")
    passed(talk, 30)
    assert (talk.count(queue), talk.count(grave)) == (2, 0)
    assert talk.take(queue).body == "stays"
    assert talk.get(queue) is None
    assert talk.receive(grave)[0].body == "waits"


@pytest.mark.parametrize("by_queue", [True, False])
def test_a_waiting_consumer_gets_messages_with_a_zero_ttl(talk: Dialogue, by_queue: bool) -> None:
    """RabbitMQ: messages expire "upon reaching a queue unless they can be delivered to a consumer immediately"."""
    arguments: dict[str, Any] = {"message_ttl": 0} if by_queue else {}
    expiration = None if by_queue else "0"
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, **arguments)
    talk.publish(queue, "nobody", expiration=expiration)
    assert talk.receive(grave)[0].body == "nobody"
    found: list[Got] = []
    talk.collect(found, queue)
    talk.publish(queue, "somebody", "somebody else", expiration=expiration)
    talk.until(lambda: len(found) == 2, "two deliveries")
    assert [got.body for got in found] == ["somebody", "somebody else"]
    assert talk.count(grave) == 0


def test_a_consumer_without_room_does_not_save_a_message(talk: Dialogue) -> None:
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, message_ttl=0)
    talk.channel.basic_qos(prefetch_count=1)
    found: list[Got] = []
    talk.collect(found, queue)
    talk.publish(queue, "held", "dead")
    talk.receive_on_another(grave, "dead")
    assert [got.body for got in found] == ["held"]


def test_a_delivered_message_does_not_expire_before_it_is_requeued(talk: Dialogue) -> None:
    """RabbitMQ: "The original expiry time of a message is preserved if it is requeued"."""
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, message_ttl=100)
    found: list[Got] = []
    channel = talk.another()
    talk.collect(found, queue, channel=channel)
    talk.publish(queue, "acknowledged", "given back")
    talk.until(lambda: len(found) == 2, "both deliveries")
    passed(talk, 150)
    assert talk.count(grave) == 0
    channel.basic_ack(found[0].method.delivery_tag)
    channel.basic_nack(found[1].method.delivery_tag)
    (got,) = talk.receive(grave)
    assert (got.body, got.deaths[0]["reason"], got.method.redelivered) == ("given back", "expired", False)


def test_get_finds_nothing_where_all_has_expired(talk: Dialogue) -> None:
    queue = talk.queue(message_ttl=30)
    talk.publish(queue, "1", "2")
    passed(talk, 60)
    assert talk.get(queue) is None
    assert talk.count(queue) == 0


@pytest.mark.parametrize("value", ["315360000001", "99999999999999999999", "1e3", "-1", "0x10", "1 ", "1_0"])
def test_expirations_that_are_no_time_are_refused(talk: Dialogue, value: str) -> None:
    assert talk.publish_refused("", "anywhere", expiration=value) == 406


@pytest.mark.parametrize("value", ["0", "4294967296", "315360000000", "0010", "+1", "-0"])
def test_expirations_that_are_a_time_are_taken(talk: Dialogue, value: str) -> None:
    assert talk.publish_refused("", "anywhere", expiration=value) == 0


# -- queues that expire ------------------------------------------------------------------------------------------------


def test_messages_of_an_expired_queue_are_no_dead_letters(talk: Dialogue) -> None:
    """RabbitMQ: "the server … does not dead-letter the messages in an expired queue" (Dead Letter Exchanges)."""
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, expires=200)
    talk.publish(queue, "lost")
    talk.until(lambda: not talk.exists(queue), "the queue gone")
    assert talk.refused(lambda channel: channel.queue_declare(queue, passive=True)) == 404
    passed(talk, 1)
    assert talk.count(grave) == 0


def test_queues_that_are_used_stay(talk: Dialogue) -> None:
    """RabbitMQ: "unused means the queue has no consumers, was not recently redeclared …, and basic.get has not"."""
    arguments = {"x-expires": EXPIRES}
    for _ in range(5):
        got, declared, looked_at, consumed, watched = (talk.queue(expires=EXPIRES) for _ in range(5))
        talk.collect([], consumed)
        longest, last, gone = 0.0, time.monotonic(), False
        while not gone:
            talk.channel.basic_get(got)
            talk.channel.queue_declare(declared, exclusive=True, arguments=arguments)
            talk.channel.queue_declare(looked_at, passive=True)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            gone = not talk.exists(watched)
            talk.connection.process_data_events(0.05)
        assert talk.exists(consumed)
        there = [talk.exists(queue) for queue in (got, declared, looked_at)]
        if max(longest, time.monotonic() - last) < EXPIRES / 2000:
            assert there == [True] * 3
            return
    pytest.fail("this machine is too busy to use a queue twice in a second")


def test_publishing_to_a_queue_is_no_use_of_it(talk: Dialogue) -> None:
    queue = talk.queue(expires=500)
    talk.until(lambda: not talk.exists(queue), "the queue gone that is published to all the time")


def test_an_unused_queue_goes_after_its_last_consumer(talk: Dialogue) -> None:
    queue = talk.queue(expires=200)
    tag = talk.collect([], queue)
    passed(talk, 400)
    assert talk.exists(queue)
    talk.channel.basic_cancel(tag)
    talk.until(lambda: not talk.exists(queue), "the queue gone")


# -- length limits -----------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_its_oldest_messages(talk: Dialogue) -> None:
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, max_length=2)
    assert talk.publish(queue, "1", "2", "3", "4") == [True] * 4
    assert [got.body for got in talk.receive(grave, 2)] == ["1", "2"]
    assert talk.drain(queue) == ["3", "4"]


def test_bytes_of_bodies_count(talk: Dialogue) -> None:
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, max_length_bytes=10)
    talk.publish(queue, "1" * 4, "2" * 4, "3" * 4, message_id="not counted")
    assert [got.body for got in talk.receive(grave)] == ["1111"]
    talk.publish(queue, "4" * 11)
    assert [got.body for got in talk.receive(grave, 3)] == ["2222", "3333", "4" * 11]
    assert talk.count(queue) == 0


def test_only_ready_messages_count(talk: Dialogue) -> None:
    """RabbitMQ: "the number of ready messages is taken into account"; unacknowledged messages do not count."""
    queue = talk.queue(max_length=2)
    talk.publish(queue, "1", "2")
    assert [talk.take(queue).body, talk.take(queue).body] == ["1", "2"]
    talk.publish(queue, "3", "4")
    assert talk.count(queue) == 2
    talk.channel.basic_nack(2, multiple=True)
    assert talk.drain(queue) == ["3", "4"]


def test_a_queue_of_no_length_hands_over_to_consumers_alone(talk: Dialogue) -> None:
    queue = talk.queue(max_length=0)
    talk.publish(queue, "nobody")
    found: list[Got] = []
    talk.collect(found, queue, auto_ack=True)
    talk.publish(queue, "1", "2")
    talk.until(lambda: len(found) == 2, "two deliveries")
    assert [got.body for got in found] == ["1", "2"]


def test_a_queue_that_refuses_keeps_its_oldest_messages(talk: Dialogue) -> None:
    grave = talk.grave()
    limits: tuple[dict[str, Any], ...] = ({"max_length": 2}, {"max_length_bytes": 2})
    for arguments in limits:
        queue = talk.queue(dead_letter_exchange=grave, overflow="reject-publish", **arguments)
        assert talk.publish(queue, "1", "2", "3") == [True, True, False]
        talk.take(queue)
        assert talk.publish(queue, "4", "5") == [True, False]
        assert talk.drain(queue) == ["2", "4"]
    passed(talk, 1)
    assert talk.count(grave) == 0


def test_a_message_refused_by_a_queue_may_be_dead_lettered(talk: Dialogue) -> None:
    """RabbitMQ: reject-publish-dlx "also dead-letters rejected messages"."""
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave, max_length=1, overflow="reject-publish-dlx")
    assert talk.publish(queue, "1", "2", "3", message_id="m") == [True, False, False]
    found = talk.receive(grave, 2)
    assert [got.body for got in found] == ["2", "3"]
    for got in found:
        assert got.deaths == [{"count": 1, "reason": "maxlen", "queue": queue, "exchange": "", "routing-keys": [queue]}]
        assert (got.properties.message_id, got.method.routing_key) == ("m", queue)
    assert talk.drain(queue) == ["1"]


def test_without_a_dead_letter_exchange_refused_messages_are_dropped(talk: Dialogue) -> None:
    queue = talk.queue(max_length=1, overflow="reject-publish-dlx")
    assert talk.publish(queue, "1", "2") == [True, False]
    assert talk.drain(queue) == ["1"]


def test_one_queue_that_refuses_is_enough_for_a_nack(talk: Dialogue) -> None:
    """In RabbitMQ the other queues keep the message; in standalone mode no queue gets it, to avoid duplicates."""
    full, other = talk.queue(max_length=1, overflow="reject-publish"), talk.queue()
    fanout = talk.exchange("fanout")
    for queue in (full, other):
        talk.channel.queue_bind(queue, fanout)
    assert talk.publish("", "1", "2", exchange=fanout) == [True, False]
    assert talk.drain(full) == ["1"]
    assert talk.drain(other)[:1] == ["1"]


def test_a_mandatory_message_that_is_refused_is_not_returned(talk: Dialogue) -> None:
    queue = talk.queue(max_length=0, overflow="reject-publish")
    assert talk.publish(queue, "1", mandatory=True) == [False]


# -- priorities --------------------------------------------------------------------------------------------------------


def test_messages_come_by_priority_and_then_by_age(talk: Dialogue) -> None:
    queue = talk.queue(max_priority=5)
    for body, priority in (("none", None), ("0", 0), ("1", 1), ("9", 9), ("5", 5), ("3", 3), ("1b", 1), ("255", 255)):
        talk.publish(queue, body, priority=priority)
    assert talk.drain(queue) == ["9", "5", "255", "3", "1", "1b", "none", "0"]


def test_given_back_a_message_has_its_priority_and_place(talk: Dialogue) -> None:
    queue = talk.queue(max_priority=5)
    talk.publish(queue, "low 1", "low 2", priority=1)
    talk.publish(queue, "high 1", "high 2", priority=4)
    for _ in range(3):
        talk.take(queue)
    talk.channel.basic_nack(3, multiple=True)
    assert talk.drain(queue) == ["high 1", "high 2", "low 1", "low 2"]


def test_a_full_queue_with_priorities_drops_from_its_head(talk: Dialogue) -> None:
    """RabbitMQ: "higher priority messages might be dropped to make way for lower priority ones"."""
    queue = talk.queue(max_priority=5, max_length=2)
    talk.publish(queue, "low", priority=1)
    talk.publish(queue, "high", priority=5)
    talk.publish(queue, "lower", priority=0)
    assert talk.drain(queue) == ["low", "lower"]


def test_a_low_priority_message_expires_only_at_the_head(talk: Dialogue) -> None:
    """RabbitMQ, Priority Queues: "expired lower-priority messages getting stuck behind non-expired" ones."""
    grave = talk.grave()
    queue = talk.queue(max_priority=5, dead_letter_exchange=grave)
    talk.publish(queue, "high", priority=5)
    talk.publish(queue, "low", priority=1, expiration="1")
    passed(talk, 30)
    assert (talk.count(queue), talk.count(grave)) == (2, 0)
    assert talk.take(queue).body == "high"
    (got,) = talk.receive(grave)
    assert (got.body, got.properties.priority) == ("low", 1)


def test_without_queue_priorities_message_priorities_are_ignored(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, "low", priority=1)
    talk.publish(queue, "high", priority=5)
    assert talk.drain(queue) == ["low", "high"]


# -- exclusive queues and deletion -------------------------------------------------------------------------------------


def test_an_exclusive_queue_is_for_its_connection(talk: Dialogue) -> None:
    queue = talk.queue()
    with Dialogue(talk.url) as other:
        for ask in (
            lambda channel: channel.queue_declare(queue, passive=True),
            lambda channel: channel.queue_declare(queue),
            lambda channel: channel.queue_declare(queue, exclusive=True),
            lambda channel: channel.basic_consume(queue, lambda *_: None),
            lambda channel: channel.basic_get(queue),
            lambda channel: channel.queue_purge(queue),
            lambda channel: channel.queue_bind(queue, "amq.direct", "key"),
            lambda channel: channel.queue_delete(queue),
        ):
            assert other.refused(ask) == 405
        assert other.publish(queue, "from anywhere") == [True]
        assert talk.drain(queue) == ["from anywhere"]
        talk.connection.close()
        assert other.refused(lambda channel: channel.queue_declare(queue, passive=True)) == 404


def test_a_queue_is_deleted_only_with_its_last_consumer(talk: Dialogue) -> None:
    name = unique()
    talk.channel.queue_declare(name, auto_delete=True)
    talk.publish(name, "1")
    assert talk.drain(name) == ["1"]
    tag = talk.collect([], name)
    another = talk.another()
    talk.collect([], name, channel=another)
    talk.channel.basic_cancel(tag)
    assert talk.exists(name)
    another.close()
    talk.until(lambda: not talk.exists(name), "the queue gone with the channel of its last consumer")


def test_an_exchange_goes_with_its_last_binding(talk: Dialogue) -> None:
    name, source = talk.exchange("fanout"), talk.exchange("fanout")
    talk.channel.exchange_bind(name, source)
    first, second = talk.queue(), talk.queue()
    for queue in (first, second):
        talk.channel.queue_bind(queue, name)

    def there(exchange: str) -> bool:
        return talk.refused(lambda channel: channel.exchange_declare(exchange, passive=True)) == 0

    talk.channel.queue_unbind(first, name)
    assert there(name)
    talk.channel.queue_delete(second)
    # both are deleted: the first has lost its last binding, and with it the source its only one
    assert (there(name), there(source)) == (False, False)


def test_consumers_are_notified_of_the_end_of_their_queue(talk: Dialogue) -> None:
    """RabbitMQ, Consumer Cancel Notification."""
    queue = talk.queue()
    cancelled: list[str] = []
    talk.channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    tags = {talk.collect([], queue), talk.collect([], queue)}
    with_another = talk.another()
    with_another.queue_delete(queue)
    talk.until(lambda: set(cancelled) == tags, "both consumers told")
    assert talk.channel.is_open


def test_consumers_on_other_connections_are_notified_of_the_deletion(talk: Dialogue) -> None:
    name = unique()
    talk.channel.queue_declare(name)
    cancelled: list[object] = []
    talk.channel.add_on_cancel_callback(cancelled.append)
    talk.collect([], name, exclusive=True)
    with Dialogue(talk.url) as other:
        assert other.refused(lambda channel: channel.basic_consume(name, lambda *_: None)) == 403
        other.channel.queue_delete(name)
    talk.until(lambda: len(cancelled) == 1, "the consumer told")


def test_a_conditional_delete_keeps_a_queue_in_use_or_filled(talk: Dialogue) -> None:
    queue = talk.queue()
    tag = talk.collect([], queue)
    assert talk.refused(lambda channel: channel.queue_delete(queue, if_unused=True)) == 406
    talk.channel.basic_cancel(tag)
    talk.publish(queue, "1")
    assert talk.refused(lambda channel: channel.queue_delete(queue, if_empty=True)) == 406
    talk.take(queue)
    # unacknowledged messages do not count
    assert talk.channel.queue_delete(queue, if_empty=True, if_unused=True).method.message_count == 0


def test_purge_and_delete_count_ready_messages(talk: Dialogue) -> None:
    queue = talk.queue()
    talk.publish(queue, "1", "2", "3", "4")
    talk.take(queue)
    assert talk.channel.queue_purge(queue).method.message_count == 3
    assert talk.channel.queue_purge(queue).method.message_count == 0
    talk.publish(queue, "5", "6")
    assert talk.channel.queue_delete(queue).method.message_count == 2

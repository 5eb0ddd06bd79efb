"""Dead letters of standalone mode and RabbitMQ: the same dialogue gives the same messages.

RabbitMQ, "Dead Letter Exchanges", "Time-To-Live and Expiration", "Queue Length Limit", "Sender-selected Distribution".
"""

from typing import Any, Final

import pytest

from tests.support.dialogue import Dialogue, unique

LIMITS: Final[dict[str, dict[str, Any]]] = {
    "expired": {"message_ttl": 0},
    "maxlen": {"max_length": 0},
    "rejected": {},
}


def graves(talk: Dialogue, reason: str, **arguments: Any) -> tuple[str, str]:
    """A queue whose messages die for *reason* by :func:`kill`, and the queue for its dead letters."""
    grave = talk.grave()
    return talk.queue(dead_letter_exchange=grave, **LIMITS[reason], **arguments), grave


def kill(talk: Dialogue, queue: str, body: str = "dies", **properties: Any) -> None:
    """Publish a message that dies in *queue*."""
    assert talk.publish(queue, body, **properties) == [True]
    if (got := talk.get(queue)) is not None:
        talk.channel.basic_reject(got.method.delivery_tag, requeue=False)


REASONS = pytest.mark.parametrize("reason", ["rejected", "expired", "maxlen"])


@REASONS
def test_a_dead_letter_names_the_reason(talk: Dialogue, reason: str) -> None:
    queue, grave = graves(talk, reason)
    kill(talk, queue, headers={"mine": 1}, message_id="m", content_type="text/plain")
    (got,) = talk.receive(grave)
    death = {"count": 1, "reason": reason, "queue": queue, "exchange": "", "routing-keys": [queue]}
    assert got.deaths == [death]
    assert got.headers["x-death"][0].keys() == {*death, "time"}
    assert {key: value for key, value in got.headers.items() if key != "x-death"} == {
        "mine": 1,
        "x-first-death-reason": reason,
        "x-first-death-queue": queue,
        "x-first-death-exchange": "",
    }
    assert (got.body, got.method.exchange, got.method.routing_key) == ("dies", grave, queue)
    assert (got.properties.message_id, got.properties.content_type) == ("m", "text/plain")
    assert not got.method.redelivered


def test_an_expiration_is_taken_away_and_remembered(talk: Dialogue) -> None:
    grave = talk.grave()
    queue = talk.queue(dead_letter_exchange=grave)
    talk.publish(queue, "short", expiration="20", delivery_mode=2)
    (got,) = talk.receive(grave)
    assert (got.properties.expiration, got.properties.delivery_mode) == (None, 2)
    assert got.deaths[0]["original-expiration"] == "20"
    kill(talk, queue, "rejected", expiration="60000")
    (got,) = talk.receive(grave)
    assert got.properties.expiration is None
    assert got.deaths[0]["original-expiration"] == "60000"


def test_a_message_that_dies_again_is_counted(talk: Dialogue) -> None:
    """RabbitMQ: x-death has an entry for each "unique combination of queue and reason", the latest first."""
    second = talk.queue(dead_letter_exchange="", dead_letter_routing_key=(first := unique()))
    third = talk.queue(dead_letter_exchange="", dead_letter_routing_key=second, message_ttl=0)
    talk.queue(first, dead_letter_exchange="", dead_letter_routing_key=third)
    talk.publish(first, "round")
    for _ in range(3):
        talk.until(lambda: talk.count(first) == 1, "a message in the first queue")
        talk.channel.basic_reject(talk.take(first).method.delivery_tag, requeue=False)
        talk.until(lambda: talk.count(second) == 1, "a message in the second queue")
        talk.channel.basic_reject(talk.take(second).method.delivery_tag, requeue=False)
    (got,) = talk.receive(first)
    found = [(death["queue"], death["reason"], death["count"]) for death in got.deaths]
    assert found[0] == (second, "rejected", 3)
    # RabbitMQ 3 reverses the order of the others each time
    assert set(found[1:]) == {(third, "expired", 3), (first, "rejected", 3)}
    assert (got.headers["x-first-death-queue"], got.headers["x-first-death-reason"]) == (first, "rejected")
    assert got.method.routing_key == first


def test_a_message_that_comes_round_by_itself_is_dropped(talk: Dialogue) -> None:
    """RabbitMQ: "Messages will be dropped if there was no rejections in the entire cycle"."""
    grave = talk.grave()
    watched = talk.queue(dead_letter_exchange=grave, message_ttl=100)
    name = unique()
    talk.queue(name, dead_letter_exchange="", dead_letter_routing_key=name, message_ttl=0)
    talk.publish(name, "itself")
    first, second = unique(), unique()
    talk.queue(first, dead_letter_exchange="", dead_letter_routing_key=second, message_ttl=0)
    talk.queue(second, dead_letter_exchange="", dead_letter_routing_key=first, message_ttl=50)
    talk.publish(first, "round")
    talk.until(lambda: talk.count(second) == 0, "an empty second queue")
    talk.publish(watched, "later")
    talk.receive(grave)
    assert [talk.count(queue) for queue in (name, first, second)] == [0, 0, 0]


def test_a_rejected_message_may_come_back_to_its_own_queue(talk: Dialogue) -> None:
    name = unique()
    talk.queue(name, dead_letter_exchange="", dead_letter_routing_key=name)
    talk.publish(name, "back")
    for _ in range(2):
        talk.until(lambda: talk.count(name) == 1, "the message back")
        talk.channel.basic_nack(talk.take(name).method.delivery_tag, requeue=False)
    (got,) = talk.receive(name)
    assert [(death["queue"], death["count"]) for death in got.deaths] == [(name, 2)]
    assert not got.method.redelivered


def test_a_cycle_ends_at_one_queue_not_at_others(talk: Dialogue) -> None:
    grave, first = talk.grave(), unique()
    talk.queue(first, dead_letter_exchange=grave, message_ttl=0)
    talk.channel.queue_bind(first, grave)
    talk.publish(first, "twice")
    (got,) = talk.receive(grave)
    assert got.deaths[0]["count"] == 1
    assert talk.count(first) == 0


# -- routes ------------------------------------------------------------------------------------------------------------


def test_keys_of_cc_and_bcc_count_for_dead_letters_too(talk: Dialogue) -> None:
    """RabbitMQ: "Dead-lettered with their own routing keys" includes those of "the CC and BCC headers"."""
    graveyard = talk.exchange("direct")
    queue = talk.queue(dead_letter_exchange=graveyard, message_ttl=0)
    found = {key: talk.queue() for key in (queue, "copy", "blind", "none")}
    for key, name in found.items():
        talk.channel.queue_bind(name, graveyard, key)
    talk.publish(queue, "copied", headers={"CC": ["copy"], "BCC": ["blind"]})
    for key in (queue, "copy", "blind"):
        (got,) = talk.receive(found[key])
        assert got.method.routing_key == queue
        assert got.headers["CC"] == ["copy"]
        assert "BCC" not in got.headers
        assert got.deaths[0]["routing-keys"] == [queue, "copy"]
    assert talk.count(found["none"]) == 0


def test_blind_copies_are_dead_lettered_repeatedly(talk: Dialogue) -> None:
    second, last = talk.exchange("direct"), talk.exchange("direct")
    queue = talk.queue(dead_letter_exchange=second, message_ttl=0)
    between = talk.queue(dead_letter_exchange=last, message_ttl=0)
    end = talk.queue()
    talk.channel.queue_bind(between, second, "blind")
    talk.channel.queue_bind(end, last, "blind")
    talk.publish(queue, "copied", headers={"BCC": ["blind"]})
    (got,) = talk.receive(end)
    assert [death["queue"] for death in got.deaths] == [between, queue]
    assert "BCC" not in got.headers


def test_a_key_of_the_queue_replaces_all_of_the_message(talk: Dialogue) -> None:
    graveyard = talk.exchange("topic")
    queue = talk.queue(dead_letter_exchange=graveyard, dead_letter_routing_key="new.key", message_ttl=0)
    grave, others = talk.queue(), talk.queue()
    talk.channel.queue_bind(grave, graveyard, "new.*")
    for key in (queue, "copy", "blind"):
        talk.channel.queue_bind(others, graveyard, key)
    talk.publish(queue, "renamed", headers={"CC": ["copy"], "BCC": ["blind"]})
    (got,) = talk.receive(grave)
    assert got.method.routing_key == "new.key"
    assert got.headers.keys() & {"CC", "BCC"} == set()
    assert got.deaths[0]["routing-keys"] == [queue, "copy"]
    assert talk.count(others) == 0


@REASONS
def test_without_a_dead_letter_exchange_a_message_is_gone(talk: Dialogue, reason: str) -> None:
    queue = talk.queue(**LIMITS[reason])
    kill(talk, queue)
    watched, grave = graves(talk, reason)
    kill(talk, watched, "later")
    talk.receive(grave)
    assert talk.count(queue) == 0


def test_a_dead_letter_exchange_may_come_later(talk: Dialogue) -> None:
    """RabbitMQ: the exchange "should exist by the time messages need to be dead-lettered"; else they are dropped."""
    name = unique()
    queue = talk.queue(dead_letter_exchange=name)
    watched, grave = graves(talk, "rejected")
    kill(talk, queue, "lost")
    kill(talk, watched)
    talk.receive(grave)
    late = talk.queue()
    talk.exchange("fanout", name=name)
    talk.channel.queue_bind(late, name)
    kill(talk, queue, "found")
    (got,) = talk.receive(late)
    assert got.body == "found"


def test_an_unroutable_dead_letter_goes_to_the_alternate_exchange(talk: Dialogue) -> None:
    grave = talk.grave()
    graveyard = talk.exchange("direct", alternate_exchange=grave)
    talk.channel.queue_bind(talk.queue(), graveyard, "unused")
    queue = talk.queue(dead_letter_exchange=graveyard, message_ttl=0)
    kill(talk, queue)
    (got,) = talk.receive(grave)
    assert (got.method.exchange, got.method.routing_key) == (graveyard, queue)


def test_a_dead_letter_is_matched_by_its_headers(talk: Dialogue) -> None:
    graveyard = talk.exchange("headers")
    queue = talk.queue(dead_letter_exchange=graveyard, message_ttl=0)
    grave, other = talk.queue(), talk.queue()
    reason = {"x-match": "all-with-x", "x-first-death-reason": "expired", "mine": "yes"}
    talk.channel.queue_bind(grave, graveyard, arguments=reason)
    talk.channel.queue_bind(other, graveyard, arguments={**reason, "x-first-death-reason": "rejected"})
    kill(talk, queue, headers={"mine": "yes"})
    talk.receive(grave)
    assert talk.count(other) == 0


def test_a_dead_letter_exchange_may_be_internal(talk: Dialogue) -> None:
    name, grave = unique(), talk.queue()
    talk.channel.exchange_declare(name, "fanout", auto_delete=True, internal=True)
    talk.channel.queue_bind(grave, name)
    kill(talk, talk.queue(dead_letter_exchange=name, message_ttl=0))
    talk.receive(grave)


# -- order, limits and transactions ------------------------------------------------------------------------------------


def test_dead_letters_keep_their_order(talk: Dialogue) -> None:
    queue, grave = graves(talk, "rejected")
    bodies = [str(number) for number in range(20)]
    talk.publish(queue, *bodies)
    last = [talk.take(queue) for _ in bodies][-1]
    talk.channel.basic_nack(last.method.delivery_tag, multiple=True, requeue=False)
    assert [got.body for got in talk.receive(grave, 20)] == bodies


def test_purged_deleted_and_acknowledged_messages_are_no_dead_letters(talk: Dialogue) -> None:
    queue, grave = graves(talk, "rejected")
    talk.publish(queue, "acknowledged", "purged", "deleted")
    talk.channel.basic_ack(talk.take(queue).method.delivery_tag)
    talk.drain(queue)
    talk.publish(queue, "purged")
    talk.channel.queue_purge(queue)
    talk.publish(queue, "deleted")
    talk.channel.queue_delete(queue)
    watched = talk.queue(dead_letter_exchange=grave)
    kill(talk, watched, "seen")
    assert [got.body for got in talk.receive(grave)] == ["seen"]


def test_an_invented_x_death_is_replaced(talk: Dialogue) -> None:
    queue, grave = graves(talk, "rejected")
    kill(talk, queue, headers={"x-death": "nonsense"})
    (got,) = talk.receive(grave)
    assert [(death["queue"], death["count"]) for death in got.deaths] == [(queue, 1)]
    assert "x-first-death-reason" not in got.headers


def test_an_x_death_that_a_client_kept_goes_on(talk: Dialogue) -> None:
    """If a client publishes a dead letter again with all its headers, the counts continue."""
    queue, grave = graves(talk, "rejected")
    kill(talk, queue)
    (got,) = talk.receive(grave)
    kill(talk, queue, headers=got.headers)
    (got,) = talk.receive(grave)
    assert [(death["queue"], death["count"]) for death in got.deaths] == [(queue, 2)]


def test_a_full_dead_letter_queue_drops_or_refuses(talk: Dialogue) -> None:
    for overflow, left in (("drop-head", ["2", "3"]), ("reject-publish", ["1", "2"])):
        grave = talk.grave(max_length=2, overflow=overflow)
        queue = talk.queue(dead_letter_exchange=grave, max_length=0)
        second = talk.grave()
        talk.channel.queue_bind(second, grave)
        talk.publish(queue, "1", "2", "3")
        talk.receive(second, 3)
        assert talk.drain(grave) == left


def test_dead_letters_of_a_transaction_come_with_its_commit(talk: Dialogue) -> None:
    queue, grave = graves(talk, "rejected")
    talk.publish(queue, "rejected")
    channel = talk.another()
    channel.tx_select()
    method, _, _ = channel.basic_get(queue)
    channel.basic_nack(method.delivery_tag, requeue=False)
    assert talk.count(grave) == 0
    channel.tx_commit()
    talk.receive(grave)

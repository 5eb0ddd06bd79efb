"""Queues of type quorum in standalone mode and RabbitMQ: the same dialogue gives the same messages.

RabbitMQ, "Quorum Queues": "x-delivery-count ... is provided with redelivered messages"; "when a message has been
returned more times than the limit the message will be dropped or dead-lettered".
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.dialogue import Dialogue, Got, unique


@pytest.fixture
def quorum(talk: Dialogue) -> Iterator[Callable[..., str]]:
    """Declares quorum queues, and deletes them with the test."""
    names: list[str] = []

    def declare(**arguments: Any) -> str:
        table = {"x-" + key.replace("_", "-"): value for key, value in arguments.items()}
        names.append(unique())
        talk.channel.queue_declare(names[-1], durable=True, arguments={"x-queue-type": "quorum", **table})
        return names[-1]

    yield declare
    channel = talk.another()
    for name in names:
        channel.queue_delete(name)


def taken(talk: Dialogue, queue: str) -> Got:
    """The next message of a queue; RabbitMQ may need a moment to make a returned one ready."""
    found: list[Got] = []

    def came() -> bool:
        got = talk.get(queue)
        found.extend([] if got is None else [got])
        return bool(found)

    talk.until(came, "a message")
    return found[0]


def test_a_quorum_queue_counts_deliveries_that_returned(talk: Dialogue, quorum: Callable[..., str]) -> None:
    queue = quorum(delivery_limit=100)
    talk.publish(queue, "1", headers={"mine": 1})
    for count in range(4):
        got = taken(talk, queue)
        # RabbitMQ also says 0. Standalone dtx leaves the headers of a first delivery as they are.
        assert {"x-delivery-count": 0} | got.headers == {"mine": 1, "x-delivery-count": count}
        assert got.method.redelivered is (count > 0)
        talk.channel.basic_nack(got.method.delivery_tag)


def test_messages_beyond_the_limit_are_dead_lettered(talk: Dialogue, quorum: Callable[..., str]) -> None:
    grave = talk.grave()
    queue = quorum(delivery_limit=2, dead_letter_exchange=grave)
    talk.publish(queue, "1")
    for _ in range(3):
        talk.channel.basic_reject(taken(talk, queue).method.delivery_tag, requeue=True)
    (got,) = talk.receive(grave)
    assert [(death["reason"], death["count"], death["queue"]) for death in got.deaths] == [("delivery_limit", 1, queue)]
    assert talk.get(queue) is None


def test_messages_beyond_the_delivery_limit_are_dropped(talk: Dialogue, quorum: Callable[..., str]) -> None:
    queue = quorum(delivery_limit=0)
    talk.publish(queue, "1", "2")
    talk.channel.basic_nack(taken(talk, queue).method.delivery_tag)
    assert taken(talk, queue).body == "2"


def test_a_closed_channel_counts_for_the_delivery_limit(talk: Dialogue, quorum: Callable[..., str]) -> None:
    queue = quorum(delivery_limit=100)
    talk.publish(queue, "1", "2")
    channel, found = talk.another(), list[Got]()
    talk.collect(found, queue, channel=channel)
    talk.until(lambda: len(found) == 2, "two deliveries")
    channel.close()
    assert [taken(talk, queue).headers["x-delivery-count"] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("durable", "exclusive", "auto_delete"),
    [(False, False, False), (True, True, False), (True, False, True)],
    ids=["transient", "exclusive", "auto-delete"],
)
def test_a_quorum_queue_must_be_lasting(talk: Dialogue, durable: bool, exclusive: bool, auto_delete: bool) -> None:
    assert (
        talk.refused(
            lambda channel: channel.queue_declare(
                unique(),
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments={"x-queue-type": "quorum"},
            )
        )
        == 406
    )


@pytest.mark.parametrize("arguments", [{}, {"x-queue-type": "classic"}], ids=["no type", "classic"])
def test_a_quorum_queue_is_no_classic_queue(
    talk: Dialogue, quorum: Callable[..., str], arguments: dict[str, Any]
) -> None:
    queue = quorum()
    assert talk.refused(lambda channel: channel.queue_declare(queue, durable=True, arguments=arguments)) == 406


def test_a_quorum_queue_has_no_priorities(talk: Dialogue) -> None:
    arguments = {"x-queue-type": "quorum", "x-max-priority": 5}
    assert talk.refused(lambda channel: channel.queue_declare(unique(), durable=True, arguments=arguments)) == 406


def test_arguments_of_frameworks_are_accepted(quorum: Callable[..., str]) -> None:
    """Those of Celery's queues for delayed tasks."""
    quorum(
        dead_letter_strategy="at-least-once",
        overflow="reject-publish",
        dead_letter_exchange="later",
        message_ttl=1000,
    )

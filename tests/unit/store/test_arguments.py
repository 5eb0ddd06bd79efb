"""The arguments of queue.declare."""

from collections.abc import Mapping
from typing import Any

import pytest

from dtx.store.postgres.arguments import (
    MAX_MILLISECONDS,
    Overflow,
    QueueArguments,
    check_equivalent,
    check_field,
    queue_arguments,
)
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.xa.codes import ReplyCode, XaError
from tests.support.rules import ACCEPTED, REFUSED
from tests.support.topology import table

WHERE = "queue 'q' in vhost 'v'"


def read(arguments: Mapping[str, Any]) -> QueueArguments:
    return queue_arguments(table(arguments), WHERE)


def test_a_queue_without_arguments_has_no_limits() -> None:
    assert read({}) == QueueArguments()


def test_each_argument_is_read() -> None:
    """RabbitMQ, Queues: optional arguments."""
    assert read(
        {
            "x-message-ttl": 60_000,
            "x-expires": 1,
            "x-max-length": 0,
            "x-max-length-bytes": 2**40,
            "x-overflow": "reject-publish",
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "dead",
            "x-max-priority": 10,
            "x-queue-type": "classic",
            "x-queue-mode": "lazy",
            "x-queue-version": 2,
            "x-single-active-consumer": True,
            "x-something-of-the-application": "kept, not read",
        }
    ) == QueueArguments(
        message_ttl=60_000,
        expires=1,
        max_length=0,
        max_length_bytes=2**40,
        overflow=Overflow.REJECT_PUBLISH,
        dead_letter_exchange=b"",
        dead_letter_routing_key=b"dead",
        max_priority=10,
        single_active=True,
    )


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_arguments_of_rabbitmq_are_accepted(arguments: dict[str, Any]) -> None:
    read(arguments)


@pytest.mark.parametrize("arguments", REFUSED)
def test_arguments_refused_by_rabbitmq_are_refused(arguments: dict[str, Any]) -> None:
    """RabbitMQ: "invalid arg 'x-expires' for queue 'q' in vhost 'v': …"."""
    with pytest.raises(XaError, match=f"invalid (arg|type) .*{list(arguments)[-1]}.*{WHERE}") as refused:
        read(arguments)
    assert refused.value.code is ReplyCode.PRECONDITION_FAILED


def test_streams_are_not_implemented() -> None:
    with pytest.raises(XaError, match="standalone dtx has no streams") as refused:
        read({"x-queue-type": "stream"})
    assert refused.value.code is ReplyCode.NOT_IMPLEMENTED


@pytest.mark.parametrize(("argument", "limit"), [({}, None), ({"x-delivery-limit": -1}, None)], ids=["none", "-1"])
def test_a_quorum_queue_has_no_delivery_limit_by_default(argument: dict[str, Any], limit: int | None) -> None:
    assert read({"x-queue-type": "quorum", **argument}) == QueueArguments(counts=True, delivery_limit=limit)


@pytest.mark.parametrize("argument", [{"x-delivery-limit": -2}, {"x-overflow": "reject-publish-dlx"}, {"x-max-age": 1}])
def test_arguments_that_no_quorum_queue_has_are_refused(argument: dict[str, Any]) -> None:
    with pytest.raises(XaError, match=f"invalid arg '{next(iter(argument))}'") as refused:
        read({"x-queue-type": "quorum", **argument})
    assert refused.value.code is ReplyCode.PRECONDITION_FAILED


def test_times_have_rabbitmqs_limit() -> None:
    """RabbitMQ's limit is ten years."""
    assert read({"x-message-ttl": MAX_MILLISECONDS}).message_ttl == 315_360_000_000
    with pytest.raises(XaError, match="315360000001 is more than 315360000000"):
        read({"x-message-ttl": MAX_MILLISECONDS + 1})


def test_a_malformed_table_is_a_syntax_error() -> None:
    with pytest.raises(WireError) as refused:
        queue_arguments(b"\x09x-expi", WHERE)
    assert refused.value.code is HardCode.SYNTAX_ERROR


@pytest.mark.parametrize(
    ("received", "current", "reason"),
    [
        ({"x-max-length": 6}, {"x-max-length": 5}, "received '6' but current is '5'"),
        ({}, {"x-max-length": 5}, "received none but current is the value '5' of type 'signedint'"),
        ({"x-max-length": 5}, {}, "received the value '5' of type 'signedint' but current is none"),
        ({"x-max-length": "5"}, {"x-max-length": 5}, "received '5' but current is '5'"),
        (
            {"x-single-active-consumer": False},
            {"x-single-active-consumer": True},
            "received 'false' but current is 'true'",
        ),
        ({"x-expires": None}, {"x-expires": [1]}, "received 'void' but current is 'array'"),
    ],
)
def test_arguments_that_differ_are_refused(received: dict[str, Any], current: dict[str, Any], reason: str) -> None:
    """RabbitMQ: "inequivalent arg 'x-max-length' for queue 'q' in vhost 'v': received '6' but current is '5'"."""
    (name,) = received or current
    with pytest.raises(XaError) as refused:
        check_equivalent(table(received), table(current), WHERE)
    assert refused.value.code is ReplyCode.PRECONDITION_FAILED
    assert refused.value.reason == f"inequivalent arg '{name}' for {WHERE}: {reason}"


@pytest.mark.parametrize(
    ("received", "current"),
    [
        (table({"x-max-length": 5}), b"\x0cx-max-lengthb\x05"),
        (table({"x-mine": 5}), table({"x-mine": "other"})),
        (table({"x-queue-type": "classic"}), b""),
        (b"\x09x-expiresf\x3f\x80\x00\x00", b"\x09x-expiresd\x3f\xf0\x00\x00\x00\x00\x00\x00"),
    ],
)
def test_arguments_that_mean_the_same_are_equivalent(received: bytes, current: bytes) -> None:
    check_equivalent(received, current, WHERE)


def test_a_field_that_differs_is_named() -> None:
    """RabbitMQ: "inequivalent arg 'durable' for queue 'q' in vhost 'v': received 'true' but current is 'false'"."""
    check_field(True, True, "durable", WHERE)
    with pytest.raises(
        XaError, match=f"inequivalent arg 'durable' for {WHERE}: received 'true' but current is 'false'"
    ):
        check_field(True, False, "durable", WHERE)

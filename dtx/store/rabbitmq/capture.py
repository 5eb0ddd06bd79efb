"""What may be captured for a branch: dtx must be able to publish it later, or to put it back."""

from typing import Final

from dtx.store.rabbitmq.consume_channel import REPLY_TO
from dtx.store.rabbitmq.phase_two import Lane
from dtx.store.work import Delivery
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import BasicProperties
from dtx.xa.codes import ReplyCode, XaError

_ADDED: Final = 1024
"""Bytes that a header frame of dtx has at most, on top of the properties of its publisher (see messages.py)."""


def republishable(lane: Lane, raw: bytes) -> bool:
    """Whether dtx could publish these properties: for a frame too large the broker would end its connection."""
    return len(raw) + _ADDED <= lane.frame_max


def check_publish(lane: Lane, own_user: str, exchange: bytes, routing_key: bytes, raw: bytes) -> None:
    """Refuse a publish that dtx could not do for a branch.

    Args:
        lane: that would do it.
        own_user: of dtx at the broker.
        exchange: where to, and
        routing_key: with what key.
        raw: properties.

    Raises:
        XaError: 406, 540.
        WireError: 502, the properties are malformed.
    """
    if not republishable(lane, raw):
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"headers of {len(raw)} octets are too large for a branch")
    view = properties.read(raw)
    if view.reply_to == REPLY_TO or (not exchange and routing_key.startswith(REPLY_TO + b".")):
        raise XaError(
            ReplyCode.NOT_IMPLEMENTED, "direct reply-to cannot be part of a branch: it would outlive its connection"
        )
    _check_user(lane, own_user, view)


def _check_user(lane: Lane, own_user: str, view: BasicProperties) -> None:
    user = view.user_id
    if user is not None and not lane.impersonates and user != own_user.encode():
        raise XaError(
            ReplyCode.PRECONDITION_FAILED,
            "dtx's own user at the broker lacks the tag 'impersonator': it cannot publish a message with a user-id",
        )


def check_settle(delivery: Delivery) -> None:
    """Refuse to settle a delivery with a branch that cannot be given back: it comes from a stream.

    Raises:
        XaError: 540.
    """
    if delivery.stream:
        raise XaError(ReplyCode.NOT_IMPLEMENTED, "a delivery from a stream cannot be consumed in a branch")


def check_consume(lane: Lane, delivery: Delivery) -> None:
    """Refuse to consume a delivery that dtx could not put back.

    Args:
        lane: that would do it.
        delivery: not settled.

    Raises:
        XaError: 406, 540; 506, the branch is to be rolled back.
    """
    check_settle(delivery)
    if delivery.body is None:
        raise XaError(
            ReplyCode.RESOURCE_ERROR,
            "unsettled deliveries exceed --max-kept-bytes or --max-held-bytes; consume with a prefetch (basic.qos), or "
            "with less credit",
        )
    try:
        view = properties.read(delivery.properties)
        _ = view.headers  # raises where they cannot be written anew
    except WireError as error:  # brokers take tables that are nested as deep as a frame has room for
        raise XaError(ReplyCode.RESOURCE_ERROR, f"headers that cannot be put back: {error.reason}") from error
    _check_user(lane, lane.broker.user, view)
    if not republishable(lane, delivery.properties):
        raise XaError(
            ReplyCode.RESOURCE_ERROR, f"headers of {len(delivery.properties)} octets are too large to be put back"
        )

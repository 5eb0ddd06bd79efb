"""Which messages a branch may hold: dtx must be able to publish them later, or to put them back."""

from typing import Final

from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.commit_connection import CommitConnection
from dtx.store.rabbitmq.consume_channel import REPLY_TO, REVOKED
from dtx.store.work import Delivery
from dtx.wire.amqp09 import content, properties, tables
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.properties import BasicProperties, Property
from dtx.xa.codes import ReplyCode, XaError

_MARKS: Final = 2
"""Headers that dtx adds to a message that it publishes more than once."""


def republishable(connection: CommitConnection, raw: bytes) -> bool:
    """Whether dtx can publish these properties: the broker ends the connection for a frame that is too large."""
    return len(raw) + messages.MAX_MARKS <= connection.frame_max


def check_size(connection: CommitConnection, size: int) -> None:
    """Refuse a body of *size* bytes that the broker would refuse when the branch commits.

    Raises:
        XaError: 406, with the text of RabbitMQ.
    """
    content.check_size(size, connection.max_message_bytes)


def check_publish(connection: CommitConnection, own_user: str, exchange: bytes, routing_key: bytes, raw: bytes) -> None:
    """Refuse a publish that dtx cannot do for a branch.

    Args:
        connection: that will publish it.
        own_user: of dtx at the broker.
        exchange: of the publish.
        routing_key: of the publish.
        raw: properties.

    Raises:
        XaError: 406 for properties that are too large, have the user-id of another user, or have headers that RabbitMQ
            cannot read; 540 for direct reply-to.
        WireError: 502, the properties are malformed.
    """
    if not republishable(connection, raw):
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"headers of {len(raw)} bytes are too large for a branch")
    view = properties.read(raw)
    if len(view.headers) > tables.MAX_ENTRIES - _MARKS:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"{len(view.headers)} headers are too many for a branch")
    if view.reply_to == REPLY_TO or (not exchange and routing_key.startswith(REPLY_TO + b".")):
        raise XaError(
            ReplyCode.NOT_IMPLEMENTED, "direct reply-to cannot be part of a branch: it would outlive its connection"
        )
    _check_user(connection, own_user, view)
    table = view.value(Property.HEADERS)
    if table is not None and not tables.is_readable(table):
        raise XaError(
            ReplyCode.PRECONDITION_FAILED, "RabbitMQ cannot read headers with infinite numbers, NaN or the type U"
        )


def _check_user(connection: CommitConnection, own_user: str, view: BasicProperties) -> None:
    user = view.user_id
    if user is not None and not connection.may_set_user_id and user != own_user.encode():
        raise XaError(
            ReplyCode.PRECONDITION_FAILED,
            "dtx's own user at the broker lacks the tag 'impersonator': it cannot publish a message with a user-id",
        )


def check_settle(delivery: Delivery) -> None:
    """Refuse to settle a delivery within a branch that cannot be put back, or that the broker may have taken back.

    Raises:
        XaError: 540 for a stream, 406 when its consumer was cancelled by the broker.
    """
    if delivery.revoked:
        raise XaError(ReplyCode.PRECONDITION_FAILED, f"delivery tag {delivery.tag}: {REVOKED}")
    if delivery.stream:
        raise XaError(ReplyCode.NOT_IMPLEMENTED, "a delivery from a stream cannot be consumed in a branch")


def check_consume(connection: CommitConnection, delivery: Delivery) -> None:
    """Refuse to consume a delivery that dtx cannot put back.

    Args:
        connection: that would put it back.
        delivery: not settled.

    Raises:
        XaError: as :func:`check_settle`; 406 for the user-id of another user. 506 if its content was not kept, or its
            headers cannot be written again; then the branch must be rolled back.
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
        _ = view.headers  # raises if they cannot be written again
    except WireError as error:  # brokers accept tables that are nested as deeply as a frame allows
        raise XaError(ReplyCode.RESOURCE_ERROR, f"the headers cannot be put back: {error.reason}") from error
    _check_user(connection, connection.broker.user, view)
    if not republishable(connection, delivery.properties):
        raise XaError(
            ReplyCode.RESOURCE_ERROR, f"headers of {len(delivery.properties)} bytes are too large to be put back"
        )

"""Work with messages within a branch: ``dtx_publish``, ``dtx_get``, ``dtx_ack``, ``dtx_reject``.

A branch has its own channel while a thread of control is associated with it. The server closes a channel after a
refused call, and all associations of that channel end. With one channel for each branch, other branches are not
affected.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError

from dtx.client.calls import FAILURES, alive, closing_reason, limited
from dtx.client.coordination import XAResource
from dtx.client.errors import XA_RBROLLBACK, XAER_INVAL, XAER_RMFAIL, XAException
from dtx.xa.xid import Xid

_PERSISTENT: Final = 2
_SHORT: Final = 255
"""Bytes of a short string at most."""
_MOST_PRIORITY: Final = 255


class SwitchAssociation:
    """An association of a thread of control with a branch, active or suspended, and its channel.

    Args:
        xid: the branch.
        resource: the channel that is associated with it.
        timeout: seconds to wait for answers on the channel; ``None`` sets no limit.
    """

    def __init__(self, xid: Xid, resource: XAResource, timeout: float | None) -> None:
        self.xid = xid
        self.resource = resource
        self.timeout = timeout
        self.suspended = False
        self.unsettled: dict[int, Mapping[str, Any]] = {}
        """Headers of messages that are neither acknowledged nor rejected, by delivery tag."""
        self.waiting: dict[str, Any] = {}
        """Messages that did not fit into the caller's buffer, by queue."""

    @property
    def channel(self) -> BlockingChannel:
        """The channel of the association."""
        return self.resource.channel

    @property
    def connection(self) -> BlockingConnection:
        """The connection of the channel."""
        return self.channel.connection

    def lost(self, error: Exception) -> XAException:
        """The exception for a call whose channel or connection was lost.

        If the server has closed only the channel, it has marked the branch rollback-only. If the connection is lost,
        it is not known what the server has received.
        """
        code = getattr(error, "reply_code", None)
        words = getattr(error, "reply_text", None) or getattr(error, "reason", None) or str(error)
        if code is not None and self.connection.is_open:
            return XA_RBROLLBACK(f"the server refused work of {self.xid}: {code} {words}", code)
        return XAER_RMFAIL(f"{words or type(error).__name__} (branch {self.xid})", code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A message from a queue; its strings are UTF-8.

    Args:
        tag: its delivery tag.
        redelivered: whether the server has delivered the message before.
        exchange: the exchange that it was published to.
        routing_key: the routing key that it was published with.
        properties: its properties, as pika's class.
        body: its bytes.
    """

    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: Any
    body: bytes


def short(what: str, value: bytes) -> str:
    """Decode a short string of AMQP from C.

    Raises:
        XAER_INVAL: it is too long, or no UTF-8, which pika requires.
    """
    if len(value) > _SHORT:
        raise XAER_INVAL(f"{what} of {len(value)} bytes, {_SHORT} are possible")
    return text(what, value)


def text(what: str, value: bytes) -> str:
    """Decode a text from C.

    Raises:
        XAER_INVAL: it is no UTF-8.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise XAER_INVAL(f"{what} is not UTF-8") from None


def properties_of(
    values: Mapping[str, bytes],
    priority: int = 0,
    *,
    transient: bool = False,
    timestamp: int = 0,
    headers: Mapping[str, str | int] | None = None,
) -> pika.BasicProperties:
    """Make the properties of a message.

    Args:
        values: names and values of string properties.
        priority: 0 for none.
        transient: whether the message need not survive a restart of the broker.
        timestamp: seconds since 1970; 0 for none.
        headers: names and values.

    Raises:
        XAER_INVAL: a value is not possible.
    """
    if not 0 <= priority <= _MOST_PRIORITY:
        raise XAER_INVAL(f"a priority of {priority}, 0 to {_MOST_PRIORITY} are possible")
    if timestamp < 0:
        raise XAER_INVAL(f"a timestamp of {timestamp}, which is before 1970")
    return pika.BasicProperties(
        delivery_mode=None if transient else _PERSISTENT,
        priority=priority or None,
        timestamp=timestamp or None,
        headers=headers or None,
        **{name: short(name, value) for name, value in values.items()},
    )


def publish(
    mine: SwitchAssociation, exchange: str, routing_key: str, body: bytes, properties: pika.BasicProperties
) -> None:
    """Publish a message. Consumers can get it when the branch commits.

    Raises:
        XA_RBROLLBACK: the server has refused this or an earlier call; the branch is rollback-only.
        XAER_RMFAIL: the connection is lost.
    """
    with _working(mine):
        mine.channel.basic_publish(exchange, routing_key, body, properties)


def get(mine: SwitchAssociation, queue: str, size: int) -> Taken | int | None:
    """Take a message out of *queue*.

    Args:
        mine: the branch.
        queue: its name.
        size: the space of the caller for the body, in bytes.

    Returns:
        The message. If it does not fit, its size in bytes; the next call for the queue returns the same message.
        ``None`` if the queue is empty.

    Raises:
        XA_RBROLLBACK: the server has refused this or an earlier call; the branch is rollback-only.
        XAER_RMFAIL: the connection is lost.
    """
    found = mine.waiting.pop(queue, None)
    if found is None:
        with _working(mine):
            method, properties, body = mine.channel.basic_get(queue)
        if method is None:
            return None
        mine.unsettled[method.delivery_tag] = properties.headers or {}
        found = Taken(
            tag=method.delivery_tag,
            redelivered=method.redelivered,
            exchange=method.exchange,
            routing_key=method.routing_key,
            properties=properties,
            body=body,
        )
    if len(found.body) > size:
        mine.waiting[queue] = found
        return len(found.body)
    return found  # type: ignore[no-any-return]


def header(mine: SwitchAssociation, tag: int, name: str) -> bytes | None:
    """Return a header of an unsettled message of this branch as text; ``None`` if it is missing or has no value.

    Raises:
        XAER_INVAL: there is no such message, or the header is a table or an array.
    """
    match _headers(mine, tag).get(name):  # the Python types that pika decodes values to
        case None:
            return None
        case bool() as value:
            return b"true" if value else b"false"
        case datetime() as value:
            return b"%d" % value.timestamp()
        case bytes() | bytearray() as value:
            return bytes(value)
        case str() | int() | float() | Decimal() as value:
            return str(value).encode()
        case _:
            raise XAER_INVAL(f"header {name} is a table or an array")


def _headers(mine: SwitchAssociation, tag: int) -> Mapping[str, Any]:
    try:
        return mine.unsettled[tag]
    except KeyError:
        raise XAER_INVAL(f"this thread has no unsettled message with delivery tag {tag} in {mine.xid}") from None


def settle(mine: SwitchAssociation, tag: int, *, ack: bool, requeue: bool) -> None:
    """Acknowledge or reject a message of this branch.

    Raises:
        XAER_INVAL: the branch has no such unsettled message. The server would close the channel, and the branch with
            it.
        XA_RBROLLBACK: the server has refused an earlier call; the branch is rollback-only.
        XAER_RMFAIL: the connection is lost.
    """
    _headers(mine, tag)
    with _working(mine):
        if ack:
            mine.channel.basic_ack(tag)
        else:
            mine.channel.basic_reject(tag, requeue=requeue)
    mine.unsettled.pop(tag, None)


def give_back(mine: SwitchAssociation) -> None:
    """Requeue unsettled messages after the end of the branch. Raise nothing."""
    for tag in sorted(mine.unsettled):
        with suppress(XAException):
            settle(mine, tag, ack=False, requeue=True)
    mine.unsettled.clear()
    mine.waiting.clear()


@contextmanager
def _working(mine: SwitchAssociation) -> Iterator[None]:
    """A context for calls of pika on the channel of the branch; it translates their errors and sets the timeout."""
    if not mine.channel.is_open:
        raise mine.lost(closing_reason(mine.channel))
    alive(mine.connection)
    try:
        with limited(mine.connection, mine.timeout):
            yield
    except FAILURES as error:
        raise mine.lost(closing_reason(mine.channel) if isinstance(error, AMQPError) else error) from error

"""What a program does with messages within a branch: ``dtx_publish``, ``dtx_get``, ``dtx_ack``, ``dtx_reject``.

A branch has a channel of its own while a thread of control is associated with it. The server closes a channel over a
refused call, and all associations of that channel end with it. So a refused start costs no other branch anything.
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
"""Octets of a short string, at most."""
_MOST_PRIORITY: Final = 255


class SwitchAssociation:
    """A branch that a thread of control works for, or has suspended, and the channel that it works with.

    Args:
        xid: the branch.
        resource: its channel, associated with it.
        timeout: seconds to wait for answers of the channel, ``None``: no limit.
    """

    def __init__(self, xid: Xid, resource: XAResource, timeout: float | None) -> None:
        self.xid = xid
        self.resource = resource
        self.timeout = timeout
        self.suspended = False
        self.unsettled: dict[int, Mapping[str, Any]] = {}
        """Headers of the messages that were taken, and neither acknowledged nor given back, by delivery tag."""
        self.waiting: dict[str, Any] = {}
        """Messages that were taken and did not fit into the caller's buffer, by queue."""

    @property
    def channel(self) -> BlockingChannel:
        """The channel."""
        return self.resource.channel

    @property
    def connection(self) -> BlockingConnection:
        """Its connection."""
        return self.channel.connection

    def lost(self, error: Exception) -> XAException:
        """What a call gets whose channel has ended under it.

        Where the server closed the channel alone it is there still, and has marked the branch rollback-only. Where the
        connection is gone nobody knows what the server has heard.
        """
        code = getattr(error, "reply_code", None)
        words = getattr(error, "reply_text", None) or getattr(error, "reason", None) or str(error)
        if code is not None and self.connection.is_open:
            return XA_RBROLLBACK(f"the server refused work of {self.xid}: {code} {words}", code)
        return XAER_RMFAIL(f"{words or type(error).__name__} (branch {self.xid})", code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A message that was taken out of a queue; strings as they came, in UTF-8.

    Args:
        tag: its delivery tag.
        redelivered: whether the server has delivered the message before.
        exchange: it was published to.
        routing_key: it was published with.
        properties: pika's.
        body: its octets.
    """

    tag: int
    redelivered: bool
    exchange: str
    routing_key: str
    properties: Any
    body: bytes


def short(what: str, value: bytes) -> str:
    """A short string of AMQP that came from C.

    Raises:
        XAER_INVAL: it is too long, or no UTF-8, which is all that pika sends.
    """
    if len(value) > _SHORT:
        raise XAER_INVAL(f"{what} of {len(value)} octets, {_SHORT} are possible")
    return text(what, value)


def text(what: str, value: bytes) -> str:
    """A text that came from C.

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
    """Properties to publish with.

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
    """Publish; it is there for others when the branch commits.

    Raises:
        XA_RBROLLBACK: the server refused, now or earlier.
        XAER_RMFAIL: it is out of reach.
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
        The message; or its size, where there is no room: it waits for the next call. ``None``: there is none.

    Raises:
        XA_RBROLLBACK: the server refused, now or earlier.
        XAER_RMFAIL: it is out of reach.
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
    """A header of a message that was taken in this branch and is not settled, as text; ``None``: it has no value.

    Raises:
        XAER_INVAL: the message is not there; the header is a table or an array.
    """
    match _headers(mine, tag).get(name):  # what pika makes of values
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
        raise XAER_INVAL(f"delivery tag {tag} is of no message that this thread has taken in {mine.xid}") from None


def settle(mine: SwitchAssociation, tag: int, *, ack: bool, requeue: bool) -> None:
    """Acknowledge a message that was taken in this branch, or give it back.

    Raises:
        XAER_INVAL: it was not, or is settled: the server would close the channel over it, and the branch with it.
        XA_RBROLLBACK: the server refused something earlier.
        XAER_RMFAIL: it is out of reach.
    """
    _headers(mine, tag)
    with _working(mine):
        if ack:
            mine.channel.basic_ack(tag)
        else:
            mine.channel.basic_reject(tag, requeue=requeue)
    mine.unsettled.pop(tag, None)


def give_back(mine: SwitchAssociation) -> None:
    """What was taken and not acknowledged is for others, now that the branch has ended; raises nothing."""
    for tag in sorted(mine.unsettled):
        with suppress(XAException):
            settle(mine, tag, ack=False, requeue=True)
    mine.unsettled.clear()
    mine.waiting.clear()


@contextmanager
def _working(mine: SwitchAssociation) -> Iterator[None]:
    """Within it pika is asked for something on the channel of the branch."""
    if not mine.channel.is_open:
        raise mine.lost(closing_reason(mine.channel))
    alive(mine.connection)
    try:
        with limited(mine.connection, mine.timeout):
            yield
    except FAILURES as error:
        raise mine.lost(closing_reason(mine.channel) if isinstance(error, AMQPError) else error) from error

"""Payloads of the methods that dtx itself sends. Each starts with class and method, ready for a method frame.

Names longer than a shortstr may be (255 octets) raise WireError 502.
"""

from struct import Struct
from typing import Final

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.tables import put_long, put_short

NO_ARGUMENTS: Final = b""

TX_SELECT: Final = methods.TxSelect().encode()
TX_COMMIT: Final = methods.TxCommit().encode()
TX_ROLLBACK: Final = methods.TxRollback().encode()
CHANNEL_OPEN: Final = methods.ChannelOpen.HEAD + b"\x00"
CHANNEL_CLOSE_OK: Final = methods.ChannelCloseOk().encode()
CONNECTION_CLOSE_OK: Final = methods.ConnectionCloseOk().encode()
CONFIRM_SELECT: Final = methods.ConfirmSelect.HEAD + b"\x00"

_SETTLE: Final = Struct(">IQB")
SETTLE_FRAME: Final = 8 + _SETTLE.size
"""Octets of a frame of basic.ack, nack or reject."""
_DELIVER: Final = Struct(">QB")
_QOS: Final = Struct(">IIHB")
_CODE: Final = Struct(">IH")
_LONG: Final = Struct(">I")
_PUBLISH: Final = methods.BasicPublish.HEAD + b"\x00\x00"
_DELIVER_KEY: Final = methods.BasicDeliver.HEAD


def _ticket(key: int) -> bytes:
    """Class and method, and the ticket (reserved in 0-9-1) that comes first in many methods."""
    return key.to_bytes(4, "big") + b"\x00\x00"


def publish(exchange: bytes, routing_key: bytes, flags: int = 0) -> bytes:
    """basic.publish; *flags* as in :class:`dtx.wire.amqp09.content.Publish`."""
    return b"%b%b%b%c" % (_PUBLISH, put_short(exchange), put_short(routing_key), flags)


def deliver(consumer_tag: bytes, delivery_tag: int, redelivered: bool, exchange: bytes, routing_key: bytes) -> bytes:
    """basic.deliver."""
    middle = _DELIVER.pack(delivery_tag, redelivered)
    return b"".join((_DELIVER_KEY, put_short(consumer_tag), middle, put_short(exchange), put_short(routing_key)))


def returned(code: int, text: bytes, exchange: bytes, routing_key: bytes) -> bytes:
    """basic.return; *text* is at most 255 octets."""
    head = _CODE.pack(methods.BasicReturn.KEY, code)
    return b"".join((head, put_short(text), put_short(exchange), put_short(routing_key)))


def ack(delivery_tag: int, multiple: bool = False) -> bytes:
    """basic.ack."""
    return _SETTLE.pack(methods.BasicAck.KEY, delivery_tag, multiple)


def nack(delivery_tag: int, multiple: bool = False, requeue: bool = True) -> bytes:
    """basic.nack."""
    return _SETTLE.pack(methods.BasicNack.KEY, delivery_tag, multiple | requeue << 1)


def reject(delivery_tag: int, requeue: bool = True) -> bytes:
    """basic.reject."""
    return _SETTLE.pack(methods.BasicReject.KEY, delivery_tag, requeue)


def qos(prefetch_count: int, everywhere: bool = False) -> bytes:
    """basic.qos."""
    return _QOS.pack(methods.BasicQos.KEY, 0, prefetch_count, everywhere)


def consume(
    queue: bytes,
    consumer_tag: bytes,
    *,
    no_ack: bool = False,
    exclusive: bool = False,
    no_wait: bool = False,
    arguments: bytes = NO_ARGUMENTS,
) -> bytes:
    """basic.consume; *arguments* are a table without its length."""
    bits = no_ack << 1 | exclusive << 2 | no_wait << 3
    return (
        _ticket(methods.BasicConsume.KEY)
        + put_short(queue)
        + put_short(consumer_tag)
        + bytes((bits,))
        + put_long(arguments)
    )


def cancel(consumer_tag: bytes, no_wait: bool = False) -> bytes:
    """basic.cancel; sent by a server, it tells that the consumer is gone."""
    return methods.BasicCancel.HEAD + put_short(consumer_tag) + bytes((no_wait,))


def get(queue: bytes, no_ack: bool = False) -> bytes:
    """basic.get."""
    return _ticket(methods.BasicGet.KEY) + put_short(queue) + bytes((no_ack,))


def close(key: int, code: int, text: bytes, failed: int = 0) -> bytes:
    """channel.close or connection.close.

    Args:
        key: which of them.
        code: reply code.
        text: reply text, at most 255 octets.
        failed: class << 16 | method of what failed; 0 where nothing did.
    """
    return _CODE.pack(key, code) + put_short(text) + _LONG.pack(failed)

"""Messages that a branch refuses to consume."""

import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import XAResource, Xid
from tests.support.client import new_xid


def is_not_consumed(connection: BlockingConnection, queue: str, *, code: int, match: str) -> Xid:
    """Acknowledge the first message of *queue* in a branch, which must be refused; return the branch, which remains."""
    channel = connection.channel()
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    method = channel.basic_get(queue)[0]
    assert method is not None
    channel.basic_ack(method.delivery_tag)
    with pytest.raises(ChannelClosedByBroker, match=match) as refused:
        channel.queue_declare(queue, passive=True)
    assert refused.value.reply_code == code
    return xid

"""If the broker accepts a publish, the result is valid on the connection for ten seconds. Then dtx asks again."""

import secrets

import pika
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import XAException, XAResource
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode

PATIENCE = 90
"""Seconds: ten for dtx, ten for the broker's own cache, and more for a busy machine."""


def refused(connection: BlockingConnection, exchange: str) -> int:
    """The code with which a publish in a branch is refused; 0 when it is not."""
    channel = connection.channel()
    xa, xid = XAResource(channel, timeout=60), new_xid()
    try:
        xa.start(xid)
        channel.basic_publish(exchange, "key", b"", pika.BasicProperties(delivery_mode=2))
        xa.end(xid)
        xa.rollback(xid)
        channel.close()
    except (ChannelClosedByBroker, XAException):
        reason = channel._impl._closing_reason
        return int(reason.reply_code)
    return 0


def test_a_revoked_permission_and_a_deleted_exchange_are_noticed(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode
) -> None:
    service = dtx_service()
    mark = secrets.token_hex(4)
    user, closed, gone, kept = (f"{word}-{mark}" for word in ("user", "closed", "gone", "kept"))
    rabbitmq.add_user(user)
    with rabbitmq.channel() as guest, connected(service.url(user)) as connection:
        for exchange in (closed, gone, kept):
            guest.exchange_declare(exchange, "fanout")
            assert refused(connection, exchange) == 0
        rabbitmq.set_permissions(user, write=f"^(amq.default|dtx[.].*|{gone}|{kept})$")
        guest.exchange_delete(gone)
        wait_until(lambda: refused(connection, gone) == 404, seconds=PATIENCE, what="the exchange's end")
        wait_until(lambda: refused(connection, closed) == 403, seconds=PATIENCE, what="the refusal")
        assert refused(connection, kept) == 0
        for exchange in (closed, kept):
            guest.exchange_delete(exchange)
    rabbitmq.delete_user(user)

"""Mandatory messages that no queue takes, within a branch."""

import pika
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import XAResource
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid


def test_an_unroutable_mandatory_message_is_returned_at_commit(dtx_service: ServiceFactory) -> None:
    """basic.publish.mandatory: "the server will return an unroutable message"; with tx, when it is committed."""
    returned = []

    def note(_: BlockingChannel, method: pika.spec.Basic.Return, properties: pika.BasicProperties, body: bytes) -> None:
        returned.append((method.reply_code, method.routing_key, properties.message_id, body))

    with connected(dtx_service().url()) as connection:
        channel = connection.channel()
        channel.add_on_return_callback(note)
        xa, xid = XAResource(channel), new_xid()
        xa.start(xid)
        channel.basic_publish("", "nobody", b"x" * 200_000, pika.BasicProperties(message_id="m1"), mandatory=True)
        channel.basic_publish("", "nobody", b"not mandatory")
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        connection.process_data_events(0)
        assert returned == []
        assert xa.commit(xid) is XaFlag.OK
        connection.process_data_events(0)
        assert returned == [(312, "nobody", "m1", b"x" * 200_000)]


def test_a_publisher_that_has_left_does_not_stop_the_commit(dtx_service: ServiceFactory) -> None:
    """The message cannot be returned, because its publisher has disconnected. The branch is committed."""
    service = dtx_service()
    xid = new_xid()
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(xid)
        channel.basic_publish("", "nobody", b"lost", mandatory=True)
        xa.end(xid)
        xa.prepare(xid)
    with connected(service.url()) as connection:
        assert XAResource(connection.channel()).commit(xid) is XaFlag.OK

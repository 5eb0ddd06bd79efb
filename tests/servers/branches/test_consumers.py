"""Consumers and branches: a consumer that is cancelled, and one whose prefetch the branch uses up."""

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from dtx.client import XaFlag, XAResource
from tests.support.broker import Mode
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Scene


class Reader:
    """A consumer that records its deliveries, and acknowledges none."""

    def __init__(self, connection: BlockingConnection, channel: BlockingChannel, queue: str) -> None:
        self._connection = connection
        self.messages: list[tuple[int, bytes, bool]] = []
        """Delivery tag, body, redelivered."""
        self.cancelled = False
        channel.add_on_cancel_callback(self._cancelled)
        channel.basic_consume(queue, self._delivered)

    def _delivered(
        self, _: BlockingChannel, method: pika.spec.Basic.Deliver, _properties: pika.BasicProperties, body: bytes
    ) -> None:
        self.messages.append((method.delivery_tag, body, method.redelivered))

    def _cancelled(self, _: object) -> None:
        self.cancelled = True

    def has(self, count: int) -> bool:
        """Whether at least *count* messages have arrived, after a read from the socket."""
        self._connection.process_data_events(0.05)
        return len(self.messages) >= count


def test_a_consumer_that_is_cancelled_changes_nothing(stage: Scene) -> None:
    """Design: "a cancelled consumer changes nothing"; its queue is deleted while the branch holds a message of it."""
    for queue in ("doomed", "in", "out"):
        stage.declare(queue)
    stage.fill("doomed", b"one")
    stage.fill("in", b"two", b"three")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xid = XAResource(channel), new_xid()
        xa.start(xid)
        reader = Reader(connection, channel, "doomed")
        stage.wait_for(lambda: reader.has(1), "the delivery")
        channel.basic_ack(reader.messages[0][0])
        channel.basic_publish("", "out", b"a", PERSISTENT)
        stage.delete("doomed")
        stage.wait_for(lambda: reader.has(1) and reader.cancelled, "the cancel")
        method, _, _ = channel.basic_get("in")
        assert method is not None
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        assert xa.commit(xid) is XaFlag.OK
        assert channel.is_open
    assert stage.bodies("out") == [b"a"]
    assert stage.bodies("in") == [b"three"]


def test_a_prefetch_of_one_blocks_until_the_branch_ends(mode: Mode, stage: Scene) -> None:
    """Design: "a prefetch of 1 holds the next delivery back until the branch ends, as with tx".

    Alongside a broker, the vote acknowledges the message there. Without one, dtx holds it until the outcome.
    """
    stage.declare("in")
    stage.fill("in", b"one", b"two", b"three")
    with stage.connected() as connection:
        channel = connection.channel()
        xa, first, second = XAResource(channel), new_xid(), new_xid()
        xa.select()
        channel.basic_qos(prefetch_count=1)
        reader = Reader(connection, channel, "in")
        stage.wait_for(lambda: reader.has(1), "the first delivery")
        xa.start(first)
        channel.basic_ack(reader.messages[0][0])
        xa.end(first)
        channel.queue_declare("in", passive=True)  # a delivery before this answer would have arrived
        assert not reader.has(2)
        assert xa.prepare(first) is XaFlag.OK
        if mode == "standalone":
            assert xa.commit(first) is XaFlag.OK
        stage.wait_for(lambda: reader.has(2), "the second delivery")
        xa.start(second)
        channel.basic_ack(reader.messages[1][0])
        xa.end(second)
        channel.queue_declare("in", passive=True)
        assert not reader.has(3)
        assert xa.rollback(second) is XaFlag.OK
        stage.wait_for(lambda: reader.has(3), "the second delivery again")
        assert [(body, again) for _, body, again in reader.messages] == [
            (b"one", False),
            (b"two", False),
            (b"two", True),
        ]
        if mode == "alongside":
            assert xa.commit(first) is XaFlag.OK
    assert stage.bodies("in") == [b"two", b"three"]

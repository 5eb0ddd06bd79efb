"""Selected channels beside branches, and their end: all that was sent is done, and nothing stays at the broker."""

import time
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import XAError, XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.methods import DtxEnd, DtxEndOk, DtxSelect, DtxSelectOk, DtxSetTimeout, DtxStart
from dtx.xa.codes import XaFlag
from tests.servers.proxy.channels import fill, get, numbers, select
from tests.support.client import bodies, connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import logged_in, message
from tests.support.service import DtxService


def test_ack_multiple_outside_a_branch_spares_its_deliveries(
    selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    xa = XAResource(selected)
    xid = new_xid()
    tags = get(selected, filled, 4)
    xa.start(xid)
    selected.basic_ack(tags[1])
    xa.end(xid)
    selected.basic_ack(tags[3], multiple=True)
    xa.rollback(xid)
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(2, 5, 6)


def test_a_nack_of_all_spares_deliveries_of_a_branch(
    selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    xa = XAResource(selected)
    xid = new_xid()
    tags = get(selected, filled, 4)
    xa.start(xid)
    selected.basic_ack(tags[1])
    xa.end(xid)
    selected.basic_nack(0, multiple=True, requeue=True)
    selected.basic_recover(requeue=True)
    assert xa.commit(xid, one_phase=True) == XaFlag.OK
    selected.close()
    assert bodies(rabbitmq, filled) == numbers(1, 3, 4, 5, 6)


def test_a_publish_outside_a_branch_precedes_the_branchs_end(
    selected: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    xa = XAResource(selected)
    xid = new_xid()
    selected.basic_publish("", queue, b"before")
    xa.start(xid)
    selected.basic_publish("", queue, b"within")
    xa.end(xid)
    selected.basic_publish("", queue, b"behind")
    wait_until(lambda: rabbitmq.count(queue) == 2, what="two messages")
    assert bodies(rabbitmq, queue) == [b"before", b"behind"]
    xa.rollback(xid)


def test_an_unroutable_mandatory_message_outside_a_branch_comes_back(
    through: BlockingConnection, selected: BlockingChannel
) -> None:
    returned: list[Any] = []
    selected.add_on_return_callback(lambda *call: returned.append((call[1].reply_code, call[3])))
    selected.basic_publish("", "nowhere", b"body", mandatory=True)
    wait_until(lambda: through.process_data_events(0.05) or returned, what="a return")
    assert returned == [(312, b"body")]


@pytest.mark.parametrize("method", ["tx_select", "confirm_delivery"])
def test_another_mode_on_a_selected_channel_is_refused(selected: BlockingChannel, method: str) -> None:
    with pytest.raises(ChannelClosedByBroker) as raised:
        getattr(selected, method)()
    assert raised.value.reply_code == 406


def test_acks_are_committed_together(
    through: BlockingConnection, selected: BlockingChannel, filled: str, rabbitmq: RabbitNode
) -> None:
    """One tx.commit covers all acks that arrived during the previous tx.commit."""
    fill(rabbitmq, filled, 3000)
    tags = get_all(selected, filled)
    begun = time.monotonic()
    for tag in tags:
        selected.basic_ack(tag)
    selected.close()
    assert time.monotonic() - begun < 5
    assert rabbitmq.count(filled) == 0


def get_all(channel: BlockingChannel, queue: str) -> list[int]:
    tags = []
    for method, _, _ in channel.consume(queue, inactivity_timeout=1):
        if method is None:
            break
        tags.append(method.delivery_tag)
        if len(tags) == 3006:
            break
    return tags


def test_a_close_pipelined_behind_an_exception_is_answered(service: DtxService) -> None:
    for _ in range(20):
        with logged_in(service.url()) as peer:
            peer.say(1, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
            missing = methods.QueueDeclare(b"no such queue", passive=True).encode()
            peer.say(1, missing, methods.ChannelClose(200, b"bye").encode())
            frame = peer.frame()
            assert frame is not None
            if frame.key == methods.ChannelClose.KEY:
                peer.say(1, methods.ChannelCloseOk().encode())
            else:
                assert frame.key == methods.ChannelCloseOk.KEY
            peer.open(1 if frame.key == methods.ChannelCloseOk.KEY else 2)


def test_everything_sent_before_a_close_counts(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    """A publish pipelined behind an unanswered select, and before the close, takes effect."""
    for close_of in (1, 0):
        row = methods.ChannelClose if close_of else methods.ConnectionClose
        with logged_in(service.url()) as peer:
            peer.send_raw(
                method_frame(1, DtxSelect().encode()),
                message(1, queue.encode(), b"body"),
                row(200, b"bye").frame(close_of),
            )
            peer.wait(methods.ChannelCloseOk.KEY, methods.ConnectionCloseOk.KEY)
    assert rabbitmq.count(queue) == 2


def test_close_ok_comes_when_everything_is_done(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    for rounds in range(1, 11):
        with connected(service.url()) as connection:
            channel = select(connection)
            for number in range(100):
                channel.basic_publish("", queue, b"%d" % number)
        assert rabbitmq.count(queue) == 100 * rounds


@pytest.mark.parametrize(("publisher", "closes"), [(1, "channel"), (2, "connection"), (1, "both")])
def test_close_ok_follows_all_work_although_a_branch_stays(
    service: DtxService, queue: str, filled: str, rabbitmq: RabbitNode, publisher: int, closes: str
) -> None:
    """The connection to the broker stays open for the branch, so its close cannot prove that all has arrived."""
    xid = new_xid()
    with rabbitmq.channel() as control:
        target = control.queue_declare(f"{queue}-target", durable=True).method.queue
    with logged_in(service.url()) as peer:
        peer.open(2)
        peer.say(1, DtxSelect().encode(), methods.BasicGet(filled.encode()).encode())
        peer.wait(methods.BasicGetOk.KEY)
        patience = DtxSetTimeout(xid=xid, timeout=3600).encode()  # on a busy machine an alarm may take a minute
        peer.say(1, DtxStart(xid=xid).encode(), patience, methods.BasicAck(1).encode(), DtxEnd(xid=xid).encode())
        peer.wait(DtxEndOk.KEY)
        rabbitmq.memory_alarm(on=True)
        peer.send_raw(message(publisher, target.encode(), b"blocked"))
        if closes != "connection":
            peer.say(1, methods.ChannelClose(200, b"bye").encode())
        if closes != "channel":
            peer.say(0, methods.ConnectionClose(200, b"bye").encode())
        peer.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            peer.wait(methods.ChannelCloseOk.KEY, methods.ConnectionCloseOk.KEY)
        rabbitmq.memory_alarm(on=False)
        peer.socket.settimeout(20)
        peer.wait(methods.ChannelCloseOk.KEY if closes == "channel" else methods.ConnectionCloseOk.KEY)
        assert bodies(rabbitmq, target) == [b"blocked"]
    with connected(service.url()) as connection:
        assert XAResource(connection.channel()).rollback(xid) == XaFlag.OK
    assert bodies(rabbitmq, filled) == numbers(1, 2, 3, 4, 5, 6)
    with rabbitmq.channel() as control:
        control.queue_delete(target)


def test_nothing_stays_at_the_broker_of_a_client_that_left(service: DtxService, rabbitmq: RabbitNode) -> None:
    with connected(service.url()) as connection:
        exclusive = select(connection).queue_declare("", exclusive=True).method.queue
    assert_gone(rabbitmq, exclusive)
    with logged_in(service.url()) as peer:
        peer.say(1, DtxSelect().encode(), methods.QueueDeclare(b"", exclusive=True).encode())
        declared = peer.wait(methods.QueueDeclareOk.KEY)
    assert_gone(rabbitmq, declared.payload[5:-8].decode())


def assert_gone(node: RabbitNode, queue: str) -> None:
    def gone() -> bool:
        try:
            node.count(queue)
        except ChannelClosedByBroker as error:
            return bool(error.reply_code == 404)
        return False

    wait_until(gone, seconds=5, what=f"the end of {queue}")


def test_consumers_end_with_their_client_though_a_branch_lives_on(
    service: DtxService, queue: str, rabbitmq: RabbitNode, filled: str
) -> None:
    """A message delivered without acks to a client that has left would be lost."""
    target = f"{queue}-noack"
    with rabbitmq.channel() as control:
        control.queue_declare(target, durable=True)
    xid = new_xid()
    with connected(service.url()) as connection:
        working = select(connection)
        xa = XAResource(working)
        (tag,) = get(working, filled)
        xa.start(xid)
        working.basic_ack(tag)
        xa.end(xid)
        connection.channel().basic_consume(target, lambda *_: None, auto_ack=True)
    wait_until(lambda: consumers(rabbitmq, target) == 0, seconds=5, what="no consumer")
    fill(rabbitmq, target, 5)
    assert bodies(rabbitmq, target) == numbers(1, 2, 3, 4, 5)
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        assert xa.commit(xid, one_phase=True) == XaFlag.OK
    assert bodies(rabbitmq, filled) == numbers(2, 3, 4, 5, 6)
    with rabbitmq.channel() as control:
        control.queue_delete(target)


def consumers(node: RabbitNode, queue: str) -> int:
    with node.channel() as channel:
        return int(channel.queue_declare(queue, passive=True).method.consumer_count)


def test_a_channel_may_be_closed_while_it_is_being_selected(service: DtxService) -> None:
    with logged_in(service.url()) as peer:
        for _ in range(50):
            peer.say(2, methods.ChannelOpen().encode(), DtxSelect().encode())
            peer.wait(methods.ChannelOpenOk.KEY)
            peer.say(2, methods.ChannelClose(200, b"never mind").encode())
            peer.wait(methods.ChannelCloseOk.KEY)
        peer.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        peer.wait(methods.QueueDeclareOk.KEY)


def test_a_client_may_disconnect_after_close_beside_a_branch(service: DtxService, filled: str, queue: str) -> None:
    """The branch needs the connection to the broker, which survives the end of the client."""
    xid = new_xid()
    with connected(service.url()) as connection:
        coordinator = XAResource(connection.channel())
        with logged_in(service.url()) as peer:
            peer.open(2)
            for channel in (1, 2):
                peer.say(channel, DtxSelect().encode())
                peer.wait(DtxSelectOk.KEY)
            peer.say(2, methods.BasicConsume(filled.encode(), b"tag").encode())
            peer.wait(methods.BasicDeliver.KEY)
            peer.say(1, methods.BasicGet(filled.encode()).encode(), methods.BasicGet(queue.encode()).encode())
            peer.say(2, methods.BasicAck(1).encode())
            peer.say(2, DtxStart(xid=xid).encode(), methods.BasicAck(2).encode(), DtxEnd(xid=xid).encode())
            peer.wait(DtxEndOk.KEY)
            peer.say(1, methods.ChannelClose(200, b"bye").encode())
        assert coordinator.prepare(xid) == XaFlag.OK
        assert coordinator.commit(xid) == XaFlag.OK


def test_methods_waiting_behind_a_refused_publish_are_released(service: DtxService, queue: str) -> None:
    """queue.declare waits for the publish before it; the broker refuses the publish and closes the channel."""
    with logged_in(service.url()) as peer:
        for _ in range(20):
            peer.say(1, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
            peer.send_raw(
                message(1, b"key", b"body", exchange=b"no such exchange"),
                methods.QueueDeclare(queue.encode(), passive=True).frame(1),
            )
            assert peer.channel_end(1).reply_code == 404
            peer.say(1, methods.ChannelCloseOk().encode())
            peer.open(1)


def test_a_select_behind_a_refused_publish_closes_only_its_channel(service: DtxService) -> None:
    with logged_in(service.url()) as peer:
        for _ in range(20):
            peer.send_raw(
                message(1, b"key", b"body", exchange=b"no such exchange"),
                method_frame(1, DtxSelect().encode()),
            )
            assert peer.channel_end(1).reply_code == 404
            peer.say(1, methods.ChannelCloseOk().encode())
            peer.open(1)


def test_headers_that_dtx_could_not_publish_again_are_refused(service: DtxService, queue: str) -> None:
    """With the headers that dtx adds, the frame would exceed frame-max and break the connection of all commits."""
    with connected(service.url()) as connection:
        channel = select(connection)
        xa, xid = XAResource(channel), new_xid()
        xa.start(xid)
        channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"large": "x" * 130_900}))
        with pytest.raises(XAError, match="too large for a branch"):
            xa.end(xid)
        assert select(connection).is_open

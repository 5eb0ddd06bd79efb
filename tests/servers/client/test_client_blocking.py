"""XAResource and Coordinator against the real service."""

from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError

from dtx.client import (
    XA_RBROLLBACK,
    XAER_DUPID,
    XAER_INVAL,
    XAER_NOTA,
    XAER_OUTSIDE,
    XAER_PROTO,
    XAER_RMFAIL,
    Coordinator,
    PeerIsNotDtx,
    XAError,
    XaFlag,
    XAResource,
    Xid,
)
from dtx.client import calls as dtx_calls
from dtx.client.calls import submit_and_wait
from dtx.client.pika_methods import DtxCoordination
from tests.support.client import bodies, connected, new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


def prepared(connection: BlockingConnection, queue: str, body: bytes = b"one") -> Xid:
    """A prepared branch that has published *body*."""
    channel = connection.channel()
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, body)
    xa.end(xid)
    assert xa.prepare(xid) is XaFlag.OK
    channel.close()
    return xid


def refused(expected: type[XAError], code: int, xa: XAResource, method: str, *args: Any, **options: Any) -> XAError:
    """Make a call that must be refused. "a channel exception with reply code" closes only the channel."""
    connection = xa.channel.connection
    with pytest.raises(expected) as raised:
        getattr(xa, method)(*args, **options)
    assert raised.value.reply_code == code
    assert raised.value.reason
    assert not xa.channel.is_open
    connection.channel().close()
    return raised.value


def test_a_channel_closed_within_its_branch_takes_no_further_work(
    connection: BlockingConnection, channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    """Work on another channel would take effect at once."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, b"one")
    with pytest.raises(ChannelClosedByBroker):
        channel.queue_declare("no-such-queue", passive=True)
    with pytest.raises(ChannelWrongStateError):
        channel.basic_publish("", queue, b"escaped")
    with pytest.raises(XAER_RMFAIL):
        xa.end(xid)
    with Coordinator(connection) as coordinator:
        coordinator.rollback(xid)
    assert bodies(rabbitmq, queue) == []


# -- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_message_is_there_when_its_branch_is_committed(
    channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    """Commit: "Any produced messages are made available"."""
    xa, xid = XAResource(channel), new_xid()
    assert xa.start(xid) is XaFlag.OK
    channel.basic_publish("", queue, b"one")
    assert xa.end(xid) is XaFlag.OK
    assert xa.prepare(xid) is XaFlag.OK
    assert rabbitmq.count(queue) == 0
    assert xa.commit(xid) is XaFlag.OK
    assert bodies(rabbitmq, queue) == [b"one"]


def test_a_message_is_there_after_a_one_phase_commit(
    channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, b"one")
    xa.end(xid)
    assert xa.commit(xid, one_phase=True) is XaFlag.OK
    assert bodies(rabbitmq, queue) == [b"one"]


def test_a_consumed_message_is_gone_after_commit(channel: BlockingChannel, queue: str, rabbitmq: RabbitNode) -> None:
    """Commit: "any consumed messages are discarded"."""
    xa, xid = XAResource(channel), new_xid()
    channel.basic_publish("", queue, b"one")
    xa.start(xid)
    method, _, body = channel.basic_get(queue)
    assert body == b"one"
    channel.basic_ack(method.delivery_tag)
    xa.end(xid)
    assert xa.prepare(xid) is XaFlag.OK
    assert xa.commit(xid) is XaFlag.OK
    assert bodies(rabbitmq, queue) == []


@pytest.mark.parametrize("vote", [False, True])
def test_a_consumed_message_is_back_after_rollback(
    channel: BlockingChannel, queue: str, rabbitmq: RabbitNode, vote: bool
) -> None:
    """Rollback: "any consumed messages are re-enqueued"."""
    xa, xid = XAResource(channel), new_xid()
    channel.basic_publish("", queue, b"one")
    xa.start(xid)
    method, _, _ = channel.basic_get(queue)
    channel.basic_ack(method.delivery_tag)
    channel.basic_publish("", queue, b"two")
    xa.end(xid)
    if vote:
        xa.prepare(xid)
    assert xa.rollback(xid) is XaFlag.OK
    assert bodies(rabbitmq, queue) == [b"one"]


def test_a_branch_without_work_votes_read_only_and_is_gone(channel: BlockingChannel) -> None:
    """xa-rdonly: "The transaction branch was read-only and has been committed"."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    xa.end(xid)
    assert xa.prepare(xid) is XaFlag.RDONLY
    refused(XAER_NOTA, 404, xa, "commit", xid)


def test_failed_work_can_only_be_rolled_back(channel: BlockingChannel, queue: str, rabbitmq: RabbitNode) -> None:
    """End: "If fail is specified then the transaction should be marked as rollback-only"."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, b"one")
    assert xa.end(xid, fail=True) is XaFlag.RBROLLBACK
    with pytest.raises(XA_RBROLLBACK) as raised:
        xa.prepare(xid)
    assert raised.value.code == 100
    assert channel.is_open
    assert xa.rollback(xid) is XaFlag.RBROLLBACK
    assert bodies(rabbitmq, queue) == []


def test_work_while_a_branch_is_suspended_is_not_its_own(
    channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    """End: "must be resumed via the start method with resume specified"."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("", queue, b"inside")
    xa.end(xid, suspend=True)
    channel.basic_publish("", queue, b"outside")
    xa.start(xid, resume=True)
    xa.end(xid)
    xa.prepare(xid)
    xa.rollback(xid)
    assert bodies(rabbitmq, queue) == [b"outside"]


def test_another_connection_joins(
    service: DtxService, channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    """Start: "Indicate that the start applies to joining a transaction previously seen"."""
    xa, xid = XAResource(channel), new_xid()
    with connected(service.url()) as second:
        other = XAResource(second.channel())
        xa.start(xid)
        channel.basic_publish("", queue, b"one")
        other.start(xid, join=True)
        other.channel.basic_publish("", queue, b"two")
        xa.end(xid)
        other.end(xid)
        xa.prepare(xid)
        other.commit(xid)
    assert sorted(bodies(rabbitmq, queue)) == [b"one", b"two"]


def test_the_timeout_of_a_branch_is_the_one_set(channel: BlockingChannel) -> None:
    """Get-timeout: "the value used in the previous setTimeout call is returned"; 0 "resets ... to the default"."""
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    default = xa.get_timeout(xid)
    xa.set_timeout(xid, 17)
    assert xa.get_timeout(xid) == 17
    xa.set_timeout(xid, 0)
    assert xa.get_timeout(xid) == default
    xa.end(xid)
    xa.rollback(xid)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prepare", "commit", "rollback", "forget", "get_timeout"])
def test_an_unknown_xid_is_nota(channel: BlockingChannel, method: str) -> None:
    """Each of them: "If Xid is unknown ... reply code 404 (not found)"."""
    xid = new_xid()
    error = refused(XAER_NOTA, 404, XAResource(channel), method, xid)
    assert str(xid) in str(error)


def test_an_xid_that_exists_is_dupid(channel: BlockingChannel, connection: BlockingConnection) -> None:
    """Start: "If Xid is already known by the broker ... reply code 530 (not allowed)"."""
    xid = new_xid()
    XAResource(channel).start(xid)
    refused(XAER_DUPID, 530, XAResource(connection.channel()), "start", xid)


def test_the_wrong_order_is_proto(connection: BlockingConnection) -> None:
    """Each of them: "If the method is invoked in an improper context ... reply code 503 (command invalid)"."""

    def started() -> tuple[XAResource, Xid]:
        xa, xid = XAResource(connection.channel()), new_xid()
        xa.start(xid)
        return xa, xid

    xa, xid = started()
    refused(XAER_PROTO, 503, xa, "prepare", xid)
    xa, xid = started()
    refused(XAER_PROTO, 503, xa, "start", new_xid())
    xa, xid = started()
    refused(XAER_PROTO, 503, xa, "start", xid, join=True, resume=True)
    xa, xid = started()
    refused(XAER_PROTO, 503, xa, "end", xid, fail=True, suspend=True)
    xa, xid = started()
    xa.end(xid)
    refused(XAER_PROTO, 503, xa, "commit", xid)


def test_a_channel_with_work_of_its_own_is_outside(connection: BlockingConnection, queue: str) -> None:
    confirming = connection.channel()
    confirming.confirm_delivery()
    refused(XAER_OUTSIDE, 406, XAResource(confirming), "start", new_xid())
    transacted = connection.channel()
    transacted.tx_select()
    refused(XAER_OUTSIDE, 406, XAResource(transacted), "select")
    busy = connection.channel()
    busy.basic_publish("", queue, b"one")
    busy.basic_get(queue)
    refused(XAER_OUTSIDE, 406, XAResource(busy), "select")


def test_a_malformed_xid_is_inval(channel: BlockingChannel, connection: BlockingConnection) -> None:
    """Xid: "The sum of the two lengths must equal the length of the data field"."""
    request = DtxCoordination.Prepare(xid=b"\x00\x00\x00\x01\x05\x05short")
    call = dtx_calls.Call(
        operation="prepare", xid=None, request=request, reply=DtxCoordination.PrepareOk, read=lambda answer: answer
    )
    with pytest.raises(XAER_INVAL):
        submit_and_wait(channel, call, None)
    assert connection.is_open


def test_the_next_call_reports_a_channel_closed_by_a_publish(
    channel: BlockingChannel, connection: BlockingConnection
) -> None:
    xa, xid = XAResource(channel), new_xid()
    xa.start(xid)
    channel.basic_publish("no such exchange", "", b"one")
    with pytest.raises(XAER_RMFAIL) as raised:
        xa.end(xid)
    assert raised.value.reply_code == 404
    assert "no such exchange" in raised.value.reason
    with pytest.raises(XAER_RMFAIL, match="no such exchange"):
        xa.prepare(xid)
    with Coordinator(connection) as coordinator:
        assert coordinator.rollback(xid) in (XaFlag.OK, XaFlag.RBROLLBACK)


def test_another_broker_gets_no_dtx_method(rabbitmq: RabbitNode) -> None:
    with connected(rabbitmq.url()) as connection:
        channel = connection.channel()
        with pytest.raises(PeerIsNotDtx, match="the peer is not dtx: RabbitMQ"):
            XAResource(channel)
        with pytest.raises(PeerIsNotDtx):
            Coordinator(connection)
        channel.queue_declare("", exclusive=True)


def test_a_closed_connection_is_rmfail(service: DtxService) -> None:
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        coordinator = Coordinator(connection)
        connection.close()
        with pytest.raises(XAER_RMFAIL):
            xa.start(new_xid())
        with pytest.raises(XAER_RMFAIL):
            coordinator.commit(new_xid())
        with pytest.raises(XAER_RMFAIL, match="not open"):
            Coordinator(connection)


# -- recovery ---------------------------------------------------------------------------------------------------------


def test_recover_lists_exactly_the_prepared_branches(connection: BlockingConnection, queue: str) -> None:
    """Recover: "a list of transaction branches that are in a prepared or heuristically completed state"."""
    xids = {prepared(connection, queue) for _ in range(3)}
    unfinished = XAResource(connection.channel())
    active = new_xid()
    unfinished.start(active)
    with Coordinator(connection) as coordinator:
        found = list(coordinator.recover())
        assert xids <= set(found)
        assert active not in found
        assert len(found) == len(set(found))
        for xid in xids:
            coordinator.rollback(xid)
        assert not xids & set(coordinator.recover())


def test_branches_are_completed_while_the_scan_goes_on(
    connection: BlockingConnection, queue: str, rabbitmq: RabbitNode
) -> None:
    xids = {prepared(connection, queue) for _ in range(5)}
    with Coordinator(connection) as coordinator:
        for xid in coordinator.recover():
            if xid in xids:
                coordinator.commit(xid)
            with pytest.raises(XAER_NOTA):
                coordinator.commit(new_xid())
        assert not xids & set(coordinator.recover())
    assert rabbitmq.count(queue) == 5


def test_an_abandoned_scan_is_harmless_and_a_second_replaces_it(connection: BlockingConnection, queue: str) -> None:
    """Recover: "If a recovery scan is already open, the effect is as if the recovery scan were ended and then
    restarted."
    """
    xids = {prepared(connection, queue) for _ in range(2)}
    xa = XAResource(connection.channel())
    first = xa.recover()
    next(first)
    second = xa.recover()
    assert xids <= set(second)
    with pytest.raises(XAER_PROTO, match="another recovery scan"):
        list(first)
    assert xids <= set(xa.recover())
    for xid in xids:
        xa.rollback(xid)


def test_a_coordinator_goes_on_after_a_refused_call(connection: BlockingConnection, queue: str) -> None:
    xid = prepared(connection, queue)
    coordinator = Coordinator(connection)
    for _ in range(3):
        with pytest.raises(XAER_NOTA):
            coordinator.commit(new_xid())
    assert coordinator.commit(xid) is XaFlag.OK
    coordinator.close()
    coordinator.close()


# -- deliveries during calls ------------------------------------------------------------------------------------------


def test_deliveries_that_arrive_during_a_call_are_not_lost(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    xa, xid = XAResource(channel), new_xid()
    xa.select()
    received: list[bytes] = []
    channel.basic_consume(queue, lambda _channel, _method, _properties, body: received.append(body), auto_ack=True)
    for number in range(20):
        channel.basic_publish("", queue, str(number).encode())
        assert xa.start(xid) is XaFlag.OK
        assert xa.end(xid) is XaFlag.OK
        assert xa.rollback(xid) is XaFlag.OK
    while len(received) < 20:
        connection.process_data_events(None)
    assert received == [str(number).encode() for number in range(20)]


def test_a_consumer_callback_may_run_a_whole_branch(
    connection: BlockingConnection, channel: BlockingChannel, queue: str, rabbitmq: RabbitNode
) -> None:
    xa = XAResource(channel)
    xa.select()
    done: list[bytes] = []

    def move(_channel: BlockingChannel, method: Any, _properties: Any, body: bytes) -> None:
        xid = new_xid()
        xa.start(xid)
        channel.basic_ack(method.delivery_tag)
        xa.end(xid)
        xa.prepare(xid)
        xa.commit(xid)
        done.append(body)

    channel.basic_publish("", queue, b"one")
    channel.basic_publish("", queue, b"two")
    channel.basic_consume(queue, move)
    while len(done) < 2:
        connection.process_data_events(None)
    channel.cancel()
    connection.close()
    assert done == [b"one", b"two"]
    assert bodies(rabbitmq, queue) == []

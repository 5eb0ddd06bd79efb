"""No request holds the event loop for more than 50 ms, whatever its size: each limit is driven to its maximum.

The tests measure processor time, so that other load on the machine does not count.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from dtx.server.limits import MAX_CONSUMERS, MAX_UNACKED
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp09.frames import BODY, header_frame
from dtx.wire.amqp09.properties import Property, build
from dtx.wire.amqp09.tables import entry, put_short
from tests.support.client import new_xid
from tests.support.loop_watch import WatchedService, a_queue, ask, fill, not_held, service, take, watched
from tests.support.processes import wait_until
from tests.support.raw import RawClient, logged_in, message
from tests.support.standalone import arguments

__all__ = ["service", "watched"]

PATIENCE: Final = 120.0
SINGLE: Final = entry(b"x-single-active-consumer", b"t", b"\x01")
BRANCH_MESSAGES: Final = 10_000
"""The default of --max-branch-messages."""


@pytest.fixture
def peer(service: WatchedService) -> Iterator[RawClient]:
    """A client with channel 1."""
    with RawClient(service.url(), patience=PATIENCE) as one:
        one.log_in()
        one.open(1)
        yield one


# -- consumers ---------------------------------------------------------------------------------------------------------


def consume_often(peer: RawClient, queue: Callable[[int], bytes], priority: Callable[[int], int]) -> None:
    for number in range(MAX_CONSUMERS):
        table = arguments(priority=priority(number)) if priority(number) else b""
        peer.say(
            1,
            methods.BasicConsume(
                queue(number), b"%d" % number, no_wait=number < MAX_CONSUMERS - 1, arguments=table
            ).encode(),
        )
    peer.wait(methods.BasicConsumeOk.KEY)


@pytest.mark.parametrize("end", ["close", "disconnect", "delete"])
@pytest.mark.parametrize("kind", ["single", "plain", "priorities"])
def test_many_consumers_of_a_queue_end(service: WatchedService, peer: RawClient, kind: str, end: str) -> None:
    queue = a_queue(peer, arguments=SINGLE if kind == "single" else b"")
    consume_often(peer, lambda _: queue, lambda number: number if kind == "priorities" else 0)
    if end == "close":
        ask(peer, methods.ChannelClose(200, b"").encode(), methods.ChannelCloseOk.KEY)
    elif end == "disconnect":
        peer.socket.close()
    else:
        with logged_in(service.url()) as other:
            ask(other, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


def test_the_next_active_consumer_gets_messages_in_order(service: WatchedService, peer: RawClient) -> None:
    """It gets the returned messages of the former consumer first, however many consumers end before it is active."""
    had, left = 1000, 1000
    queue = a_queue(peer, arguments=SINGLE)
    ask(peer, methods.BasicQos(0, had).encode(), methods.BasicQosOk.KEY)
    consume_often(peer, lambda _: queue, lambda _: 0)
    with RawClient(service.url(), patience=PATIENCE) as other:
        other.log_in()
        other.open(1)
        ask(other, methods.BasicConsume(queue, b"next").encode(), methods.BasicConsumeOk.KEY)
        for number in range(had + left):
            other.send_raw(message(1, queue, b"%d" % number))
        take(peer, had)
        ask(peer, methods.ChannelClose(200, b"").encode(), methods.ChannelCloseOk.KEY)
        assert [int(other.wait(BODY).payload) for _ in range(had + left)] == list(range(had + left))
        ask(other, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


# -- deliveries --------------------------------------------------------------------------------------------------------


def test_very_many_deliveries_are_settled_or_return(service: WatchedService) -> None:
    """All ways share one queue, because filling it takes longer than all of them."""
    with logged_in(service.url()) as peer:
        queue = a_queue(peer)
        fill(peer, queue, MAX_UNACKED)
    recover = methods.BasicRecover.HEAD + b"\x01"
    ways: tuple[tuple[str, bytes, int], ...] = (
        ("nack", methods.BasicNack(0, multiple=True).encode(), MAX_UNACKED),
        ("recover", recover, MAX_UNACKED),
        ("close", methods.ChannelClose(200, b"").encode(), MAX_UNACKED),
        ("disconnect", b"", MAX_UNACKED),
        ("ack some", methods.BasicAck(MAX_UNACKED // 2, multiple=True).encode(), MAX_UNACKED // 2),
        ("reject", methods.BasicNack(MAX_UNACKED // 4, multiple=True, requeue=False).encode(), MAX_UNACKED // 4),
        ("ack", methods.BasicAck(0, multiple=True).encode(), 0),
    )
    ready = MAX_UNACKED
    for how, said, left in ways:
        print(how)
        with not_held(service), RawClient(service.url(), patience=PATIENCE) as peer:
            peer.log_in()
            peer.open(1)
            peer.say(1, methods.BasicConsume(queue, b"all").encode())
            take(peer, ready)
            if how not in ("close", "disconnect"):
                ask(peer, methods.BasicCancel(b"all").encode(), methods.BasicCancelOk.KEY)
                peer.say(1, said)
                ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
            elif said:
                ask(peer, said, methods.ChannelCloseOk.KEY)
            peer.close()
        ready = left
        assert count(service, queue) == ready, how
    with logged_in(service.url()) as peer:
        ask(peer, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_very_many_messages_are_removed(service: WatchedService, peer: RawClient, how: str) -> None:
    queue = a_queue(peer)
    fill(peer, queue, MAX_UNACKED // 2)
    if how == "purge":
        ask(peer, methods.QueuePurge(queue).encode(), methods.QueuePurgeOk.KEY)
    ask(peer, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


def test_all_frames_of_a_read_are_little_work_together(service: WatchedService, peer: RawClient) -> None:
    queue = a_queue(peer)
    many = methods.BasicConsume(queue, b"one", no_wait=True).frame(1) + methods.BasicCancel(b"one", True).frame(1)
    peer.send_raw(many * 20_000, methods.QueueDeclare(queue, passive=True).frame(1))
    peer.wait(methods.QueueDeclareOk.KEY)
    peer.send_raw(message(1, queue, b"") * 30_000, methods.QueueDeclare(queue, passive=True).frame(1))
    peer.wait(methods.QueueDeclareOk.KEY)


def test_frames_that_wait_behind_a_method_are_little_work_together(service: WatchedService, peer: RawClient) -> None:
    queue = a_queue(peer)
    one = message(1, queue, b"")
    get = methods.QueueDeclare(queue, passive=True).frame(1)
    for _ in range(5):
        peer.send_raw(
            one,
            get,
            methods.BasicConsume(queue, b"one", no_wait=True).frame(1)
            + methods.BasicCancel(b"one", True).frame(1) * 30_000,
        )
    for _ in range(5):
        peer.wait(methods.QueueDeclareOk.KEY)


# -- transactions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback", "one-phase", "unvoted"])
@pytest.mark.parametrize("kind", ["publish", "consume"])
def test_the_largest_branch_ends(service: WatchedService, peer: RawClient, kind: str, end: str) -> None:
    queue = a_queue(peer, durable=True)
    xid = new_xid()
    ask(peer, methods.DtxSelect().encode(), methods.DtxSelectOk.KEY)
    if kind == "consume":
        fill(peer, queue, BRANCH_MESSAGES)
        peer.say(1, methods.BasicConsume(queue, b"all").encode())
        take(peer, BRANCH_MESSAGES)
    ask(peer, methods.DtxStart(xid=xid, join=False, resume=False).encode(), methods.DtxStartOk.KEY)
    if kind == "consume":
        service.reset()
        peer.say(1, methods.BasicAck(0, multiple=True).encode())
    else:
        peer.send_raw(message(1, queue, b"x" * 100) * BRANCH_MESSAGES)
    ask(peer, methods.DtxEnd(xid=xid, fail=False, suspend=False).encode(), methods.DtxEndOk.KEY)
    service.reset()
    if end in ("commit", "rollback"):
        ask(peer, methods.DtxPrepare(xid=xid).encode(), methods.DtxPrepareOk.KEY)
        service.reset()
    if end in ("commit", "one-phase"):
        ask(peer, methods.DtxCommit(xid=xid, one_phase=end == "one-phase").encode(), methods.DtxCommitOk.KEY)
    else:
        ask(peer, methods.DtxRollback(xid=xid).encode(), methods.DtxRollbackOk.KEY)
    with logged_in(service.url()) as other:
        ask(other, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
@pytest.mark.parametrize("how", ["publish", "ack", "nack"])
def test_the_largest_local_transaction_ends(service: WatchedService, peer: RawClient, how: str, end: str) -> None:
    queue = a_queue(peer, durable=True)
    if how != "publish":
        fill(peer, queue, BRANCH_MESSAGES)
    ask(peer, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    if how == "publish":
        peer.send_raw(message(1, queue, b"x" * 100) * BRANCH_MESSAGES)
    else:
        peer.say(1, methods.BasicConsume(queue, b"all").encode())
        take(peer, BRANCH_MESSAGES)
        peer.say(1, methods.BasicCancel(b"all").encode())
        peer.wait(methods.BasicCancelOk.KEY)
        service.reset()
        peer.say(
            1,
            methods.BasicAck(0, multiple=True).encode()
            if how == "ack"
            else methods.BasicNack(0, multiple=True).encode(),
        )
    if end == "commit":
        ask(peer, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    elif end == "rollback":
        ask(peer, methods.TxRollback().encode(), methods.TxRollbackOk.KEY)
    else:
        ask(peer, methods.ChannelClose(200, b"").encode(), methods.ChannelCloseOk.KEY)
    with logged_in(service.url()) as other:
        ask(other, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


# -- topology and headers ----------------------------------------------------------------------------------------------


def with_headers(queue: bytes, exchange: bytes, headers: bytes) -> bytes:
    properties = build({Property.HEADERS: headers})
    return b"".join(
        (
            methods.BasicPublish(exchange, queue).frame(1),
            header_frame(1, 60, 0, properties),
        )
    )


@pytest.mark.parametrize("kind", ["many", "nested"])
def test_a_message_has_as_many_headers_as_may_be(service: WatchedService, peer: RawClient, kind: str) -> None:
    queue = a_queue(peer)
    table = entry(b"k", b"V", b"")
    ask(peer, methods.QueueBind(queue, b"amq.headers", b"", arguments=table).encode(), methods.QueueBindOk.KEY)
    headers = b"\x00V" * (tables.MAX_ENTRIES - 2)
    if kind == "nested":
        headers = entry(b"k", b"A", b"V" * (tables.MAX_ENTRIES - 2)) + b"\x00V" * (tables.MAX_ENTRIES - 4)
    peer.send_raw(with_headers(b"", b"amq.headers", entry(b"CC", b"A", b"") + headers) * 5)
    ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    ask(peer, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


MANY = 10_000


@pytest.mark.parametrize("kind", [b"headers", b"topic", b"fanout"])
@pytest.mark.parametrize("end", ["queue", "exchange"])
def test_very_many_bindings_go(service: WatchedService, peer: RawClient, kind: bytes, end: str) -> None:
    queue, exchange = a_queue(peer), secrets.token_hex(6).encode()
    ask(peer, methods.ExchangeDeclare(exchange, kind).encode(), methods.ExchangeDeclareOk.KEY)
    for number in range(MANY):
        table = entry(b"k%d" % number, b"S", b"v") if kind == b"headers" else b""
        peer.say(1, methods.QueueBind(queue, exchange, b"#.k%d" % number, arguments=table).encode())
    for _ in range(MANY):
        peer.wait(methods.QueueBindOk.KEY)
    service.reset()
    peer.send_raw(with_headers(b"a.b.k7", exchange, entry(b"k7", b"S", b"v")) * 5)
    ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    service.reset()
    if end == "exchange":
        delete = methods.ExchangeDelete.HEAD + b"\x00\x00" + put_short(exchange) + b"\x00"
        ask(peer, delete, methods.ExchangeDeleteOk.KEY)
    ask(peer, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)


def test_very_many_queues_go_with_their_connection(service: WatchedService, peer: RawClient) -> None:
    names = [secrets.token_hex(6).encode() for _ in range(5000)]
    for name in names:
        peer.say(1, methods.QueueDeclare(name, exclusive=True, no_wait=True).encode())
        peer.say(1, methods.QueueBind(name, b"amq.fanout", b"").encode())
    for _ in names:
        peer.wait(methods.QueueBindOk.KEY)
    peer.close()


def test_a_message_goes_to_very_many_queues(service: WatchedService, peer: RawClient) -> None:
    names = [secrets.token_hex(6).encode() for _ in range(2000)]
    for name in names:
        peer.say(1, methods.QueueDeclare(name, exclusive=True, no_wait=True).encode())
        peer.say(1, methods.QueueBind(name, b"amq.fanout", b"").encode())
        peer.say(1, methods.BasicConsume(name, name, no_ack=True, no_wait=True).encode())
    for _ in names:
        peer.wait(methods.QueueBindOk.KEY)
    service.reset()
    peer.send_raw(message(1, b"", b"x" * 100, exchange=b"amq.fanout"))
    take(peer, len(names))


@pytest.mark.parametrize("why", ["expired", "rejected"])
def test_very_many_messages_leave_their_queue(service: WatchedService, peer: RawClient, why: str) -> None:
    grave = a_queue(peer)
    options: dict[str, int | str] = {"dead_letter_exchange": "", "dead_letter_routing_key": grave.decode()}
    if why == "expired":
        options["message_ttl"] = 10_000
    queue = a_queue(peer, arguments=arguments(**options))
    fill(peer, queue, MANY)
    if why != "expired":
        peer.say(1, methods.BasicConsume(queue, b"all").encode())
        take(peer, MANY)
        peer.say(1, methods.BasicNack(0, multiple=True, requeue=False).encode())
    service.reset()
    wait_until(lambda: count(service, grave) == MANY, seconds=100, what="the dead letters")


def count(service: WatchedService, queue: bytes) -> int:
    """The number of ready messages."""
    with logged_in(service.url()) as other:
        payload = ask(other, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    return int.from_bytes(payload[-8:-4], "big")

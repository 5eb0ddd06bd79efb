"""The work that belongs to a branch between start and end, and its fate when its channel ends."""

import secrets
import struct
from collections.abc import Callable

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.wire.amqp09.tables import entry
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker, Mode, only_alongside, only_standalone
from tests.support.client import bodies, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, session
from tests.support.service import DtxService


@pytest.fixture
def full(broker: Broker, queue: str) -> str:
    """A queue with the messages 0 to 9."""
    with broker.channel() as channel:
        channel.confirm_delivery()
        for number in range(10):
            channel.basic_publish("", queue, str(number).encode())
    return queue


def numbers(*values: int) -> list[bytes]:
    return [str(value).encode() for value in values]


def read_declared(client: RawClient, channel: int) -> str:
    """The name in queue.declare-ok."""
    return methods.QueueDeclareOk.decode(client.read_method(channel, methods.QueueDeclareOk.KEY)).queue.decode()


def test_an_ack_outside_the_branch_settles_no_delivery_of_branches(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """Transactionality; ack with multiple is "up to and including", except for messages that a branch holds."""
    tags = [raw.get(1, full) for _ in range(6)]
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicAck(tags[1] or 0).encode(), methods.BasicAck(tags[3] or 0).encode())
    raw.ask(1, DtxEnd(xid=xid))
    raw.say(1, methods.BasicAck(tags[4] or 0, multiple=True).encode())
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert sorted(bodies(broker, full)) == numbers(1, 3, 5, 6, 7, 8, 9)


def test_an_ack_of_all_in_a_branch_settles_unsettled_deliveries(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """Delivery tag 0 with multiple: "all outstanding messages"; messages acknowledged before are excluded."""
    tags = [raw.get(1, full) for _ in range(3)]
    raw.say(1, methods.BasicAck(tags[0] or 0).encode())
    raw.ask(1, DtxStart(xid=xid))
    assert raw.get(1, full) is not None
    raw.say(1, methods.BasicAck(0, multiple=True).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert sorted(bodies(broker, full)) == numbers(*range(1, 10))


@pytest.mark.parametrize("within", [True, False], ids=["within", "outside"])
@pytest.mark.parametrize(
    ("settle", "left"),
    [
        (lambda tag: methods.BasicAck(tag).encode(), 0),
        (lambda _: methods.BasicAck(0, multiple=True).encode(), 0),
        (lambda tag: methods.BasicReject(tag).encode(), 1),
        (lambda tag: methods.BasicNack(tag, multiple=True).encode(), 1),
    ],
    ids=["ack", "ack all", "reject", "nack"],
)
def test_a_delivery_is_settled_before_all_of_it_has_come(
    raw: RawClient,
    broker: Broker,
    queue: str,
    xid: Xid,
    settle: Callable[[int], bytes],
    left: int,
    within: bool,
) -> None:
    """RabbitMQ accepts a settlement as soon as it has sent the method of the delivery."""
    body = bytes(200_000)
    with broker.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", queue, body)
    if within:
        raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicGet(queue.encode()).encode())
    tag = methods.BasicGetOk.decode(raw.read_method(1, methods.BasicGetOk.KEY)).delivery_tag
    raw.say(1, settle(tag))
    if within:
        assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
        assert raw.ask(2, DtxCommit(xid=xid, one_phase=False)) is XaFlag.OK
    raw.close_channel(1)
    assert bodies(broker, queue) == [body] * left


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "unprepared"])
def test_a_reject_within_the_branch_waits_for_its_end(
    raw: RawClient, broker: Broker, full: str, xid: Xid, commits: bool, prepares: bool
) -> None:
    """A rollback undoes the reject with the rest; a requeued message returns in either case."""
    tags = [raw.get(1, full) or 0 for _ in range(3)]
    raw.ask(1, DtxStart(xid=xid))
    raw.say(
        1,
        methods.BasicAck(tags[0]).encode(),
        methods.BasicReject(tags[1], requeue=False).encode(),
        methods.BasicNack(tags[2], requeue=True).encode(),
    )
    raw.ask(1, DtxEnd(xid=xid))
    if prepares:
        assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    raw.close_channel(1)
    assert broker.count(full) == 7
    end = DtxCommit(xid=xid, one_phase=not prepares) if commits else DtxRollback(xid=xid)
    assert raw.ask(2, end) is XaFlag.OK
    expected = numbers(*(range(2, 10) if commits else range(10)))
    wait_until(lambda: broker.count(full) == len(expected), what="what returns")
    assert sorted(bodies(broker, full)) == expected


@only_standalone
def test_a_branch_that_only_requeues_returns_messages_at_its_end(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    tag = raw.get(1, full) or 0
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicNack(tag, multiple=True, requeue=True).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert broker.count(full) == 9
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert broker.count(full) == 9
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, full) == numbers(*range(10))


@only_standalone
def test_too_many_rejections_roll_the_branch_back(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """Rejections count as messages of the branch; the limit is 20."""
    with broker.channel() as channel:
        channel.confirm_delivery()
        for number in range(21):
            channel.basic_publish("", queue, b"%d" % number)
    tags = [raw.get(1, queue) or 0 for _ in range(21)]
    raw.ask(1, DtxStart(xid=xid))
    assert raw.refusal_of(1, methods.BasicNack(tags[-1], multiple=True, requeue=False).encode()).code == 506
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert bodies(broker, queue) == numbers(*range(21))


def dying(raw: RawClient, grave_arguments: bytes = b"") -> tuple[str, str]:
    """A queue with one message, and the queue for its dead letters; both are exclusive."""
    grave = f"grave-{secrets.token_hex(4)}".encode()
    queue = f"dying-{secrets.token_hex(4)}".encode()
    letters = entry(b"x-dead-letter-exchange", b"S", b"") + entry(b"x-dead-letter-routing-key", b"S", grave)
    for name, arguments in ((grave, grave_arguments), (queue, letters)):
        raw.say(2, methods.QueueDeclare(name, exclusive=True, arguments=arguments).encode())
        raw.read_method(2, methods.QueueDeclareOk.KEY)
    raw.publish(2, queue.decode(), b"rejected")
    return queue.decode(), grave.decode()


@only_standalone
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_a_branch_publishes_dead_letters_of_its_rejected_messages(raw: RawClient, xid: Xid, commits: bool) -> None:
    queue, grave = dying(raw)
    tag = raw.get(1, queue) or 0
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicReject(tag, requeue=False).encode())
    raw.publish(1, grave, b"behind it")
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.take(2, grave) is None
    assert raw.ask(2, DtxCommit(xid=xid) if commits else DtxRollback(xid=xid)) is XaFlag.OK
    assert [raw.take(2, name) for name in (queue, grave, grave)] == (
        [None, b"rejected", b"behind it"] if commits else [b"rejected", None, None]
    )


@only_standalone
def test_a_full_dead_letter_queue_dooms_the_branch(raw: RawClient, xid: Xid) -> None:
    """Reject-publish applies to dead letters as to the publishes of the branch."""
    limits = entry(b"x-max-length", b"I", b"\x00\x00\x00\x00") + entry(b"x-overflow", b"S", b"reject-publish")
    queue, grave = dying(raw, limits)
    tag = raw.get(1, queue) or 0
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicReject(tag, requeue=False).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert [raw.take(2, name) for name in (queue, grave)] == [b"rejected", None]


def test_a_delivery_without_acknowledgement_belongs_to_no_branch(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """No-ack: the server "assumes the delivery will succeed and immediately dequeues it"."""
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicGet(full.encode(), no_ack=True).encode())
    raw.read_method(1, methods.BasicGetOk.KEY)
    assert raw.read_content(1) == b"0"
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert bodies(broker, full) == numbers(*range(1, 10))


@only_alongside
def test_a_branch_that_only_rejects_asks_for_the_decision(raw: RawClient, broker: Broker, full: str, xid: Xid) -> None:
    """Read-only is "no recoverable change"; the reject must still be sent to the broker."""
    tag = raw.get(1, full) or 0
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicNack(tag, multiple=True, requeue=False).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    wait_until(lambda: broker.count(full) == 10, what="the rejected message")


@only_alongside
def test_a_client_that_leaves_leaves_its_rejects_to_the_branch(
    service: DtxService, raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """The client's connection to the broker stays open until the branch has completed."""
    with session(service.url()) as worker:
        worker.open(1, select=True)
        tag = worker.get(1, full) or 0
        worker.ask(1, DtxStart(xid=xid))
        worker.say(1, methods.BasicReject(tag, requeue=False).encode())
        worker.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert broker.count(full) == 9
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    raw.get(1, full)
    raw.close_channel(1)
    wait_until(lambda: broker.count(full) == 9, what="what was only looked at")
    assert sorted(bodies(broker, full)) == numbers(*range(1, 10))


@only_alongside
def test_a_reject_is_lost_with_its_channel_not_the_message(raw: RawClient, broker: Broker, full: str, xid: Xid) -> None:
    """The broker requeues unsettled deliveries of a channel that ends; the branch still commits."""
    tag = raw.get(1, full) or 0
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicReject(tag, requeue=False).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.refusal_of(1, methods.BasicGet(b"no such queue").encode()).code == 404
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert sorted(bodies(broker, full)) == numbers(*range(10))


@only_alongside
def test_contents_of_rejected_messages_are_not_kept(raw: RawClient, broker: Broker, queue: str, xid: Xid) -> None:
    """The contents of the rejected messages exceed --max-kept-bytes, which is 256 KiB."""
    with broker.channel() as channel:
        channel.confirm_delivery()
        for number in range(5):
            channel.basic_publish("", queue, bytes((number,)) * 100_000)
    raw.ask(1, DtxStart(xid=xid))
    for _ in range(4):
        raw.say(1, methods.BasicReject(raw.get(1, queue) or 0, requeue=False).encode())
    raw.consume_one(1, queue)
    assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    wait_until(lambda: broker.count(queue) == 5, what="all of them")


@only_alongside
def test_too_many_rejects_for_a_branch_roll_it_back(raw: RawClient, broker: Broker, full: str, xid: Xid) -> None:
    """Rejects count as messages of the branch; the limit is 20."""
    with broker.channel() as channel:
        channel.confirm_delivery()
        for _ in range(11):
            channel.basic_publish("", full, b"more")
    tags = [raw.get(1, full) or 0 for _ in range(21)]
    raw.ask(1, DtxStart(xid=xid))
    assert raw.refusal_of(1, methods.BasicNack(tags[-1], multiple=True, requeue=False).encode()).code == 506
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    wait_until(lambda: broker.count(full) == 21, what="all of them")


@only_alongside
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_the_broker_has_dead_letters_of_committed_branches_only(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, commits: bool
) -> None:
    """A message rejected in a branch is dead-lettered when the branch commits, not before."""
    dying = f"{queue}-dying"
    letters = entry(b"x-dead-letter-exchange", b"S", b"") + entry(b"x-dead-letter-routing-key", b"S", queue.encode())
    raw.say(2, methods.QueueDeclare(dying.encode(), exclusive=True, arguments=letters).encode())
    raw.read_method(2, methods.QueueDeclareOk.KEY)
    raw.publish(2, dying, b"rejected")
    while (tag := raw.get(1, dying)) is None:  # it was published on another channel and may be late
        pass
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicReject(tag, requeue=False).encode())
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid) if commits else DtxRollback(xid=xid)) is XaFlag.OK
    if commits:
        wait_until(lambda: bodies(broker, queue) == [b"rejected"], what="the dead letter")
    else:
        while (again := raw.get(3, dying)) is None:
            pass
        assert again == 1
        assert bodies(broker, queue) == []


def test_a_recover_spares_deliveries_of_branches(raw: RawClient, broker: Broker, full: str, xid: Xid) -> None:
    """basic.recover: "redeliver all unacknowledged messages"; a held one is acknowledged."""
    tags = [raw.get(1, full) or 0 for _ in range(3)]
    raw.ask(1, DtxStart(xid=xid))
    raw.say(1, methods.BasicAck(tags[1]).encode())
    raw.say(1, struct.pack(">IB", methods.BasicRecover.KEY, 1))
    raw.read_method(1, methods.BasicRecoverOk.KEY)
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(2, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    raw.close_channel(1)
    assert sorted(bodies(broker, full)) == numbers(0, 2, 3, 4, 5, 6, 7, 8, 9)


def test_deliveries_on_two_connections_are_one_branch(
    service: DtxService, raw: RawClient, broker: Broker, full: str
) -> None:
    """Join: each connection consumes its messages in its own unit; the branch commits or rolls back as a whole."""
    committed, rolled_back = new_xid(), new_xid()
    with session(service.url()) as second:
        second.open(1, select=True)
        for xid in (committed, rolled_back):
            raw.ask(1, DtxStart(xid=xid))
            second.ask(1, DtxStart(xid=xid, join=True))
            raw.consume_one(1, full)
            second.consume_one(1, full)
            raw.consume_one(1, full)
            raw.ask(1, DtxEnd(xid=xid))
            second.ask(1, DtxEnd(xid=xid))
            assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
        assert broker.count(full) == 4
    assert raw.ask(2, DtxCommit(xid=committed)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=rolled_back)) is XaFlag.OK
    assert sorted(bodies(broker, full)) == numbers(3, 4, 5, 6, 7, 8, 9)


def test_a_channel_exception_ends_the_associated_branch(raw: RawClient, broker: Broker, full: str, xid: Xid) -> None:
    """A "channel exception" of the broker is passed on with its text."""
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, full)
    raw.publish(1, full, b"lost")
    refusal = raw.refusal_of(1, methods.BasicGet(b"no such queue").encode())
    assert (refusal.code, refusal.class_id, refusal.method_id) == (404, 60, 70)
    assert "no such queue" in refusal.text
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
    assert sorted(bodies(broker, full)) == numbers(*range(10))


@only_alongside
def test_an_exception_after_the_end_loses_only_consumed_messages(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """An ended branch survives its channel, unless it holds deliveries, which the broker has requeued."""
    consuming = new_xid()
    raw.idle(1, xid, queue=full, body=b"kept")
    raw.ask(1, DtxStart(xid=consuming))
    raw.consume_one(1, full)
    raw.ask(1, DtxEnd(xid=consuming))
    assert raw.refusal_of(1, methods.BasicGet(b"no such queue").encode()).code == 404
    assert raw.ask(2, DtxPrepare(xid=consuming)) is XaFlag.RBROLLBACK
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert sorted(bodies(broker, full)) == [*numbers(*range(10)), b"kept"]


@only_standalone
def test_an_exception_after_the_end_loses_nothing_that_dtx_stores(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """An ended branch survives its channel; consumed messages are held in the queue, not on the channel."""
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, full)
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.refusal_of(1, methods.BasicGet(b"no such queue").encode()).code == 404
    assert raw.ask(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert sorted(bodies(broker, full)) == numbers(*range(1, 10))


def test_a_refused_dtx_call_keeps_deliveries_of_an_ended_branch(
    raw: RawClient, broker: Broker, full: str, xid: Xid
) -> None:
    """The exception comes from dtx, so the channel at the broker stays open for the branch."""
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, full)
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.get(1, full) is not None
    assert raw.refusal(1, DtxCommit(xid=new_xid())).code == 404
    wait_until(lambda: broker.count(full) == 9, what="the return of what no branch holds")
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(1, DtxCommit(xid=xid)) is XaFlag.OK
    assert sorted(bodies(broker, full)) == numbers(*range(1, 10))


@only_alongside
def test_an_ended_branch_keeps_a_lost_clients_exclusive_queue(
    service: DtxService, raw: RawClient, rabbitmq: RabbitNode, queue: str
) -> None:
    """The connection to RabbitMQ stays open while a branch needs it, then it is closed."""
    xids = [new_xid(), new_xid()]
    names = [f"{queue}-{number}".encode() for number in range(2)]
    for xid, name in zip(xids, names, strict=True):
        worker = RawClient(service.url()).log_in()
        worker.open(1, select=True)
        worker.say(1, methods.QueueDeclare(name, exclusive=True).encode())
        worker.read_method(1, methods.QueueDeclareOk.KEY)
        worker.publish(1, name.decode(), b"mine")
        worker.ask(1, DtxStart(xid=xid))
        worker.consume_one(1, name.decode())
        worker.publish(1, queue, b"result")
        worker.ask(1, DtxEnd(xid=xid))
        worker.close()
    assert all(name.decode() in rabbitmq.ctl("list_queues", "name") for name in names)
    assert raw.ask(2, DtxPrepare(xid=xids[0])) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xids[0])) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xids[1])) is XaFlag.OK
    wait_until(lambda: not any(name.decode() in rabbitmq.ctl("list_queues", "name") for name in names), what="the end")
    assert bodies(rabbitmq, queue) == [b"result"]


@only_alongside
@pytest.mark.parametrize("declares_on", [1, 2], ids=["the selected channel", "another channel"])
def test_messages_of_a_deleted_exclusive_queue_are_dropped(
    service: DtxService, raw: RawClient, rabbitmq: RabbitNode, full: str, xid: Xid, declares_on: int
) -> None:
    """No other connection could receive the message; without dtx the broker would have dropped it."""
    with session(service.url()) as worker:
        worker.open(1, select=True)
        worker.open(2)
        worker.say(declares_on, methods.QueueDeclare(b"", exclusive=True).encode())
        exclusive = read_declared(worker, declares_on)
        worker.publish(declares_on, exclusive, b"mine")
        worker.ask(1, DtxStart(xid=xid))
        worker.consume_one(1, exclusive)
        worker.consume_one(1, full)
        worker.ask(1, DtxEnd(xid=xid))
        assert worker.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    wait_until(lambda: exclusive not in rabbitmq.ctl("list_queues", "name"), what="the end of the queue")
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert sorted(bodies(rabbitmq, full)) == numbers(*range(10))


@only_alongside
def test_an_exclusive_queue_that_lives_gets_its_message_back(raw: RawClient, broker: Broker, xid: Xid) -> None:
    raw.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
    exclusive = read_declared(raw, 1)
    raw.publish(1, exclusive, b"mine")
    raw.ask(1, DtxStart(xid=xid))
    raw.consume_one(1, exclusive)
    raw.ask(1, DtxEnd(xid=xid))
    assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert raw.take(1, exclusive) == b"mine"


@only_alongside
def test_only_messages_of_an_exclusive_queue_may_be_dropped(
    service: DtxService, raw: RawClient, rabbitmq: RabbitNode, queue: str, xid: Xid
) -> None:
    """A deleted queue that is not exclusive may be declared again; its message is kept for this case."""
    target = f"{queue}-gone".encode()
    with session(service.url()) as worker:
        worker.open(1, select=True)
        worker.say(1, methods.QueueDeclare(target).encode())
        read_declared(worker, 1)
        worker.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
        exclusive = read_declared(worker, 1)
        for name in (target.decode(), exclusive):
            worker.publish(1, name, name.encode())
        worker.ask(1, DtxStart(xid=xid))
        worker.consume_one(1, target.decode())
        worker.consume_one(1, exclusive)
        worker.ask(1, DtxEnd(xid=xid))
        assert worker.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
        worker.say(1, methods.QueueDelete(target).encode())
        worker.read_method(1, methods.QueueDeleteOk.KEY)
    wait_until(lambda: exclusive not in rabbitmq.ctl("list_queues", "name"), what="the end of the queue")
    refusal = raw.refusal(2, DtxRollback(xid=xid))
    assert (refusal.code, "1 message(s) could not be put back" in refusal.text) == (541, True)
    raw.say(2, methods.QueueDeclare(target).encode())
    read_declared(raw, 2)
    assert raw.ask(2, DtxRollback(xid=xid)) is XaFlag.OK
    assert bodies(rabbitmq, target.decode()) == [target]
    raw.say(2, methods.QueueDelete(target).encode())


def test_published_messages_keep_order_properties_and_id(
    mode: Mode, raw: RawClient, broker: Broker, queue: str, xid: Xid
) -> None:
    """Bodies of no, one and many frames; a message sent to a broker has one header added by dtx."""
    payloads = [b"", b"x", bytes(range(256)) * 64]
    flags = 0x8000 | 0x1000 | 0x0080  # content-type, delivery-mode, message-id
    properties = struct.pack(">H", flags) + b"\x0atext/plain" + b"\x02" + b"\x02id"
    raw.ask(1, DtxStart(xid=xid))
    for payload in payloads:
        raw.publish(1, queue, payload, properties=properties)
    raw.ask(1, DtxEnd(xid=xid))
    raw.ask(1, DtxPrepare(xid=xid))
    assert raw.ask(1, DtxCommit(xid=xid)) is XaFlag.OK
    taken = broker.take_all(queue)
    assert [body for body, _, _ in taken] == payloads
    for _, found, _ in taken:
        assert (found.content_type, found.delivery_mode, found.message_id) == ("text/plain", 2, "id")
    if mode == "alongside":
        assert [list(found.headers or ()) for _, found, _ in taken] == [["x-dtx-id"]] * 3
        assert len({(found.headers or {})["x-dtx-id"] for _, found, _ in taken}) == 3
    else:
        assert [found.headers for _, found, _ in taken] == [None] * 3

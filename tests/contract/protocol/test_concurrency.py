"""Many concurrent branches and concurrent calls for one branch: no message is lost or doubled, answers are correct."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxCall, DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Broker, Mode
from tests.support.client import bodies, new_xid
from tests.support.raw import RawClient, session
from tests.support.service import DtxService

THREADS = 50
ROUNDS = 6


def attempt(client: RawClient, call: DtxCall) -> XaFlag | int:
    """The flag, or the code of the refusal, of a call on channel 1 of a connection without other calls."""
    client.say(1, call.encode())
    payload = client.next_method(1)
    if payload[:4] == b"\x00\x14\x00\x28":
        client.say(1, methods.ChannelCloseOk().encode())
        return int.from_bytes(payload[4:6], "big")
    return XaFlag(int.from_bytes(payload[4:6], "big"))


@pytest.fixture
def pair(service: DtxService) -> Iterator[Callable[[DtxCall, DtxCall], list[XaFlag | int]]]:
    """Makes two calls at the same time, each on its own connection, and returns the answers."""
    clients = [RawClient(service.url()).log_in() for _ in range(2)]
    for client in clients:
        client.open(1)

    def race(*calls: DtxCall) -> list[XaFlag | int]:
        barrier = threading.Barrier(len(calls))

        def run(client: RawClient, call: DtxCall) -> XaFlag | int:
            barrier.wait()
            answer = attempt(client, call)
            if not isinstance(answer, XaFlag):
                client.open(1)
            return answer

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(run, clients, calls))

    yield race
    for client in clients:
        client.close()


def test_fifty_threads_do_two_phase_commits_with_joins(service: DtxService, broker: Broker, queue: str) -> None:
    """Each branch works on two connections; one thread prepares it and the other completes it."""
    source = f"{queue}-source"
    with broker.channel() as channel:
        channel.queue_declare(source, durable=True)
        channel.confirm_delivery()
        for number in range(THREADS * ROUNDS):
            channel.basic_publish("", source, f"{number}".encode())
    clients = [RawClient(service.url()).log_in() for _ in range(THREADS)]
    branches = [[new_xid() for _ in range(ROUNDS)] for _ in range(THREADS)]
    barrier = threading.Barrier(THREADS)

    def work(me: int) -> None:
        client, partner = clients[me], (me + 1) % THREADS
        client.open(1, select=True)
        for turn in range(ROUNDS):
            barrier.wait()
            mine, others = branches[me][turn], branches[partner][turn]
            client.ask(1, DtxStart(xid=mine))
            client.consume_one(1, source)
            client.publish(1, queue, f"{me}.{turn}.own".encode())
            client.ask(1, DtxEnd(xid=mine))
            barrier.wait()
            client.ask(1, DtxStart(xid=others, join=True))
            client.publish(1, queue, f"{partner}.{turn}.joined".encode())
            client.ask(1, DtxEnd(xid=others))
            barrier.wait()
            assert client.ask(1, DtxPrepare(xid=mine)) is XaFlag.OK
            barrier.wait()
            # every third is rolled back
            call = DtxRollback(xid=others) if (partner + turn) % 3 == 0 else DtxCommit(xid=others)
            assert client.ask(1, call) is XaFlag.OK

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    for client in clients:
        client.close()

    committed = {(me, turn) for me in range(THREADS) for turn in range(ROUNDS) if (me + turn) % 3}
    expected = {f"{me}.{turn}.{part}".encode() for me, turn in committed for part in ("own", "joined")}
    found = bodies(broker, queue)
    assert Counter(found) == Counter(expected)
    assert len(bodies(broker, source)) == THREADS * ROUNDS - len(committed)
    with broker.channel() as channel:
        channel.queue_delete(source)


@pytest.mark.parametrize("_turn", range(5))
def test_two_commits_at_once_are_both_answered_ok(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, pair: Callable[..., list[XaFlag | int]], _turn: int
) -> None:
    """The second waits for the first; if the branch has completed before it arrives, the answer is 404."""
    raw.prepared(1, xid, queue=queue)
    answers = pair(DtxCommit(xid=xid), DtxCommit(xid=xid))
    assert XaFlag.OK in answers
    assert set(answers) <= {XaFlag.OK, 404}
    assert bodies(broker, queue) == [b"one"]


def test_a_commit_during_another_commit_waits_and_is_ok(raw: RawClient, broker: Broker, queue: str) -> None:
    """A repeated commit waits for the first; one packet for both channels makes sure that the second is in time."""
    raw.open(4)
    for _ in range(5):
        xid = raw.prepared(1, new_xid(), queue=queue)
        raw.send_raw(_frame(2, DtxCommit(xid=xid)) + _frame(4, DtxCommit(xid=xid)))
        assert raw.answer(2, DtxCommit(xid=xid)) is XaFlag.OK
        assert raw.answer(4, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"one"] * 5


def test_a_rollback_during_another_rollback_waits_and_is_ok(raw: RawClient, broker: Broker, queue: str) -> None:
    """A repeated rollback waits for the first."""
    raw.open(4)
    for _ in range(5):
        xid = new_xid()
        raw.publish(1, queue, b"back")
        raw.ask(1, DtxStart(xid=xid))
        raw.consume_one(1, queue)
        raw.ask(1, DtxEnd(xid=xid))
        assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
        raw.send_raw(_frame(2, DtxRollback(xid=xid)) + _frame(4, DtxRollback(xid=xid)))
        assert raw.answer(2, DtxRollback(xid=xid)) is XaFlag.OK
        assert raw.answer(4, DtxRollback(xid=xid)) is XaFlag.OK
        assert bodies(broker, queue) == [b"back"]


def _frame(channel: int, call: DtxCall) -> bytes:
    payload = call.encode()
    return b"\x01" + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + b"\xce"


@pytest.mark.parametrize("first", ["commit", "rollback"])
def test_of_concurrent_commit_and_rollback_exactly_one_wins(
    raw: RawClient, broker: Broker, queue: str, first: str
) -> None:
    """The first call wins; the second is refused with 404 or 503."""
    raw.open(4)
    for _ in range(5):
        xid = raw.prepared(1, new_xid(), queue=queue)
        calls: list[DtxCall] = [DtxCommit(xid=xid), DtxRollback(xid=xid)]
        if first == "rollback":
            calls.reverse()
        raw.send_raw(_frame(2, calls[0]) + _frame(4, calls[1]))
        assert raw.answer(2, calls[0]) is XaFlag.OK
        refusal = raw.refused(4)
        assert refusal.code in (404, 503)
        assert bodies(broker, queue) == ([b"one"] if first == "commit" else [])


@pytest.mark.parametrize("_turn", range(10))
def test_commit_racing_rollback_from_two_connections(
    raw: RawClient, broker: Broker, queue: str, xid: Xid, pair: Callable[..., list[XaFlag | int]], _turn: int
) -> None:
    """Exactly one call gets xa-ok, and the queue shows its outcome."""
    raw.prepared(1, xid, queue=queue)
    committed, rolled_back = pair(DtxCommit(xid=xid), DtxRollback(xid=xid))
    assert sorted([committed is XaFlag.OK, rolled_back is XaFlag.OK]) == [False, True]
    assert {committed, rolled_back} & {404, 503}
    assert bodies(broker, queue) == ([b"one"] if committed is XaFlag.OK else [])


@pytest.mark.parametrize("_turn", range(10))
def test_prepare_racing_the_end_of_the_channel_that_worked(
    service: DtxService, raw: RawClient, broker: Broker, queue: str, xid: Xid, _turn: int
) -> None:
    """An ended branch does not need its channel; deliveries that it holds keep the connection to the broker."""
    raw.publish(1, queue, b"moved")
    worker = RawClient(service.url()).log_in()
    worker.open(1, select=True)
    worker.ask(1, DtxStart(xid=xid))
    worker.consume_one(1, queue)
    worker.publish(1, queue, b"result")
    worker.ask(1, DtxEnd(xid=xid))
    raw.say(2, DtxPrepare(xid=xid).encode())
    if _turn % 2:
        worker.abort()
    else:
        worker.close_channel(1)
    assert raw.answer(2, DtxPrepare(xid=xid)) is XaFlag.OK
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == [b"result"]
    if not _turn % 2:
        worker.close()


@pytest.mark.parametrize("how", ["channel.close", "connection.close", "socket"])
@pytest.mark.parametrize("_turn", range(4))
def test_the_channel_that_asks_for_prepare_closes_before_the_answer(
    service: DtxService, raw: RawClient, broker: Broker, queue: str, xid: Xid, how: str, _turn: int
) -> None:
    """The prepare continues without the connection that asked for it; another prepare shows its result."""
    raw.publish(1, queue, b"moved")
    worker = RawClient(service.url()).log_in()
    worker.open(1, select=True)
    worker.ask(1, DtxStart(xid=xid))
    worker.consume_one(1, queue)
    worker.ask(1, DtxEnd(xid=xid))
    worker.say(1, DtxPrepare(xid=xid).encode())
    if how == "channel.close":
        worker.say(1, methods.ChannelClose(200, b"done").encode())
        while worker.next_method(1)[:4] != b"\x00\x14\x00\x29":
            """prepare-ok may still come first."""
    elif how == "connection.close":
        worker.say(0, methods.ConnectionClose(200, b"done").encode())
    else:
        worker.abort()
    with session(service.url()) as another:
        another.open(1)
        assert attempt(another, DtxPrepare(xid=xid)) in (XaFlag.OK, 503)  # 503: already prepared
    assert raw.ask(2, DtxCommit(xid=xid)) is XaFlag.OK
    assert bodies(broker, queue) == []
    worker.abort()


def test_five_hundred_branches_are_open_at_once(mode: Mode, raw: RawClient, broker: Broker, queue: str) -> None:
    """Suspended on one channel, ended and completed in another order.

    A broker has messages in the order of the commits; in standalone mode prepare fixes their order.
    """
    xids = [new_xid() for _ in range(500)]
    for number, xid in enumerate(xids):
        raw.ask(1, DtxStart(xid=xid))
        raw.publish(1, queue, str(number).encode())
        raw.ask(1, DtxEnd(xid=xid, suspend=True))
    for xid in reversed(xids):
        raw.ask(1, DtxStart(xid=xid, resume=True))
        raw.ask(1, DtxEnd(xid=xid))
        assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
    assert set(xids) <= {found for batch in raw.recover(2) for found in batch}
    for number, xid in enumerate(xids):
        assert raw.ask(2, DtxCommit(xid=xid) if number % 2 else DtxRollback(xid=xid)) is XaFlag.OK
    committed = range(1, 500, 2) if mode == "alongside" else range(499, 0, -2)
    assert bodies(broker, queue) == [str(number).encode() for number in committed]

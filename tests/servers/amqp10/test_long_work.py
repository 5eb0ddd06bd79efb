"""No request of AMQP 1.0 holds the event loop for more than 50 ms, whatever its size, as with AMQP 0-9."""

from collections.abc import Callable, Iterator

import pytest

from dtx.server.limits import MAX_UNACKED
from dtx.wire.amqp09 import methods, tables
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.coordination import MAX_LIVE
from dtx.wire.amqp10.endpoint import AMQP, Attached, EndpointSettings, Event, frame
from dtx.wire.amqp10.errors import Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.message import Header, Properties
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    DeliveryState,
    Disposition,
    Rejected,
    Role,
    Source,
    Target,
    TransactionalState,
)
from dtx.wire.amqp10.session import Session
from dtx.xa.xid import Xid
from tests.servers.amqp10.raw import Raw, body
from tests.support.broker import MODES
from tests.support.client import new_xid
from tests.support.loop_watch import WatchedService, a_queue, ask, fill, service
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import RawClient, logged_in

__all__ = ["service"]

WINDOW = 2 * MAX_UNACKED
BRANCH_MESSAGES = 10_000
"""The default of --max-branch-messages."""


class Shut(set[Callable[[], None]]):
    """The due calls of an engine, always empty, so that sessions never open their windows again."""

    def add(self, _: Callable[[], None]) -> None:
        """Add nothing."""


@pytest.fixture(scope="module", params=MODES)
def watched(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service of its own, so that only these tests are measured."""
    alongside = request.param == "alongside"
    broker = request.getfixturevalue("shared_rabbitmq").url() if alongside else None
    database = postgres.create_database()
    with WatchedService(broker=broker, database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(scope="module")
def queue(watched: WatchedService) -> bytes:
    """A queue with as many messages as a link may have unsettled; the last test consumes them."""
    with RawClient(watched.url(), patience=120) as peer:
        peer.log_in()
        peer.open(1)
        queue = a_queue(peer)
        fill(peer, queue, MAX_UNACKED)
    return queue


def take(raw: Raw, count: int) -> None:
    """Receive *count* messages in large reads, for speed."""
    seen: list[Event] = []
    raw.flush()
    while count > 0:
        seen += raw.received(raw.socket.recv(1 << 20))
        count -= sum(type(event).__name__ == "Delivered" for event in seen)
        seen.clear()
        raw.flush()


def ready(service: WatchedService, queue: bytes) -> int:
    """The number of ready messages."""
    with logged_in(service.url()) as peer:
        payload = ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    return int.from_bytes(payload[-8:-4], "big")


@pytest.mark.parametrize("window", [WINDOW, 10_000])
def test_a_rollback_returns_very_many_messages(service: WatchedService, queue: bytes, window: int) -> None:
    """Also those that wait for the session's window."""
    count = MAX_UNACKED if window == WINDOW else 20_000
    with Raw(service, window=window) as raw:
        raw.engine.due = Shut()
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        link, _ = raw.receiver(session, queue.decode(), 0)
        link.grant(count, properties={"txn-id": txn_id})
        raw.flush()
        taken = 0
        while taken < min(count, window):
            taken += sum(type(event).__name__ == "Delivered" for event in raw.received(raw.socket.recv(1 << 20)))
        assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
    wait_until(lambda: ready(service, queue) == MAX_UNACKED, what="messages that have returned")


@pytest.fixture
def own(watched: WatchedService) -> Iterator[bytes]:
    """An empty durable queue."""
    with logged_in(watched.url()) as peer:
        name = a_queue(peer, durable=True)
    yield name
    with logged_in(watched.url()) as peer:
        ask(peer, methods.QueueDelete(name).encode(), methods.QueueDeleteOk.KEY)


def post(raw: Raw, session: Session, link: Link, txn_id: bytes | None, count: int) -> None:
    """Send so many messages in a transaction, and wait for their provisional outcomes."""
    state = None if txn_id is None else TransactionalState(txn_id=txn_id)
    payload = message.data(b"x" * 100)
    for _ in range(count):
        if link.credit == 0:
            raw.until(lambda: link.credit > 0 and session._remote_window > 0)
            raw.events.clear()
        link.send(b"post", payload, state=state)
    raw.until(lambda: not link.unsettled)
    raw.events.clear()


@pytest.mark.parametrize("end", ["commit", "rollback", "detach", "distributed"])
@pytest.mark.parametrize("kind", ["post", "retire", "reject", "acquire", "leave"])
def test_the_largest_transaction_ends(service: WatchedService, own: bytes, kind: str, end: str) -> None:
    """It posts or retires messages: accepted, rejected, acquired in the transaction, or from a link that ends."""
    xid = new_xid() if end == "distributed" else None
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        sender = raw.sender(session, own.decode())
        if kind != "post":
            post(raw, session, sender, None, BRANCH_MESSAGES)
        txn_id = raw.declare(session, control, None if xid is None else xid.to_wire())
        if kind == "post":
            post(raw, session, sender, txn_id, BRANCH_MESSAGES)
        else:
            link, _ = raw.receiver(session, own.decode(), 0)
            link.grant(BRANCH_MESSAGES, properties={"txn-id": txn_id} if kind == "acquire" else None)
            take(raw, BRANCH_MESSAGES)
            state = TransactionalState(txn_id=txn_id, outcome=Rejected() if kind in ("reject", "leave") else ACCEPTED)
            said = Disposition(role=Role.RECEIVER, first=0, last=BRANCH_MESSAGES - 1, state=state)
            raw.socket.sendall(frame(AMQP, session.channel, encode(said)))
            if kind == "leave":
                raw.detach(session, link)
        if end == "detach":
            raw.detach(session, control)
        else:
            assert raw.discharge(session, control, txn_id, fail=end == "rollback") == ACCEPTED
        if xid is not None:
            conclude(service, xid)
    left = BRANCH_MESSAGES if (kind == "post") is (end in ("commit", "distributed")) else 0
    wait_until(lambda: ready(service, own) == left, what=f"{left} messages")


def conclude(service: WatchedService, xid: Xid) -> None:
    """Prepare and commit a branch, as its transaction manager does."""
    with RawClient(service.url(), patience=120) as peer:
        peer.log_in()
        peer.open(1)
        ask(peer, methods.DtxSelect().encode(), methods.DtxSelectOk.KEY)
        ask(peer, methods.DtxPrepare(xid).encode(), methods.DtxPrepareOk.KEY)
        ask(peer, methods.DtxCommit(xid).encode(), methods.DtxCommitOk.KEY)


@pytest.mark.parametrize("kind", ["retire", "reject", "acquire"])
def test_a_transaction_that_retires_too_much_is_rolled_back(service: WatchedService, queue: bytes, kind: str) -> None:
    """One disposition may retire all messages that a link may have unsettled."""
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        txn_id = raw.declare(session, control)
        link, _ = raw.receiver(session, queue.decode(), 0)
        link.grant(MAX_UNACKED, properties={"txn-id": txn_id} if kind == "acquire" else None)
        take(raw, MAX_UNACKED)
        state = TransactionalState(txn_id=txn_id, outcome=Rejected() if kind == "reject" else ACCEPTED)
        said = Disposition(role=Role.RECEIVER, first=0, last=MAX_UNACKED - 1, state=state)
        raw.socket.sendall(frame(AMQP, session.channel, encode(said)))
        outcome = raw.discharge(session, control, txn_id)
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == Condition.ROLLBACK
    # For each of the 40,000 that return first, RabbitMQ searches the 10,000 that the branch holds, which takes it 14 s.
    wait_until(lambda: ready(service, queue) == MAX_UNACKED, seconds=120, what="messages that have returned")


MOST = tables.MAX_ENTRIES - 8
"""The application properties or annotations that a message may have, as dtx adds a few of its own."""
LARGEST: dict[str, bytes] = {
    "properties": message.bare(Properties(), {f"{number:x}": None for number in range(MOST)}, message.data(b"x")),
    "annotations": message.head(Header(), None, {f"x-{number:x}": None for number in range(MOST)}) + message.data(b"x"),
    "delivery annotations": message.head(Header(), {f"{number:x}": None for number in range(6000)})
    + message.data(b"x"),
    "list": message.head(Header(), None, {"x-a": [None] * 40_000}) + message.data(b"x"),
    "lists": message.head(Header(), None, {f"x-{number:x}": [[None]] for number in range(2000)}) + message.data(b"x"),
}
"""Messages with as much as possible before the body."""


@pytest.mark.parametrize("kind", LARGEST)
def test_messages_of_a_transaction_have_the_largest_heads(service: WatchedService, own: bytes, kind: str) -> None:
    count = 20
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, own.decode())
        txn_id = raw.declare(session, control)
        for _ in range(count):
            sender.send(b"post", LARGEST[kind], state=TransactionalState(txn_id=txn_id))
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        txn_id = raw.declare(session, control)
        raw.receiver(session, own.decode(), count)
        take(raw, count)
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        said = Disposition(role=Role.RECEIVER, first=0, last=count - 1, state=state)
        raw.socket.sendall(frame(AMQP, session.channel, encode(said)))
        assert raw.discharge(session, control, txn_id) == ACCEPTED
    assert ready(service, own) == 0


@pytest.mark.parametrize("how", ["detach", "end", "close", "disconnect", "rollback", "control"])
def test_a_transaction_ends_while_it_acquires_the_largest_heads(service: WatchedService, own: bytes, how: str) -> None:
    """Messages that were sent in it return to their places, before the others."""
    bodies = [b"%d" % number for number in range(20)]
    named = {f"{number:x}": None for number in range(MOST)}
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        control, sender = raw.control(session), raw.sender(session, own.decode())
        txn_id = raw.declare(session, control)
        for one in bodies:
            payload = message.bare(Properties(), named, message.data(one))
            sender.send(b"post", payload, state=TransactionalState(txn_id=txn_id))
        assert raw.discharge(session, control, txn_id) == ACCEPTED
        txn_id = raw.declare(session, control)
        link, _ = raw.receiver(session, own.decode(), 0)
        link.grant(len(bodies), properties={"txn-id": txn_id})
        assert body(raw.take()) == bodies[0]
        match how:
            case "detach":
                raw.detach(session, link)
            case "end":
                session.end()
                raw.until(lambda: raw.engine.session(session.channel) is None)
            case "close":
                raw.close()
            case "rollback":
                assert raw.discharge(session, control, txn_id, fail=True) == ACCEPTED
            case "control":
                raw.detach(session, control)
            case _:
                raw.socket.close()
    wait_until(lambda: ready(service, own) == len(bodies), what="messages that have returned")
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        raw.receiver(session, own.decode(), len(bodies))
        assert [body(raw.take()) for _ in bodies] == bodies


@pytest.mark.parametrize("how", ["detach", "close", "disconnect"])
def test_very_many_transactions_end_with_their_control_link(service: WatchedService, queue: bytes, how: str) -> None:
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        control = raw.control(session)
        for _ in range(MAX_LIVE):
            raw.until(lambda: control.credit > 0)
            raw.declare(session, control)
        if how == "detach":
            raw.detach(session, control)
        elif how == "close":
            raw.close()
    assert ready(service, queue) == MAX_UNACKED


def test_very_many_links_end_at_once(service: WatchedService, queue: bytes) -> None:
    settings = EndpointSettings(container_id="")
    with Raw(service) as raw:
        raw.opened()
        for number in range(settings.max_links // (settings.handle_max + 1)):
            session = raw.begin()
            for handle in range(settings.handle_max + 1):
                session.new_link(f"{number}-{handle}", Role.RECEIVER).attach(
                    source=Source(address=queue.decode()), target=Target()
                )
            for _ in range(settings.handle_max + 1):
                raw.expect(Attached)
        raw.close()
    assert ready(service, queue) == MAX_UNACKED


def test_transfers_of_one_read_are_little_work_together(service: WatchedService) -> None:
    payload = message.data(b"x")
    with logged_in(service.url()) as peer:
        queue = a_queue(peer)
    with Raw(service) as raw:
        session = raw.opened().begin()
        link = raw.sender(session, queue.decode())
        sent = 0
        while sent < 5000:
            raw.until(lambda: link.credit > 0 and session._remote_window > 0)
            while link.credit > 0:
                link.send(b"t", payload)
                sent += 1
        raw.flush()
        raw.begin()


@pytest.mark.parametrize("how", ["released", "detach", "close", "accepted"])
def test_very_many_deliveries_are_settled_or_return(service: WatchedService, queue: bytes, how: str) -> None:
    with Raw(service, window=WINDOW) as raw:
        session = raw.opened().begin()
        link, _ = raw.receiver(session, queue.decode(), MAX_UNACKED)
        take(raw, MAX_UNACKED)
        match how:
            case "detach":
                raw.detach(session, link)
            case "close":
                raw.close()
            case _:
                state: DeliveryState = ACCEPTED if how == "accepted" else RELEASED
                said = Disposition(role=Role.RECEIVER, first=0, last=MAX_UNACKED - 1, state=state, settled=True)
                raw.socket.sendall(frame(AMQP, session.channel, encode(said)))
                raw.begin()
    left = 0 if how == "accepted" else MAX_UNACKED
    wait_until(lambda: ready(service, queue) == left, what="messages that have returned")

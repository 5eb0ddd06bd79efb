"""No request of AMQP 1.0 holds the event loop for more than 50 ms, whatever its size; see the same of AMQP 0-9."""

from collections.abc import Callable, Iterator

import pytest

from dtx.server.limits import MAX_UNACKED
from dtx.wire.amqp09 import methods
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.coordination import MAX_LIVE
from dtx.wire.amqp10.endpoint import AMQP, Attached, Event, Settings, frame
from dtx.wire.amqp10.performatives import ACCEPTED, RELEASED, DeliveryState, Disposition, Role, Source, Target
from tests.servers.amqp10.raw import Raw
from tests.support.broker import MODES
from tests.support.peer import Peer, logged_in
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.watched import WatchedService, a_queue, ask, fill, service

__all__ = ["service"]

WINDOW = 2 * MAX_UNACKED


class Shut(set[Callable[[], None]]):
    """Of an end that opens no window again."""

    def add(self, _: Callable[[], None]) -> None:
        """It stays as it is."""


@pytest.fixture(scope="module", params=MODES)
def watched(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service of its own: nobody else is to be measured."""
    alongside = request.param == "alongside"
    broker = request.getfixturevalue("shared_rabbitmq").url() if alongside else None
    database = postgres.create_database()
    with WatchedService(broker=broker, database=database) as running:
        yield running
    postgres.drop_database(database)


@pytest.fixture(scope="module")
def queue(watched: WatchedService) -> bytes:
    """A queue with as many messages as a link may have unsettled; the last test takes them."""
    with Peer(watched.url(), patience=120) as peer:
        peer.log_in()
        peer.open(1)
        queue = a_queue(peer)
        fill(peer, queue, MAX_UNACKED)
    return queue


def take(raw: Raw, count: int) -> None:
    """So many messages, quickly: the engine of the client looks at each."""
    seen: list[Event] = []
    raw.flush()
    while count > 0:
        seen += raw.received(raw.socket.recv(1 << 20))
        count -= sum(type(event).__name__ == "Delivered" for event in seen)
        seen.clear()
        raw.flush()


def ready(service: WatchedService, queue: bytes) -> int:
    """Messages that are ready."""
    with logged_in(service.url()) as peer:
        payload = ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    return int.from_bytes(payload[-8:-4], "big")


@pytest.mark.parametrize("window", [WINDOW, 10_000])
def test_a_rollback_returns_very_many_messages(service: WatchedService, queue: bytes, window: int) -> None:
    """Those that wait for the session's window, too."""
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
    settings = Settings(container_id="")
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

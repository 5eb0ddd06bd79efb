"""A publish to many queues: its body is stored once; a publish that exceeds MAX_FAN_OUT is refused."""

import threading
from collections.abc import Iterator
from secrets import token_hex
from typing import Final, Self

import psycopg
import pytest

from dtx.server.limits import MAX_FAN_OUT
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, header_frame, method_frame
from dtx.wire.amqp09.properties import Property, build
from dtx.wire.amqp09.tables import entry
from dtx.wire.amqp10 import message as messages
from dtx.wire.amqp10.errors import Condition
from dtx.wire.amqp10.performatives import ACCEPTED, Rejected
from dtx.xa.codes import ReplyCode
from tests.servers.amqp10.raw import Raw
from tests.support.loop_watch import WatchedService, ask, not_held
from tests.support.postgres import PostgresServer
from tests.support.processes import resident
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

PATIENCE: Final = 120.0
QUEUES: Final = 2_800
"""Each queue needs its own copy of the properties; MAX_FAN_OUT limits their total size."""


def declare(peer: RawClient, exchange: bytes, count: int, *, durable: bool = False) -> list[bytes]:
    """Declare a fanout exchange and queues bound to it; return the names of the queues."""
    ask(peer, methods.ExchangeDeclare(exchange, b"fanout").encode(), methods.ExchangeDeclareOk.KEY)
    names = [exchange + b"-%d" % number for number in range(count)]
    for name in names:
        peer.say(1, methods.QueueDeclare(name, durable=durable, exclusive=not durable, no_wait=True).encode())
        peer.say(1, methods.QueueBind(name, exchange, b"").encode())
    for _ in names:
        peer.wait(methods.QueueBindOk.KEY)
    return names


def ready(peer: RawClient, queue: bytes) -> int:
    """The number of ready messages."""
    payload = ask(peer, methods.QueueDeclare(queue, passive=True).encode(), methods.QueueDeclareOk.KEY)
    return int.from_bytes(payload[-8:-4], "big")


@pytest.fixture(scope="module")
def exchange(standalone: DtxService) -> Iterator[tuple[RawClient, bytes]]:
    """An exchange with many queues, and the connection that owns them."""
    with RawClient(standalone.url(), patience=PATIENCE) as peer:
        peer.log_in()
        peer.open(1)
        name = f"fan-{token_hex(4)}".encode()
        declare(peer, name, QUEUES)
        yield peer, name
        ask(peer, methods.ExchangeDelete(name).encode(), methods.ExchangeDeleteOk.KEY)


def test_a_publish_that_takes_too_much_is_refused(standalone: DtxService, exchange: tuple[RawClient, bytes]) -> None:
    owner, name = exchange
    size = MAX_FAN_OUT // QUEUES
    headers = build({Property.HEADERS: entry(b"k", b"S", bytes(size))})
    before = ready(owner, name + b"-0")
    with logged_in(standalone.url()) as peer:
        method = methods.BasicPublish(name, b"").encode()
        peer.send_raw(method_frame(1, method), header_frame(1, methods.BasicPublish.KEY >> 16, 0, headers))
        close = peer.channel_end(1)
        assert close.reply_code == ReplyCode.RESOURCE_ERROR
        assert close.reply_text.endswith(f"queues are too much for one publish, the limit is {MAX_FAN_OUT}".encode())
        peer.say(1, methods.ChannelCloseOk().encode())
        peer.open(1)
        ask(peer, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
        peer.send_raw(message(1, b"", b"small", exchange=name))
        peer.wait(methods.BasicAck.KEY)
    assert ready(owner, name + b"-0") == before + 1


def test_a_publish_beyond_the_memory_is_refused_in_amqp_10(
    standalone: DtxService, exchange: tuple[RawClient, bytes]
) -> None:
    """Properties are stored twice: as received, and as AMQP 0-9 properties."""
    owner, name = exchange
    before = ready(owner, name + b"-0")
    large = {"k": "x" * (MAX_FAN_OUT // QUEUES // 2)}
    with Raw(standalone) as raw:
        session = raw.opened().begin()
        link = raw.sender(session, f"/exchanges/{name.decode()}")
        outcome = raw.outcome(
            session, link.send(b"1", messages.bare(messages.Properties(), large, messages.data(b"x")))
        )
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
        assert f"the limit is {MAX_FAN_OUT}" in (outcome.error.description or "")
        assert raw.outcome(session, raw.post(link, b"small")) == ACCEPTED
    assert ready(owner, name + b"-0") == before + 1


BODY_BYTES: Final = 16 << 20
COPIES: Final = 24
PERSISTENT: Final = build({Property.DELIVERY_MODE: b"\x02"})


class Watch:
    """Samples the memory of a service and its lease. Use as a context manager.

    Args:
        service: the service to watch.
        database: the database of its log.
    """

    def __init__(self, service: DtxService, database: str) -> None:
        self.most = 0
        """The most resident memory, in bytes."""
        self.epochs: set[int] = set()
        self.runs_out = False
        """Whether the lease expired at any time."""
        self._service = service
        self._database = database
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with psycopg.connect(self._database, autocommit=True) as connection:
            while not self._over.wait(0.005):
                self.most = max(self.most, resident(self._service.pid))
                found = connection.execute("SELECT epoch, expires_at < clock_timestamp() FROM dtx.lease").fetchone()
                assert found is not None
                self.epochs.add(found[0])
                self.runs_out |= found[1]


def test_a_large_message_is_held_once_for_all_its_queues(postgres: PostgresServer) -> None:
    """Each queue gets the message, the event loop is not held, and the lease is renewed."""
    database = postgres.create_database()
    body = bytes(range(256)) * (BODY_BYTES // 256)
    with (
        WatchedService(database=database, options=("--lease-ttl", "3")) as service,
        not_held(service),
        RawClient(service.url(), patience=PATIENCE) as peer,
    ):
        peer.log_in()
        peer.open(1)
        names = declare(peer, b"large", COPIES, durable=True)
        ask(peer, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
        before = resident(service.pid)
        with Watch(service, database) as seen:
            peer.send_raw(publish(b"large", body))
            peer.wait(methods.BasicAck.KEY)
            for name in names:
                ask(peer, methods.BasicGet(name, no_ack=True).encode(), methods.BasicGetOk.KEY)
                assert take_body(peer) == body
        print(f"MEMORY {(seen.most - before) >> 20} MiB")
        assert seen.most - before < 6 * BODY_BYTES
        assert len(seen.epochs) == 1
        assert not seen.runs_out
    postgres.drop_database(database)


def publish(exchange: bytes, body: bytes) -> bytes:
    """The frames of a persistent message."""
    frames = message(1, b"", body, exchange=exchange)
    plain = header_frame(1, methods.BasicPublish.KEY >> 16, len(body), b"\x00\x00")
    assert frames.count(plain) == 1
    return frames.replace(plain, header_frame(1, methods.BasicPublish.KEY >> 16, len(body), PERSISTENT))


def take_body(peer: RawClient) -> bytes:
    """Read the body of the next message."""
    found: list[bytes] = []
    while sum(map(len, found)) < BODY_BYTES:
        found.append(peer.wait(BODY).payload)
    return b"".join(found)

"""dtx reaches its limit of open files: its clients stay connected, new ones are refused until files are free."""

import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pika
import pytest

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import Protocol
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import DtxService

Mode = Literal["alongside", "standalone", "standalone with TLS"]
SPARE = 20
"""The number of files that dtx may still open."""


@pytest.fixture(params=["alongside", "standalone", "standalone with TLS"])
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


@pytest.fixture
def tls(mode: Mode, certificates: Path) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=str(certificates / "ca.pem")) if mode.endswith("TLS") else None


@pytest.fixture
def service(
    mode: Mode, postgres: PostgresServer, certificates: Path, request: pytest.FixtureRequest
) -> Iterator[DtxService]:
    options: tuple[str, ...] = ()
    broker = None
    if mode == "alongside":
        node: RabbitNode = request.getfixturevalue("rabbitmq")
        broker, options = node.url(), ("--management", node.management_url)
    if mode.endswith("TLS"):
        options = ("--tls-cert", str(certificates / "server.pem"), "--tls-key", str(certificates / "server.key"))
    database = postgres.create_database()
    with DtxService(broker=broker, database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


def descriptors(service: DtxService) -> set[str]:
    """The file descriptors of dtx."""
    return {path.name for path in Path(f"/proc/{service.pid}/fd").iterdir()}


def busy(service: DtxService) -> float:
    """Processor time of dtx, seconds."""
    fields = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def use(peer: RawClient) -> None:
    """Declare an exclusive queue and delete it."""
    peer.say(1, methods.QueueDeclare(b"", exclusive=True, auto_delete=True).encode())
    queue = methods.QueueDeclareOk.decode(peer.wait(methods.QueueDeclareOk.KEY).payload).queue
    peer.say(1, methods.QueueDelete(queue).encode())
    peer.wait(methods.QueueDeleteOk.KEY)


def test_open_connections_stay_and_new_ones_succeed_later(
    service: DtxService, tls: ssl.SSLContext | None, wait_for_login: Callable[[], None]
) -> None:
    with ExitStack() as stack:
        inside = stack.enter_context(RawClient(service.url(), tls=tls)).log_in()
        inside.open(1)
        use(inside)
        _, hard = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        allowed = max(map(int, descriptors(service))) + 1 + SPARE
        before = resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (allowed, hard))
        outside = []
        for _ in range(10 * SPARE):
            one = stack.enter_context(socket.create_connection((service.host, service.port), 10))
            with contextlib.suppress(OSError):
                one.sendall(Protocol.AMQP_0_9_1.value if tls is None else b"\x16\x03\x01")
            outside.append(one)
        wait_until(lambda: len(descriptors(service)) >= allowed - 3, what="no more files to open")
        spent = busy(service)
        for _ in range(100):
            use(inside)
        assert busy(service) - spent < 5, "dtx retries without a pause"
        for one in outside:
            one.close()
        wait_for_login()
        use(inside)
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture
def wait_for_login(service: DtxService, tls: ssl.SSLContext | None) -> Callable[[], None]:
    def works() -> bool:
        try:
            with RawClient(service.url(), tls=tls) as peer:
                peer.log_in().open(1)
                use(peer)
        except (AssertionError, OSError, pika.exceptions.AMQPError):
            return False
        return True

    return lambda: wait_until(works, seconds=60, what="room for another client")

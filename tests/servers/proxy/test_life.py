"""The broker ends while clients are connected; dtx ends by a signal."""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPError, ConnectionClosedByBroker

from dtx.client import XAResource
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import (
    DtxCommit,
    DtxCommitOk,
    DtxEnd,
    DtxPrepare,
    DtxPrepareOk,
    DtxSelect,
    DtxSelectOk,
    DtxStart,
)
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.servers.proxy.channels import fill, get, select
from tests.support.client import bodies, connected, new_xid
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, logged_in, message
from tests.support.service import DtxService

GOODBYE = 320


def test_clients_survive_the_loss_and_return_of_the_broker(
    dtx_service: ServiceFactory, own_rabbitmq: RabbitNode
) -> None:
    service = dtx_service(broker=own_rabbitmq.url())
    for end_broker in (own_rabbitmq.kill9, own_rabbitmq.stop):
        with logged_in(service.url()) as plain, logged_in(service.url()) as selected:
            plain.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
            plain.wait(methods.QueueDeclareOk.KEY)
            selected.say(1, DtxSelect().encode())
            selected.wait(DtxSelectOk.KEY)
            end_broker()
            for peer in (plain, selected):
                end = peer.end()
                assert end is not None
                assert end.reply_code == GOODBYE
        with pytest.raises(AMQPError):
            BlockingConnection(pika.URLParameters(service.url()))
        own_rabbitmq.start()
        use(service)


def use(service: DtxService) -> None:
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        queue = channel.queue_declare("").method.queue
        xid = new_xid()
        xa.start(xid)
        channel.basic_publish("", queue, b"back again")
        xa.end(xid)
        assert xa.commit(xid, one_phase=True) == XaFlag.OK
        assert channel.basic_get(queue, auto_ack=True)[2] == b"back again"


# -- SIGTERM


def test_clients_are_notified_of_the_shutdown(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    with logged_in(service.url()) as peer, logged_in(service.url()) as selected, RawClient(service.url()) as silent:
        selected.say(1, DtxSelect().encode())
        selected.wait(DtxSelectOk.KEY)
        begun = time.monotonic()
        service.signal(signal.SIGTERM)
        for client in (peer, selected):
            end = client.end()
            assert end is not None
            assert end.reply_code == GOODBYE
            assert b"shutting down" in end.reply_text
        assert service.wait() == 0
        assert silent.drain() == b""
        assert time.monotonic() - begun < 4


def test_pika_names_the_end(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    with connected(service.url()) as connection:
        service.signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosedByBroker) as raised:
            connection.process_data_events(time_limit=20)
        assert raised.value.reply_code == GOODBYE
    assert service.wait() == 0


def test_deaf_clients_do_not_delay_the_end_for_long(
    dtx_service: ServiceFactory, queue: str, rabbitmq: RabbitNode
) -> None:
    with rabbitmq.channel() as channel:
        for _ in range(20):
            channel.basic_publish("", queue, bytes(1 << 20))
    service = dtx_service()
    with logged_in(service.url()) as peer:
        peer.say(1, methods.BasicConsume(queue.encode(), b"deaf").encode())
        begun = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begun < 12


def test_frames_sent_before_the_shutdown_arrive(dtx_service: ServiceFactory, queue: str, rabbitmq: RabbitNode) -> None:
    service = dtx_service()
    with logged_in(service.url()) as peer:
        peer.send_raw(*(message(1, queue.encode(), b"%d" % number) for number in range(2000)))
        peer.say(1, methods.BasicQos(0, 1).encode())
        peer.wait(methods.BasicQosOk.KEY)
        service.signal(signal.SIGTERM)
        assert peer.end() is not None
        assert service.wait() == 0
    assert rabbitmq.count(queue) == 2000


def test_an_idle_branch_of_a_lost_client_delays_no_shutdown(
    dtx_service: ServiceFactory, queue: str, rabbitmq: RabbitNode
) -> None:
    fill(rabbitmq, queue, 1)
    service = dtx_service()
    with connected(service.url()) as connection:
        channel = select(connection)
        (tag,) = get(channel, queue)
        xa = XAResource(channel)
        xid = new_xid()
        xa.start(xid)
        channel.basic_ack(tag)
        xa.end(xid)
    begun = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - begun < 4
    wait_until(lambda: rabbitmq.count(queue) == 1, what="the message is back")


@contextlib.contextmanager
def hanging_commit(service: DtxService, between: Proxy, queue: str) -> Iterator[RawClient]:
    """A commit on channel 1 that does not reach the broker; channel 2 is selected too."""
    with logged_in(service.url()) as peer:
        peer.open(2)
        for channel in (1, 2):
            peer.say(channel, DtxSelect().encode())
            peer.wait(DtxSelectOk.KEY)
        xid = new_xid()
        peer.send_raw(
            DtxStart(xid=xid).frame(1),
            message(1, queue.encode(), b"committed"),
            DtxEnd(xid=xid).frame(1),
            DtxPrepare(xid=xid).frame(1),
        )
        peer.wait(DtxPrepareOk.KEY)
        between.stall("up")
        peer.say(1, DtxCommit(xid=xid).encode())
        committing = ("in-doubt", "--json", "--state", "committing")
        wait_until(lambda: service.run(*committing).stdout, what="the decision to commit")
        yield peer


@pytest.fixture
def between(proxy: Callable[[str, int], Proxy], rabbitmq: RabbitNode) -> Proxy:
    """The proxy between dtx and the broker."""
    return proxy("127.0.0.1", rabbitmq.port)


@pytest.fixture
def service(dtx_service: ServiceFactory, between: Proxy) -> DtxService:
    """A service that reaches the broker through the proxy."""
    return dtx_service(broker=f"amqp://guest:guest@127.0.0.1:{between.port}/")


def test_a_commit_under_way_is_finished_first(
    service: DtxService, between: Proxy, rabbitmq: RabbitNode, queue: str
) -> None:
    with hanging_commit(service, between, queue) as peer:
        service.signal(signal.SIGTERM)
        wait_until(lambda: not accepts(service), what="no more connections")
        peer.say(2, DtxStart(xid=new_xid()).encode())
        assert peer.channel_end(2).reply_code == 506
        between.resume()
        peer.wait(DtxCommitOk.KEY)
        end = peer.end()
        assert end is not None
        assert end.reply_code == GOODBYE
        assert service.wait() == 0
    assert bodies(rabbitmq, queue) == [b"committed"]


def accepts(service: DtxService) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((service.host, service.port), 2).close()
        return True
    return False


def test_after_a_second_signal_the_commit_continues_at_restart(
    dtx_service: ServiceFactory, between: Proxy, rabbitmq: RabbitNode, queue: str
) -> None:
    options = ("--drain-timeout", "600", "--replay", "receipts")
    service = dtx_service(*options, broker=f"amqp://guest:guest@127.0.0.1:{between.port}/")
    with hanging_commit(service, between, queue):
        service.signal(signal.SIGTERM)
        wait_until(lambda: b'"stopping"' in service.log_path.read_bytes(), what="the first signal")
        service.signal(signal.SIGTERM)
        assert service.wait() == 128 + signal.SIGTERM
        between.resume()
        service.start()
        wait_until(lambda: rabbitmq.count(queue) == 1, seconds=60, what="the commit")
        wait_until(lambda: not service.run("in-doubt", "--json").stdout, seconds=60, what="the end of the branch")
    assert bodies(rabbitmq, queue) == [b"committed"]


def test_a_hanging_commit_does_not_delay_the_shutdown_forever(
    dtx_service: ServiceFactory, between: Proxy, rabbitmq: RabbitNode, queue: str
) -> None:
    options = ("--drain-timeout", "1", "--replay", "receipts")
    service = dtx_service(*options, broker=f"amqp://guest:guest@127.0.0.1:{between.port}/")
    with hanging_commit(service, between, queue) as peer:
        begun = time.monotonic()
        service.signal(signal.SIGTERM)
        assert peer.end() is not None
        assert service.wait() == 0
        assert time.monotonic() - begun < 12
        between.resume()
        service.start()
        wait_until(lambda: not service.run("in-doubt", "--json").stdout, seconds=60, what="the end of the branch")
    assert bodies(rabbitmq, queue) == [b"committed"]


def test_a_client_that_leaves_during_the_handshake_is_no_news(dtx_service: ServiceFactory) -> None:
    """Port scans, health checks and impatient clients are logged at debug level only."""
    service = dtx_service("--log-level", "debug")
    with RawClient(service.url()) as peer:
        peer.begin()
    quiet = "the client left during the handshake"
    wait_until(lambda: quiet in service.log_path.read_text(), what="the end of the client")
    lines = [json.loads(line) for line in service.log_path.read_text().splitlines() if line.startswith("{")]
    assert [line["level"] for line in lines if quiet in line.values()] == ["debug"]
    assert not [line for line in lines if "aborted" in line["event"]]

"""A call always ends, also if the service is killed, stopped, silent or cut off."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from dtx.client import XAER_NOTA, XAER_RMFAIL, Coordinator, XaFlag, XAResource, Xid
from tests.conftest import ServiceFactory
from tests.support.client import bodies, connected, new_xid
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


@pytest.fixture
def service(dtx_service: ServiceFactory) -> DtxService:
    return dtx_service()


def prepare_one(service: DtxService, queue: str) -> Xid:
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa, xid = XAResource(channel), new_xid()
        xa.start(xid)
        channel.basic_publish("", queue, b"one")
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
    return xid


def test_a_killed_services_successor_knows_the_branch(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    """Prepare: "it is guaranteed that the transaction branch may be either committed or rolled back regardless of
    failures".
    """
    xid = prepare_one(service, queue)
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        # A paused service receives the call and never answers it; then it dies.
        service.pause()
        killer = threading.Timer(0.2, service.kill9)
        killer.start()
        with pytest.raises(XAER_RMFAIL):
            xa.commit(xid)
        killer.join()
    service.start()
    with connected(service.url()) as connection, Coordinator(connection) as coordinator:
        if xid in set(coordinator.recover()):
            assert coordinator.commit(xid) is XaFlag.OK
        else:
            with pytest.raises(XAER_NOTA):
                coordinator.commit(xid)
    assert bodies(rabbitmq, queue) == [b"one"]


def test_a_silent_service_ends_the_call_at_the_timeout(service: DtxService, queue: str, rabbitmq: RabbitNode) -> None:
    xid = prepare_one(service, queue)
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel(), timeout=0.3)
        service.pause()
        with pytest.raises(XAER_RMFAIL, match=r"no answer within 0\.3 s, the outcome is not known"):
            xa.rollback(xid)
        assert not xa.channel.is_open
        with pytest.raises(XAER_RMFAIL):
            xa.rollback(xid)
        service.resume()
        # The first rollback may have succeeded after the client had closed its channel.
        with Coordinator(connection, timeout=30) as coordinator, contextlib.suppress(XAER_NOTA):
            assert coordinator.rollback(xid) is XaFlag.OK
    assert bodies(rabbitmq, queue) == []


def test_a_service_that_does_not_read_ends_call_and_connection(service: DtxService, queue: str) -> None:
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel, timeout=0.3)
        service.pause()
        # What does not fit in the socket stays in pika, and so does the call: a timer of the call alone cannot end it.
        channel._impl.basic_publish("", queue, bytes(64 * 1024 * 1024))
        with pytest.raises(XAER_RMFAIL):
            xa.select()
        assert not connection.is_open
        service.resume()


def test_no_channel_is_to_be_had_from_a_silent_service(service: DtxService) -> None:
    with connected(service.url()) as connection:
        coordinator = Coordinator(connection, timeout=0.3)
        service.pause()
        with pytest.raises(XAER_RMFAIL):
            coordinator.commit(new_xid())
        service.resume()


def test_a_cut_connection_ends_the_call(service: DtxService, proxy: Callable[[str, int], Proxy]) -> None:
    between = proxy(service.host, service.port)
    url = service.url().replace(f":{service.port}/", f":{between.port}/")
    with connected(url) as connection:
        xa = XAResource(connection.channel())
        xa.select()
        between.cut()
        with pytest.raises(XAER_RMFAIL):
            xa.start(new_xid())


def test_a_stopping_service_ends_the_call(service: DtxService) -> None:
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        xa.select()
        service.stop()
        with pytest.raises(XAER_RMFAIL):
            xa.start(new_xid())


def test_a_closed_connection_refuses_a_channel_with_a_reason(service: DtxService) -> None:
    with connected(service.url()) as connection:
        coordinator = Coordinator(connection, timeout=5)
        connection.close()
        with pytest.raises(XAER_RMFAIL, match="not open"):
            next(coordinator.recover())

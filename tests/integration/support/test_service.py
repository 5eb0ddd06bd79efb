"""Starting and ending ``dtx serve`` from tests."""

import signal

import pika
import pytest

from tests.conftest import ServiceFactory
from tests.support.service import DtxService


def answers(service: DtxService) -> bool:
    connection = pika.BlockingConnection(pika.URLParameters(service.url()))
    connection.channel()
    connection.close()
    return True


def test_a_service_comes_back_on_its_port_after_a_kill(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    port = service.port
    assert service.ready_line.startswith("READY listen=127.0.0.1:")
    assert answers(service)
    service.restart()
    assert service.port == port
    assert answers(service)


def test_a_service_ends_in_order_with_exit_status_0(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    assert service.stop() == 0
    assert not service.running


def test_a_killed_service_says_so_by_its_exit_status(dtx_service: ServiceFactory) -> None:
    service = dtx_service()
    service.kill9()
    assert service.wait() == -signal.SIGKILL


def test_a_service_with_its_own_postgresql_keeps_its_data_over_a_kill(dtx_service: ServiceFactory) -> None:
    service = dtx_service(database="embedded")
    first = (service.data_dir / "postgres" / "PG_VERSION").stat()
    service.restart()
    assert answers(service)
    assert (service.data_dir / "postgres" / "PG_VERSION").stat().st_ino == first.st_ino


def test_a_service_that_does_not_start_shows_what_it_said(dtx_service: ServiceFactory) -> None:
    with pytest.raises(RuntimeError, match=r"did not become ready \(exit status 2\):\n[^*]*--default-tiemout"):
        dtx_service("--default-tiemout", "5", database="postgresql://nobody@127.0.0.1:1/")

"""What tests of a running service share; each package says which ``service`` and ``broker`` these are."""

from collections.abc import Iterator

import pytest
from pika.adapters.blocking_connection import BlockingConnection

from tests.support.broker import Broker
from tests.support.client import connected, fresh_queue
from tests.support.service import DtxService


@pytest.fixture
def queue(broker: Broker) -> Iterator[str]:
    """A fresh durable queue, made past the connections under test."""
    with fresh_queue(broker) as name:
        yield name


@pytest.fixture
def through(service: DtxService, broker: Broker) -> Iterator[BlockingConnection]:
    """A connection to the service."""
    with connected(service.url()) as open_connection:
        yield open_connection

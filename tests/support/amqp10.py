"""Fixtures for tests of AMQP 1.0: a client, an AMQP 0-9-1 channel, and a queue."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.support.client import connected
from tests.support.service import DtxService

if TYPE_CHECKING:
    from tests.support.proton import Client


@pytest.fixture
def client(service: DtxService) -> "Iterator[Client]":
    """An AMQP 1.0 connection."""
    from tests.support.proton import Client  # Proton may be missing

    with Client(service) as open_client:
        yield open_client


@pytest.fixture
def channel(service: DtxService) -> Iterator[BlockingChannel]:
    """An AMQP 0-9-1 channel."""
    with connected(service.url()) as connection:
        yield connection.channel()


@pytest.fixture
def queue(channel: BlockingChannel) -> Iterator[str]:
    """A fresh durable queue."""
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.connection.channel().queue_delete(name)

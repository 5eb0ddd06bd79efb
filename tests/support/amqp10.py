"""Fixtures for tests of AMQP 1.0: a client, a channel with AMQP 0-9-1 beside it, and a queue."""

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
    """A connection with AMQP 1.0."""
    from tests.support.proton import Client  # where there is Proton

    with Client(service) as open_client:
        yield open_client


@pytest.fixture
def channel(service: DtxService) -> Iterator[BlockingChannel]:
    """A channel with AMQP 0-9-1."""
    with connected(service.url()) as connection:
        yield connection.channel()


@pytest.fixture
def queue(channel: BlockingChannel) -> Iterator[str]:
    """A fresh durable queue."""
    name = f"amqp10-{secrets.token_hex(6)}"
    channel.queue_declare(name, durable=True)
    yield name
    channel.connection.channel().queue_delete(name)

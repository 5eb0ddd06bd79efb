"""Clients and xids for the tests of the protocol."""

from collections.abc import Iterator

import pytest

from dtx.xa.xid import Xid
from tests.support.broker import Broker
from tests.support.client import new_xid
from tests.support.raw import RawClient, session
from tests.support.service import DtxService


@pytest.fixture
def vhost(broker: Broker) -> Iterator[str]:
    """A fresh virtual host that guest may use."""
    name = broker.add_vhost()
    yield name
    broker.delete_vhost(name)


@pytest.fixture
def raw(service: DtxService, broker: Broker) -> Iterator[RawClient]:
    """A connection with channels 1 to 3; channels 1 and 3 are selected."""
    with session(service.url()) as client:
        client.open(1, select=True)
        client.open(2)
        client.open(3, select=True)
        yield client


@pytest.fixture
def xid() -> Xid:
    """A new xid."""
    return new_xid()

"""Clients that have left branches behind: their connections to the broker live on, and count."""

import contextlib
from collections.abc import Iterator

import pytest

from dtx.client import XaFlag
from dtx.wire.amqp09.calls import End, Rollback, Start
from tests.conftest import ServiceFactory
from tests.support.client import bodies, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import ConnectionEnded, RawClient


@pytest.fixture
def queue(rabbitmq: RabbitNode) -> Iterator[str]:
    """A queue with one message."""
    with fresh_queue(rabbitmq) as name:
        with rabbitmq.channel() as channel:
            channel.basic_publish("", name, b"one")
        yield name


@pytest.mark.parametrize("limit", [("--max-connections", "2"), ("--quota", "user=* connections=2")])
def test_whoever_leaves_branches_behind_has_as_many_connections_as_others(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, queue: str, limit: tuple[str, str]
) -> None:
    """The limits bound the sockets of dtx: a client may not have more of them by closing its own."""
    service = dtx_service(*limit, "--default-timeout", "0")
    xid = new_xid()
    leaver = RawClient(service.url())
    leaver.open(1, select=True)
    leaver.ask(1, Start(xid=xid))
    leaver.consume_one(1, queue)
    assert leaver.ask(1, End(xid=xid)) is XaFlag.OK
    leaver.close()

    def let_in() -> bool:
        with contextlib.suppress(ConnectionEnded, OSError), RawClient(service.url()):
            return True
        return False

    with RawClient(service.url()) as manager:
        manager.open(1)
        for _ in range(3):
            assert not let_in()
        assert manager.ask(1, Rollback(xid=xid)) is XaFlag.OK
        wait_until(let_in, what="room for another client")
    assert bodies(rabbitmq, queue) == [b"one"]

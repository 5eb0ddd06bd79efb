"""Whether a queue of a broker is a stream: needed for each link, and asked of the broker only now and then."""

from typing import Any

import pytest

from dtx.server.alongside.amqp10 import upstream
from dtx.server.alongside.amqp10.upstream import BrokerAccess
from dtx.store.rabbitmq.management import ManagementError


class Broker:
    """Store, management API and connection in one.

    Args:
        tells: whether the API answers.
    """

    vhost = "/"

    def __init__(self, *, tells: bool) -> None:
        self.queries = self.who = self
        self.tells = tells
        self.asked: list[bytes] = []
        self.tried: list[bytes] = []
        place: Any = self
        self.access = BrokerAccess(place, place, place, place, place)
        self.access._refuses_for_want_of_prefetch = self.attempt  # type: ignore[method-assign]

    async def is_stream(self, vhost: str, queue: bytes) -> bool:
        assert vhost == "/"
        self.asked.append(queue)
        if not self.tells:
            raise ManagementError("no management API")
        return queue == b"stream"

    async def attempt(self, queue: bytes) -> bool:
        self.tried.append(queue)
        return queue == b"stream"

    async def types(self, *queues: bytes) -> list[bool]:
        return [await self.access.is_stream(queue) for queue in queues]


@pytest.mark.parametrize("tells", [True, False], ids=["API", "attempt"])
async def test_a_type_holds_for_a_while(tells: bool) -> None:
    broker = Broker(tells=tells)
    assert await broker.types(b"stream", b"queue", b"stream", b"queue") == [True, False, True, False]
    assert broker.asked == [b"stream", b"queue"]
    assert broker.tried == ([] if tells else [b"stream", b"queue"])


async def test_a_type_holds_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_FRESH", 0.0)
    broker = Broker(tells=True)
    assert await broker.types(b"stream", b"stream") == [True, True]
    assert broker.asked == [b"stream"] * 2


async def test_no_more_types_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_MAX_KNOWN", 2)
    broker = Broker(tells=True)
    await broker.types(b"1", b"2", b"3", b"4")
    assert len(broker.access._streams) <= 2

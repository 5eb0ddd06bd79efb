"""Publishing of a link at a broker, without a broker behind it."""

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

from dtx.server.alongside.amqp10.destination import BrokerDestination
from dtx.store.work import HeldPublish

MESSAGE = HeldPublish(b"", b"queue", False, b"", b"")
FEW = 2_000
"""A number of messages that takes some milliseconds to publish."""


class Destination(BrokerDestination):
    """A destination that records what it would publish."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.published: list[int | None] = []

    def _publish(self, delivery: int | None, message: HeldPublish) -> None:
        self.published.append(delivery)


async def test_reading_pauses_while_many_messages_wait_for_validation() -> None:
    """The size does not matter: all of them are published in one turn of the event loop."""
    judged = asyncio.get_running_loop().create_future()
    said: deque[str] = deque()
    home = SimpleNamespace(hold_client=lambda _: said.append("hold"), release_client=lambda _: said.append("release"))
    broker: Any = SimpleNamespace(home=home, validate=lambda *_: judged, upstream=SimpleNamespace(handlers={}))
    channel: Any = SimpleNamespace(engine=SimpleNamespace(become=lambda _: None, number=1, send=lambda _: None))
    destination = Destination(broker, channel, None, None, lambda: None)
    count = 0
    while not said and count < FEW:
        destination.send(count, MESSAGE)
        count += 1
    assert said.popleft() == "hold"
    judged.set_result(None)
    await asyncio.sleep(0)
    assert said[-1] == "release"
    await asyncio.sleep(0)
    assert destination.published == list(range(count))

"""The cost of second copies for a consumer that reads through dtx, in microseconds of a processor for each delivery.

It measures the code between the broker's frames and the client's socket alone, without sockets. Run:
python -m benchmarks.copies
"""

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID, uuid4

from benchmarks.support.report import Table
from dtx.log.records import LogWrite, Replay
from dtx.server.alongside.plain_deliveries import ConsumingChannels, PlainDeliveries
from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.frames import Frame, FrameSplitter
from dtx.wire.amqp09.properties import Property, build

COUNT: Final = 500
"""Deliveries in one read."""
ROUNDS: Final = 40
BODY: Final = bytes(1024)


class Side:
    """The channel."""

    mode = ChannelMode.PLAIN

    def accept(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """See :class:`ChannelSide`."""

    to_upstream = settled_by_dtx = abandon = lambda *_: None


def deliveries(branches: Sequence[UUID] | None) -> tuple[bytes, list[Frame]]:
    """One read of the broker's frames; with *branches*, the messages have the header of dtx."""
    parts = []
    for tag in range(1, COUNT + 1):
        headers = {b"x-dtx-id": messages.message_id(branches[tag % len(branches)], tag)} if branches else {}
        raw = build({Property.DELIVERY_MODE: b"\x02", Property.CONTENT_TYPE: b"text/plain"}, headers)
        method = methods.BasicDeliver(b"consumer", tag, redelivered=False, exchange=b"", routing_key=b"queue").frame(1)
        parts.append(content.message(method, 1, raw, BODY, 131_072))
    return FrameSplitter(0).feed(b"".join(parts))


def cost(register: CopyRegister, read: tuple[bytes, list[Frame]]) -> float:
    """Microseconds for each delivery of *read*, the median of all rounds."""
    buffer, frames = read
    spawn: Any = SimpleNamespace()
    found = []
    for _ in range(ROUNDS):
        channels = ConsumingChannels(register, spawn, lambda _: None, lambda _: None)
        queues = ConsumedQueues(ExclusiveQueues())
        queues.requested(methods.BasicConsume.KEY, methods.BasicConsume(b"queue", b"consumer", no_wait=True).encode())
        plain = PlainDeliveries(channels, "/", 1, queues, Side())
        channels.by_number[1] = plain
        began = time.process_time()
        if channels.concerns(buffer, frames):
            for key, _, start, end in frames:
                plain.filter.frame(key, buffer, start, end)
        found.append((time.process_time() - began) / COUNT * 1e6)
        plain.filter.end()
    return median(found)


async def measure() -> list[tuple[str, float, float]]:
    """Microseconds for each delivery of messages that no branch has published, and of those of branches."""

    async def write(_: LogWrite) -> None: ...

    ours, others = [uuid4() for _ in range(50)], [uuid4() for _ in range(100_000)]
    plain, marked = deliveries(None), deliveries(ours)
    register = CopyRegister(write, lambda: True)
    rows = [("no branch is open", cost(register, plain), cost(register, marked))]
    members: Any = SimpleNamespace(has_ended=lambda _: True)
    register.members = members
    rows.append(("a member; the branches have ended", cost(register, plain), cost(register, marked)))
    members.has_ended = lambda _: False
    rows.append(("a member; they may not have ended", cost(register, plain), cost(register, marked)))
    register.members = None
    for branch in others[:1000]:
        register.begin(branch)
    rows.append(("1,000 other branches are open", cost(register, plain), cost(register, marked)))
    register.begin(ours[0])
    rows.append(("one in 50 messages is of an open branch", cost(register, plain), cost(register, marked)))
    for branch in others:
        await register.replay(branch, [Replay(position=0, exchange=b"", routing_key=b"queue", digest=bytes(32))])
    rows.append(("100,000 other messages were sent again", cost(register, plain), cost(register, marked)))
    digest = messages.digest_of(b"", b"queue", BODY)
    for tag in range(1, COUNT + 1):
        branch = ours[tag % len(ours)]
        await register.replay(branch, [Replay(position=tag, exchange=b"", routing_key=b"queue", digest=digest)])
    rows.append(("all messages were sent again", cost(register, plain), cost(register, marked)))
    return rows


def main() -> None:
    rows = asyncio.run(measure())
    table = Table(("µs for each delivery of 1 KiB", 40), ["other messages", "messages of branches"])
    for name, *costs in rows:
        table.row(name, [f"{each:.2f}" for each in costs])


if __name__ == "__main__":
    main()

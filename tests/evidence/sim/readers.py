"""Consumers outside of any branch, without select: during a run, and at its end, when they empty all queues.

Consumers that read through dtx must get each message of a committed branch once, even if its queue has several copies.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from dtx.store.rabbitmq import messages
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed
from dtx.wire.amqp09 import properties
from dtx.xa.codes import ReplyCode
from tests.evidence.sim.broker import COPY, SimBroker
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.ledger import Delivered, Ledger

_PREFETCH: Final = 5
_MOST: Final = 3
"""Limit of messages that a reader settles at a time."""
_ATTEMPTS: Final = 3
_EMPTY_AFTER: Final = 300.0
"""Seconds in which consumers must be able to empty all queues, while nothing fails."""


class Reader:
    """Consumes messages, and settles most of them: some for good, some by returning them.

    Args:
        ledger: gets what was settled.
        random: source of random choices.
        hosts: addresses of the dtx instances.
        queues: names.
        until: returns true when it must stop.
    """

    def __init__(
        self, ledger: Ledger, random: Random, hosts: list[str], queues: list[bytes], until: Callable[[], bool]
    ) -> None:
        self._ledger = ledger
        self._random = random
        self._client = Client(hosts)
        self._queues = queues
        self._until = until
        self._unsettled: list[Delivered] = []

    async def run(self) -> None:
        """Read until it must stop; the broker then gets the unsettled messages back."""
        client, random = self._client, self._random
        while not self._until():
            try:
                if not client.is_open:
                    await client.open(select=False)
                    self._unsettled.clear()
                    if random.random() < 0.7:
                        await client.consume(random.choice(self._queues), _PREFETCH)
                await self._read()
                if self._unsettled:
                    await self._settle()
                again = [each for each in self._unsettled if messages.attempt_of(each.properties) > 1]
                if self._unsettled and random.random() < (0.5 if again else 0.1):
                    await self._imitate(random.choice(again or self._unsettled))
                if random.random() < 0.05:
                    client.close()
            except UpstreamChannelClosed as error:
                if error.close.reply_code == ReplyCode.PRECONDITION_FAILED:
                    self._ledger.wrong(f"a reader is told: {error}")
                client.close()
            except GONE:
                client.close()
            await asyncio.sleep(random.random() ** 3)
        client.close()

    async def _read(self) -> None:
        client = self._client
        if client.channel.on_delivery is None:
            got = await client.get(self._random.choice(self._queues))
            self._unsettled += [got] if got is not None else []
            return
        if not client.deliveries:
            await client.delivered(0.3)
        self._unsettled += client.deliveries
        client.deliveries.clear()

    async def _settle(self) -> None:
        """Settle some deliveries, and wait for the broker.

        Raises:
            GONE: they may be settled or not.
        """
        client, random = self._client, self._random
        some = self._unsettled[: random.randint(1, _MOST)]
        for_good: list[Delivered] = []
        if random.random() < 0.2:
            for_good += some
            client.ack(some[-1].tag, multiple=True)
        else:
            for delivered in some:
                requeue = random.random() < 0.2
                if not requeue:
                    for_good.append(delivered)
                if requeue or random.random() < 0.2:
                    client.reject(delivered.tag, requeue=requeue)
                else:
                    client.ack(delivered.tag)
        del self._unsettled[: len(some)]
        perhaps = self._ledger.perhaps_settled
        perhaps += for_good
        await client.reach_broker()
        self._ledger.settled += for_good

    async def _imitate(self, delivered: Delivered) -> None:
        """Publish another message with the headers of *delivered*. It is no copy, and must not be suppressed.

        Raises:
            GONE: it may be published or not.
        """
        queue, number = delivered.queue, len(self._ledger.strays) + len(self._ledger.seeds)
        if queue == self._queues[-1]:  # it may refuse the message
            return
        body = b"imitation-%d of %b" % (number, delivered.body)
        raw = properties.remove_headers(delivered.properties, (COPY,))
        raw = properties.set_header(raw, messages.ATTEMPT, b"%d" % self._random.randint(1, _ATTEMPTS))
        self._ledger.strays.add(body)
        self._ledger.imitated.add(delivered.body)
        self._client.publish(queue, body, raw)
        await self._client.reach_broker()
        self._ledger.strays.discard(body)
        self._ledger.seeds[body] = queue


async def drain(
    broker: SimBroker, client: Callable[[], Client], random: Random, queues: list[bytes]
) -> tuple[list[Delivered], bool]:
    """Empty all queues through dtx, by two consumers of a random kind for each.

    Returns:
        What they got, and whether the queues are empty.
    """
    got: list[Delivered] = []
    stop = False

    async def consume(queue: bytes, *, select: bool, gets: bool) -> None:
        reader = client()
        while True:
            try:
                await reader.open(select=select)
                break
            except GONE:
                await asyncio.sleep(0.1)
        if not gets:
            await reader.consume(queue, _PREFETCH)
        while not stop:
            if gets:
                some = [one for one in (await reader.get(queue),) if one is not None]
            else:
                await reader.delivered(0.5)
                some, reader.deliveries = reader.deliveries[:], []
            await asyncio.sleep(random.random() * 0.1)
            got.extend(some)
            if some and random.random() < 0.3:
                reader.ack(some[-1].tag, multiple=True)
            else:
                for delivered in some:
                    reader.ack(delivered.tag)
        reader.close()

    tasks = [
        asyncio.create_task(consume(queue, select=random.random() < 0.5, gets=random.random() < 0.3))
        for queue in queues
        for _ in range(2)
    ]
    loop = asyncio.get_running_loop()
    until = loop.time() + _EMPTY_AFTER
    while not (is_empty := broker.is_empty(queues)) and loop.time() < until:
        await asyncio.sleep(0.5)
    stop = True
    await asyncio.gather(*tasks)
    return got, is_empty

"""A message store on a log, used as connections use it, but without connections."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dtx.log.api import LogError, MessageLog
from dtx.log.changes import DestinationKind, StoredMessage
from dtx.log.records import BranchRecord, CompleteWrite, Insert, JournalEvent, NoteWrite
from dtx.store.api import Plan
from dtx.store.postgres.consumers import Consumer, Credit, QueueDelivery
from dtx.store.postgres.exchanges import Queue
from dtx.store.postgres.store import PostgresStore
from dtx.store.work import Budget, HeldPublish, HeldWork
from dtx.store.work import Delivery as HeldDelivery
from dtx.wire.amqp09.properties import Property, build
from dtx.wire.amqp09.tables import entry
from tests.support.branches import a_branch, a_completion, a_line

PERSISTENT = build({Property.DELIVERY_MODE: b"\x02"})
TRANSIENT = build({})
OWNER = object()


def arguments(**values: int | str) -> bytes:
    """A field table: ``max_length=3`` is ``x-max-length``."""
    table = b""
    for name, value in values.items():
        key = b"x-" + name.replace("_", "-").encode()
        if isinstance(value, int):
            table += entry(key, b"l", value.to_bytes(8, "big"))
        else:
            table += entry(key, b"S", value.encode())
    return table


class Sink:
    """A channel of a client that records its deliveries."""

    def __init__(self) -> None:
        self.full = False
        self.got: list[tuple[QueueDelivery, StoredMessage]] = []
        self.empty = 0
        self.no_ack = False
        self._news = asyncio.Event()

    def deliver(self, consumer: Consumer, delivery: QueueDelivery, message: StoredMessage) -> None:
        self.got.append((delivery, message))
        self._news.set()

    def got_one(self, found: tuple[QueueDelivery, StoredMessage] | None, remaining: int) -> None:
        if found is None:
            self.empty += 1
        else:
            self.got.append(found)
        self._news.set()

    async def wait(self, count: int) -> list[bytes]:
        """Wait for *count* deliveries; return all bodies."""
        async with asyncio.timeout(30):
            while len(self.got) < count:
                self._news.clear()
                await self._news.wait()
        return [message.body for _, message in self.got]

    @property
    def deliveries(self) -> list[QueueDelivery]:
        return [delivery for delivery, _ in self.got]


class Client:
    """Declares, publishes, consumes and completes branches on a store.

    Args:
        log: an open log.
        options: options of the store.
    """

    def __init__(self, log: MessageLog, **options: Any) -> None:
        self.log = log
        if "clock" in options:  # the clock of a test is steady too
            options.setdefault("steady", options["clock"])
        self.store = PostgresStore(log, **options)
        self.budget = Budget(1 << 30)

    async def open(self) -> "Client":
        """Open the store as a service does."""
        await self.store.open()
        async for record in self.log.load():
            self.store.restore(record)
        self.host = self.store.virtual_host("/")
        return self

    async def declare(self, name: str = "q", *, durable: bool = True, **values: int | str) -> Queue:
        declared = self.host.declare_queue(name.encode(), OWNER, durable=durable, arguments=arguments(**values))
        await self.store.define(declared.define)
        return declared.queue

    async def exchange(self, name: str, kind: str, *queues: str) -> None:
        await self.store.define(self.host.declare_exchange(name.encode(), kind.encode(), durable=True))
        for queue in queues:
            await self.store.define(self.host.bind(name.encode(), DestinationKind.QUEUE, queue.encode(), b"k"))

    def message(
        self, body: bytes, key: str = "q", exchange: str = "", properties: bytes = PERSISTENT, mandatory: bool = False
    ) -> HeldPublish:
        """A message that is routed to its queues."""
        queues = self.host.route(exchange.encode(), key.encode())
        ids = tuple(queue.spec.id for queue in queues)
        return HeldPublish(exchange.encode(), key.encode(), mandatory, properties, body, None, ids)

    async def submit(
        self, publishes: Sequence[HeldPublish] = (), acked: Sequence[QueueDelivery] = (), **more: bool
    ) -> Any:
        """Write and wait; return the indexes of the refused publishes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: LogError | None) -> None:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        refused = self.store.submit("/", publishes, acked, done, **more)
        if not (refused and more.get("whole")):
            await future
        return refused

    async def publish(self, *bodies: bytes, **more: Any) -> None:
        await self.submit([self.message(body, **more) for body in bodies])

    def consume(self, queue: Queue, *, prefetch: int = 0, no_ack: bool = False) -> Sink:
        sink = Sink()
        queue.index.consume(Consumer(b"tag", sink, no_ack=no_ack, credit=Credit(prefetch)))
        return sink

    def work(self, publishes: Sequence[HeldPublish] = (), acked: Sequence[QueueDelivery] = ()) -> HeldWork:
        """The work of a branch; its deliveries are held in their queues."""
        work = HeldWork(1 << 30, 100_000, self.budget)
        for publish in publishes:
            work.add_publish(publish)
        for delivery in acked:
            delivery.queue.hold(delivery)
            held: Any = {"holder": self, "tag": 0, "queue": b"", "exchange": b"", "routing_key": b"", "redelivered": 0}
            work.add_consume(HeldDelivery(**held, properties=b"", body=None, size=0, slot=delivery.slot))
        return work

    async def prepare(self, work: HeldWork) -> BranchRecord:
        """Prepare a branch with *work*."""
        plan: Plan = self.store.plan("/", work)
        branch = a_branch(published=plan.published, consumed=plan.consumed)
        await self.log.write(Insert(branch=branch, change=plan.change, journal=a_line(branch)))
        return branch

    async def commit(self, branch: BranchRecord) -> None:
        """Commit a prepared branch."""
        published, consumed = branch.published or (), branch.consumed or ()
        change = self.store.committing(published, consumed)
        completion = a_completion(branch)
        await self.log.write(
            CompleteWrite(
                id=branch.id, expect=branch.state, version=branch.version, journal=completion.journal, change=change
            )
        )
        self.store.committed(published, consumed)

    async def roll_back(self, branch: BranchRecord) -> None:
        """Roll a prepared branch back."""
        published, consumed = branch.published or (), branch.consumed or ()
        change = self.store.rolling_back(published, consumed)
        journal = a_line(branch, JournalEvent.ROLLED_BACK)
        await self.log.write(
            CompleteWrite(id=branch.id, expect=branch.state, version=branch.version, journal=journal, change=change)
        )
        self.store.rolled_back(published, consumed)

    async def one_phase(self, work: HeldWork) -> None:
        """Commit *work* in one phase."""
        plan = self.store.plan("/", work)
        second = self.store.committing(plan.published, plan.consumed)
        change = type(second)(puts=plan.change.puts, drops=second.drops, expiries=second.expiries)
        await self.log.write(NoteWrite(journal=a_line(a_branch(), JournalEvent.COMMITTED), change=change))
        self.store.committed(plan.published, plan.consumed)

    async def close(self) -> None:
        await self.store.close()


OpenClient = Callable[..., Coroutine[Any, Any, Client]]


async def rows(client: Client, queue: int) -> int:
    """The number of messages of a queue in the log."""
    (contents,) = [found async for found in client.log.load_queues([queue])]
    return len(contents.positions)


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Wait until *condition* holds."""
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.01)


async def gone(client: Client, queue: int, left: int = 0) -> None:
    """Wait until the log has only *left* messages of *queue*."""

    async def few() -> bool:
        return await rows(client, queue) == left

    await until(few)

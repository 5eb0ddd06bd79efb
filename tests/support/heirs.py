"""An active dtx and one that stands by, and applications that go on with whichever serves."""

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
"""Seconds: ``--lease-ttl`` of every stage."""
FENCED: Final = 5
"""docs/operations/running: "5: another dtx took over the lease"."""


class Pair:
    """The active dtx of a scene, and a standby.

    Args:
        scene: its service is the active one.
        options: further words of the standby's command line.
    """

    def __init__(self, scene: Scene, *options: str) -> None:
        self.scene = scene
        self.active = scene.service
        self.standby = scene.another_service(*options, start=False)
        self.standby.start(wait=False)
        self.serving = self.active
        """Where applications connect."""
        wait_until(
            lambda: b"another dtx is active, standing by" in self.standby.log_path.read_bytes(),
            seconds=60,
            what="a second dtx that stands by",
        )

    def be_far_apart(self) -> None:
        """As on two machines: whether the active one's process lives cannot be seen, so the lease must run out."""
        with psycopg.connect(self.scene.database, autocommit=True) as connection:
            connection.execute("UPDATE dtx.lease SET process = NULL")

    def succeed(self) -> float:
        """Wait until the standby serves, and send the applications there.

        Returns:
            How many seconds that took.
        """
        began = time.monotonic()
        self.standby.wait_ready()
        took = time.monotonic() - began
        self.go_on_with(self.standby)
        return took

    def go_on_with(self, service: DtxService) -> None:
        """*service* is the active one from now on."""
        self.serving = self.scene.service = service
        if isinstance(self.scene, StandaloneStage):
            self.scene.broker = StandaloneBroker(service)

    def epoch(self) -> int:
        """How often the lease was taken, or proved anew after a lost connection."""
        with psycopg.connect(self.scene.database) as connection:
            row = connection.execute("SELECT epoch FROM dtx.lease").fetchone()
        assert row is not None
        return int(row[0])


_deciding = threading.Lock()


@dataclass
class Transfer:
    """What a branch does.

    Args:
        own: the message that it adds to ``out``.
        moved: the message that it takes from ``in`` to ``out``; ``None``: there was none.
        commits: what its transaction manager has decided; ``None``: nothing yet.
    """

    own: bytes
    moved: bytes | None = None
    commits: bool | None = None

    def decide(self, *, commit: bool) -> bool:
        """Decide, once and for all: who asks later is told what was decided first.

        Args:
            commit: what it shall be, if nothing was decided.

        Returns:
            Whether it commits.
        """
        with _deciding:
            if self.commits is None:
                self.commits = commit
            return self.commits


class Application(threading.Thread):
    """Moves messages from ``in`` to ``out`` in branches, and remembers what was decided, as a transaction manager does.

    Args:
        pair: where to.
        number: of this one.
        books: what all of them have decided.
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
            # ValueError: what pika raises for a socket that is reset at once after it was connected.
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
    """Applications that work until told to stop, and the reckoning. Use as a context manager.

    Args:
        pair: where to.
        messages: in ``in`` when they begin.
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
        """So many more begin."""
        for _ in range(count):
            application = Application(self._pair, len(self._applications), self.books)
            self._applications.append(application)
            application.start()

    def wait_for(self, more: int) -> None:
        """Wait until so many more branches were completed."""
        goal = self.done + more
        wait_until(lambda: self.done >= goal, seconds=60, what=f"{more} more branches")

    @property
    def done(self) -> int:
        """How many branches were completed."""
        return sum(application.done for application in self._applications)

    def stop(self) -> None:
        """Let them finish what they are doing."""
        for application in self._applications:
            application.stop.set()
        for application in self._applications:
            application.join(90)
            assert not application.is_alive(), f"{application.name} hangs"

    def recover(self, of: Collection[Xid] | None = None) -> int:
        """Complete what is in doubt as it was decided.

        Args:
            of: these alone, while others are still being decided.

        Returns:
            How many there were.
        """
        with self._pair.scene.coordinator(self._pair.serving) as coordinator:
            found = [xid for xid in coordinator.recover() if of is None or xid in of]
            for xid in found:
                commits = self.books[xid].decide(commit=False)  # presumed abort
                self._insist(coordinator.commit if commits else coordinator.rollback, xid)
        return len(found)

    def _insist(self, decide: Callable[[Xid], object], xid: Xid) -> None:
        """Ask again as long as a predecessor's connection may still act for the branch."""
        deadline = time.monotonic() + 60
        while True:
            try:
                decide(xid)
            except XAER_RMFAIL:
                if time.monotonic() > deadline:
                    raise
            except XAER_NOTA as error:  # phase two was under way, and ended before we asked
                if "completed" not in str(error):
                    raise
                return
            else:
                return

    def settle(self) -> None:
        """Stop, recover, and compare all that there is with what was decided.

        Raises:
            AssertionError: something was lost or repeated, or ended otherwise than it was decided.
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
        with contextlib.suppress(TimeoutError):  # then the comparison says what is missing
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
        """Which branches had *body*, for people."""
        return [
            f"{xid} commits={transfer.commits}: {self._pair.scene.history(xid)}"
            for xid, transfer in self.books.items()
            if body in (transfer.own, transfer.moved)
        ]

    def _told(self) -> dict[Xid, str]:
        """What the journal says of everything that ended by a commit."""
        query = "SELECT format_id, gtrid, bqual, event FROM dtx.journal WHERE event = 'committed'"
        with psycopg.connect(self._pair.scene.database) as connection:
            rows = connection.execute(query).fetchall()
        assert len(rows) == len({row[:3] for row in rows}), "a branch was committed twice"
        return {Xid(f, bytes(g), bytes(b)): event for f, g, b, event in rows}

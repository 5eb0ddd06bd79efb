"""The servers for cells: one database and one virtual host for all of them; only dtx is restarted between cells.

Two branches are in doubt from before the first cell until after the last one, and a queue has a message without a
consumer. No death may change them.
"""

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from pika.adapters.blocking_connection import BlockingChannel

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.client import XaFlag, Xid
from dtx.failpoint import DIED
from tests.evidence.matrix.cases import Condition, Mode
from tests.support.broker import StandaloneBroker
from tests.support.crash import Scene, work
from tests.support.postgres import PostgresServer
from tests.support.prefork import Preforker
from tests.support.processes import Child, free_port, unmeasured
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

IDLE: Final = "b-idle"
BYSTANDERS: Final = "b-in", "b-out", IDLE
SOURCES: Final = "s1", "s2"
TARGETS: Final = "o1", "o2"
SPARE: Final = "spare"
FULL: Final = "full"
"""A queue with room for one message, which refuses the next."""
GONE: Final = "gone"
"""An exchange bound to the first of TARGETS, until it is deleted."""
_ROWS: Final = """
SELECT b.format_id, b.gtrid, b.bqual, b.state, (to_jsonb(b) - 'member')::text, (
    SELECT array_agg(w::text ORDER BY w.position) FROM dtx.work w WHERE w.branch_id = b.id
) FROM dtx.branch b
"""
_LEFT: Final = """
SELECT (SELECT count(*) FROM dtx.work w WHERE NOT EXISTS (SELECT FROM dtx.branch b WHERE b.id = w.branch_id))
     + (SELECT count(*) FROM dtx.unit u WHERE NOT EXISTS (SELECT FROM dtx.branch b WHERE b.id = u.branch_id))
"""


def ready(channel: BlockingChannel, queue: str) -> int:
    """Return the number of ready messages in *queue*."""
    return int(channel.queue_declare(queue, passive=True).method.message_count)


class ArmedService(DtxService):
    """``dtx serve``, with a failpoint while *arming* has arguments for ``python -m dtx.failpoint``.

    Args:
        preforker: makes its processes.
        options: see :class:`DtxService`.
    """

    def __init__(self, preforker: Preforker, **options: Any) -> None:
        super().__init__(**options)
        self.arming: Sequence[str] = ()
        self._preforker = preforker

    def _spawn(self, output: int, errors: int) -> Child:
        words = self.command()
        words = words[words.index("serve") :]
        module = "dtx"
        if self.arming:
            module, words = "dtx.failpoint", [*self.arming, "--", *words]
        return self._preforker.copy(
            module, words, output=output, errors=errors, env=self._environment(), cwd=self.directory
        )

    @property
    def hold_file(self) -> Path:
        """A file that exists while the process is stopped at its point."""
        return self.directory / "held"

    @property
    def trace_file(self) -> Path:
        """A file with the points that were reached."""
        return self.directory / "trace"

    def start_armed(self, *arming: str) -> bool:
        """Start it with these arguments for the failpoint.

        Returns:
            Whether it became ready; otherwise it died during the start.
        """
        self.arming = arming
        self.start(wait=False)
        try:
            self.wait_ready()
        except RuntimeError:
            if self.running:
                raise
            return False
        finally:
            self.arming = ()
        return True

    @property
    def died(self) -> bool:
        """Whether it died at its failpoint."""
        return not self.running and self.wait() == DIED

    def wait_end(self, seconds: float) -> bool:
        """Wait for its end; return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        return not self.running


class Servers:
    """The servers that all stages of one process share. Use as a context manager.

    Args:
        postgres: a server to use; ``None``: start one.
        node: returns a broker at its first use; ``None``: start one.
    """

    def __init__(self, postgres: PostgresServer | None = None, node: Callable[[], RabbitNode] | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._postgres = postgres
        self._find_node = node or (lambda: self._stack.enter_context(RabbitNode()))
        self._node: RabbitNode | None = None

    def __enter__(self) -> Self:
        with unmeasured():  # copies die at their failpoints, before coverage is written
            self.preforker = self._stack.enter_context(Preforker())
        self.postgres = self._postgres or self._stack.enter_context(PostgresServer("matrix"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def node(self) -> RabbitNode:
        """Return the broker."""
        if self._node is None:
            self._node = self._find_node()
        return self._node


class MatrixStage(Scene):
    """dtx between a broker (or none) and a database, for many cells. Use as a context manager.

    Args:
        condition: of the cells.
        mode: alongside or standalone.
        servers: the shared servers.
    """

    dtx: ArmedService
    other: ArmedService | None = None
    """The second member, which has no failpoint."""

    def __init__(self, condition: Condition, mode: Mode, servers: "Servers") -> None:
        super().__init__(servers.postgres)
        self._preforker = servers.preforker
        self.condition = condition
        self.mode: Mode = mode
        self.node = servers.node() if mode == "alongside" else None
        self.numbers = itertools.count(1)
        self.bystanders: dict[Xid, tuple[Any, ...]] = {}

    def __enter__(self) -> Self:
        self.database = self.postgres.create_migrated_database()
        self._stack.callback(self.postgres.drop_database, self.database)
        self.token = OperatorLog(self.database, "dtx").make_token("operator", OperatorRole.OPERATOR, "matrix")
        self.admin_port = free_port()
        options = ["--lease-ttl", "5", "--unit-deadline", "20", "--default-timeout", "600"]
        url: str | None = None
        self.vhost = "/"
        if self.node is not None:
            self.node.mend()
            self.vhost = self.node.add_vhost()
            self._stack.callback(self._delete_vhost, self.node)
            options += ["--management", self.node.management_url]
            options += ["--replay", "always" if self.condition is Condition.REPLAY else "auto"]
            url = self.node.url(vhost=self.vhost)
        if self.condition is Condition.MEMBERS:
            options += ["--advertise", "amqp://127.0.0.1"]
        self._options = {"broker": url, "database": self.database}
        self._words = tuple(options)
        words = (*options, "--admin-listen", f"127.0.0.1:{self.admin_port}")
        self.service = self.dtx = self._stack.enter_context(
            ArmedService(self._preforker, options=words, **self._options)
        )
        self.broker = self.node if self.node is not None else StandaloneBroker(self.service)
        self._stack.callback(self._threads.shutdown)
        if self.condition is Condition.MEMBERS:
            self.other = self._stack.enter_context(self.another_service())
        self._place_bystanders()
        return self

    def another_service(self, *options: str, start: bool = True) -> ArmedService:
        """Return a further dtx without a failpoint; leave its context before the next cell."""
        return ArmedService(self._preforker, options=(*self._words, *options), start=start, **self._options)

    def _delete_vhost(self, node: RabbitNode) -> None:
        node.mend()
        node.delete_vhost(self.vhost)

    # -- what must not change

    def _place_bystanders(self) -> None:
        with self.broker.channel(self.vhost) as channel:
            for name in (*BYSTANDERS, *SOURCES, *TARGETS):
                channel.queue_declare(name, durable=True)
            if self.condition is Condition.REFUSING:
                channel.queue_declare(FULL, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        if self.condition is Condition.BROKER and self.node is not None:
            self.node.keep_definitions()
        self.fill("b-in", b"b1", b"b2", b"b3")
        self.fill(IDLE, b"idle")
        with self.connected() as connection:
            for number in range(2):
                xa, xid = work(connection.channel(), publish={"b-out": [b"o%d" % number]}, consume={"b-in": 1})
                assert xa.prepare(xid) is XaFlag.OK
        self.bystanders = self.rows()
        assert len(self.bystanders) == 2
        # A restart writes late records (delivered positions of queues) now, so that they are not in the first cell.
        assert self.dtx.stop() == 0
        self.dtx.start()

    def changed(self, channel: BlockingChannel) -> Iterator[str]:
        """Yield changes of the branches and queues that no cell uses."""
        rows = self.rows()
        for xid, row in self.bystanders.items():
            if rows.get(xid) != row:
                yield f"the branch {xid} that stood by was {row}, and is {rows.get(xid)}"
        for queue, count in (("b-in", 1), ("b-out", 0), (IDLE, 1)):
            if (found := ready(channel, queue)) != count:
                yield f"{queue} has {found} messages ready instead of {count}"

    def finish_bystanders(self) -> Iterator[str]:
        """Commit one of the two branches and roll the other back; yield differences."""
        first, second = self.bystanders
        with self.coordinator() as coordinator:
            coordinator.commit(first)
            coordinator.rollback(second)
        wanted = {"b-in": [b"b2", b"b3"], "b-out": [b"o0"], IDLE: [b"idle"]}
        for queue, bodies in wanted.items():
            if (found := sorted(self.bodies(queue))) != bodies:
                yield f"{queue} had {found} at last, instead of {bodies}"

    # -- trouble

    def open_exchange(self, *, exists: bool) -> None:
        """Make or delete the exchange ``GONE``. Idempotent."""
        with self.broker.channel(self.vhost) as channel:
            if exists:
                channel.exchange_declare(GONE, "fanout", durable=True)
                channel.queue_bind(TARGETS[0], GONE)
            else:
                channel.exchange_delete(GONE)

    def end_connections(self) -> None:
        """Let the broker end all connections of the virtual host, of clients and of dtx."""
        assert self.node is not None
        self.node.ctl("close_all_connections", "--vhost", self.vhost, "the test wants it")

    def forget_markers(self) -> None:
        """Remove receipts and markers, so that the broker looks new or restarted to dtx."""
        assert self.node is not None
        found = self.node.api("GET", f"/api/queues/{self.vhost}?columns=name")
        with self.broker.channel(self.vhost) as channel:
            for queue in found:
                if queue["name"].startswith("dtx.receipts."):
                    channel.queue_purge(queue["name"])

    # -- the log

    def rows(self) -> dict[Xid, tuple[Any, ...]]:
        """Return every branch in the log: its state, and all its columns and work."""
        with psycopg.connect(self.database) as connection:
            found = connection.execute(_ROWS).fetchall()
        return {Xid(f, bytes(g), bytes(b)): (state, *rest) for f, g, b, state, *rest in found}

    def orphans(self) -> int:
        """Return the number of rows that belong to no branch."""
        with psycopg.connect(self.database) as connection:
            row = connection.execute(_LEFT).fetchone()
        assert row is not None
        return int(row[0])

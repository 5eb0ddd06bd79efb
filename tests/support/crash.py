"""Stages for faults: dtx with a broker, a database and a network that can be cut; or dtx without a broker."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Self

import pika
import psycopg
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from dtx.client import Coordinator, XAResource, Xid
from tests.support.broker import Broker, StandaloneBroker
from tests.support.client import connected, new_xid
from tests.support.failpoints import ArmedService
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

Replay = Literal["auto", "receipts", "always"]
PERSISTENT = pika.BasicProperties(delivery_mode=2, content_type="text/plain")


class Scene:
    """A dtx in either mode, with helpers for tests.

    Args:
        postgres: the server of the fresh database.
        env: further environment variables of every dtx.
    """

    service: DtxService
    broker: Broker
    """Access to the messages without the connections under test."""
    vhost: str
    database: str

    def __init__(self, postgres: PostgresServer, env: Mapping[str, str] | None = None) -> None:
        self.postgres = postgres
        self._env = env
        self._stack = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(thread_name_prefix="stage")

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def another_service(self, *options: str, start: bool = True) -> DtxService:
        """A further dtx on the same data, with further options; it ends with the stage."""
        raise NotImplementedError

    def queues(self) -> list[str]:
        """The queues of the vhost that are not dtx's own."""
        raise NotImplementedError

    def locks(self) -> int:
        """How many connections of dtx to the broker may act for branches."""
        raise NotImplementedError

    # -- work

    def connected(self, service: DtxService | None = None) -> contextlib.AbstractContextManager[BlockingConnection]:
        """A client connection to dtx."""
        return connected((service or self.service).url(vhost=self.vhost))

    @contextlib.contextmanager
    def coordinator(self, service: DtxService | None = None) -> Iterator[Coordinator]:
        """A coordinator with its own connection."""
        with self.connected(service) as connection, Coordinator(connection) as coordinator:
            yield coordinator

    def declare(self, name: str, **arguments: Any) -> str:
        """Declare a durable queue."""
        with self.broker.channel(self.vhost) as channel:
            channel.queue_declare(name, durable=True, arguments=arguments)
        return name

    def delete(self, queue: str) -> None:
        """Delete a queue with its messages."""
        with self.broker.channel(self.vhost) as channel:
            channel.queue_delete(queue)

    def fill(self, queue: str, *bodies: bytes) -> None:
        """Publish persistent messages directly to the broker."""
        with self.broker.channel(self.vhost) as channel:
            channel.confirm_delivery()
            for body in bodies:
                channel.basic_publish("", queue, body, PERSISTENT)

    def take(self, queue: str) -> list[tuple[bytes, pika.BasicProperties, bool]]:
        """Take all ready messages out of *queue*: body, properties, redelivered."""
        return self.broker.take_all(queue, self.vhost)

    def bodies(self, queue: str) -> list[bytes]:
        """As :meth:`take`, only the bodies."""
        return [body for body, _, _ in self.take(queue)]

    def count(self, queue: str) -> int:
        """How many messages are ready in *queue*."""
        return self.broker.count(queue, self.vhost)

    def wait_for_count(self, queue: str, count: int) -> None:
        """Wait until *count* messages are ready in *queue*."""
        wait_until(lambda: self.count(queue) == count, what=f"{count} messages in {queue}")

    def wait_for(self, condition: Callable[[], object], what: str, *, seconds: float = 40.0) -> None:
        """Wait until *condition* holds."""
        wait_until(condition, seconds=seconds, what=what)

    def background(self, call: Callable[[], object]) -> "Future[object]":
        """Run *call* in another thread."""
        return self._threads.submit(call)

    # -- the log

    def states(self) -> dict[Xid, str]:
        """The state of every branch in the log."""
        query = "SELECT format_id, gtrid, bqual, state FROM dtx.branch"
        with psycopg.connect(self.database) as connection:
            return {Xid(f, bytes(g), bytes(b)): state for f, g, b, state in connection.execute(query)}

    def wait_for_state(self, xid: Xid, state: str | None, *, seconds: float = 40.0) -> None:
        """Wait until *xid* is in *state* in the log; ``None``: not in the log."""
        wait_until(lambda: self.states().get(xid) == state, seconds=seconds, what=f"{xid} in state {state}")

    def wait_for_end(self, *, seconds: float = 40.0) -> None:
        """Wait until no branch is in the log."""
        wait_until(lambda: not self.states(), seconds=seconds, what="the end of all branches")

    def in_doubt(self) -> list[dict[str, Any]]:
        """The output of ``dtx in-doubt --json``."""
        return [json.loads(line) for line in self.service.run("in-doubt", "--json").stdout.splitlines()]

    def history(self, xid: Xid) -> list[str]:
        """The events of *xid* in the journal, in order; a commit may be answered before its end is written."""
        decided = ("committing", "rolling-back")
        wait_until(lambda: self.states().get(xid) not in decided, what=f"the end of {xid} in the log")
        with psycopg.connect(self.database) as connection:
            rows = connection.execute(
                "SELECT event FROM dtx.journal WHERE gtrid = %s AND bqual = %s AND format_id = %s ORDER BY at",
                (xid.gtrid, xid.bqual, xid.format_id),
            )
            return [event for (event,) in rows]


class Stage(Scene):
    """A dtx in alongside mode with a proxy to the broker. Use as a context manager.

    Its services can be armed with failpoints: see ``ArmedService``.

    Args:
        node: the broker; a fresh vhost of it is used.
        postgres: the server of the fresh database for the log.
        replay: the option ``--replay`` of dtx.
        options: further words of its command line.
        start: whether entering the context starts dtx.
        env: further environment variables of every dtx.
    """

    def __init__(
        self,
        node: RabbitNode,
        postgres: PostgresServer,
        *,
        replay: Replay = "auto",
        options: Sequence[str] = (),
        start: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(postgres, env)
        self.node = self.broker = node
        self._start = start
        self.proxy = Proxy("127.0.0.1", node.port)
        self.options = ("--management", node.management_url, "--replay", replay, "--lease-ttl", "2", *options)

    def __enter__(self) -> Self:
        self.node.mend()
        self.vhost = self.node.add_vhost()
        self._stack.callback(self._delete_vhost)
        self.database = self.postgres.create_migrated_database()
        self._stack.callback(self.postgres.drop_database, self.database)
        self._stack.enter_context(self.proxy)
        self._stack.callback(self.proxy.resume)
        self.service = self.another_service(through_proxy=True, start=self._start)
        self._stack.callback(self._threads.shutdown)
        return self

    def _delete_vhost(self) -> None:
        self.node.mend()
        self.node.delete_vhost(self.vhost)

    def another_service(self, *options: str, through_proxy: bool = False, start: bool = True) -> ArmedService:
        """A further dtx on the same log and broker; it ends with the stage."""
        port = self.proxy.port if through_proxy else self.node.port
        broker = f"amqp://guest:guest@127.0.0.1:{port}/{self.vhost}"
        words = (*self.options, *options)
        return self._stack.enter_context(
            ArmedService(broker=broker, database=self.database, options=words, env=self._env, start=start)
        )

    def queues(self) -> list[str]:
        """The queues of the vhost that are not dtx's own."""
        found = self.node.api("GET", f"/api/queues/{self.vhost}?columns=name")
        return [queue["name"] for queue in found if not queue["name"].startswith("dtx.")]

    def locks(self) -> int:
        """How many connections of dtx to the broker may act for branches."""
        found = self.node.api("GET", f"/api/queues/{self.vhost}?columns=name")
        return sum(queue["name"].startswith("dtx.lock.") for queue in found)

    def held(self, queue: str) -> int:
        """How many messages *queue* has, including unacknowledged ones (takes a second)."""
        lines = self.node.ctl("list_queues", "--vhost", self.vhost, "--no-table-headers", "name", "messages")
        return next(int(count) for name, count in map(str.split, lines.splitlines()) if name == queue)

    def receipts(self) -> int:
        """How many receipts are in the broker, without the marker of each queue."""
        return sum(self._receipts_in(queue) for queue in self.receipt_queues())

    def _receipts_in(self, queue: str) -> int:
        try:
            return max(0, self.count(queue) - 1)
        except ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return 0  # dtx has deleted it meanwhile

    def receipt_queues(self) -> list[str]:
        """The receipt queues of every dtx in the vhost."""
        found = self.node.api("GET", f"/api/queues/{self.vhost}?columns=name")
        return [queue["name"] for queue in found if queue["name"].startswith("dtx.receipts.")]


class StandaloneStage(Scene):
    """A dtx without a broker. Use as a context manager.

    Args:
        postgres: the server of the fresh database.
        options: further options of dtx.
        env: further environment variables of every dtx.
    """

    def __init__(
        self, postgres: PostgresServer, *, options: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(postgres, env)
        self._options = ("--lease-ttl", "2", *options)

    def __enter__(self) -> Self:
        self.vhost = "/"
        self.database = self.postgres.create_migrated_database()
        self._stack.callback(self.postgres.drop_database, self.database)
        self.service = self.another_service()
        self.broker = StandaloneBroker(self.service)
        self._stack.callback(self._threads.shutdown)
        return self

    def another_service(self, *options: str, start: bool = True) -> DtxService:
        """A further dtx on the same database; it ends with the stage."""
        words = (*self._options, *options)
        return self._stack.enter_context(DtxService(database=self.database, options=words, env=self._env, start=start))

    def queues(self) -> list[str]:
        """The durable queues."""
        with psycopg.connect(self.database) as connection:
            return [bytes(name).decode() for (name,) in connection.execute("SELECT name FROM dtx.queue")]

    def locks(self) -> int:
        """Always 0: there is no broker with locks."""
        return 0


def work(
    channel: BlockingChannel,
    *,
    publish: dict[str, list[bytes]] | None = None,
    consume: dict[str, int] | None = None,
    xid: Xid | None = None,
    end: bool = True,
) -> tuple[XAResource, Xid]:
    """A branch on *channel* that publishes bodies to queues and consumes numbers of messages from queues."""
    xa, xid = XAResource(channel, timeout=60), xid or new_xid()
    xa.start(xid)
    for queue, bodies in (publish or {}).items():
        for body in bodies:
            channel.basic_publish("", queue, body, PERSISTENT)
    for queue, count in (consume or {}).items():
        for _ in range(count):
            method, _, _ = channel.basic_get(queue)
            assert method is not None, f"{queue} is empty"
            channel.basic_ack(method.delivery_tag)
    if end:
        xa.end(xid)
    return xa, xid


def ids(taken: Sequence[tuple[bytes, pika.BasicProperties, bool]]) -> list[str]:
    """The ``x-dtx-id`` of messages; empty if there is none."""
    return [(properties.headers or {}).get("x-dtx-id", "") for _, properties, _ in taken]

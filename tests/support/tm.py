"""The resources of transaction managers in tests: two databases of one PostgreSQL server, and two dtx.

The messages of the two dtx are in the same server, or in two virtual hosts of a RabbitMQ.
"""

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pika
import psycopg
import pytest

from dtx.client.errors import XAER_NOTA
from dtx.client.tm import DtxResource, Pep249Resource, Transaction, TransactionManager, steps
from dtx.client.tm.steps import CommitPoint
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.service import ADMIN, DtxService

ALL = ("db1", "db2", "q1", "q2")
"""The resources of a world."""
PREPARED = 200
"""The setting max_prepared_transactions of the server."""
_SILENCE = 60.0
"""Seconds without a message after which a queue that is not empty delivers nothing."""
PERSISTENT = pika.BasicProperties(delivery_mode=2)


def two_phase_server() -> contextlib.AbstractContextManager[PostgresServer]:
    """A PostgreSQL server with prepared transactions enabled."""

    @contextlib.contextmanager
    def serving() -> Iterator[PostgresServer]:
        with PostgresServer("tm") as server:
            server.configure(max_prepared_transactions=PREPARED, max_connections=200)
            yield server

    return serving()


class HostedService(DtxService):
    """A service of which the tests use one virtual host.

    Args:
        vhost: the name of the virtual host.
        more: see :class:`DtxService`.
    """

    def __init__(self, vhost: str, **more: Any) -> None:
        super().__init__(**more)
        self.vhost = vhost

    def url(self, user: str = "guest", password: str | None = None, vhost: str | None = None) -> str:
        """The URL for clients; the default virtual host is that of this service."""
        return super().url(user, password, self.vhost if vhost is None else vhost)


class World:
    """Two databases with a table each, two dtx with a queue each, and a log of decisions.

    Args:
        server: a server with prepared transactions enabled.
        directory: the directory of the log.
        node: the broker of both dtx; without it they run in standalone mode.
    """

    def __init__(self, server: PostgresServer, directory: Path, node: RabbitNode | None = None) -> None:
        self.server = server
        self.log = directory / "tm.db"
        self._node = node
        self._stack = contextlib.ExitStack()
        self.databases: dict[str, str] = {}
        self.services: dict[str, HostedService] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for name in ("db1", "db2"):
                self.databases[name] = self._database(stack)
            for name in ("q1", "q2"):
                self.services[name] = stack.enter_context(self._service(stack))
            self._stack = stack.pop_all()
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _database(self, stack: contextlib.ExitStack) -> str:
        url = self.server.create_database()
        stack.callback(self.server.drop_database, url)
        return url

    def _service(self, stack: contextlib.ExitStack) -> HostedService:
        database = self._database(stack)
        if self._node is None:
            return HostedService("/", database=database, options=ADMIN)
        vhost = self._node.add_vhost()
        stack.callback(self._node.delete_vhost, vhost)
        options = (*ADMIN, "--management", self._node.management_url)
        return HostedService(vhost, database=database, broker=self._node.url(), options=options)

    def clear(self) -> None:
        """Reset: nothing in doubt, empty tables, empty queues, no log."""
        for url in self.databases.values():
            with self.server.connection(url) as connection:
                connection.execute(  # sessions left by a failed test hold locks
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                found = connection.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                ).fetchall()
                for (gid,) in found:
                    connection.execute(f"ROLLBACK PREPARED '{gid}'".encode())
                connection.execute("DROP TABLE IF EXISTS entry")
                connection.execute("CREATE TABLE entry (id text PRIMARY KEY, amount integer)")
        for service in self.services.values():
            if not service.running:
                service.start()
            with contextlib.closing(DtxResource("q", service.url()).open()) as session:
                for xid in session.recover():
                    with contextlib.suppress(XAER_NOTA):  # the transaction manager of the last test may complete it
                        session.rollback(xid)
                session.handle.queue_declare("q", durable=True)
                session.handle.queue_purge("q")
        for path in self.log.parent.glob(f"{self.log.name}*"):
            path.unlink()

    @contextlib.contextmanager
    def channel(self, service: DtxService) -> Iterator[Any]:
        """A channel of a service."""
        connection = pika.BlockingConnection(pika.URLParameters(service.url()))
        try:
            yield connection.channel()
        finally:
            connection.close()

    def decide(self, name: str, decision: str) -> None:
        """Decide the only branch that a service has in doubt, as an operator.

        Args:
            name: the name of the service.
            decision: ``commit`` or ``rollback``.
        """
        (xid,) = [line.split()[1] for line in self.in_doubt() if line.startswith(f"{name} ")]
        service = self.services[name]
        service.run(decision, xid, "--vhost", service.vhost, "--yes", "--reason", "a test")

    def resources(self) -> list[Any]:
        """New resources: ``db1``, ``db2``, ``q1``, ``q2``."""
        found: list[Any] = [Pep249Resource(name, partial(psycopg.connect, url)) for name, url in self.databases.items()]
        return found + [DtxResource(name, service.url()) for name, service in self.services.items()]

    def manager(self, **options: Any) -> TransactionManager:
        """A new transaction manager of node ``n``, without background recovery and with interval 0 for orphans."""
        given: dict[str, Any] = {"node": "n", "log": self.log, "resources": self.resources(), "interval": 0.0}
        return TransactionManager(**{**given, "recover_every": None, **options})

    def rows(self, name: str) -> set[str]:
        """The ids in a table."""
        with self.server.connection(self.databases[name]) as connection:
            return {id_ for (id_,) in connection.execute("SELECT id FROM entry").fetchall()}

    def messages(self, name: str) -> list[str]:
        """Take all messages of a queue."""
        found: list[str] = []
        with self.channel(self.services[name]) as channel:
            while count := channel.queue_declare("q", passive=True).method.message_count:
                consumed = channel.consume("q", auto_ack=True, inactivity_timeout=_SILENCE)
                bodies = [body for _, _, body in itertools.islice(consumed, count)]
                channel.cancel()
                assert None not in bodies, f"{name} was said to have {count} messages, and does not deliver them"
                found += map(bytes.decode, bodies)
            while (body := channel.basic_get("q", auto_ack=True)[2]) is not None:
                found.append(body.decode())
        return found

    def in_doubt(self) -> list[str]:
        """The branches in doubt at all resources, as ``name gid`` or ``name xid``."""
        found = []
        for name, url in self.databases.items():
            with self.server.connection(url) as connection:
                query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                found += [f"{name} {gid}" for (gid,) in connection.execute(query).fetchall()]
        for name, service in self.services.items():
            resource = DtxResource(name, service.url())
            session = resource.open()
            found += [f"{name} {xid}" for xid in session.recover()]
            session.close()
        return found


def write(tx: Any, id_: str, *names: str) -> None:
    """Write a row or a message to the named resources in a transaction."""
    for name in names:
        handle = tx.enlist(name)
        if name.startswith("db"):
            handle.execute("INSERT INTO entry VALUES (%s, 1)", (id_,))
        else:
            handle.basic_publish("", "q", id_.encode(), PERSISTENT)


def new_id() -> str:
    """A unique id."""
    return secrets.token_hex(6)


class Died(BaseException):
    """The transaction is interrupted here."""


def left_at(tm: TransactionManager, point: CommitPoint, *names: str) -> Transaction:
    """A transaction whose commit is interrupted at *point*, as by Ctrl-C."""

    def reached(here: CommitPoint) -> None:
        if here is point:
            steps.arm(None)
            raise Died

    tx = tm.begin()
    write(tx, new_id(), *(names or ALL))
    steps.arm(reached)
    try:
        with pytest.raises(Died):
            tx.commit()
    finally:
        steps.arm(None)
    return tx

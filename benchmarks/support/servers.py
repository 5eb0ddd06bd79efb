"""The servers of benchmarks, with private ports and directories, which are removed at the end."""

import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import structlog

from tests.support.postgres import PostgresServer
from tests.support.processes import short_directory
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import Address
from tests.support.service import DtxService


class Servers:
    """RabbitMQ, and on demand PostgreSQL servers and dtx. Use as a context manager.

    Args:
        options: further options for ``dtx serve``.
        standalone: dtx has no broker.
    """

    def __init__(self, options: tuple[str, ...] = (), *, standalone: bool = False) -> None:
        self._options = options
        self._standalone = standalone
        self._rabbitmq: RabbitNode | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        # on SIGTERM, a benchmark also ends its servers and removes their directories
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            self.directory: Path = self._stack.enter_context(short_directory("bench"))
            if not self._standalone:
                _ = self.rabbitmq
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def rabbitmq(self) -> RabbitNode:
        """The RabbitMQ node, started at the first use."""
        if self._rabbitmq is None:
            self._rabbitmq = self._stack.enter_context(RabbitNode())
        return self._rabbitmq

    @property
    def broker(self) -> Address:
        """The address of RabbitMQ."""
        return Address.of(self.rabbitmq.url())

    def postgres(self, name: str, *, prepared_transactions: int = 0) -> PostgresServer:
        """Start a PostgreSQL as ``dtx serve`` runs it.

        Args:
            name: of its directory.
            prepared_transactions: limit of prepared transactions, with as many connections; dtx needs none.
        """
        server = self._stack.enter_context(PostgresServer(name))
        if prepared_transactions:
            with server.connection() as connection:
                connection.execute(f"ALTER SYSTEM SET max_prepared_transactions = {int(prepared_transactions)}")
                connection.execute(f"ALTER SYSTEM SET max_connections = {int(prepared_transactions) + 20}")
            server.stop()
            server.start()
        return server

    def dtx(self, postgres: PostgresServer, *, start: bool = True) -> DtxService:
        """Return ``dtx serve`` on a new database of *postgres*, started if *start*."""
        behind = () if self._standalone else ("--management", self.rabbitmq.management_url)
        service = DtxService(
            broker=None if self._standalone else self.rabbitmq.url(),
            database=postgres.create_database(),
            options=(*behind, "--log-level", "warning", *self._options),
            start=start,
        )
        return self._stack.enter_context(service)

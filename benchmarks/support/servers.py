"""The servers that benchmarks measure: private, on ports and in directories of their own, removed afterwards."""

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
        options: further words for ``dtx serve``.
        standalone: dtx itself is the broker, and no RabbitMQ is started for it.
    """

    def __init__(self, options: tuple[str, ...] = (), *, standalone: bool = False) -> None:
        self._options = options
        self._standalone = standalone
        self._rabbitmq: RabbitNode | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        # a benchmark that is told to end takes its servers and their directories with it
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
        """The node, started when it is first asked for."""
        if self._rabbitmq is None:
            self._rabbitmq = self._stack.enter_context(RabbitNode())
        return self._rabbitmq

    @property
    def broker(self) -> Address:
        """Straight to RabbitMQ."""
        return Address.of(self.rabbitmq.url())

    def postgres(self, name: str, *, prepared_transactions: int = 0) -> PostgresServer:
        """A PostgreSQL as ``dtx serve`` runs it.

        Args:
            name: of its directory.
            prepared_transactions: how many it allows, beyond the connections that go with them; dtx uses none.
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
        """``dtx serve`` on a fresh database of *postgres*."""
        behind = () if self._standalone else ("--management", self.rabbitmq.management_url)
        service = DtxService(
            broker=None if self._standalone else self.rabbitmq.url(),
            database=postgres.create_database(),
            options=(*behind, "--log-level", "warning", *self._options),
            start=start,
        )
        return self._stack.enter_context(service)

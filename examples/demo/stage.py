"""The servers of the demo: a private PostgreSQL, ``dtx serve`` as a child process, and the broker of BROKER, if set."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit

import pika
import psycopg
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, ProbableAccessDeniedError, ProbableAuthenticationError

from dtx import telemetry
from dtx.embedded.postgres import EmbeddedPostgres


class DemoError(Exception):
    """The demo cannot continue; the message is one sentence."""


class Stage:
    """A context manager that starts the servers and removes everything at its end."""

    def __init__(self) -> None:
        self.run = uuid.uuid4().hex[:8]
        self.queue = f"dtx-demo-{self.run}"
        self._broker = os.environ.get("BROKER") or None
        self._cleanup = ExitStack()
        self._dtx: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        logging.getLogger("pika").setLevel(logging.CRITICAL)
        telemetry.configure("error")
        try:
            self._set_up()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def has_broker(self) -> bool:
        """Whether the messages are in RabbitMQ; otherwise they are in dtx."""
        return self._broker is not None

    @property
    def keeper(self) -> str:
        """The name of the server that has the messages."""
        return "RabbitMQ" if self.has_broker else "dtx"

    def _set_up(self) -> None:
        if self.has_broker:
            self._declare_queue()
            self._cleanup.callback(self._delete_queue)
        self.directory = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="dtx-demo-")))
        # Under root, PostgreSQL runs as another user, which needs access to its data directory.
        self.directory.chmod(0o711)
        self.port = free_port()
        self.database_url = self._start_postgres()
        self._cleanup.callback(self._stop_dtx)
        self.start_dtx()
        if not self.has_broker:
            self._declare_queue()

    def _declare_queue(self) -> None:
        with self.channel_past_dtx() as channel:
            channel.queue_declare(self.queue, durable=True)

    def _start_postgres(self) -> str:
        """Start the database server of the demo. dtx starts another one for its log."""
        server = EmbeddedPostgres(self.directory / "bank")
        self._cleanup.callback(server.stop)
        with psycopg.connect(server.start(), autocommit=True) as database:
            # Off by default. The table of the demo needs it for two-phase commit; dtx does not need it.
            database.execute("ALTER SYSTEM SET max_prepared_transactions = 10")
        server.stop()
        return server.start()

    def start_dtx(self) -> None:
        """Start ``dtx serve``, without settings from the environment, and wait for its READY line."""
        listen, log = f"127.0.0.1:{self.port}", self.directory / "dtx.log"
        words = ["serve", "--no-admin", "--listen", listen, "--data-dir", str(self.directory / "dtx")]
        if self._broker is not None:
            words += ["--broker", self._broker]
        with log.open("ab") as errors:
            self._dtx = subprocess.Popen(
                [sys.executable, "-m", "dtx", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=self.directory,
                env={name: value for name, value in os.environ.items() if not name.startswith("DTX_")},
            )
        assert self._dtx.stdout is not None
        for line in self._dtx.stdout:
            if line.startswith("READY"):
                return
        raise DemoError(f"dtx did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def kill_dtx(self) -> None:
        """End it with kill -9."""
        assert self._dtx is not None
        self._dtx.kill()
        self._dtx.communicate()

    def _stop_dtx(self) -> None:
        if self._dtx is not None and self._dtx.poll() is None:
            self._dtx.terminate()
            try:
                self._dtx.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill_dtx()

    @property
    def dtx_url(self) -> str:
        """The URL of dtx for clients: that of the broker with another host and port."""
        broker = urlsplit(self._broker or "amqp://guest:guest@127.0.0.1/")
        user, password = unquote(broker.username or "guest"), unquote(broker.password or "guest")
        return f"amqp://{quote(user, safe='')}:{quote(password, safe='')}@127.0.0.1:{self.port}{broker.path}"

    def channel_past_dtx(self) -> "_Channel":
        """A channel to the broker, without dtx in between; without a broker, a channel to dtx."""
        url = self._broker or self.dtx_url
        try:
            return _Channel(pika.BlockingConnection(pika.URLParameters(url)))
        except (AMQPError, OSError, ValueError) as error:
            place = urlsplit(url).netloc.rpartition("@")[2]
            refused = isinstance(error, ProbableAuthenticationError | ProbableAccessDeniedError)
            raise DemoError(
                f"{'this user may not use RabbitMQ' if refused else 'no RabbitMQ answers'} at {place}: start one with "
                "`docker run -d -p 5672:5672 rabbitmq:4`, name yours with BROKER=amqp://user:password@host:port/, or "
                "leave BROKER out: then dtx keeps the messages itself"
            ) from None

    def _delete_queue(self) -> None:
        with self.channel_past_dtx() as channel:
            channel.queue_delete(self.queue)


class _Channel:
    """A channel whose connection closes with it."""

    def __init__(self, connection: pika.BlockingConnection) -> None:
        self._connection = connection

    def __enter__(self) -> BlockingChannel:
        return self._connection.channel()

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def free_port() -> int:
    """A free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""PostgreSQL servers of the tests' own: the embedded one, so its life cycle is exercised all the time."""

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from dtx.embedded.postgres import EmbeddedPostgres
from tests.support.processes import forget_log, short_directory, show_on_failure, wait_until


class PostgresServer:
    """A private server in a directory of its own.

    Use as a context manager. A server whose process is killed comes back by itself; ``stop`` and ``start`` keep it away
    for as long as a test wants. Its URLs stay the same.

    Args:
        name: for people.
        place: an empty directory for it; ``None``: one of its own, which is removed afterwards.
        in_memory: that one is in memory, if there is room.
    """

    def __init__(self, name: str = "pg", *, place: Path | None = None, in_memory: bool = False) -> None:
        self._name = name
        self._place = place
        self._in_memory = in_memory
        self._stack = contextlib.ExitStack()
        self._embedded: EmbeddedPostgres | None = None
        self._template: str | None = None
        self.url = ""

    def __enter__(self) -> Self:
        directory = self._place or self._stack.enter_context(short_directory(self._name, in_memory=self._in_memory))
        self._embedded = EmbeddedPostgres(directory / "data")
        self._stack.callback(self._embedded.stop)
        self.start()
        logs = sorted(directory.glob("data/postgres-log/*.log"))
        if logs:
            show_on_failure(f"PostgreSQL {self._name}", logs[-1])
            self._stack.callback(forget_log, f"PostgreSQL {self._name}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def embedded(self) -> EmbeddedPostgres:
        """The server's life cycle."""
        assert self._embedded is not None
        return self._embedded

    @property
    def data_dir(self) -> Path:
        """Its data directory."""
        return self.embedded.data_dir

    def start(self) -> None:
        """Start it (again)."""
        self.url = self.embedded.start()

    def stop(self) -> None:
        """Stop it in order; connections are closed."""
        self.embedded.stop()

    def kill9(self) -> None:
        """Kill the postmaster; it comes back by itself. Returns when it is dead."""
        pid = self._postmaster()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.embedded.pid != pid, what="the death of the postmaster")

    def restart(self) -> None:
        """Shut it down in order; it comes back by itself, at once. Returns when it is down."""
        pid = self._postmaster()
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: self.embedded.pid != pid, what="the end of the postmaster")

    def _postmaster(self) -> int:
        """Its process; after a kill it takes a moment until there is one again."""
        wait_until(lambda: self.embedded.pid is not None, what="a postmaster")
        pid = self.embedded.pid
        assert pid is not None
        return pid

    def wait_ready(self, *, seconds: float = 30.0) -> None:
        """Wait until it accepts connections."""

        def answers() -> bool:
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError:
                return False
            return True

        wait_until(answers, seconds=seconds, what="PostgreSQL's return")

    @contextlib.contextmanager
    def connection(self, url: str | None = None) -> Iterator[psycopg.Connection]:
        """A connection in autocommit mode."""
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            yield connection

    def pause(self) -> None:
        """Stop every process of the server (SIGSTOP): its sockets accept and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):  # somebody's session, which has ended since
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        postmaster = self.embedded.pid
        assert postmaster is not None
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [postmaster, *map(int, children)]

    def configure(self, **settings: str | int) -> None:
        """Change settings of the server (``ALTER SYSTEM``), and start it again with them."""
        with self.connection() as connection:
            for name, value in settings.items():
                connection.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        self.stop()
        self.start()

    def create_database(self, *, template: str = "template1") -> str:
        """A fresh database, a copy of *template*; returns its URL."""
        name = f"t_{secrets.token_hex(6)}"
        with self.connection() as connection:
            # FILE_COPY makes checkpoints and flushes caches; WAL_LOG is the quicker one for small databases
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY WAL_LOG").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return self.url_of(name)

    def create_migrated_database(self) -> str:
        """A fresh database with the log's tables in it, copied from one that was migrated once."""
        from dtx.db import migrate

        if self._template is None:
            url = self.create_database()
            migrate.upgrade(url)
            self._template = name_of(url)
        return self.create_database(template=self._template)

    def drop_database(self, url: str) -> None:
        """Drop it, with whoever is still connected."""
        with self.connection() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name_of(url))))

    def url_of(self, database: str) -> str:
        """The URL of another database of this server."""
        return self.url.replace("@/dtx?", f"@/{database}?")


def name_of(url: str) -> str:
    """The database that *url* names."""
    return str(conninfo_to_dict(url)["dbname"])

"""PostgreSQL servers for tests; they use the embedded one, so that its life cycle is tested too."""

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
    """A private server in its own directory.

    Use as a context manager. A killed server restarts by itself; ``stop`` and ``start`` stop it for as long as a test
    needs. Its URLs stay the same.

    Args:
        name: a name for logs and directories.
        place: an empty directory; ``None``: a new one, which is removed afterwards.
        in_memory: whether the new one is in memory, if there is room.
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
        """Shut it down; connections are closed."""
        self.embedded.stop()

    def kill9(self) -> None:
        """Kill the postmaster, which restarts by itself. Returns when the killed process has ended."""
        pid = self._postmaster()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.embedded.pid != pid, what="the death of the postmaster")

    def restart(self) -> None:
        """Shut it down; it restarts by itself at once. Returns when the old process has ended."""
        pid = self._postmaster()
        os.kill(pid, signal.SIGINT)
        wait_until(lambda: self.embedded.pid != pid, what="the end of the postmaster")

    def _postmaster(self) -> int:
        """The process id of the postmaster; waits for a new one after a kill."""
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
        """Stop every process of the server (SIGSTOP): its sockets accept connections, but nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue every process of the server."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):  # a session that has ended since
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        postmaster = self.embedded.pid
        assert postmaster is not None
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [postmaster, *map(int, children)]

    def configure(self, **settings: str | int) -> None:
        """Change settings of the server (``ALTER SYSTEM``) and restart it."""
        with self.connection() as connection:
            for name, value in settings.items():
                connection.execute(sql.SQL("ALTER SYSTEM SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
        self.stop()
        self.start()

    def create_database(self, *, template: str = "template1") -> str:
        """A fresh database, a copy of *template*; returns its URL."""
        name = f"t_{secrets.token_hex(6)}"
        with self.connection() as connection:
            # FILE_COPY makes checkpoints and flushes caches; WAL_LOG is faster for small databases
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY WAL_LOG").format(
                    sql.Identifier(name), sql.Identifier(template)
                )
            )
        return self.url_of(name)

    def create_migrated_database(self) -> str:
        """A fresh database with the tables of the log, copied from one that was migrated once."""
        from dtx.db import migrate

        if self._template is None:
            url = self.create_database()
            migrate.upgrade(url)
            self._template = name_of(url)
        return self.create_database(template=self._template)

    def drop_database(self, url: str) -> None:
        """Drop the database and its connections."""
        with self.connection() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name_of(url))))

    def url_of(self, database: str) -> str:
        """The URL of another database of this server."""
        return self.url.replace("@/dtx?", f"@/{database}?")


def name_of(url: str) -> str:
    """The database that *url* names."""
    return str(conninfo_to_dict(url)["dbname"])

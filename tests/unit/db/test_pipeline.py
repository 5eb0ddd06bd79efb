"""One exchange with PostgreSQL, in whatever pieces the answer arrives."""

import socket
from collections import deque
from contextlib import suppress
from typing import cast

import psycopg
import pytest
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus

from dtx.db.connections import Dsn
from dtx.db.pipeline import PipelineSession, Statement, StatementRefused


class Result:
    """libpq's result for one message of the server."""

    def __init__(self, status: ExecStatus) -> None:
        self.status = status
        self.error_message = b"no"

    def error_field(self, field: DiagnosticField) -> bytes:
        return b"23505" if field is DiagnosticField.SQLSTATE else b"no"


class Libpq:
    """A stub of libpq: each read of the socket consumes one item of *pieces*."""

    status = ConnStatus.OK
    backend_pid = 1

    def __init__(self, pieces: list[list[Result | None]]) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.socket = self._ours.fileno()
        self._pieces = deque(pieces)
        self._held: deque[Result | None] = deque()

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()

    def enter_pipeline_mode(self) -> None: ...

    def send_prepare(self, name: bytes, sql: bytes) -> None: ...

    def pipeline_sync(self) -> None: ...

    def flush(self) -> int:
        self._theirs.send(b"x")
        return 0

    def consume_input(self) -> None:
        if self._pieces:
            self._held.extend(self._pieces.popleft())
        if not self._pieces:
            with suppress(BlockingIOError):
                self._ours.recv(1, socket.MSG_DONTWAIT)  # not readable any more

    def is_busy(self) -> bool:
        return not self._held

    def get_result(self) -> Result | None:
        return self._held.popleft()


class Connection:
    """The connection that the session uses."""

    def __init__(self, pgconn: Libpq) -> None:
        self.pgconn = pgconn

    async def close(self) -> None:
        self.pgconn.close()


async def test_an_error_whose_end_comes_a_moment_later_is_answered() -> None:
    """Once libpq has read the data, the socket is not readable. The reader must take all results that libpq holds."""
    libpq = Libpq([[Result(ExecStatus.FATAL_ERROR), None], [Result(ExecStatus.PIPELINE_SYNC)]])
    connection = cast("psycopg.AsyncConnection", Connection(libpq))
    session = PipelineSession(connection, Dsn("postgresql://dtx@127.0.0.1/dtx"), answer_timeout=2)
    try:
        with pytest.raises(StatementRefused) as refused:
            await session.prepare([Statement(b"name", "SELECT 1")])
        assert refused.value.sqlstate == "23505"
    finally:
        await session.close()

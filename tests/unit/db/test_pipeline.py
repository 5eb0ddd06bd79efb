"""One exchange with PostgreSQL, whatever the network makes of its answer."""

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
    """What libpq makes of one message of the server."""

    def __init__(self, status: ExecStatus) -> None:
        self.status = status
        self.error_message = b"no"

    def error_field(self, field: DiagnosticField) -> bytes:
        return b"23505" if field is DiagnosticField.SQLSTATE else b"no"


class Libpq:
    """libpq as the session sees it: *pieces* is what each read finds on the socket, and it is read once."""

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
                self._ours.recv(1, socket.MSG_DONTWAIT)  # readable no more

    def is_busy(self) -> bool:
        return not self._held

    def get_result(self) -> Result | None:
        return self._held.popleft()


class Connection:
    """What the session is given."""

    def __init__(self, pgconn: Libpq) -> None:
        self.pgconn = pgconn

    async def close(self) -> None:
        self.pgconn.close()


async def test_an_error_whose_end_comes_a_moment_later_is_answered() -> None:
    """What libpq has read makes the socket readable no more: whoever reads must also take what is in it."""
    libpq = Libpq([[Result(ExecStatus.FATAL_ERROR), None], [Result(ExecStatus.PIPELINE_SYNC)]])
    connection = cast("psycopg.AsyncConnection", Connection(libpq))
    session = PipelineSession(connection, Dsn("postgresql://dtx@127.0.0.1/dtx"), answer_timeout=2)
    try:
        with pytest.raises(StatementRefused) as refused:
            await session.prepare([Statement(b"name", "SELECT 1")])
        assert refused.value.sqlstate == "23505"
    finally:
        await session.close()

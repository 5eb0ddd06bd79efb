"""One database session driven at libpq's own level: many statements, one round trip, one commit.

psycopg makes the connection; from then on the pipeline is ours, since what psycopg does for each statement
(adaptation, transformers, a wait with handlers of its own) costs more than PostgreSQL needs to run it. In pipeline
mode everything up to the sync is one implicit transaction: it commits at the sync when no statement failed.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Self
from uuid import UUID

import psycopg
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from dtx.log.connecting import Dsn, connect
from dtx.log.statement import Bound, Statement

_FAILED: Final = frozenset({ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE})
_BINARY: Final = [1] * 64
_KEEP_DURABLE: Final = """
SELECT set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
"""
# not simply "on": a server whose default is remote_apply promises more than that


class SessionLost(Exception):
    """The connection died: whether what was sent has committed is not known."""


class Refused(Exception):
    """PostgreSQL answered with an error: nothing was written.

    Args:
        sqlstate: its five characters.
        message: PostgreSQL's primary message.
    """

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(sqlstate, message)
        self.sqlstate = sqlstate
        self.message = message


class _Exchange:
    """Statements on their way, up to a sync, and who waits for what PostgreSQL makes of them."""

    __slots__ = ("answer", "error", "results")

    def __init__(self, answer: "asyncio.Future[list[PGresult]]") -> None:
        self.answer = answer
        self.results: list[PGresult] = []
        self.error: PGresult | None = None


class Session:
    """A pipelined connection; exchanges are answered in the order in which they were sent.

    Args:
        connection: freshly made, in autocommit; the session owns it from now on.
        dsn: for messages.
        answer_timeout: seconds after which a server that does not answer counts as gone.
    """

    def __init__(self, connection: psycopg.AsyncConnection, dsn: Dsn, *, answer_timeout: float) -> None:
        self._connection = connection
        self._pgconn: PGconn = connection.pgconn
        self._dsn = dsn
        self._answer_timeout = answer_timeout
        self._loop = asyncio.get_running_loop()
        self._socket = self._pgconn.socket
        self._exchanges: deque[_Exchange] = deque()
        self._patience_ends = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._alive = True
        self._lost = ""
        self._writing = False
        self.backend_pid = self._pgconn.backend_pid
        self._pgconn.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self._readable)

    @classmethod
    async def connect(
        cls,
        dsn: Dsn,
        statements: Sequence[Statement],
        *,
        settings: dict[str, str],
        timeout: float,
        answer_timeout: float,
        durable: bool,
    ) -> Self:
        """Connect, set *settings* and prepare *statements*.

        Args:
            dsn: the database.
            statements: the only ones that the session will run.
            settings: of PostgreSQL, by name.
            timeout: seconds for the connection.
            answer_timeout: see the class.
            durable: never answer before the commit is on disk, whatever the defaults become later.

        Raises:
            psycopg.Error, OSError: no connection.
        """
        connection = await connect(dsn, settings, timeout=timeout)
        try:
            if durable:
                await connection.execute(_KEEP_DURABLE)
            session = cls(connection, dsn, answer_timeout=answer_timeout)
        except BaseException:
            await connection.close()
            raise
        try:
            await session.prepare(statements)
        except BaseException:
            await session.close()
            raise
        return session

    @property
    def alive(self) -> bool:
        """False once the connection is known to be dead."""
        return self._alive

    async def prepare(self, statements: Sequence[Statement]) -> None:
        """Prepare them in one round trip.

        Raises:
            Refused, SessionLost.
        """
        for statement in statements:
            self._pgconn.send_prepare(statement.name, statement.sql.encode())
        await self._end_exchange()

    async def run(self, statements: Sequence[Bound]) -> list[PGresult]:
        """Execute in one round trip and one transaction; returns after its commit.

        Args:
            statements: what to execute.

        Raises:
            Refused: nothing was written.
            SessionLost: not known.
        """
        return await self.send(statements)

    def send(self, statements: Sequence[Bound]) -> "asyncio.Future[list[PGresult]]":
        """Send what is to be executed in one transaction, behind whatever is under way and whether or not that commits.

        Args:
            statements: what to execute.

        Returns:
            What :meth:`run` returns or raises.
        """
        if self._alive:
            send = self._pgconn.send_query_prepared
            try:
                for statement, parameters in statements:
                    send(statement.name, parameters, _BINARY[: len(parameters)], 1)
            except psycopg.Error as error:
                self._lose(self._dsn.explain(error))
        return self._end_exchange()

    def _end_exchange(self) -> "asyncio.Future[list[PGresult]]":
        """What was handed to libpq is one transaction: send it."""
        exchange = _Exchange(self._loop.create_future())
        if not self._alive:
            exchange.answer.set_exception(SessionLost(self._lost or "the connection to the database is closed"))
            return exchange.answer
        if not self._exchanges:
            self._patience_ends = self._loop.time() + self._answer_timeout
        self._exchanges.append(exchange)
        if self._watch is None:
            self._watch = self._loop.call_at(self._patience_ends, self._overdue)
        try:
            self._pgconn.pipeline_sync()
        except psycopg.Error as error:
            self._lose(self._dsn.explain(error))
        else:
            self._flush()
        return exchange.answer

    def _overdue(self) -> None:
        """One timer watches all exchanges: to make and cancel one for each would cost more than to look again."""
        self._watch = None
        if self._exchanges:
            if self._loop.time() >= self._patience_ends:
                self._lose("the database does not answer")
            else:
                self._watch = self._loop.call_at(self._patience_ends, self._overdue)

    def _flush(self) -> None:
        """Send what libpq holds; where the socket takes no more, go on when it does."""
        try:
            more = self._pgconn.flush() != 0
        except psycopg.Error as error:
            self._lose(self._dsn.explain(error))
            return
        if more and not self._writing:
            self._writing = True
            self._loop.add_writer(self._socket, self._flush)
        elif not more and self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        asked = bool(self._exchanges)
        try:
            self._read()
            if not asked or (self._exchanges and self._exchanges[0].error is not None):
                # A server that ends with a request unread leaves last words and an error on the socket. uvloop tells of
                # both at once, and never again: what has come is read to its end.
                self._read()
        except psycopg.Error as error:
            self._lose(self._dsn.explain(error))
        else:
            if self._pgconn.status != ConnStatus.OK:
                error_result = self._exchanges[0].error if self._exchanges else None
                self._lose("the server closed the connection" if error_result is None else self._message(error_result))

    def _read(self) -> None:
        """Take what the socket has and every result in it: what libpq holds unparsed makes no socket readable again."""
        pgconn = self._pgconn
        pgconn.consume_input()
        ended = False
        while self._exchanges and not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if ended:
                    break  # nothing is under way
                ended = True  # of one statement; the next one's result follows
                continue
            ended = False
            exchange = self._exchanges[0]
            if result.status == ExecStatus.PIPELINE_SYNC:
                self._answer(self._exchanges.popleft())
                if self._exchanges:  # what is next has only now begun
                    self._patience_ends = self._loop.time() + self._answer_timeout
            elif result.status in _FAILED:
                exchange.error = exchange.error or result
            else:
                exchange.results.append(result)

    def _answer(self, exchange: _Exchange) -> None:
        """What was sent is done."""
        answer, error = exchange.answer, exchange.error
        if answer.done():
            return  # who waited has gone
        if error is None:
            answer.set_result(exchange.results)
            return
        code = error.error_field(DiagnosticField.SQLSTATE) or b"XX000"
        answer.set_exception(Refused(code.decode(), self._message(error)))

    def _message(self, result: PGresult) -> str:
        message = result.error_field(DiagnosticField.MESSAGE_PRIMARY) or result.error_message
        return self._dsn.explain(Exception(message.decode("utf-8", "replace")))

    def _lose(self, why: str) -> None:
        if self._alive:
            self._alive = False
            self._lost = why
            self._loop.remove_reader(self._socket)
            if self._writing:
                self._loop.remove_writer(self._socket)
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._exchanges:
            answer = self._exchanges.popleft().answer
            if not answer.done():
                answer.set_exception(SessionLost(why))

    async def close(self) -> None:
        """Close the connection; harmless when it is closed already."""
        self._lose("closed")
        await self._connection.close()


def session_settings(role: str, instance: UUID, *, statement_timeout: float) -> dict[str, str]:
    """What every session of the log sets, whatever the server's, database's or role's defaults are.

    Args:
        role: of the session, for ``pg_stat_activity``.
        instance: of this process; with *role* it names the session's ``application_name``.
        statement_timeout: seconds.
    """
    return {
        "application_name": application_name(role, instance),
        "client_encoding": "UTF8",
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "statement_timeout": f"{round(statement_timeout * 1000)}ms",
        "idle_in_transaction_session_timeout": f"{round(statement_timeout * 1000)}ms",
        "lock_timeout": f"{round(statement_timeout * 1000)}ms",
        "TimeZone": "UTC",
        "DateStyle": "ISO",
    }


def application_name(role: str, instance: UUID) -> str:
    """How a session shows itself in ``pg_stat_activity``; PostgreSQL keeps 63 octets."""
    return f"dtx {role} {instance}"

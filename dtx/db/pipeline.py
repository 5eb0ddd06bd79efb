"""Pipelines: set-based statements with binary parameters, and the session that runs them, many in one round trip.

Plain SQL, not SQLAlchemy: these statements run thousands of times a second, are prepared once per connection, and take
the arrays of :mod:`dtx.db.columns`. Each statement has a second form for one row, whose values are the parameters,
without arrays. A single client always writes one row, and the arrays would be a third of PostgreSQL's work for it. If
such a statement begins a group, it can also contain the check that the group needs, which saves one statement.

psycopg makes the connection. Then this module runs the pipeline: psycopg's work for each statement (adaptation,
transformers, waiting) costs more than PostgreSQL's execution. In pipeline mode everything up to the sync is one
implicit transaction: it commits at the sync if no statement failed.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from operator import call
from typing import Any, Final, Self

import psycopg
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from dtx.db.columns import Field, int8
from dtx.db.connections import Dsn, connect

CONFLICT: Final = "DTX01"
"""SQLSTATE that is raised when a row was not in the expected state and version."""
MAX_STATEMENT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of bodies in one statement. PostgreSQL holds each body three times while it reads them. Its limit is 1 GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One prepared statement.

    Args:
        name: name of the prepared statement.
        sql: ``$1`` is the resource manager, ``$2`` a count or epoch; then one array for each column, which
            :func:`unnest` expands to rows.
        columns: of the arrays.
        proof: an expression of ``$1`` and ``$2``, for a statement that may be the first of a group. Such a statement
            has a form that fails unless the expression is true.
    """

    name: bytes
    sql: str
    columns: tuple[Field, ...] = ()
    proof: str = ""
    of_one: "Statement | None" = field(init=False, default=None)
    """The form for one row, whose values are the parameters; ``None`` for a statement without rows."""
    proving: "Statement | None" = field(init=False, default=None)
    """The form for one row with the proof, to which ``$2`` belongs; ``None`` without a proof."""
    cells: tuple[Callable[[Any], bytes | None], ...] = field(init=False, default=())
    """By column, the encoders of one value."""
    arrays: tuple[Callable[[Sequence[Any]], bytes], ...] = field(init=False, default=())
    """By column, the encoders of an array."""

    def __post_init__(self) -> None:
        rows = unnest(self.columns)
        object.__setattr__(self, "cells", tuple([column.encoder.cell for column in self.columns]))
        object.__setattr__(self, "arrays", tuple([column.encoder.array for column in self.columns]))
        if self.columns and rows in self.sql:
            # MATERIALIZED expands the arrays once for all readers; one row needs no such barrier.
            sql = self.sql.replace(rows, _one(self.columns)).replace(" AS MATERIALIZED ", " AS NOT MATERIALIZED ")
            object.__setattr__(self, "of_one", Statement(self.name + b"_of_one", sql, self.columns))
            if self.proof:
                proving = Statement(self.name + b"_proving", _proving(sql, self.proof), self.columns)
                object.__setattr__(self, "proving", proving)

    def bind(self, rm: bytes, number: int, rows: Sequence[Sequence[Any]]) -> "Bound":
        """The statement with its parameters.

        Args:
            rm: the resource manager (``$1``).
            number: a count or epoch (``$2``).
            rows: values in the order of the columns.
        """
        if len(rows) == 1 and self.of_one is not None:
            return self.of_one, self._parameters(rm, number, rows[0])
        columns = zip(self.arrays, zip(*rows, strict=True), strict=True)
        return self, [rm, int8(number), *starmap(call, columns)]

    def bind_proving(self, rm: bytes, number: int, row: Sequence[Any]) -> "Bound":
        """The form with the proof, and its parameters; *number* is the ``$2`` of the proof."""
        assert self.proving is not None
        return self.proving, self._parameters(rm, number, row)

    def _parameters(self, rm: bytes, number: int, row: Sequence[Any]) -> list[bytes | None]:
        return [rm, int8(number), *map(call, self.cells, row)]


Bound = tuple[Statement, Sequence[bytes | None]]


def both(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """All forms of *statements*, to be prepared: for many rows, for one row, and for one row with the proof."""
    forms = [form for statement in statements for form in (statement, statement.of_one, statement.proving)]
    return tuple(form for form in forms if form is not None)


def unnest(columns: Iterable[Field], first: int = 3) -> str:
    """SQL that expands the arrays of *columns* to rows ``u``; *first* is the number of the first parameter."""
    columns = list(columns)
    arrays = ", ".join(f"${number}::{column.encoder.type}[]" for number, column in enumerate(columns, first))
    return f"unnest({arrays}) AS u({_names(columns)})"


def _one(columns: Iterable[Field], first: int = 3) -> str:
    """As :func:`unnest` for one row: PostgreSQL's planner inlines the values."""
    cells = ", ".join(
        f"${number}::{column.encoder.type} AS {column.name}" for number, column in enumerate(columns, first)
    )
    return f"(SELECT {cells}) AS u"


def _proving(sql: str, proof: str) -> str:
    """*sql*, a statement for one row, extended so that it fails unless *proof* is true.

    Raises:
        ValueError: *sql* is neither an insert of the form of :func:`insert` nor counts its changes.
    """
    counted = "SELECT dtx.require((SELECT count(*)"
    if sql.startswith("INSERT INTO") or sql.count(counted) == 0:
        inserts = re.fullmatch(r"(.*SELECT \$1::text, .* FROM .* WHERE )\$2::bigint >= 0( .*)?", sql)
        if inserts is None:
            raise ValueError(f"cannot prove anything: {sql}")
        return f"{inserts[1]}{proof}{inserts[2] or ''}"
    # PostgreSQL computes columns in their order: the proof comes first
    return sql.replace(counted, f"SELECT {proof}, {counted.removeprefix('SELECT ')}").replace("= $2::bigint, ", "= 1, ")


def _names(columns: Iterable[Field]) -> str:
    return ", ".join(column.name for column in columns)


def insert(table: str, columns: tuple[Field, ...], conflict: str = "") -> str:
    """SQL that inserts rows of the resource manager into *table*."""
    # the condition uses $2 only to give it a type: a parameter without one is an error
    return (
        f"INSERT INTO dtx.{table} (rm, {_names(columns)}) "
        f"SELECT $1::text, u.* FROM {unnest(columns)} WHERE $2::bigint >= 0 {conflict}"
    )


def expect_all(change: str, what: str) -> str:
    """SQL for *change*, which returns each changed row, and a check that there were ``$2`` of them.

    Args:
        change: a statement with RETURNING.
        what: message of the error.
    """
    return (
        f"WITH done AS ({change}) SELECT dtx.require((SELECT count(*) FROM done) = $2::bigint, '{CONFLICT}', '{what}')"
    )


def in_pieces(rows: list[Any], body: int) -> Iterable[list[Any]]:
    """Splits rows into pieces with ``MAX_STATEMENT_BYTES`` in the column *body* at most, or of one row."""
    start = size = 0
    for index, row in enumerate(rows):
        length = len(row[body])
        if size + length > MAX_STATEMENT_BYTES and index > start:
            yield rows[start:index]
            start, size = index, 0
        size += length
    yield rows[start:]


# In Python 3.11 an access to an enum member costs as much as a call, and these are read for each result.
_SYNC: Final = int(ExecStatus.PIPELINE_SYNC)
_FAILED: Final = frozenset((int(ExecStatus.FATAL_ERROR), int(ExecStatus.BAD_RESPONSE)))
_OK: Final = int(ConnStatus.OK)
_BINARY: Final = [1] * 64
_KEEP_DURABLE: Final = """
SELECT set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
"""
# not simply "on": a default of remote_apply is stronger


class SessionLost(Exception):
    """The connection is lost. Whether pending statements have committed is not known."""


class StatementRefused(Exception):
    """PostgreSQL answered with an error: nothing was written.

    Args:
        sqlstate: five characters.
        message: PostgreSQL's primary message.
        constraint: name of the constraint that a row breaks; empty for other errors.
    """

    def __init__(self, sqlstate: str, message: str, constraint: str = "") -> None:
        super().__init__(sqlstate, message)
        self.sqlstate = sqlstate
        self.message = message
        self.constraint = constraint


class _Exchange:
    """Statements that were sent, up to a sync, and the future for their results."""

    __slots__ = ("answer", "error", "results")

    def __init__(self, answer: "asyncio.Future[list[PGresult]]") -> None:
        self.answer = answer
        self.results: list[PGresult] = []
        self.error: PGresult | None = None


class PipelineSession:
    """A pipelined connection; exchanges are answered in the order in which they were sent.

    Args:
        connection: new, in autocommit; the session owns it from now on.
        dsn: for messages.
        answer_timeout: seconds without an answer after which the connection counts as lost.
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
            statements: all that the session will run.
            settings: of PostgreSQL, by name.
            timeout: seconds for the connection.
            answer_timeout: see the class.
            durable: commits are on disk before they are answered, even if the server's default becomes ``off``.

        Raises:
            psycopg.Error, OSError: no connection.
            StatementRefused, SessionLost: the statements could not be prepared.
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
        """Whether the connection is not known to be lost."""
        return self._alive

    async def prepare(self, statements: Sequence[Statement]) -> None:
        """Prepare *statements* in one round trip.

        Raises:
            StatementRefused, SessionLost.
        """
        for statement in statements:
            self._pgconn.send_prepare(statement.name, statement.sql.encode())
        await self._end_exchange()

    def send(self, statements: Sequence[Bound]) -> "asyncio.Future[list[PGresult]]":
        """Send statements that run in one transaction, after the pending ones, whether or not those commit.

        Args:
            statements: with their parameters.

        Returns:
            A future for their results after the commit. It raises StatementRefused if nothing was written, and
            SessionLost if that is not known.
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
        """Send the statements that libpq has as one transaction."""
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
        """One timer watches all exchanges: a timer for each would cost more than another check."""
        self._watch = None
        if self._exchanges:
            if self._loop.time() >= self._patience_ends:
                self._lose("the database does not answer")
            else:
                self._watch = self._loop.call_at(self._patience_ends, self._overdue)

    def _flush(self) -> None:
        """Send libpq's output. If the socket is full, continue when it is writable."""
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
                # A server that ends with an unread request leaves a message and an error on the socket. uvloop reports
                # both at once, and only once: so read to the end.
                self._read()
        except psycopg.Error as error:
            self._lose(self._dsn.explain(error))
        else:
            if self._pgconn.status != _OK:
                error_result = self._exchanges[0].error if self._exchanges else None
                self._lose("the server closed the connection" if error_result is None else self._message(error_result))

    def _read(self) -> None:
        """Read the socket and all results: data that libpq has not parsed does not make the socket readable again."""
        pgconn, exchanges = self._pgconn, self._exchanges
        pgconn.consume_input()
        is_busy, get_result = pgconn.is_busy, pgconn.get_result
        ended = False
        while exchanges and not is_busy():
            result = get_result()
            if result is None:
                if ended:
                    break  # nothing is pending
                ended = True  # the end of one statement; the result of the next one follows
                continue
            ended = False
            status = result.status
            if status == _SYNC:
                self._answer(exchanges.popleft())
                if exchanges:  # the next exchange begins only now
                    self._patience_ends = self._loop.time() + self._answer_timeout
            elif status in _FAILED:
                exchange = exchanges[0]
                exchange.error = exchange.error or result
            else:
                exchanges[0].results.append(result)

    def _answer(self, exchange: _Exchange) -> None:
        """Give the caller the results of an exchange, or its error."""
        answer, error = exchange.answer, exchange.error
        if answer.done():
            return  # cancelled by the caller
        if error is None:
            answer.set_result(exchange.results)
            return
        code = error.error_field(DiagnosticField.SQLSTATE) or b"XX000"
        constraint = error.error_field(DiagnosticField.CONSTRAINT_NAME) or b""
        answer.set_exception(StatementRefused(code.decode(), self._message(error), constraint.decode()))

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
        """Close the connection. Idempotent."""
        self._lose("closed")
        await self._connection.close()

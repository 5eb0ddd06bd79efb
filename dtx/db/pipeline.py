"""Pipelines: set-based statements with binary parameters, and the session that runs them, many in one round trip.

Plain SQL, not SQLAlchemy: these statements run thousands of times a second, are prepared once per connection, and take
the arrays of :mod:`dtx.db.columns`. What has one row is another plan of the same statement: its values are parameters,
and no arrays are taken apart. A client that is alone has one row of everything, and that is a third of PostgreSQL's
work for it. Where such a statement begins a group, it can prove what the group demands as well: a statement less for
PostgreSQL to begin and to end, and to answer.

psycopg makes the connection; from then on the pipeline is ours, since what psycopg does for each statement
(adaptation, transformers, a wait with handlers of its own) costs more than PostgreSQL needs to run it. In pipeline
mode everything up to the sync is one implicit transaction: it commits at the sync when no statement failed.
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
"""SQLSTATE raised when a row was not in the expected state and version."""
MAX_STATEMENT_BYTES: Final = 32 * 1024 * 1024
"""Bodies in one statement: PostgreSQL holds each three times while it reads them, and takes no message of 1 GiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One prepared statement.

    Args:
        name: under which it is prepared.
        sql: with ``$1`` the resource manager, ``$2`` a count or epoch, then one array for each column, which
            :func:`unnest` makes rows of.
        columns: of the arrays.
        proof: an expression of ``$1`` and ``$2``, where it may be the only statement of a group, or the first: then it
            has a form that fails unless this is true.
    """

    name: bytes
    sql: str
    columns: tuple[Field, ...] = ()
    proof: str = ""
    of_one: "Statement | None" = field(init=False, default=None)
    """The same for one row, whose values are the parameters; ``None`` where there are no rows."""
    proving: "Statement | None" = field(init=False, default=None)
    """That with the proof, whose number ``$2`` is; ``None`` without one."""
    cells: tuple[Callable[[Any], bytes | None], ...] = field(init=False, default=())
    """The encoders of one row's values;"""
    arrays: tuple[Callable[[Sequence[Any]], bytes], ...] = field(init=False, default=())
    """of those of many, by column."""

    def __post_init__(self) -> None:
        rows = unnest(self.columns)
        object.__setattr__(self, "cells", tuple([column.encoder.cell for column in self.columns]))
        object.__setattr__(self, "arrays", tuple([column.encoder.array for column in self.columns]))
        if self.columns and rows in self.sql:
            # Arrays are taken apart once, wherever their rows are read; one row is parameters in every place.
            sql = self.sql.replace(rows, _one(self.columns)).replace(" AS MATERIALIZED ", " AS NOT MATERIALIZED ")
            object.__setattr__(self, "of_one", Statement(self.name + b"_of_one", sql, self.columns))
            if self.proof:
                proving = Statement(self.name + b"_proving", _proving(sql, self.proof), self.columns)
                object.__setattr__(self, "proving", proving)

    def bind(self, rm: bytes, number: int, rows: Sequence[Sequence[Any]]) -> "Bound":
        """The statement with its parameters, from rows of values in the order of the columns."""
        if len(rows) == 1 and self.of_one is not None:
            return self.of_one, self._parameters(rm, number, rows[0])
        columns = zip(self.arrays, zip(*rows, strict=True), strict=True)
        return self, [rm, int8(number), *starmap(call, columns)]

    def bind_proving(self, rm: bytes, number: int, row: Sequence[Any]) -> "Bound":
        """The form with the proof, which *number* is for."""
        assert self.proving is not None
        return self.proving, self._parameters(rm, number, row)

    def _parameters(self, rm: bytes, number: int, row: Sequence[Any]) -> list[bytes | None]:
        return [rm, int8(number), *map(call, self.cells, row)]


Bound = tuple[Statement, Sequence[bytes | None]]


def both(statements: Iterable[Statement]) -> tuple[Statement, ...]:
    """*statements* as they are prepared: for many rows, for one, and for one that begins a group."""
    forms = [form for statement in statements for form in (statement, statement.of_one, statement.proving)]
    return tuple(form for form in forms if form is not None)


def unnest(columns: Iterable[Field], first: int = 3) -> str:
    """The arrays of *columns* as rows ``u``."""
    columns = list(columns)
    arrays = ", ".join(f"${number}::{column.encoder.type}[]" for number, column in enumerate(columns, first))
    return f"unnest({arrays}) AS u({_names(columns)})"


def _one(columns: Iterable[Field], first: int = 3) -> str:
    """As :func:`unnest`, where each column has one value: PostgreSQL puts it in its place when it plans."""
    cells = ", ".join(
        f"${number}::{column.encoder.type} AS {column.name}" for number, column in enumerate(columns, first)
    )
    return f"(SELECT {cells}) AS u"


def _proving(sql: str, proof: str) -> str:
    """*sql*, a statement for one row, that fails unless *proof* holds, whatever rows it finds.

    Raises:
        ValueError: *sql* neither inserts what :func:`insert` does nor counts what it has done.
    """
    counted = "SELECT dtx.require((SELECT count(*)"
    if sql.startswith("INSERT INTO") or sql.count(counted) == 0:
        inserts = re.fullmatch(r"(.*SELECT \$1::text, .* FROM .* WHERE )\$2::bigint >= 0( .*)?", sql)
        if inserts is None:
            raise ValueError(f"cannot prove anything: {sql}")
        return f"{inserts[1]}{proof}{inserts[2] or ''}"
    # columns are computed in their order
    return sql.replace(counted, f"SELECT {proof}, {counted.removeprefix('SELECT ')}").replace("= $2::bigint, ", "= 1, ")


def _names(columns: Iterable[Field]) -> str:
    return ", ".join(column.name for column in columns)


def insert(table: str, columns: tuple[Field, ...], conflict: str = "") -> str:
    """An insert of rows into *table*, which all belong to the resource manager."""
    # $2 is not needed here, but a parameter without a type is an error
    return (
        f"INSERT INTO dtx.{table} (rm, {_names(columns)}) "
        f"SELECT $1::text, u.* FROM {unnest(columns)} WHERE $2::bigint >= 0 {conflict}"
    )


def expect_all(change: str, what: str) -> str:
    """*change*, which returns each row that it changed, and the proof that there were as many as expected."""
    return (
        f"WITH done AS ({change}) SELECT dtx.require((SELECT count(*) FROM done) = $2::bigint, '{CONFLICT}', '{what}')"
    )


def in_pieces(rows: list[Any], body: int) -> Iterable[list[Any]]:
    """Rows, whose column *body* is their weight, in statements of ``MAX_STATEMENT_BYTES`` at most, or of one row."""
    start = size = 0
    for index, row in enumerate(rows):
        length = len(row[body])
        if size + length > MAX_STATEMENT_BYTES and index > start:
            yield rows[start:index]
            start, size = index, 0
        size += length
    yield rows[start:]


# Reading a member of an enum costs as much as a call in Python 3.11, and these are read for each result.
_SYNC: Final = int(ExecStatus.PIPELINE_SYNC)
_FAILED: Final = frozenset((int(ExecStatus.FATAL_ERROR), int(ExecStatus.BAD_RESPONSE)))
_OK: Final = int(ConnStatus.OK)
_BINARY: Final = [1] * 64
_KEEP_DURABLE: Final = """
SELECT set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
"""
# not simply "on": a server whose default is remote_apply promises more than that


class SessionLost(Exception):
    """The connection died: whether what was sent has committed is not known."""


class StatementRefused(Exception):
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
    """Statements on their way, up to a sync, and the future of the caller that waits for their results."""

    __slots__ = ("answer", "error", "results")

    def __init__(self, answer: "asyncio.Future[list[PGresult]]") -> None:
        self.answer = answer
        self.results: list[PGresult] = []
        self.error: PGresult | None = None


class PipelineSession:
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

    def send(self, statements: Sequence[Bound]) -> "asyncio.Future[list[PGresult]]":
        """Send what is to be executed in one transaction, behind whatever is under way and whether or not that commits.

        Args:
            statements: what to execute.

        Returns:
            Their results, after the commit. Refused: nothing was written. SessionLost: not known.
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
            if self._pgconn.status != _OK:
                error_result = self._exchanges[0].error if self._exchanges else None
                self._lose("the server closed the connection" if error_result is None else self._message(error_result))

    def _read(self) -> None:
        """Take what the socket has and every result in it: what libpq holds unparsed makes no socket readable again."""
        pgconn, exchanges = self._pgconn, self._exchanges
        pgconn.consume_input()
        is_busy, get_result = pgconn.is_busy, pgconn.get_result
        ended = False
        while exchanges and not is_busy():
            result = get_result()
            if result is None:
                if ended:
                    break  # nothing is under way
                ended = True  # of one statement; the next one's result follows
                continue
            ended = False
            status = result.status
            if status == _SYNC:
                self._answer(exchanges.popleft())
                if exchanges:  # what is next has only now begun
                    self._patience_ends = self._loop.time() + self._answer_timeout
            elif status in _FAILED:
                exchange = exchanges[0]
                exchange.error = exchange.error or result
            else:
                exchanges[0].results.append(result)

    def _answer(self, exchange: _Exchange) -> None:
        """What was sent is done."""
        answer, error = exchange.answer, exchange.error
        if answer.done():
            return  # the caller that waited has gone
        if error is None:
            answer.set_result(exchange.results)
            return
        code = error.error_field(DiagnosticField.SQLSTATE) or b"XX000"
        answer.set_exception(StatementRefused(code.decode(), self._message(error)))

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

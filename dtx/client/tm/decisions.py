"""The log of decisions: the records that must be durable before a branch gets its decision. Writers share an fsync.

Theory of operation. Presumed abort: only a decision to commit is written before the branches get it, and transactions
that are not in the log are rolled back. The primary key of a row is the gtrid, so each transaction has one decision.
Before recovery rolls an orphan back, it inserts ``rollback`` under the same key; the second insert finds the row of the
first. So a process that only seemed dead, because it was stopped or its clock was wrong, cannot commit a transaction
that recovery rolled back. Nor can a commit that was delayed in a lost connection take effect afterwards.

    decision   gtrid (primary key), format_id, node, decision ('commit' or 'rollback'), at, finished (null: not yet),
               resources (JSON: the names of the resources with a branch that votes, which are the bquals),
               recoveries (number of recoveries of its branches)
    heuristic  gtrid, resource (together the primary key), outcome, decision, reason, at, forgotten (null: not yet)

:class:`DecisionLog` has the statements and their order. :mod:`dtx.client.tm.databases` (SQLite) and
:mod:`dtx.client.tm.postgres_log` have connections, transactions, the form of times, and the tables.
"""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import wraps
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, Self, TypeVar

from dtx.client.tm.errors import HeuristicReport, LogFailed
from dtx.xa.codes import Heuristic

_P = ParamSpec("_P")
_R = TypeVar("_R")
_L = TypeVar("_L", bound="DecisionLog")
_FINISHED_KEPT: Final = 200
"""The number of finished decisions that may wait for the next write. They need no fsync of their own."""
_COLUMNS: Final = "gtrid, format_id, node, decision, at, finished, resources, recoveries"
_KNOWN_AT_ONCE: Final = 400
"""Keys in one query: old versions of SQLite have a limit of 999 values."""


class Decision(StrEnum):
    """The decision about a transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One row of the table ``decision``. The module docstring explains the columns."""

    gtrid: bytes
    format_id: int
    node: str
    decision: Decision
    at: datetime
    finished: datetime | None = None
    resources: tuple[str, ...] = ()
    recoveries: int = 0


@dataclass(slots=True)
class DecisionEntry:
    """A decision that waits to be written."""

    row: DecisionRow
    logged: Decision | None = None
    """The decision in the log afterwards. If two processes decide, the first decision is valid."""
    error: Exception | None = None
    settled: bool = False


@dataclass(slots=True)
class Batch:
    """The contents of one transaction of the log."""

    entries: list[DecisionEntry] = field(default_factory=list)
    finished: list[tuple[bytes, datetime]] = field(default_factory=list)


class Statements:
    """An open transaction of the log. Statements have ``%s`` for values, and ``tm.`` before the names of tables.

    Args:
        database: the connection.
        tables: the text that replaces ``tm.``.
        placeholder: the text that replaces ``%s``.
        sync: a function that waits for pending statements. psycopg's pipeline delays statements without rows.
    """

    def __init__(
        self, database: Any, *, tables: str, placeholder: str, sync: Callable[[], object] = lambda: None
    ) -> None:
        self._database = database
        self._tables = tables
        self._placeholder = placeholder
        self._sync = sync

    def _sql(self, statement: str) -> str:
        return statement.replace("tm.", self._tables).replace("%s", self._placeholder)

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a query and return all its rows."""
        return self._database.execute(self._sql(statement), values).fetchall()  # type: ignore[no-any-return]

    def change(self, statement: str, values: Sequence[object] = ()) -> int:
        """Run a statement and return the number of rows that it changed."""
        cursor = self._database.execute(self._sql(statement), values)
        self._sync()
        return cursor.rowcount  # type: ignore[no-any-return]

    def each(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """Run a statement with one row of values after the other."""
        if values:
            with closing(self._database.cursor()) as cursor:
                cursor.executemany(self._sql(statement), values)


def repeat_once(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """Repeat a method once on a new connection if its connection was lost: the server may have restarted.

    All methods of the log may be repeated: if the first call has written a decision, the second finds it.
    """

    @wraps(method)
    def retried(log: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(log, *args, **kwargs)
        except LogFailed as error:
            if not log.lost(error):
                raise
        return method(log, *args, **kwargs)

    return retried


class DecisionLog(ABC):
    """A log of decisions in two tables of a database. Several threads may use it, and several processes of one node.

    Every method raises :class:`~dtx.client.tm.errors.LogFailed` if the log cannot be used. After such an error of
    :meth:`decide` or :meth:`fence` it is *not known* whether the row was written; :meth:`fence` finds out.

    Args:
        where: the database, for messages.
    """

    failure: ClassVar[type[Exception]]
    """The base of the exceptions of the driver."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._database: Any = None
        self._queue = threading.Lock()
        self._waiting = Batch()
        self._writing = threading.RLock()

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, row: DecisionRow) -> Decision:
        """Make a decision durable, unless there is one.

        Args:
            row: the decision.

        Returns:
            The valid decision: that of *row*, or an earlier one of another process.
        """
        entry = DecisionEntry(row)
        with self._queue:
            self._waiting.entries.append(entry)
        with self._writing:  # the first thread here writes for all threads that wait: one fsync for the group
            if not entry.settled:
                self._write_waiting()
        if entry.error is not None:
            raise LogFailed(f"the log of decisions did not answer: {entry.error}") from entry.error
        assert entry.logged is not None
        return entry.logged

    def fence(self, row: DecisionRow) -> Decision:
        """Decide to roll back, unless the log has a decision already. Return the valid decision.

        It is used for orphans, and after an error.

        Args:
            row: the decision to roll back.
        """
        return self.decide(
            DecisionRow(
                gtrid=row.gtrid,
                format_id=row.format_id,
                node=row.node,
                decision=Decision.ROLLBACK,
                at=row.at,
                resources=row.resources,
            )
        )

    def finish(self, gtrid: bytes) -> None:
        """Record that all branches are completed. It is written with the next decision, or by :meth:`flush`.

        If the record is lost, recovery asks the resources again.

        Args:
            gtrid: the transaction.
        """
        with self._queue:
            self._waiting.finished.append((gtrid, now()))
            full = len(self._waiting.finished) >= _FINISHED_KEPT
        if full:
            self.flush()

    def flush(self) -> None:
        """Write the waiting entries."""
        with self._writing:
            self._write_waiting()

    def _write_waiting(self) -> None:
        with self._queue:
            batch, self._waiting = self._waiting, Batch()
        if not batch.entries and not batch.finished:
            return
        try:
            self.write(batch)
        except BaseException as error:
            with self._queue:
                self._waiting.finished[:0] = batch.finished
            for entry in batch.entries:
                entry.error = LogFailed(str(error) or type(error).__name__)
            if not batch.entries or not isinstance(error, Exception):
                raise
        finally:
            for entry in batch.entries:
                entry.settled = True

    @repeat_once
    def write(self, batch: Batch) -> None:
        """Write *batch* in one transaction, which is durable when this returns. Set ``logged`` of its entries."""
        # In the order of the keys, so that two processes cannot deadlock.
        entries = sorted(batch.entries, key=lambda entry: entry.row.gtrid)
        logged: dict[bytes, Decision] = {}
        with self.transaction() as tm:
            tm.each(
                "INSERT INTO tm.decision (gtrid, format_id, node, decision, at, resources)"
                " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid) DO NOTHING",
                [self._values(entry.row) for entry in entries],
            )
            tm.each(
                "UPDATE tm.decision SET finished = %s WHERE gtrid = %s AND finished IS NULL",
                [(self.when(at), gtrid) for gtrid, at in sorted(batch.finished)],
            )
            for some in _portions([entry.row.gtrid for entry in entries]):
                # A separate statement: it sees a row of another process for which the insert had to wait.
                marks = ", ".join(["%s"] * len(some))
                query = f"SELECT gtrid, decision FROM tm.decision WHERE gtrid IN ({marks})"  # noqa: S608 - only marks
                logged |= {bytes(gtrid): Decision(found) for gtrid, found in tm.rows(query, some)}
        for entry in entries:  # after the commit
            entry.logged = logged[entry.row.gtrid]

    def _values(self, row: DecisionRow) -> tuple[object, ...]:
        return row.gtrid, row.format_id, row.node, row.decision.value, self.when(row.at), json.dumps(row.resources)

    @repeat_once
    def read(self, gtrid: bytes) -> DecisionRow | None:
        """Return the decision about a transaction; ``None`` if there is none, which means roll-back.

        Args:
            gtrid: the transaction.
        """
        found = self._decisions("WHERE gtrid = %s", (gtrid,))
        return found[0] if found else None

    @repeat_once
    def unfinished(self, node: str, decision: Decision = Decision.COMMIT) -> list[DecisionRow]:
        """Return the decisions of a node that are not finished, the oldest first.

        Args:
            node: the name of the node.
            decision: only these decisions.
        """
        where = "WHERE node = %s AND finished IS NULL AND decision = %s ORDER BY at"
        return self._decisions(where, (node, decision.value))

    def _decisions(self, where: str, values: Sequence[object]) -> list[DecisionRow]:
        with self.transaction() as tm:
            found = tm.rows(f"SELECT {_COLUMNS} FROM tm.decision {where}", values)  # noqa: S608 - constant text
        return [_decision(*row) for row in found]

    @repeat_once
    def count_recovery(self, gtrid: bytes) -> None:
        """Count, durably, that recovery is about to complete the branches of a transaction."""
        self._change("UPDATE tm.decision SET recoveries = recoveries + 1 WHERE gtrid = %s", gtrid)

    @repeat_once
    def withdraw(self, gtrid: bytes) -> None:
        """Remove a decision to roll back whose branch was committed in one phase, by its resource alone."""
        self._change("DELETE FROM tm.decision WHERE gtrid = %s AND decision = 'rollback'", gtrid)

    @repeat_once
    def prune(self, older: timedelta) -> int:
        """Remove decisions that were finished longer ago than *older*, and return their number.

        Heuristic outcomes are kept.
        """
        before = self.when(now() - older)
        return self._change(
            "DELETE FROM tm.decision WHERE finished < %s OR (decision = 'rollback' AND at < %s)", before, before
        )

    # -- heuristic outcomes -------------------------------------------------------------------------------------------

    @repeat_once
    def record(self, report: HeuristicReport) -> None:
        """Make a heuristic outcome durable. A second report of the same branch changes nothing."""
        values = report.gtrid, report.resource, report.outcome.value, report.decision, report.reason, self.when(now())
        self._change(
            "INSERT INTO tm.heuristic (gtrid, resource, outcome, decision, reason, at)"
            " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid, resource) DO NOTHING",
            *values,
        )

    @repeat_once
    def forgotten(self, gtrid: bytes, resource: str) -> None:
        """Record that the resource has forgotten a heuristic outcome."""
        self._change(
            "UPDATE tm.heuristic SET forgotten = %s WHERE gtrid = %s AND resource = %s AND forgotten IS NULL",
            *(self.when(now()), gtrid, resource),
        )

    @repeat_once
    def heuristics(self, *, unforgotten: bool = False) -> list[tuple[HeuristicReport, datetime, datetime | None]]:
        """Return reports with the times at which they were recorded and forgotten, the oldest first.

        Args:
            unforgotten: only outcomes that the resource still keeps.
        """
        query = "SELECT gtrid, resource, outcome, decision, reason, at, forgotten FROM tm.heuristic"
        query += " WHERE forgotten IS NULL ORDER BY at" if unforgotten else " ORDER BY at"
        with self.transaction() as tm:
            found = tm.rows(query)
        return [_heuristic(*row) for row in found]

    # -- processes that are alive -------------------------------------------------------------------------------------

    @abstractmethod
    def claim(self, node: str, process: str) -> None:
        """Show other processes that *process* is alive, until it ends in any way."""

    @abstractmethod
    def alive(self, node: str, process: str) -> bool:
        """Return whether a process that has claimed this name is alive."""

    @abstractmethod
    def close(self) -> None:
        """Write the waiting entries, and release the claim. A second call changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the database -------------------------------------------------------------------------------------------------

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Statements]:
        """A transaction, which is durable after its end. After any error its connection is not used again.

        Raises:
            LogFailed: it failed. It is not known whether it is durable.
        """

    @abstractmethod
    def _connect(self) -> Any:
        """Return the connection; open one if there is none."""

    @contextmanager
    def _guarded(self) -> Iterator[Any]:
        """Return the connection, for one thread at a time. After any error it is not used again."""
        with self._writing:
            try:
                yield self._connect()
            except self.failure as error:
                self._drop()
                raise LogFailed(f"log of decisions {self._where}: {error}") from error
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(self.failure):
                database.close()  # rolls an open transaction back

    def lost(self, error: LogFailed) -> bool:  # noqa: ARG002 - a file has no connection
        """Return whether the connection was lost, so that a new one may succeed."""
        return False

    @abstractmethod
    def when(self, at: datetime) -> object:
        """Return a time as a value for a statement."""

    def _change(self, statement: str, *values: object) -> int:
        with self.transaction() as tm:
            return tm.change(statement, values)


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


def _portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[first : first + _KNOWN_AT_ONCE] for first in range(0, len(keys), _KNOWN_AT_ONCE))


def _decision(
    gtrid: Any, format_id: int, node: str, decision: str, at: Any, finished: Any, resources: Any, recoveries: int
) -> DecisionRow:
    return DecisionRow(
        gtrid=bytes(gtrid),
        format_id=format_id,
        node=node,
        decision=Decision(decision),
        at=_time(at),
        finished=finished and _time(finished),
        resources=tuple(json.loads(resources) if isinstance(resources, str) else resources),
        recoveries=recoveries,
    )


def _heuristic(
    gtrid: Any, resource: str, outcome: str, decision: str, reason: str, at: Any, forgotten: Any
) -> tuple[HeuristicReport, datetime, datetime | None]:
    report = HeuristicReport(
        gtrid=bytes(gtrid), resource=resource, outcome=Heuristic(outcome), decision=decision, reason=reason
    )
    return report, _time(at), forgotten and _time(forgotten)


def _time(found: datetime | str) -> datetime:
    """Return a time from the result of a query; in SQLite it is ISO 8601."""
    return datetime.fromisoformat(found) if isinstance(found, str) else found

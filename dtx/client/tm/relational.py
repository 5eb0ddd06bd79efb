"""What logs of decisions in databases have in common: the statements, their order, and what a row means.

A database says how it is reached, what a transaction is there, and how it writes values that are not the same
everywhere: times, and the table's schema.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, Protocol, TypeVar

from dtx.client.tm.decisions import Batch, Decision, DecisionLog, DecisionRow, now
from dtx.client.tm.errors import HeuristicReport, LogFailed
from dtx.xa.codes import Heuristic

_P = ParamSpec("_P")
_R = TypeVar("_R")
_L = TypeVar("_L", bound="RelationalLog")
_COLUMNS: Final = "gtrid, format_id, node, decision, at, finished, resources, recoveries"
_KNOWN_AT_ONCE: Final = 400
"""Keys in one query: SQLite has had a limit of 999 values."""


class Statements(Protocol):
    """A transaction of the log that is open."""

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run a query; all its rows."""

    def change(self, statement: str, values: Sequence[object] = ()) -> int:
        """Run a statement; how many rows it changed."""

    def each(self, statement: str, values: Sequence[Sequence[object]]) -> None:
        """Run a statement with one row of values after the other."""


def twice(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """Once more on a new connection where the connection was lost: the server may have restarted since the last call.

    Nothing here does harm when it is done twice: a decision that came in the first time is found, and stands.
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


class RelationalLog(DecisionLog):
    """A log in the tables ``decision`` and ``heuristic``.

    Statements are written with ``%s`` for values, and with ``tm.`` before the names of tables.
    """

    tables: ClassVar[str]
    """What stands before the name of a table."""
    placeholder: ClassVar[str]
    """What stands for a value."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Statements]:
        """One transaction, durable when it is left; after any error its connection is not used again.

        Raises:
            LogFailed: it failed. Whether it is durable all the same is not known.
        """

    @abstractmethod
    def lost(self, error: LogFailed) -> bool:
        """Whether a connection was lost, and trying once more on another one may do."""

    @abstractmethod
    def when(self, at: datetime) -> object:
        """A time, as a value of a statement."""

    @abstractmethod
    def time(self, found: Any) -> datetime:
        """A time, as a query found it."""

    def sql(self, statement: str) -> str:
        """*statement* as this database wants it."""
        return statement.replace("tm.", self.tables).replace("%s", self.placeholder)

    # -- decisions ----------------------------------------------------------------------------------------------------

    @twice
    def write(self, batch: Batch) -> None:
        """Write *batch* in one transaction."""
        # In the order of their keys, so that two processes never wait for each other.
        entries = sorted(batch.entries, key=lambda entry: entry.row.gtrid)
        stands: dict[bytes, Decision] = {}
        with self.transaction() as tm:
            tm.each(
                self.sql(
                    "INSERT INTO tm.decision (gtrid, format_id, node, decision, at, resources)"
                    " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid) DO NOTHING"
                ),
                [self._values(entry.row) for entry in entries],
            )
            tm.each(
                self.sql("UPDATE tm.decision SET finished = %s WHERE gtrid = %s AND finished IS NULL"),
                [(self.when(at), gtrid) for gtrid, at in sorted(batch.finished)],
            )
            for some in _portions([entry.row.gtrid for entry in entries]):
                # A statement of its own: it sees a row of somebody else that the insert had to wait for.
                marks = ", ".join(["%s"] * len(some))
                query = f"SELECT gtrid, decision FROM tm.decision WHERE gtrid IN ({marks})"  # noqa: S608 - only marks
                stands |= {bytes(gtrid): Decision(found) for gtrid, found in tm.rows(self.sql(query), some)}
        for entry in entries:  # only now is it durable
            entry.stands = stands[entry.row.gtrid]

    def _values(self, row: DecisionRow) -> tuple[object, ...]:
        return row.gtrid, row.format_id, row.node, row.decision.value, self.when(row.at), json.dumps(row.resources)

    @twice
    def read(self, gtrid: bytes) -> DecisionRow | None:
        """The decision about a transaction."""
        found = self._decisions("WHERE gtrid = %s", (gtrid,))
        return found[0] if found else None

    @twice
    def unfinished(self, node: str, decision: Decision = Decision.COMMIT) -> list[DecisionRow]:
        """Decisions that are not finished."""
        where = "WHERE node = %s AND finished IS NULL AND decision = %s ORDER BY at"
        return self._decisions(where, (node, decision.value))

    def _decisions(self, where: str, values: Sequence[object]) -> list[DecisionRow]:
        with self.transaction() as tm:
            found = tm.rows(self.sql(f"SELECT {_COLUMNS} FROM tm.decision {where}"), values)  # noqa: S608 - our words
        return [self._row(row) for row in found]

    @twice
    def take_up(self, gtrid: bytes) -> None:
        """Count that recovery completes it."""
        self._change("UPDATE tm.decision SET recoveries = recoveries + 1 WHERE gtrid = %s", gtrid)

    @twice
    def withdraw(self, gtrid: bytes) -> None:
        """Remove a decision to roll back."""
        self._change("DELETE FROM tm.decision WHERE gtrid = %s AND decision = 'rollback'", gtrid)

    @twice
    def prune(self, older: timedelta) -> int:
        """Remove what was finished so long ago."""
        before = self.when(now() - older)
        return self._change(
            "DELETE FROM tm.decision WHERE finished < %s OR (decision = 'rollback' AND at < %s)", before, before
        )

    # -- heuristic outcomes -------------------------------------------------------------------------------------------

    @twice
    def record(self, report: HeuristicReport) -> None:
        """Make a heuristic outcome durable."""
        values = report.gtrid, report.resource, report.outcome.value, report.decision, report.reason, self.when(now())
        self._change(
            "INSERT INTO tm.heuristic (gtrid, resource, outcome, decision, reason, at)"
            " VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (gtrid, resource) DO NOTHING",
            *values,
        )

    @twice
    def forgotten(self, gtrid: bytes, resource: str) -> None:
        """The resource has forgotten it."""
        self._change(
            "UPDATE tm.heuristic SET forgotten = %s WHERE gtrid = %s AND resource = %s AND forgotten IS NULL",
            *(self.when(now()), gtrid, resource),
        )

    @twice
    def heuristics(self, *, unforgotten: bool = False) -> list[tuple[HeuristicReport, datetime, datetime | None]]:
        """Reports, with when they were recorded and forgotten."""
        query = "SELECT gtrid, resource, outcome, decision, reason, at, forgotten FROM tm.heuristic"
        query += " WHERE forgotten IS NULL ORDER BY at" if unforgotten else " ORDER BY at"
        with self.transaction() as tm:
            found = tm.rows(self.sql(query))
        return [(_report(row[:5]), self.time(row[5]), self._time_or_none(row[6])) for row in found]

    # -- values -------------------------------------------------------------------------------------------------------

    def _change(self, statement: str, *values: object) -> int:
        with self.transaction() as tm:
            return tm.change(self.sql(statement), values)

    def _row(self, found: tuple[Any, ...]) -> DecisionRow:
        gtrid, format_id, node, decision, at, finished, resources, recoveries = found
        return DecisionRow(
            gtrid=bytes(gtrid),
            format_id=format_id,
            node=node,
            decision=Decision(decision),
            at=self.time(at),
            finished=self._time_or_none(finished),
            resources=tuple(json.loads(resources) if isinstance(resources, str) else resources),
            recoveries=recoveries,
        )

    def _time_or_none(self, found: Any) -> datetime | None:
        return None if found is None else self.time(found)


def _portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[first : first + _KNOWN_AT_ONCE] for first in range(0, len(keys), _KNOWN_AT_ONCE))


def _report(found: tuple[Any, ...]) -> HeuristicReport:
    gtrid, resource, outcome, decision, reason = found
    return HeuristicReport(
        gtrid=bytes(gtrid), resource=resource, outcome=Heuristic(outcome), decision=decision, reason=reason
    )

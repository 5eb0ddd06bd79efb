"""The results: verdicts and their history, which are public, and the state that the next run needs.

::

    RESULTS/verdicts/          Delta: one row for each global transaction, as it stands
    RESULTS/history/           Delta: one row for each change of a verdict that is or was a finding
    RESULTS/runs/N.json        the totals of run N, and what the next run compares with
    RESULTS/state/…            branches in doubt of participants (observed), and digests of all decisions (decided)

A run is complete when the commit of ``verdicts`` names it. If a run dies earlier, the next run has the same number and
replaces its files. The file of a run is written last: if a complete run has none, all lines are read again. Without a
lock, two runs may be active at once: the one whose commit of ``verdicts`` is refused has changed no verdict.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dtx.pipeline import parquet_files
from dtx.pipeline.delta import DataFile, Table
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.reconcile.folded_rows import KEPT
from dtx.pipeline.reconcile.judged_rows import EVIDENCE
from dtx.pipeline.source.columns import ARROW
from dtx.pipeline.verdicts import micros_of, time_of

FORM: Final = 3
"""Version of ``facts`` and ``state``. If the last run has another one, all lines are read again."""
OPEN: Final = "open"
"""Partition of the transactions whose verdict may change with time alone."""
UNDATED: Final = "undated"
"""Partition of settled transactions without any time."""
_LONG, _TEXT, _BYTES, _TIME, _INT = pa.int64(), pa.string(), pa.binary(), pa.timestamp("us", tz="UTC"), pa.int32()


def _structs(columns: Mapping[str, str]) -> pa.DataType:
    return pa.list_(pa.struct({name: ARROW[kind] for name, kind in columns.items()}))


VERDICTS: Final = pa.schema(
    {
        "format_id": _LONG, "gtrid": _BYTES, "verdict": _TEXT, "findings": pa.list_(_TEXT), "since": _TIME,
        "first_at": _TIME, "last_at": _TIME, "rms": pa.list_(_TEXT), "owners": pa.list_(_TEXT), "branches": _INT,
        "decision": _TEXT, "tm": _TEXT, "fingerprint": _BYTES, "known_at": _TIME, "run": _LONG,
        "evidence": _structs(EVIDENCE), "lines": _LONG, "facts": _structs(KEPT), "settled": _TEXT,
    }
)  # fmt: skip
"""Columns of the table of verdicts. All but ``facts``, which is internal, never change; columns may be added."""
HISTORY: Final = pa.schema(
    {
        "run": _LONG, "as_of": _TIME, "format_id": _LONG, "gtrid": _BYTES, "was": _TEXT, "verdict": _TEXT,
        "findings": pa.list_(_TEXT), "month": _TEXT,
    }
)  # fmt: skip
"""Columns of the history: ``was`` is null for a new transaction, ``verdict`` for one that is no longer known."""
_APP: Final = "dtx/run"
_RUNS: Final = "runs"
_STATE: Final = "state"
_WRITTEN: Final = "_written.json"
_RETAINED: Final = "retained.json"


class StateDamaged(Exception):
    """The state of the last run cannot be read, or its totals do not agree; a full run replaces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Control totals of one verdict."""

    transactions: int = 0
    branches: int = 0


class SourcePart(StrEnum):
    """The data of a source."""

    JOURNAL = "journal"
    BRANCHES = "branches in doubt"
    DECISIONS = "decisions"


class SourceRead(NamedTuple):
    """When a source was last read."""

    source: str
    part: SourcePart
    read_at: datetime | None
    """The data are known as of this time; ``None``: they were never read."""
    is_missing: bool
    """Whether the last run could not read it, so that older data count. ``archive`` reads journals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A complete run.

    Args:
        as_of, skew, archived: see :class:`~dtx.pipeline.verdicts.Rules`.
        token: the number of the lake's last batch; the next run reads later batches.
        lines_read: journal lines that this run has read.
        lines: journal lines that all verdicts rest on.
        touched: number of gtrids that this run has judged; 0 if it has judged all.
        fingerprint: the hashes of all fingerprints, joined by "exclusive or".
        damaged: files of the lake whose lines are missing.
        asked: microseconds since the epoch at which each participant and database last reported its branches in doubt;
            0: never.
        logs_read: the same for the decision logs.
        state: the directory of the state for the next run.
    """

    number: int
    as_of: int
    token: int
    lines_read: int
    lines: int
    touched: int
    totals: Mapping[str, Total]
    fingerprint: int
    skew: int = 0
    lake: str | None = None
    damaged: Collection[str] = ()
    form: int = FORM
    archived: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, int] = field(default_factory=dict)
    logs_read: Mapping[str, int] = field(default_factory=dict)
    state: str = ""

    @property
    def transactions(self) -> int:
        """The number of transactions."""
        return sum(total.transactions for total in self.totals.values())

    @property
    def sources(self) -> list[SourceRead]:
        """When each source was last read."""
        return [
            SourceRead(source, part, time_of(read_at) if read_at else None, read_at < least)
            for part, times, least in (
                (SourcePart.JOURNAL, self.archived, 1),
                (SourcePart.BRANCHES, self.asked, self.as_of),
                (SourcePart.DECISIONS, self.logs_read, self.as_of),
            )
            for source, read_at in sorted(times.items())
        ]


class Results:
    """The directory of results; the file of a run that cannot be read raises :class:`StateDamaged`."""

    def __init__(self, out: str) -> None:
        missing = "has no verdicts yet: dtx pipeline reconcile"
        self.verdicts: Final = Table(f"{out.rstrip('/')}/verdicts", VERDICTS, missing)
        self.history: Final = Table(f"{out.rstrip('/')}/history", HISTORY, missing)
        self._files = Files(out)

    def runs(self) -> list[Run]:
        """Return the complete runs in order."""
        last = self.number()
        names = [name for name in self._files.names(_RUNS, directories=False) if name.endswith(".json")]
        return [self._run(number) for number in (int(name.partition(".")[0]) for name in names) if number <= last]

    def last(self) -> Run | None:
        """Return the last complete run; ``None`` if there is none, or its file is missing."""
        number = self.number()
        return self._run(number) if number and self._files.exists(_name(number)) else None

    def number(self) -> int:
        """Return the number of the last complete run; 0 if there is none."""
        return (self.verdicts.load().transaction_version(_APP) or 0) if self.verdicts.exists else 0

    def _run(self, number: int) -> Run:
        name = _name(number)
        try:
            found: dict[str, Any] = self._files.read(name)
            found["totals"] = {verdict: Total(**total) for verdict, total in found["totals"].items()}
            return Run(**found)
        except (LakeError, TypeError, KeyError, AttributeError) as error:
            raise StateDamaged(f"{self._files.path(name)} cannot be read: {error}") from error

    def complete(self, run: Run, verdicts: "TableChange", history: "TableChange") -> None:
        """Commit the tables of *run* and write its file; then the run is complete."""
        if self.number() >= run.number:
            raise LakeError(f"another process has reconciled into {self._files.uri} at the same time: run again")
        self.history.commit(history.table, history.added, history.removed, {})
        self.verdicts.commit(verdicts.table, verdicts.added, verdicts.removed, {_APP: run.number})
        self._files.write(_name(run.number), asdict(run))
        for name in self._files.names(_STATE):
            if name != run.state:
                self._files.remove(f"{_STATE}/{name}")

    def write(self, frame: DataFrame, state: str, name: str) -> DataFrame:
        """Store *frame* for the next run, by the directory of this run and a name, and return it as it is stored."""
        place = f"{_STATE}/{state}/{name}"
        parquet_files.write(frame, self._files, place, ())
        self._files.write(f"{place}/{_WRITTEN}", {})
        return self.read(frame.sparkSession, state, name, frame.schema)

    def read(self, spark: SparkSession, state: str, name: str, schema: StructType) -> DataFrame:
        """Return the rows that a run has stored."""
        names = self._files.data(f"{_STATE}/{state}/{name}")
        return parquet_files.read(spark, self._files, names, schema, named=False)

    def is_kept(self, run: Run) -> bool:
        """Return whether the state of *run* is stored completely."""
        return all(self._files.exists(f"{_STATE}/{run.state}/{name}/{_WRITTEN}") for name in ("observed", "decided"))

    def retain(self, before: date, *, dry_run: bool) -> dict[str, int]:
        """Remove settled verdicts, history and runs of days before *before*, or only count them."""
        edge = micros_of(datetime(before.year, before.month, before.day, tzinfo=UTC))
        old = [run.number for run in self.runs()[:-1] if run.as_of < edge]
        found = {
            "verdicts": self.verdicts.remove_before(before, "last_at", also=f"settled <> '{OPEN}'", dry_run=dry_run),
            "changes of verdicts": self.history.remove_before(before, "as_of", dry_run=dry_run),
            "runs": len(old),
        }
        if not dry_run:
            for number in old:
                self._files.remove(_name(number))
            self._files.write(_RETAINED, {"before": max(edge, self.retained())})
        return found

    def retained(self) -> int:
        """Return microseconds since the epoch: earlier lines may have been removed from the lake."""
        return int((self._files.read(_RETAINED) or {"before": 0})["before"])


@dataclass(frozen=True, slots=True)
class TableChange:
    """A change, not committed yet, of a version of a table: files that Spark has written replace others."""

    table: DeltaTable
    added: list[AddAction]
    removed: list[DataFile]


def _name(number: int) -> str:
    return f"{_RUNS}/{number:08d}.json"

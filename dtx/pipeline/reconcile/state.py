"""What a run leaves: verdicts and their history for everybody, and what the next run needs.

::

    RESULTS/verdicts/          Delta: one row for each global transaction, as it stands
    RESULTS/history/           Delta: one row for each change of a verdict that is or was a finding
    RESULTS/runs/N.json        the totals of run N, and what the next run compares with
    RESULTS/state/…            what participants had in doubt (observed), and digests of all decisions (decided)

A run counts when the commit of ``verdicts`` names it. What a run that died before has written is replaced by the next
one, which has the same number. Its file is written last: where a run that counts has none, all lines are read again. So
of two runs at once, where there is no lock, the one whose commit is refused has changed nothing that counts.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from dtx.pipeline import parquet_files
from dtx.pipeline.delta import Table
from dtx.pipeline.files import Files, LakeError

FORM: Final = 3
"""Of what is kept of transactions: what has another one is not folded on, and all lines are read again."""
OPEN: Final = "open"
"""Partition of the transactions whose verdict may become another one though nothing happens."""
UNDATED: Final = "undated"
"""Partition of settled transactions of which nothing has a time."""
_LONG, _TEXT, _BYTES, _TIME, _INT = pa.int64(), pa.string(), pa.binary(), pa.timestamp("us", tz="UTC"), pa.int32()
_LINE: Final = {
    "source": _TEXT, "rm": _TEXT, "vhost": _TEXT, "bqual": _BYTES, "event": _TEXT, "outcome": _TEXT, "at": _TIME,
    "actor": _TEXT, "journal_id": _TEXT,
}  # fmt: skip
_FACT: Final = {
    "is_branch": pa.bool_(), "source": _TEXT, "place": _LONG, "name": _TEXT, "owner": _TEXT, "life": _LONG,
    "marks": _INT, "opened_at": _LONG, "forgotten_at": _LONG, "first_at": _LONG, "last_at": _LONG, "lines": _LONG,
}  # fmt: skip
VERDICTS: Final = pa.schema(
    {
        "format_id": _LONG, "gtrid": _BYTES, "verdict": _TEXT, "findings": pa.list_(_TEXT), "since": _TIME,
        "first_at": _TIME, "last_at": _TIME, "rms": pa.list_(_TEXT), "owners": pa.list_(_TEXT), "branches": _INT,
        "decision": _TEXT, "tm": _TEXT, "fingerprint": _BYTES, "known_at": _TIME, "run": _LONG,
        "evidence": pa.list_(pa.struct(_LINE)), "lines": _LONG, "facts": pa.list_(pa.struct(_FACT)), "settled": _TEXT,
    }
)  # fmt: skip
"""Columns of the table of verdicts. All but ``facts``, which is dtx's own, stay as they are; others may be added."""
HISTORY: Final = pa.schema(
    {
        "run": _LONG, "as_of": _TIME, "format_id": _LONG, "gtrid": _BYTES, "was": _TEXT, "verdict": _TEXT,
        "findings": pa.list_(_TEXT), "month": _TEXT,
    }
)  # fmt: skip
"""Columns of the history: ``was`` is null where the transaction was new, ``verdict`` where nothing of it is known any
more."""
_APP: Final = "dtx/run"
_RUNS: Final = "runs"
_STATE: Final = "state"
_WRITTEN: Final = "_written.json"
_RETAINED: Final = "retained.json"


class StateDamaged(Exception):
    """What a run has left cannot be read, or does not add up; a full run makes it anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Control totals of one verdict."""

    transactions: int = 0
    branches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is complete.

    Args:
        number: from 1 on.
        as_of: microseconds since the epoch; see :class:`~dtx.pipeline.verdicts.Rules`.
        token: what the lake said when it was read: the next run asks for what has come since.
        lines_read: of journals, by this run.
        lines: of journals, that all verdicts rest on.
        touched: gtrids that this run has looked at; 0 where it has looked at all.
        totals: by verdict, of all transactions there are.
        fingerprint: all fingerprints hashed and joined by "exclusive or".
        rules: orphan_after and skew in microseconds, and whether decisions were read.
        lake: which one it was; ``None`` where it does not say.
        damaged: files of the lake whose lines are missing.
        form: of what is kept of its transactions; see :data:`FORM`.
        archived: see :class:`~dtx.pipeline.verdicts.Rules`.
        state: the directory of what it has kept for the next one.
    """

    number: int
    as_of: int
    token: int
    lines_read: int
    lines: int
    touched: int
    totals: Mapping[str, Total]
    fingerprint: int
    rules: Mapping[str, int] = field(default_factory=dict)
    lake: str | None = None
    damaged: Collection[str] = ()
    form: int = FORM
    archived: Mapping[str, int] = field(default_factory=dict)
    state: str = ""

    @property
    def transactions(self) -> int:
        """How many there are."""
        return sum(total.transactions for total in self.totals.values())


class Results:
    """The results.

    Args:
        out: where they are.
    """

    def __init__(self, out: str) -> None:
        missing = "has no verdicts yet: dtx pipeline reconcile"
        self.verdicts: Final = Table(f"{out.rstrip('/')}/verdicts", VERDICTS, missing)
        self.history: Final = Table(f"{out.rstrip('/')}/history", HISTORY, missing)
        self._files = Files(out)

    def runs(self, most: int | None = None) -> list[Run]:
        """Those that are complete, in order; the last *most* of them.

        Raises:
            StateDamaged: a file cannot be read.
        """
        last = self.number()
        names = [name for name in self._files.names(_RUNS, directories=False) if name.endswith(".json")]
        numbers = [number for number in (int(name.partition(".")[0]) for name in names) if number <= last]
        return [self._run(number) for number in (numbers if most is None else numbers[-most:])]

    def last(self) -> Run | None:
        """The last run that counts; ``None`` where there is none, or its file is missing.

        Raises:
            StateDamaged: its file cannot be read.
        """
        number = self.number()
        return self._run(number) if number and self._files.exists(_name(number)) else None

    def number(self) -> int:
        """Of the last run that counts; 0 where there is none."""
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
        """From now on *run* counts."""
        if self.number() >= run.number:
            raise LakeError(f"another process has reconciled into {self._files.uri} at the same time: run again")
        self.history.commit(history.table, history.added, history.removed)
        self.verdicts.commit(verdicts.table, verdicts.added, verdicts.removed, **{_APP: run.number})
        self._files.write(_name(run.number), asdict(run))
        for name in self._files.names(_STATE):
            if name != run.state:
                self._files.remove(f"{_STATE}/{name}")

    def write(self, frame: DataFrame, state: str, name: str) -> DataFrame:
        """Keep *frame* for the next run, and read it back.

        Args:
            frame: what.
            state: the directory of this run.
            name: the directory in it.
        """
        place = f"{_STATE}/{state}/{name}"
        parquet_files.write(frame, self._files, place, ())
        self._files.write(f"{place}/{_WRITTEN}", {})
        return self.read(frame.sparkSession, state, name, frame.schema)

    def read(self, spark: SparkSession, state: str, name: str, schema: StructType) -> DataFrame:
        """What a run has kept."""
        names = self._files.data(f"{_STATE}/{state}/{name}")
        return parquet_files.read(spark, self._files, names, schema, named=False)

    def is_kept(self, run: Run) -> bool:
        """Whether all is there that *run* has kept for the next one."""
        return all(self._files.exists(f"{_STATE}/{run.state}/{name}/{_WRITTEN}") for name in ("observed", "decided"))

    def retain(self, before: date, *, dry_run: bool) -> dict[str, int]:
        """Remove what was settled, changed or run before *before*; how much it is, by what it is.

        Args:
            before: the first day that stays.
            dry_run: count it alone.
        """
        edge = (datetime(before.year, before.month, before.day, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // (
            timedelta(microseconds=1)
        )
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
        """Microseconds since the epoch: lines of before may have been removed from the lake."""
        return int((self._files.read(_RETAINED) or {"before": 0})["before"])


@dataclass(frozen=True, slots=True)
class TableChange:
    """Of a table.

    Args:
        table: the version that is changed.
        added: files that Spark has written.
        removed: files that they replace.
    """

    table: Any
    added: list[Any]
    removed: list[Any]


def _name(number: int) -> str:
    return f"{_RUNS}/{number:08d}.json"

"""What one run leaves for the next, beside the verdicts: a directory that Spark can write to, local or not.

::

    runs/                one line of JSON for each run that is complete: what is not named here does not count
    transactions/run=N/  the transactions that run N has judged, each with the folded rows it was judged by
    evidence/run=N/      the lines that its findings rest on
    touched/run=N/       the gtrids that it has looked at: what older runs say of these does not count any more
    observed/run=N/      what participants had in doubt, when it was asked
    asked/run=N/         observations and decisions as they were given to it: the next run looks for what differs

Nothing is ever changed. A run that dies leaves a directory without a line in ``runs``; the next one has its number and
replaces it. After :data:`MOST_LAYERS` runs one writes down all that counts, and begins anew. One run at a time.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

MOST_LAYERS: Final = 20
"""Runs that a reader has to lay over each other, at most."""
FORM: Final = 2
"""Of what is kept of transactions: what has another one is not folded on, and all lines are read again."""
_BROADCAST: Final = 1_000_000
"""Gtrids, of up to 64 octets each, that every process of Spark may keep in memory."""


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
        base: the oldest run whose transactions still count.
        as_of: microseconds since the epoch; see :class:`~dtx.pipeline.verdicts.Rules`.
        token: what the lake said when it was read: the next run asks for what has come since.
        lines_read: of journals, by this run.
        lines: of journals, that all verdicts rest on.
        touched: gtrids that this run has looked at.
        totals: by verdict, of all transactions there are.
        fingerprint: all fingerprints hashed and joined by "exclusive or".
        rules: orphan_after and skew in microseconds, and whether decisions were read.
        lake: which one it was; ``None`` where it does not say.
        damaged: files of the lake whose lines are missing.
        form: of what is kept of its transactions; see :data:`FORM`.
        archived: see :class:`~dtx.pipeline.verdicts.Rules`.
    """

    number: int
    base: int
    as_of: int
    token: Mapping[str, int] | None
    lines_read: int
    lines: int
    touched: int
    totals: Mapping[str, Total]
    fingerprint: int
    rules: Mapping[str, int] = field(default_factory=dict)
    lake: str | None = None
    damaged: Collection[str] = ()
    form: int = 1
    archived: Mapping[str, int] = field(default_factory=dict)

    @property
    def transactions(self) -> int:
        """How many there are."""
        return sum(total.transactions for total in self.totals.values())

    def to_json(self) -> str:
        """As it stands in ``runs``."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Run":
        """Read what :meth:`to_json` writes.

        Raises:
            StateDamaged: it is something else.
        """
        try:
            found: dict[str, Any] = json.loads(text)
            found["totals"] = {verdict: Total(**total) for verdict, total in found["totals"].items()}
            return cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StateDamaged(f"a line of runs cannot be read: {error} ({text[:80]!r})") from error


class State:
    """The directory.

    Args:
        spark: reads and writes it.
        out: where it is.
    """

    def __init__(self, spark: SparkSession, out: str) -> None:
        self._spark = spark
        self._out = out.rstrip("/")

    def runs(self) -> list[Run]:
        """All that are complete, in order.

        Raises:
            StateDamaged: a line cannot be read.
        """
        try:
            lines = self._spark.read.text(f"{self._out}/runs").collect()
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                return []
            raise
        return sorted((Run.from_json(line.value) for line in lines), key=lambda run: run.number)

    def complete(self, run: Run) -> None:
        """From now on it counts."""
        lines = self._spark.createDataFrame([(run.to_json(),)], "value string")
        lines.coalesce(1).write.mode("append").text(f"{self._out}/runs")

    def write(self, frame: DataFrame, name: str, number: int) -> DataFrame:
        """Keep *frame*, and read it back.

        Args:
            frame: what.
            name: the directory's.
            number: of the run.
        """
        frame.write.mode("overwrite").parquet(self._path(name, number))
        return self.read(name, number).select(*frame.columns)

    def read(self, name: str, number: int) -> DataFrame:
        """What run *number* has kept as *name*."""
        return self._spark.read.parquet(self._path(name, number))

    def has(self, name: str, number: int) -> bool:
        """Whether run *number* has kept anything as *name*: an older dtx kept less."""
        try:
            return bool(self.read(name, number).columns)
        except AnalysisException as error:
            if error.getCondition() == "PATH_NOT_FOUND":
                return False
            raise

    def latest(self, name: str, run: Run) -> DataFrame:
        """All rows of *name* that count after *run*: of each gtrid, those of the last run that has looked at it."""
        later = self._touches(run)
        frame = self.read(name, run.base).withColumn("run", sf.lit(run.base))
        for number in range(run.base + 1, run.number + 1):
            frame = frame.unionByName(self.read(name, number).withColumn("run", sf.lit(number)))
        if later is None:
            return frame
        return (
            frame.join(later, "gtrid", "left")
            .where(sf.col("touched_by").isNull() | (sf.col("touched_by") == sf.col("run")))
            .drop("touched_by")
        )

    def _touches(self, run: Run) -> DataFrame | None:
        """By which run each gtrid was last looked at, where that was after the base."""
        if run.number == run.base:
            return None
        touches = self.read("touched", run.base + 1).withColumn("by", sf.lit(run.base + 1))
        for number in range(run.base + 2, run.number + 1):
            touches = touches.unionByName(self.read("touched", number).withColumn("by", sf.lit(number)))
        last = touches.groupBy("gtrid").agg(sf.max("by").alias("touched_by"))
        many = sum(each.touched for each in self.runs() if run.base < each.number <= run.number)
        return sf.broadcast(last) if many <= _BROADCAST else last

    def _path(self, name: str, number: int) -> str:
        return f"{self._out}/{name}/run={number}"

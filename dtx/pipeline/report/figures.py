"""The figures of the report: small tables that Spark computes from all verdicts and lines."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from operator import add
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sf

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile.judged_rows import evidence_json
from dtx.pipeline.reconcile.state import SourcePart, SourceRead
from dtx.pipeline.verdicts import PLAIN, Verdict, time_of

AGES: Final = (
    ("under 1 minute", timedelta(minutes=1)),
    ("1 to 10 minutes", timedelta(minutes=10)),
    ("10 to 60 minutes", timedelta(hours=1)),
    ("1 to 6 hours", timedelta(hours=6)),
    ("6 to 24 hours", timedelta(days=1)),
    ("1 to 7 days", timedelta(days=7)),
    ("over 7 days", timedelta.max),
)
"""Groups of open transactions by age; each has its upper limit."""
_SHOWN: Final = 200
"""Limit of transactions on the page. The CSV has all of them, up to :data:`LISTED`."""
LISTED: Final = 100_000
"""Limit of rows in the CSV of transactions, which this process holds in memory."""
_MOST_NAMES: Final = 20
_PERCENTILES: Final = (0.5, 0.95, 0.99)
_ACCURACY: Final = 10_000
"""Accuracy of percentiles: within 1/10,000 of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one report. Each row has the columns of the CSV of the same name.

    Args:
        as_of: the time up to which ages are counted.
        verdicts: number of transactions by verdict: all verdicts, in order of precedence.
        days: number of transactions by day of their last event and by verdict; the day is ``None`` without any time.
        ages: number of open transactions by age and verdict.
        latency: by resource manager, the number of branches, and the 50th, 95th and 99th percentile of the seconds from
            prepare to commit.
        heuristics: number of heuristic decisions by resource manager, outcome and user.
        owners: by owner, the number of transactions and of those that need attention.
        queues: number of messages in open branches by resource manager, kind and queue; ``None``: not read.
        attention: transactions that need attention, the worst verdict first, then the oldest. The age counts from the
            time of opening, or from the last event if the transaction is not open.
        attention_total: number of transactions that need attention.
        quarantine: data that was not read.
        sources: when each source was last read.
        oldest: when the oldest open transaction was opened.
    """

    as_of: datetime
    verdicts: Mapping[str, int]
    days: Sequence[tuple[date | None, str, int]]
    ages: Sequence[tuple[str, str, int]]
    latency: Sequence[tuple[str, int, float, float, float]]
    heuristics: Sequence[tuple[str, str, str, int]]
    owners: Sequence[tuple[str, int, int]]
    queues: Sequence[tuple[str, str, str, int]] | None
    attention: Sequence[Mapping[str, Any]]
    attention_total: int
    quarantine: Sequence[Quarantined] = field(default=())
    sources: Sequence[SourceRead] = field(default=())
    oldest: datetime | None = None

    @property
    def total(self) -> int:
        """Number of all transactions."""
        return sum(self.verdicts.values())

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        """The transactions of the page that need attention."""
        return self.attention[:_SHOWN]

    @property
    def databases(self) -> set[str]:
        """Names of the databases of dtx."""
        return {row.source for row in self.sources if row.part is SourcePart.JOURNAL}


def collect(
    verdicts: DataFrame,
    events: DataFrame,
    queues: Sequence[tuple[str, str, str, int]] | None = None,
    *,
    quarantine: Iterable[Quarantined] = (),
    sources: Sequence[SourceRead] = (),
    as_of: datetime | None = None,
) -> Figures:
    """Compute the figures up to *as_of*, or now, of all verdicts and all lines of the lake; see :class:`Figures`."""
    now = (as_of or datetime.now(UTC)).astimezone(UTC)
    totals = _totals(verdicts, now)
    own = [row for row in totals if row["owner"] is None]
    owned = [row for row in totals if row["owner"] is not None]
    counted = _summed(own, "verdict")
    days = _summed(own, "day", "verdict")
    ages = _summed((row for row in own if row["age"] is not None), "age", "verdict")
    trouble = _summed((row for row in owned if row["verdict"] not in PLAIN), "owner")
    owners = sorted(_summed(owned, "owner").items(), key=lambda item: (-item[1], item[0]))
    latency, heuristics = _latency_and_heuristics(events)
    return Figures(
        as_of=now,
        verdicts={str(verdict): counted[verdict,] for verdict in Verdict},
        days=sorted(((*key, count) for key, count in days.items()), key=lambda row: (row[0] or date.min, row[1])),
        ages=[(AGES[age][0], verdict, count) for (age, verdict), count in sorted(ages.items())],
        latency=latency,
        heuristics=heuristics,
        owners=[(owner, count, trouble[owner,]) for (owner,), count in owners[:_MOST_NAMES]],
        queues=None if queues is None else queues[:_MOST_NAMES],
        attention=_attention(verdicts),
        attention_total=sum(count for (verdict,), count in counted.items() if verdict not in PLAIN),
        quarantine=tuple(quarantine),
        sources=sources,
        oldest=min((time_of(row["oldest"]) for row in own if row["oldest"] is not None), default=None),
    )


def _summed(rows: Iterable[Row], *names: str) -> Counter[Any]:
    sums: Counter[Any] = Counter()
    for row in rows:
        sums[tuple(row[name] for name in names)] += row["n"]
    return sums


def _totals(verdicts: DataFrame, now: datetime) -> list[Row]:
    """Count transactions by verdict, day and age, and by verdict and owner, in one read of the verdicts."""
    seconds = sf.lit(int(now.timestamp())) - sf.unix_seconds("since")
    age = reduce(add, ((seconds >= int(limit.total_seconds())).cast("int") for _, limit in AGES[:-1]))

    def key(day: Column, age: Column, owner: Column) -> Column:
        return sf.struct(
            day.cast("date").alias("day"), age.cast("int").alias("age"), owner.cast("string").alias("owner")
        )

    nothing = sf.lit(None)
    keys = sf.concat(
        sf.array(key(sf.col("last_at"), age, nothing)),
        sf.transform("owners", lambda owner: key(nothing, nothing, owner)),
    )
    return (
        verdicts.select("verdict", "since", sf.explode(keys).alias("key"))
        .groupBy("verdict", "key.day", "key.age", "key.owner")
        .agg(sf.count("*").alias("n"), sf.min(sf.unix_micros("since")).alias("oldest"))
        .collect()
    )


def _latency_and_heuristics(
    events: DataFrame,
) -> tuple[list[tuple[str, int, float, float, float]], list[tuple[str, str, str, int]]]:
    voted = (sf.col("event") == "committed") & ~sf.col("one_phase") & sf.col("prepared_at").isNotNull()
    made = sf.col("event").isin("heuristic", "hazard")
    seconds = (sf.unix_micros("at") - sf.unix_micros("prepared_at")) / 1e6
    clipped = sf.greatest(seconds, sf.lit(0.0))  # a clock that was set back
    rows = (
        events.where(voted | made)
        .groupBy(
            "rm",
            sf.when(made, sf.coalesce("outcome", "event")).alias("what"),
            sf.when(made, sf.col("actor")).alias("actor"),
        )
        .agg(sf.count("*").alias("n"), sf.percentile_approx(clipped, list(_PERCENTILES), _ACCURACY).alias("p"))
        .collect()
    )
    latency = [(row["rm"], row["n"], *row["p"]) for row in rows if row["what"] is None]
    heuristics = [(row["rm"], row["what"], row["actor"], row["n"]) for row in rows if row["what"] is not None]
    return (
        sorted(latency, key=lambda row: (-row[1], row[0])),
        sorted(heuristics, key=lambda row: (-row[3], row[0], row[1], row[2] or ""))[:LISTED],
    )


def _attention(verdicts: DataFrame) -> list[dict[str, Any]]:
    times = ("since", "first_at", "last_at", "known_at")
    severity = sf.array_position(sf.array(*(sf.lit(str(verdict)) for verdict in Verdict)), sf.col("verdict"))
    rows = (
        verdicts.where(~sf.col("verdict").isin([str(verdict) for verdict in PLAIN]))
        .orderBy(severity, sf.asc_nulls_last(sf.coalesce("since", "last_at")), "gtrid")
        .limit(LISTED)
        .select(
            "verdict", "findings", "format_id", sf.lower(sf.hex("gtrid")).alias("gtrid"), "branches", "decision", "tm",
            "rms", "owners", evidence_json().alias("evidence"), *(sf.unix_micros(name).alias(name) for name in times),
        )
        .collect()
    )  # fmt: skip
    return [row.asDict() | {name: None if row[name] is None else time_of(row[name]) for name in times} for row in rows]

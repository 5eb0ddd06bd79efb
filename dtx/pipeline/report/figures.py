"""What the report shows: small tables, made by Spark of everything there is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sf

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.verdicts import PLAIN, Verdict

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

AGES: Final = (
    ("under 1 minute", timedelta(minutes=1)),
    ("1 to 10 minutes", timedelta(minutes=10)),
    ("10 to 60 minutes", timedelta(hours=1)),
    ("1 to 6 hours", timedelta(hours=6)),
    ("6 to 24 hours", timedelta(days=1)),
    ("1 to 7 days", timedelta(days=7)),
    ("over 7 days", timedelta.max),
)
"""How long something has been open: what is normal, what is not, and what somebody forgot."""
_SHOWN: Final = 200
"""Transactions on the page: more than anybody reads there. The CSV has them all, up to :data:`LISTED`."""
LISTED: Final = 100_000
"""Lines of the CSV of transactions: they go through the memory of this process."""
_MOST_NAMES: Final = 20
_PERCENTILES: Final = (0.5, 0.95, 0.99)
_ACCURACY: Final = 10_000
"""Of percentiles: within 1/10,000 of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one report. Rows are plain values, names of columns are those of the CSV.

    Args:
        as_of: up to when ages are counted.
        verdicts: transactions by verdict, all verdicts, in order of precedence.
        days: transactions by day of their last event, and verdict; no day where nothing of them has a time.
        ages: transactions that are open, by age and verdict.
        latency: seconds from prepare to commit by resource manager: 50, 95 and 99 of 100 branches are quicker.
        heuristics: heuristic decisions by resource manager, outcome and who made them.
        owners: transactions and those that need attention, by owner.
        queues: messages in branches that are open now, by where they come from or go to; ``None``: nobody looked.
        attention: transactions that somebody has to look at, the worst first.
        attention_total: how many there are of them.
        quarantine: what was not read.
        archived: by database, when its journal was last read to its end; ``None`` where that is not known.
        oldest: since when the oldest transaction is open.
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
    archived: Mapping[str, datetime | None] = field(default_factory=dict)
    oldest: datetime | None = None

    @property
    def total(self) -> int:
        """All transactions."""
        return sum(self.verdicts.values())

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        """Of those that need attention, what stands on the page."""
        return self.attention[:_SHOWN]


def collect(
    verdicts: "DataFrame",
    events: "DataFrame",
    work: "DataFrame | None" = None,
    *,
    quarantine: Iterable[Quarantined] = (),
    archived: Mapping[str, int | None] | None = None,
    as_of: datetime | None = None,
) -> Figures:
    """Make the figures.

    Args:
        verdicts: of all transactions, see :mod:`dtx.pipeline.reconcile`.
        events: the lake.
        work: table ``work`` of the databases, now; ``None``: nobody looked.
        quarantine: what was not read on the way.
        archived: by database, microseconds since the epoch; see :class:`Figures`.
        as_of: up to when ages are counted; ``None``: now.
    """
    now = (as_of or datetime.now(UTC)).astimezone(UTC)
    verdicts = verdicts.cache()
    try:
        counted = {row["verdict"]: row["n"] for row in verdicts.groupBy("verdict").agg(_count()).collect()}
        open_ = verdicts.where(sf.col("since").isNotNull())
        oldest = open_.agg(sf.min(sf.unix_micros("since")).alias("oldest")).first()
        troubled = verdicts.where(~sf.col("verdict").isin([str(verdict) for verdict in PLAIN]))
        return Figures(
            as_of=now,
            verdicts={str(verdict): counted.get(str(verdict), 0) for verdict in Verdict},
            days=_rows(
                verdicts.groupBy(sf.to_date("last_at").alias("day"), "verdict").agg(_count()).orderBy("day", "verdict")
            ),
            ages=_ages(open_, now),
            latency=_latency(events),
            heuristics=_heuristics(events),
            owners=_owners(verdicts),
            queues=None if work is None else _queues(work),
            attention=_attention(troubled),
            attention_total=sum(count for verdict, count in counted.items() if verdict not in PLAIN),
            quarantine=tuple(quarantine),
            archived={source: _time(at) for source, at in (archived or {}).items()},
            oldest=None if oldest is None else _time(oldest["oldest"]),
        )
    finally:
        verdicts.unpersist()


def _count() -> "Column":
    return sf.count("*").alias("n")


def _rows(frame: "DataFrame") -> list[Any]:
    return [tuple(row) for row in frame.collect()]


def _time(micros: int | None) -> datetime | None:
    return None if micros is None else datetime.fromtimestamp(micros / 1e6, UTC)


def _ages(open_: "DataFrame", now: datetime) -> list[tuple[str, str, int]]:
    age = sf.lit(int(now.timestamp())) - sf.unix_seconds("since")
    bucket: Column = sf.lit(len(AGES) - 1)
    for number, (_, limit) in reversed(list(enumerate(AGES[:-1]))):
        bucket = sf.when(age < int(limit.total_seconds()), number).otherwise(bucket)
    found = open_.groupBy(bucket.alias("bucket"), "verdict").agg(_count()).orderBy("bucket", "verdict").collect()
    return [(AGES[row["bucket"]][0], row["verdict"], row["n"]) for row in found]


def _latency(events: "DataFrame") -> list[tuple[str, int, float, float, float]]:
    voted = events.where((sf.col("event") == "committed") & ~sf.col("one_phase") & sf.col("prepared_at").isNotNull())
    seconds = (sf.unix_micros("at") - sf.unix_micros("prepared_at")) / 1e6
    found = (
        voted.withColumn("seconds", sf.greatest(seconds, sf.lit(0.0)))  # a clock that was set back
        .groupBy("rm")
        .agg(_count(), sf.percentile_approx("seconds", list(_PERCENTILES), _ACCURACY).alias("p"))
        .orderBy(sf.desc("n"), "rm")
        .collect()
    )
    return [(row["rm"], row["n"], *row["p"]) for row in found]


def _heuristics(events: "DataFrame") -> list[tuple[str, str, str, int]]:
    made = events.where(sf.col("event").isin("heuristic", "hazard"))
    outcome = sf.coalesce("outcome", "event")
    grouped = made.groupBy("rm", outcome.alias("what"), "actor").agg(_count())
    return _rows(grouped.orderBy(sf.desc("n"), "rm", "what", "actor").limit(LISTED))


def _owners(verdicts: "DataFrame") -> list[tuple[str, int, int]]:
    trouble = sf.when(~sf.col("verdict").isin([str(verdict) for verdict in PLAIN]), 1).otherwise(0)
    owned = verdicts.select(sf.explode("owners").alias("owner"), trouble.alias("trouble"))
    grouped = owned.groupBy("owner").agg(_count(), sf.sum("trouble").alias("trouble"))
    return _rows(grouped.orderBy(sf.desc("n"), "owner").limit(_MOST_NAMES))


def _queues(work: "DataFrame") -> list[tuple[str, str, str, int]]:
    def text(name: str) -> "Column":
        return sf.expr(f"coalesce(try_validate_utf8(cast({name} AS string)), hex({name}))")

    place = sf.when(sf.col("kind") == "consume", text("queue")).otherwise(
        # the default exchange has no name: its routing key is the queue
        sf.when(sf.length("exchange") == 0, text("routing_key")).otherwise(
            sf.concat_ws(" / ", text("exchange"), text("routing_key"))
        )
    )
    grouped = work.groupBy("rm", "kind", place.alias("place")).agg(_count())
    return _rows(grouped.orderBy(sf.desc("n"), "rm", "kind", "place").limit(_MOST_NAMES))


def _attention(troubled: "DataFrame") -> list[dict[str, Any]]:
    order = reduce(
        lambda column, item: column.when(sf.col("verdict") == str(item[1]), item[0]),
        enumerate(list(Verdict)[1:], 1),
        sf.when(sf.col("verdict") == str(next(iter(Verdict))), 0),
    )
    columns = troubled.select(
        "verdict",
        "findings",
        "format_id",
        sf.lower(sf.hex("gtrid")).alias("gtrid"),
        sf.unix_micros("since").alias("since"),
        sf.unix_micros("first_at").alias("first_at"),
        sf.unix_micros("last_at").alias("last_at"),
        sf.unix_micros("known_at").alias("known_at"),
        "branches",
        "decision",
        "tm",
        "rms",
        "owners",
        sf.to_json("evidence").alias("evidence"),
    )
    found = columns.orderBy(order, sf.asc_nulls_last("since"), "gtrid").limit(LISTED).collect()
    times = ("since", "first_at", "last_at", "known_at")
    return [
        {name: _time(value) if name in times else value for name, value in row.asDict(recursive=True).items()}
        for row in found
    ]

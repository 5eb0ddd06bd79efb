"""The figures of the report, as Spark counts them."""

import json
from datetime import UTC, date, datetime

import pytest
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.report import collect
from dtx.pipeline.report.figures import Figures

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
DAY = 86_400_000_000
NOW = datetime(1970, 1, 10, tzinfo=UTC)
"""As :data:`DAY`, 9 times over."""
EVIDENCE = (
    "array(named_struct('source', 'db', 'rm', 'rm', 'vhost', '/', 'bqual', X'00ff', 'event', 'prepared', 'outcome', "
    "CAST(NULL AS string), 'at', timestamp_micros(since), 'actor', 'ann', 'journal_id', 'line')) AS evidence"
)


@pytest.fixture
def verdicts(spark: SparkSession) -> DataFrame:
    rows = [
        (b"1", "in-doubt", 8 * DAY, 8 * DAY, ["ann", "bob"]),
        (b"2", "in-doubt", 9 * DAY - 90_000_000, 9 * DAY, ["bob"]),
        (b"3", "mixed", None, 7 * DAY, ["ann"]),
        (b"4", "mixed", None, None, []),
        (b"5", "mixed", 6 * DAY, 8 * DAY, ["ann"]),
        (b"6", "committed", None, 8 * DAY, ["zoë"]),
    ]
    types = "gtrid binary, verdict string, since bigint, last_at bigint, owners array<string>"
    times = [f"timestamp_micros({name}) AS {name}" for name in ("since", "last_at")]
    return spark.createDataFrame(rows, types).selectExpr(
        "1L AS format_id", "gtrid", "verdict", "array(verdict) AS findings", *times, "now() AS first_at",
        "array('rm') AS rms", "owners", "1 AS branches", "'commit' AS decision", "'tm' AS tm", "gtrid AS fingerprint",
        "now() AS known_at", EVIDENCE,
    )  # fmt: skip


@pytest.fixture
def events(spark: SparkSession) -> DataFrame:
    rows = [
        ("rm", "committed", None, "ann", False, 5_000_000, 2_000_000),
        ("quick", "committed", None, "ann", False, 5_000_000, 6_000_000),
        ("rm", "committed", None, "ann", True, 5_000_000, 1_000_000),
        ("rm", "committed", None, "ann", False, 5_000_000, None),
        ("rm", "rolled-back", None, "ann", False, 5_000_000, 1_000_000),
        ("rm", "hazard", None, "carol", False, 1, None),
        *((rm, "heuristic", "heuristic-mixed", "ann", False, 1, 0) for rm in ("rm2", "rm2", "rm1")),
    ]
    types = "rm string, event string, outcome string, actor string, one_phase boolean, at bigint, prepared_at bigint"
    times = [f"timestamp_micros({name}) AS {name}" for name in ("at", "prepared_at")]
    return spark.createDataFrame(rows, types).selectExpr("rm", "event", "outcome", "actor", "one_phase", *times)


@pytest.fixture
def figures(verdicts: DataFrame, events: DataFrame) -> Figures:
    return collect(verdicts, events, as_of=NOW)


def test_transactions_are_counted_by_verdict_day_age_and_owner(figures: Figures) -> None:
    there = {verdict: count for verdict, count in figures.verdicts.items() if count}
    assert there == {"mixed": 3, "in-doubt": 2, "committed": 1}
    assert (figures.total, figures.attention_total) == (6, 5)
    assert figures.days == [
        (None, "mixed", 1),
        (date(1970, 1, 8), "mixed", 1),
        (date(1970, 1, 9), "committed", 1),
        (date(1970, 1, 9), "in-doubt", 1),
        (date(1970, 1, 9), "mixed", 1),
        (date(1970, 1, 10), "in-doubt", 1),
    ]
    assert figures.ages == [
        ("1 to 10 minutes", "in-doubt", 1),
        ("1 to 7 days", "in-doubt", 1),
        ("1 to 7 days", "mixed", 1),
    ]
    assert figures.oldest == datetime(1970, 1, 7, tzinfo=UTC)
    assert figures.owners == [("ann", 3, 3), ("bob", 2, 2), ("zoë", 1, 0)]


def test_latency_and_heuristic_decisions_come_from_the_journals(figures: Figures) -> None:
    """A commit in one phase has no vote; a clock that was set back gives no negative time."""
    assert figures.latency == [("quick", 1, 0.0, 0.0, 0.0), ("rm", 1, 3.0, 3.0, 3.0)]
    assert figures.heuristics == [
        ("rm2", "heuristic-mixed", "ann", 2),
        ("rm", "hazard", "carol", 1),
        ("rm1", "heuristic-mixed", "ann", 1),
    ]


def test_the_worst_verdict_comes_first_then_the_oldest(figures: Figures) -> None:
    """What is not open is as old as its last event."""
    assert [bytes.fromhex(row["gtrid"]) for row in figures.attention] == [b"5", b"3", b"4", b"1", b"2"]
    (line,) = json.loads(figures.attention[0]["evidence"])
    assert line == {
        "source": "db", "rm": "rm", "vhost": "/", "bqual": "00ff", "event": "prepared", "outcome": None,
        "at": "1970-01-07 00:00:00.000000Z", "actor": "ann", "id": "line",
    }  # fmt: skip


def test_spark_reads_verdicts_twice_and_events_once(
    spark: SparkSession, verdicts: DataFrame, events: DataFrame
) -> None:
    """The session of tests does not adapt plans, so each reading is one job."""
    spark.sparkContext.setJobGroup("figures", "")
    collect(verdicts, events)
    assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("figures")) == 3


def test_nothing_gives_empty_figures(verdicts: DataFrame, events: DataFrame) -> None:
    figures = collect(verdicts.limit(0), events.limit(0))
    assert (figures.total, figures.oldest, figures.queues) == (0, None, None)
    assert not [*figures.days, *figures.ages, *figures.latency, *figures.heuristics, *figures.owners]

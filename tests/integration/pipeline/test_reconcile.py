"""Verdicts on Spark: the same as the reference's, and the right ones for fleets whose truth is known."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.generate import Plan, generate, write
from dtx.pipeline.generate.stories import INJECTED, ORDINARY
from dtx.pipeline.reconcile import verdicts_of
from dtx.pipeline.reference import Judgement, Key, reconcile
from dtx.pipeline.verdicts import PLAIN, Rules, Verdict
from tests.support.fleets import Fleet, decisions_frame, events_frame, fleet_of, judgements, observations_frame
from tests.support.spark import LONG

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
FLEETS = 20 if LONG else 1
_RULES = st.builds(
    Rules,
    as_of=st.integers(0, 20).map(lambda step: step * 250_000_000),
    orphan_after=st.sampled_from([0, 500_000_000]),
    skew=st.sampled_from([0, 300_000_000]),
    decisions_read=st.booleans(),
)


def told(verdicts: DataFrame) -> dict[Key, tuple[Judgement, bytes]]:
    """What Spark says."""
    rows = (
        verdicts.drop("evidence")
        .withColumn("since_micros", sf.unix_micros("since"))
        .withColumn("first_micros", sf.unix_micros("first_at"))
        .withColumn("last_micros", sf.unix_micros("last_at"))
        .collect()
    )
    found = judgements(rows)
    assert len(found) == len(rows), "a transaction has two verdicts"
    return found


def expected(fleet: Fleet, rules: Rules) -> dict[Key, tuple[Judgement, bytes]]:
    """What the reference says."""
    found = reconcile(fleet.events, fleet.observations, fleet.decisions, rules)
    return {key: (judgement, judgement.fingerprint) for key, judgement in found.items()}


def require_same(verdicts: DataFrame, fleet: Fleet, rules: Rules) -> None:
    """Both say the same; where they do not, the smallest of what they differ about is shown."""
    ours, theirs = told(verdicts), expected(fleet, rules)
    differ = [key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)]
    if differ:
        key = min(differ, key=lambda each: len(fleet.about(each[1]).events))
        pytest.fail(
            f"{len(differ)} differ, one is {key}: Spark {ours.get(key)}, reference {theirs.get(key)}, "
            f"{rules}: {fleet.about(key[1])}"
        )


@pytest.mark.short_form(f"{FLEETS} fleet at random in Spark and the reference (make pipeline)", unless=LONG)
@settings(max_examples=FLEETS, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), rules=_RULES)
def test_spark_and_the_reference_agree(spark: SparkSession, seed: int, rules: Rules) -> None:
    fleet = fleet_of(seed, 2_000)
    assert len({judgement.verdict for judgement, _ in expected(fleet, rules).values()}) >= len(Verdict) - 2
    verdicts = verdicts_of(
        events_frame(spark, fleet.events),
        observations_frame(spark, fleet.observations),
        decisions_frame(spark, fleet.decisions),
        rules,
    )
    require_same(verdicts, fleet, rules)


def test_what_was_injected_is_found_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    plan = Plan(transactions=1_200, anomalies=15)
    write(generate(spark, plan), str(tmp_path))
    events, observations, decisions = (
        spark.read.parquet(str(tmp_path / name)) for name in ("events", "observations", "decisions")
    )
    rules = Rules(as_of=plan.as_of_micros)
    judged = {bytes(row.gtrid): row for row in verdicts_of(events, observations, decisions, rules).collect()}
    true = {bytes(row.gtrid): row for row in spark.read.parquet(str(tmp_path / "truth")).collect()}
    assert {gtrid: row.verdict for gtrid, row in judged.items()} == {gtrid: row.verdict for gtrid, row in true.items()}
    counted = [row.verdict for row in true.values() if row.verdict not in PLAIN]
    assert {verdict: counted.count(verdict) for verdict in counted} == {story.verdict: 15 for story in INJECTED}
    assert {row.story for row in true.values()} == {story.name for story in (*ORDINARY, *INJECTED)}
    for row in judged.values():
        assert bool(row.evidence) == (row.verdict not in PLAIN)
        assert [line.at for line in row.evidence] == sorted(line.at for line in row.evidence)
        if row.verdict == Verdict.ORPHAN:
            assert {line.source for line in row.evidence if line.event == "observed: prepared"} > {"accounts"}

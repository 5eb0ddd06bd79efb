"""Verdicts on Spark: the same as the reference's, and the right ones for fleets whose truth is known."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.verdicts import Rules, Verdict
from tests.support.fleets import (
    Fleet,
    decisions_frame,
    events_frame,
    fleet_of,
    judgements,
    line,
    observations_frame,
    verdicts_of,
)
from tests.support.reference import Decision, Event, Judgement, Key, Observation, reconcile
from tests.unit.pipeline.test_verdicts import CASES, CLOCKS, ON_THE_EDGE, RULES_NOW, with_other_clocks

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
RULES = st.builds(
    Rules,
    as_of=st.integers(0, 20).map(lambda step: step * 250_000_000),
    orphan_after=st.sampled_from([0, 500_000_000]),
    skew=st.sampled_from([0, 300_000_000]),
    decisions_read=st.booleans(),
    asked=st.sampled_from([frozenset(), frozenset({"db1"}), frozenset({"db1", "db2"})]),
    archived=st.sampled_from([{}, {"db1": 1_000_000_000}, {"db1": 2_000_000_000, "db2": 500_000_000}]),
)


def told(verdicts: DataFrame) -> dict[Key, tuple[Judgement, bytes]]:
    """What Spark says."""
    rows = (
        verdicts.drop("evidence")
        .withColumn("since_micros", sf.unix_micros("since"))
        .withColumn("first_micros", sf.unix_micros("first_at"))
        .withColumn("last_micros", sf.unix_micros("last_at"))
        .withColumn("known_micros", sf.unix_micros("known_at"))
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


@settings(max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), rules=RULES)
def test_spark_and_the_reference_agree(spark: SparkSession, seed: int, rules: Rules) -> None:
    agree(spark, seed, rules)


def agree(spark: SparkSession, seed: int, rules: Rules) -> None:
    """Spark and the reference have the same verdicts of a random fleet."""
    fleet = fleet_of(seed, 2_000)
    assert len({judgement.verdict for judgement, _ in expected(fleet, rules).values()}) >= len(Verdict) - 2
    verdicts = verdicts_of(
        events_frame(spark, fleet.events),
        observations_frame(spark, fleet.observations),
        decisions_frame(spark, fleet.decisions),
        rules,
    )
    require_same(verdicts, fleet, rules)


def test_spark_has_the_verdicts_that_were_written_by_hand(spark: SparkSession) -> None:
    """Also with clocks that differ."""
    true, known = {}, []
    for number, (case, (verdict, facts)) in enumerate(CASES.items()):
        for seed in (None, *CLOCKS) if case not in ON_THE_EDGE else (None,):
            dice = Random(seed)
            shown = facts if seed is None else [with_other_clocks(each, dice) for each in facts]
            gtrid = b"%d %s" % (number, str(seed).encode())
            true[gtrid] = (case, verdict)
            known += [replace(each, gtrid=gtrid) for each in shown]
    verdicts = verdicts_of(
        events_frame(spark, [each for each in known if isinstance(each, Event)]),
        observations_frame(spark, [each for each in known if isinstance(each, Observation)]),
        decisions_frame(spark, [each for each in known if isinstance(each, Decision)]),
        RULES_NOW,
    )
    found = {bytes(row.gtrid): row.verdict for row in verdicts.select("gtrid", "verdict").collect()}
    assert {gtrid: (true[gtrid][0], verdict) for gtrid, verdict in found.items()} == true


def test_the_oldest_lines_are_the_evidence(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtx.pipeline.reconcile.judged_rows.MOST", 3)
    lines = [line(b"g", event, at) for at, event in enumerate(("prepared", "stuck", "decided", "redirected", "hazard"))]
    own = replace(line(b"h", "prepared", 7), rm="rm2")
    verdicts = verdicts_of(
        events_frame(spark, [*reversed(lines), own]),
        observations_frame(spark, ()),
        decisions_frame(spark, ()),
        Rules(as_of=10_000_000_000),
    )
    found = {bytes(row.gtrid): [told.event for told in row.evidence] for row in verdicts.collect()}
    assert found == {b"g": ["prepared", "stuck", "decided"], b"h": ["prepared"]}

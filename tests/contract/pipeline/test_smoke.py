"""One test of the pipeline on Spark: a generated fleet with known anomalies. The servers tier has more tests."""

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession, Window
from pyspark.sql import functions as sf

from dtx.pipeline.verdicts import PLAIN
from tests.support.fleets import verdicts_of
from tests.support.generated_fleet import INJECTED, ORDINARY, FleetPlan, generate, write


@pytest.mark.timeout(900)  # the first job of Spark can take a minute on a busy machine
def test_exactly_the_injected_anomalies_are_found(spark: SparkSession, tmp_path: Path) -> None:
    plan = FleetPlan(transactions=1_200, anomalies=15)
    write(generate(spark, plan), str(tmp_path))
    events, observations, decisions = (
        spark.read.parquet(str(tmp_path / name)) for name in ("events", "observations", "decisions")
    )
    judged = {bytes(row.gtrid): row for row in verdicts_of(events, observations, decisions, plan.rules).collect()}
    true = {bytes(row.gtrid): row for row in spark.read.parquet(str(tmp_path / "truth")).collect()}
    assert {gtrid: row.verdict for gtrid, row in judged.items()} == {gtrid: row.verdict for gtrid, row in true.items()}
    counted = Counter(row.scenario for row in true.values() if row.verdict not in PLAIN)
    assert counted == {scenario.name: 15 for scenario in INJECTED}
    assert {row.scenario for row in true.values()} == {scenario.name for scenario in (*ORDINARY, *INJECTED)}
    for gtrid, row in judged.items():
        assert bool(row.evidence) == (row.verdict not in PLAIN)
        assert [line.at for line in row.evidence] == sorted(line.at for line in row.evidence)
        if true[gtrid].scenario == "orphan":
            assert {line.source for line in row.evidence if line.event == "observed: prepared"} > {"accounts"}
    branch = Window.partitionBy("source", "rm", "gtrid", "bqual").orderBy("xid8")
    back = events.withColumn("before", sf.lag("at").over(branch)).where("at < before").select("gtrid").distinct()
    stepped = {true[bytes(row.gtrid)].scenario for row in back.collect()}
    assert stepped >= {scenario.name for scenario in INJECTED if len(scenario.first) > 1 or len(scenario.others) > 1}, (
        "the clock of each kind goes back somewhere"
    )

"""Spark Connect and a cluster give the same results. ``python -m benchmarks.cluster`` does the same, with times."""

from dataclasses import replace

from pyspark.sql import SparkSession

from benchmarks.cluster import Job, compare, connect, environment, perform
from benchmarks.source import fill
from tests.support.processes import short_directory


def test_spark_connect_has_the_results_of_one_process(spark: SparkSession, migrated_postgres_url: str) -> None:
    fill(migrated_postgres_url, 500)
    with short_directory("places") as directory, environment() as env:
        here = Job(
            fleet=str(directory / "fleet"),
            out=str(directory / "here"),
            url=migrated_postgres_url,
            anomalies=5,
            transactions=300,
        )
        expected = here.do_in(spark)
        with connect(directory, env) as remote:
            found = perform(replace(here, out=str(directory / "there"), remote=remote), env)
    assert found["wrong"] == expected["wrong"] == []
    assert found["same"] == expected["same"]
    assert found["rows"] == expected["rows"] == 500


def test_a_cluster_agrees_with_one_process_despite_a_killed_executor() -> None:
    assert compare(transactions=5_000, anomalies=50, lines=20_000) == []

"""The reconciliation at size: many random fleets compared with the reference, and a million lines with their truth."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from dtx.pipeline.reconcile.judged_rows import MOST
from dtx.pipeline.verdicts import Rules
from tests.servers.pipeline.test_reconcile import RULES, agree

FLEETS = 20
LINES = 1_000_000
SIZES = tuple(map(int, os.environ.get("MILLIONS", "1 10").split()))
"""Millions of lines."""


@settings(max_examples=FLEETS, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), rules=RULES)
def test_spark_and_the_reference_agree_on_many_fleets(spark: SparkSession, seed: int, rules: Rules) -> None:
    agree(spark, seed, rules)


@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("millions", SIZES)
def test_every_anomaly_is_found(millions: int, figures: Callable[..., None]) -> None:
    """Precision and recall of every verdict are 1, also of DuckDB in the same run; otherwise the program fails."""
    words = ["--lines", str(millions * LINES), "--anomalies", "1000", "--memory", "4"]
    command = [sys.executable, "-m", "benchmarks.reconcile", *words]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [re.split(r"\s{2,}", row.strip()) for row in done.stdout.strip().splitlines()[-2:]]
    found = ", ".join(f"{who} {seconds} s and {busy} s of a processor" for _, _, who, seconds, busy, *_ in rows)
    figures(**{"lines_reconciled": int(rows[0][0].replace(",", "")), f"{millions}_million_lines": found})


def test_a_transaction_of_a_million_lines_needs_no_more_memory(figures: Callable[..., None]) -> None:
    """With one branch, and with as many branches as lines, in a heap of 1 GiB."""
    for branches in ("1", str(LINES)):
        command = [sys.executable, "-m", "tests.evidence.pipeline.one_transaction", str(LINES), branches]
        done = subprocess.run(command, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.split() == ["orphan", branches, str(MOST)]
    figures(lines_of_one_transaction=LINES)

"""A Dagster asset for the verdicts of ``dtx pipeline run``, two checks of it, and a schedule for every night.

    pip install dagster dagster-webserver 'dtx[pipeline]'
    dagster dev -f dagster_jobs.py

Change FLEET and RESULTS. The environment must have the variables that pipeline.toml names. With exit code 1 (not
finished) the asset fails and is tried again. With exit code 3 (finished, but some sources were not read) the check
``everything_read`` warns.
"""

import subprocess

import dagster as dg
import pyarrow.compute as pc
from deltalake import DeltaTable

FLEET = "/etc/dtx/pipeline.toml"
RESULTS = "/var/lib/dtx-pipeline/results"

PASSING = ["committed", "rolled-back", "in-doubt", "not-archived"]
"""Verdicts that are fine, or that a later run replaces."""


@dg.asset(
    check_specs=[dg.AssetCheckSpec("everything_read", asset="dtx_verdicts")],
    retry_policy=dg.RetryPolicy(max_retries=3, delay=600),
    pool="dtx_pipeline",  # one run at a time: dagster instance concurrency set dtx_pipeline 1
)
def dtx_verdicts() -> dg.MaterializeResult:
    """One verdict for every global transaction: the Delta table RESULTS/verdicts."""
    code = subprocess.run(["dtx", "pipeline", "run", "--fleet", FLEET], check=False).returncode
    if code not in {0, 3}:
        raise dg.Failure(f"dtx pipeline run ended with exit code {code}", allow_retries=code == 1)
    everything_read = dg.AssetCheckResult(
        check_name="everything_read",
        passed=code == 0,
        severity=dg.AssetCheckSeverity.WARN,
        description="The output of the run names the sources that were not read." if code else None,
    )
    return dg.MaterializeResult(check_results=[everything_read])


@dg.asset_check(asset=dtx_verdicts)
def no_findings() -> dg.AssetCheckResult:
    """No transaction has a verdict that needs attention."""
    verdicts = DeltaTable(f"{RESULTS}/verdicts").to_pyarrow_dataset()
    found = verdicts.to_table(columns=["verdict"], filter=~pc.field("verdict").isin(PASSING))
    counts = {row["values"]: row["counts"] for row in found["verdict"].value_counts().to_pylist()}
    return dg.AssetCheckResult(passed=not counts, metadata=counts)


job = dg.define_asset_job("dtx_pipeline", selection=[dtx_verdicts])
defs = dg.Definitions(
    assets=[dtx_verdicts],
    asset_checks=[no_findings],
    schedules=[dg.ScheduleDefinition(job=job, cron_schedule="0 2 * * *")],
)

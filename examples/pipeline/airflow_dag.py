"""An Airflow 3 DAG that runs ``dtx pipeline run`` every night.

Copy it into the DAG folder and change DTX and FLEET. Workers need ``dtx[pipeline]``, in a venv of its own,
and the environment variables that pipeline.toml names.

``run`` fails and is tried again where the pipeline did not finish (exit code 1). Where it finished, but something was
not read (exit code 3), ``run`` succeeds and ``everything_read`` fails, once: what needs the verdicts follows ``run``.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

DTX = "/opt/dtx/bin/dtx"
FLEET = "/etc/dtx/pipeline.toml"

with DAG(
    "dtx_pipeline",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # one run archives whatever the missed ones did not
    max_active_runs=1,
):
    run = BashOperator(
        task_id="run",
        bash_command=f'{DTX} pipeline run --fleet {FLEET}; code=$?; echo "$code"; [ "$code" = 3 ] || exit "$code"',
        retries=3,
        retry_delay=timedelta(minutes=10),
        execution_timeout=timedelta(hours=12),
    )
    # the last line of the output of "run" is the exit code; the lines before it name what was not read
    everything_read = BashOperator(
        task_id="everything_read",
        bash_command="exit {{ ti.xcom_pull(task_ids='run') }}",
        retries=0,
    )
    run >> everything_read

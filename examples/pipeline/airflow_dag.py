"""An Airflow 3 DAG that runs ``dtx pipeline run`` every night.

Copy it into the DAG folder and change DTX and FLEET. Workers need ``dtx[pipeline]`` in a separate venv, and the
environment variables that pipeline.toml names.

If the pipeline did not finish (exit code 1), ``run`` fails and is tried again. If it finished but some sources were not
read (exit code 3), ``run`` succeeds and ``everything_read`` fails once. Tasks that need the verdicts follow ``run``.
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
    catchup=False,  # one run archives everything that missed runs left
    max_active_runs=1,
):
    run = BashOperator(
        task_id="run",
        bash_command=f'{DTX} pipeline run --fleet {FLEET}; code=$?; echo "$code"; [ "$code" = 3 ] || exit "$code"',
        retries=3,
        retry_delay=timedelta(minutes=10),
        execution_timeout=timedelta(hours=12),
    )
    # The last line of the output of "run" is the exit code. The lines before name the sources that were not read.
    everything_read = BashOperator(
        task_id="everything_read",
        bash_command="exit {{ ti.xcom_pull(task_ids='run') }}",
        retries=0,
    )
    run >> everything_read

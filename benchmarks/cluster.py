"""The pipeline on a standalone Spark cluster and through Spark Connect, compared with one process.

A master and two workers are started on loopback, and a Connect server. In each place, a separate program reconciles a
fleet and archives a journal: in one process (``local[*]``), on the cluster, on the cluster while an executor is killed
with kill -9, and through Connect. Control totals, the fingerprint of all verdicts and the digest of all lines in the
lake must be the same everywhere. The verdicts must be those of the fleet's truth, and the lake must have the lines of
the journal. Repeated tasks are counted: if there were none, the kill came too early or too late.

    python -m benchmarks.cluster --transactions 20000 --anomalies 100
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyspark
from pyspark.sql import SparkSession

from benchmarks.reconcile import Stored, wrong
from benchmarks.source import digest, fill, server
from benchmarks.support.report import Table, machine
from dtx.pipeline.archive import archive
from dtx.pipeline.java import find_java, make_java_home
from dtx.pipeline.lake import Lake
from dtx.pipeline.reconcile import current, run
from dtx.pipeline.session import SessionOptions, open_session
from dtx.pipeline.source import register
from tests.support.generated_fleet import FleetPlan, generate, write
from tests.support.processes import end, free_port, short_directory, spawn, wait_until

_HOME: Final = Path(pyspark.__file__).parent
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"
_CONNECT: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
_START_SECONDS: Final = 600.0
_LONGEST: Final = 3600.0
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Job:
    """The task of one program.

    Args:
        fleet: directory of the fleet.
        out: directory for its verdicts and its lake.
        url: of the database with the journal.
        anomalies: of each kind, in the fleet.
        transactions: of the fleet.
        master, remote: where Spark runs.
        events: directory for Spark's event log.
    """

    fleet: str
    out: str
    url: str
    anomalies: int
    transactions: int
    master: str = "local[*]"
    remote: str | None = None
    events: str | None = None

    def do(self) -> dict[str, Any]:
        """Reconcile and archive, and return the results to compare."""
        settings = {"spark.cores.max": "2", "spark.executor.cores": "1"}
        # small partitions stay separate, so that a killed executor leaves more than one task
        settings |= {"spark.sql.adaptive.coalescePartitions.enabled": "false"}
        if self.master.startswith("spark://"):
            settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        if self.events is not None:
            settings |= {"spark.eventLog.enabled": "true", "spark.eventLog.dir": Path(self.events).as_uri()}
            settings |= {"spark.eventLog.rolling.enabled": "false", "spark.eventLog.compress": "false"}
        options = SessionOptions(
            master=self.master,
            remote=self.remote,
            memory=_GIB,
            executor_memory=_GIB,
            partitions=8,
            settings={} if self.remote else settings,
        )
        with open_session(options) as spark:
            return self.do_in(spark)

    def do_in(self, spark: SparkSession) -> dict[str, Any]:
        """Do the same in an existing session; generate the fleet if it is missing."""
        plan = FleetPlan(transactions=self.transactions, anomalies=self.anomalies)
        if not Path(self.fleet).exists():
            write(generate(spark, plan), self.fleet)
        register(spark)
        began = time.monotonic()
        seen, made = (spark.read.parquet(f"{self.fleet}/{name}") for name in ("observations", "decisions"))
        rules = plan.rules
        done = run(spark, Stored(Path(self.fleet)), seen, made, f"{self.out}/verdicts", rules)
        reconciled = time.monotonic() - began
        found = wrong(spark, current(spark, f"{self.out}/verdicts"), Path(self.fleet))
        began = time.monotonic()
        (archived,) = archive(f"{self.out}/lake", {"bank": {"url": self.url, "name": "bank"}})
        taken = time.monotonic() - began
        lines = digest(Lake(f"{self.out}/lake").frame(spark)[0])
        totals = {verdict: total.transactions for verdict, total in sorted(done.totals.items())}
        return {
            "seconds": [reconciled, taken],
            "same": [totals, done.fingerprint, list(lines)],
            "rows": archived.rows,
            "wrong": [*found, *([archived.error] if archived.error else [])],
        }


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Return the environment in which Spark's programs find Java, Python and loopback."""
    python = sys.executable
    yield {
        **os.environ,
        "JAVA_HOME": str(make_java_home(find_java())),
        "SPARK_HOME": str(_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))),
    }


@contextmanager
def program(name: str, words: list[str], says: str, directory: Path, env: dict[str, str]) -> Iterator[int]:
    """Start a program of Spark, wait until its log contains *says*, and yield its process id."""
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = spawn([_HOME / "bin" / "spark-class", *words], output=output.fileno(), env=env, cwd=directory)

    def there() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode}: {log.read_text(errors='replace')[-3000:]}")
        return says in log.read_text(errors="replace")

    try:
        wait_until(there, seconds=_START_SECONDS, what=f"the start of {name} ({says!r} in its log)")
        yield process.pid
    finally:
        end(process)


def _executors(worker: int) -> list[int]:
    """Return the process ids of the executors of a worker."""
    return [process for process in _descendants(worker) if _EXECUTOR in _command(process)]


@contextmanager
def cluster(directory: Path, env: dict[str, str]) -> Iterator[tuple[str, list[int]]]:
    """Start a master and two workers of one core each; yield the master's URL and the processes of the workers."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        words = [_MASTER, "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
        stack.enter_context(program("master", words, "New state: ALIVE", directory, env))
        workers = []
        for name in ("worker-1", "worker-2"):
            words = [_WORKER, "--host", "127.0.0.1", "--webui-port", str(free_port()), "--cores", "1"]
            words += ["--memory", "2g", "--work-dir", str(directory / name), url]
            says = "Successfully registered with master"
            workers.append(stack.enter_context(program(name, words, says, directory, env)))
        yield url, workers


@contextmanager
def connect(directory: Path, env: dict[str, str]) -> Iterator[str]:
    """Start a Spark Connect server, and yield its URL."""
    port = free_port()
    words = ["org.apache.spark.deploy.SparkSubmit", "--class", _CONNECT, "--master", "local[2]"]
    for name, value in {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
    }.items():
        words += ["--conf", f"{name}={value}"]
    says = "Spark Connect server started"
    with program("connect", [*words, "spark-internal"], says, directory, env):
        yield f"sc://127.0.0.1:{port}"


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _descendants(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            named = children.read_text().split()
        except OSError:
            continue
        for child in named:
            yield int(child)
            yield from _descendants(int(child))


def perform(job: Job, env: dict[str, str], *, kill: int | None = None) -> dict[str, Any]:
    """Do a job in a separate program.

    Args:
        job: the job.
        env: environment of the program.
        kill: the worker whose executor is killed while it writes verdicts.
    """
    command = [sys.executable, "-m", "benchmarks.cluster", "--job", json.dumps(job.__dict__)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        if kill is not None:
            _kill_one(kill, Path(job.out, "verdicts/verdicts/data"), process)
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{job.remote or job.master} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def _kill_one(worker: int, writing: Path, process: subprocess.Popen[str]) -> None:
    """Kill the executor of a worker while both write verdicts: it loses this task and its results of earlier ones."""
    wait_until(lambda: any(writing.rglob("attempt_*")) or process.poll() is not None, seconds=_LONGEST, what="verdicts")
    for executor in _executors(worker):
        os.kill(executor, signal.SIGKILL)


def repeated(events: Path) -> int:
    """Return the number of failed or repeated tasks in Spark's event logs."""
    told = [json.loads(line) for log in events.iterdir() for line in log.read_text().splitlines()]
    ended = [each for each in told if each["Event"] == "SparkListenerTaskEnd"]
    return len([each for each in ended if each["Task End Reason"]["Reason"] != "Success" or each["Stage Attempt ID"]])


def main() -> None:
    """Run everywhere, print, and end with status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=20_000, help="number of transactions (%(default)s)")
    parser.add_argument("--anomalies", type=int, default=100, help="number of anomalies of each kind (%(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, help="number of journal lines (%(default)s)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.job:
        print(json.dumps(Job(**json.loads(words.job)).do()))
        return
    print(machine())
    if failed := compare(words.transactions, words.anomalies, words.lines):
        raise SystemExit("\n".join(failed))


def compare(transactions: int, anomalies: int, lines: int) -> list[str]:
    """Run everywhere, and print.

    Args:
        transactions: of the fleet.
        anomalies: of each kind.
        lines: of the journal.

    Returns:
        The differences.
    """
    columns = ["reconcile s", "archive s", "verdicts", "lines", "tasks repeated"]
    table = Table((f"{transactions:,} transactions", 36), columns)
    failed: list[str] = []
    with short_directory("cluster") as directory, environment() as env, server() as url:
        fill(url, lines)
        expected: dict[str, Any] = {}
        job = Job(fleet=str(directory / "fleet"), out="", url=url, anomalies=anomalies, transactions=transactions)

        def row(name: str, job: Job, kill: int | None = None) -> int:
            """Run in one place, print a line of the table, and return the number of repeated tasks."""
            out, events = (directory / f"{word}-of-{name.replace(' ', '-')}" for word in ("results", "events"))
            events.mkdir()
            told = replace(job, out=str(out), events=None if job.remote else str(events))
            found = perform(told, env, kill=kill)
            again = repeated(events)
            expected.update({} if expected else found)
            same = [one == other for one, other in zip(found["same"], expected["same"], strict=True)]
            failed.extend(f"{name}: {sentence}" for sentence in found["wrong"])
            if not all(same):
                failed.append(f"{name}: {found['same']}, and in one process {expected['same']}")
            if found["rows"] != lines or found["same"][2][0] != lines:
                failed.append(f"{name}: archived {found['rows']:,}, the lake has {found['same'][2][0]:,} of {lines:,}")
            cells = [f"{seconds:.1f}" for seconds in found["seconds"]]
            cells += ["same" if same[0] and same[1] else "DIFFER", "same" if same[2] else "DIFFER"]
            table.row(name, [*cells, "" if job.remote else f"{again:,}"])
            return again

        row("one process", job)
        with cluster(directory, env) as (master, workers):
            row("two workers", replace(job, master=master))
            if not row("two workers, one executor killed", replace(job, master=master), workers[0]):
                failed.append("no task was repeated, so nothing was killed in the middle")
        with connect(directory, env) as remote:
            row("Spark Connect", replace(job, remote=remote))
    return failed


if __name__ == "__main__":
    main()

"""The pipeline where else Spark may run: a standalone cluster and Spark Connect, held against this process.

A master and two workers are started on loopback, and a Connect server. One fleet is reconciled, and one journal is
archived, in each place, each by a program of its own: in this process (``local[*]``), on the cluster, on the cluster
while the executor that is at work is killed with kill -9, and through Connect. Control totals, the fingerprint of all
verdicts and the digest of all lines in the lake have to be the same everywhere, the verdicts those that the fleet's
truth says, and the lake's lines those of the journal.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
import pyspark

from benchmarks.reconcile import Stored, wrong
from benchmarks.source import digest, fill, server
from benchmarks.support.report import Table, machine
from dtx.pipeline.archive import archive, read_lake
from dtx.pipeline.generate import Plan, generate, write
from dtx.pipeline.java import find_java, quiet_home
from dtx.pipeline.reconcile import current, run
from dtx.pipeline.session import SessionOptions, open_session, quick_python
from dtx.pipeline.source import register
from dtx.pipeline.verdicts import Rules
from tests.support.processes import end, free_port, short_directory, spawn, wait_until

_HOME: Final = Path(pyspark.__file__).parent
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"
_CONNECT: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
_START_SECONDS: Final = 600.0
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Job:
    """What one program does.

    Args:
        fleet: directory of the fleet.
        out: where its verdicts and its lake go.
        url: of the database with the journal.
        anomalies: of each kind, in the fleet.
        transactions: of the fleet.
        master, remote: where Spark runs.
    """

    fleet: str
    out: str
    url: str
    anomalies: int
    transactions: int
    master: str = "local[*]"
    remote: str | None = None

    def do(self) -> dict[str, Any]:
        """Reconcile and archive; what has to be the same everywhere."""
        settings = {"spark.cores.max": "2", "spark.executor.cores": "1"}
        if self.master.startswith("spark://"):
            settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        options = SessionOptions(
            master=self.master,
            remote=self.remote,
            memory=_GIB,
            executor_memory=_GIB,
            partitions=8,
            settings={} if self.remote else settings,
        )
        rules = Rules(as_of=Plan(transactions=self.transactions, anomalies=self.anomalies).as_of_micros)
        with open_session(options) as spark:
            register(spark)
            began = time.monotonic()
            seen, made = (spark.read.parquet(f"{self.fleet}/{name}") for name in ("observations", "decisions"))
            done = run(spark, Stored(Path(self.fleet)), seen, made, f"{self.out}/verdicts", rules)
            reconciled = time.monotonic() - began
            found = wrong(spark, current(spark, f"{self.out}/verdicts"), Path(self.fleet))
            began = time.monotonic()
            (archived,) = archive(spark, f"{self.out}/lake", {"bank": {"url": self.url, "name": "bank"}})
            taken = time.monotonic() - began
            lines = digest(read_lake(spark, f"{self.out}/lake"))
        totals = {verdict: total.transactions for verdict, total in sorted(done.totals.items())}
        return {
            "seconds": (reconciled, taken),
            "same": [totals, done.fingerprint, lines],
            "wrong": [*found, *([archived.error] if archived.error else [])],
        }


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """What Spark's programs need to find Java, Python and loopback."""
    python = str(quick_python())
    yield {
        **os.environ,
        "JAVA_HOME": str(quiet_home(find_java())),
        "SPARK_HOME": str(_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH")))),
    }


@contextmanager
def program(name: str, words: list[str], says: str, directory: Path, env: dict[str, str]) -> Iterator[int]:
    """A program of Spark's, when it has said that it is there; its process."""
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


@contextmanager
def cluster(directory: Path, env: dict[str, str]) -> Iterator[tuple[str, list[int]]]:
    """A master and two workers of one core each; the master's URL, and the processes of the workers."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        words = [_MASTER, "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(free_port())]
        stack.enter_context(program("master", words, "New state: ALIVE", directory, env))
        workers = []
        for name in ("worker-1", "worker-2"):
            words = [_WORKER, "--host", "127.0.0.1", "--webui-port", str(free_port()), "--cores", "1"]
            words += ["--memory", "2g", "--work-dir", str(directory / name), url]
            workers.append(
                stack.enter_context(program(name, words, "Successfully registered with master", directory, env))
            )
        yield url, workers


@contextmanager
def connect(directory: Path, env: dict[str, str]) -> Iterator[str]:
    """A Spark Connect server; its URL."""
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


def executors(workers: list[int]) -> list[int]:
    """Processes of executors that workers have started."""
    found = []
    for worker in workers:
        for process in _descendants(worker):
            try:
                if _EXECUTOR in Path(f"/proc/{process}/cmdline").read_bytes():
                    found.append(process)
            except OSError:
                continue
    return found


def _descendants(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            named = children.read_text().split()
        except OSError:
            continue
        for child in named:
            yield int(child)
            yield from _descendants(int(child))


def perform(job: Job, env: dict[str, str], *, kill: list[int] | None = None) -> dict[str, Any]:
    """Do it in a program of its own.

    Args:
        job: what.
        env: of the program.
        kill: workers, one of whose executors is killed while verdicts are being written.
    """
    command = [sys.executable, "-m", "benchmarks.cluster", "--job", json.dumps(job.__dict__)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        if kill is not None:
            writing = Path(job.out, "verdicts/transactions/run=1/_temporary")
            wait_until(lambda: writing.exists() or process.poll() is not None, seconds=3600, what="verdicts")
            running = executors(kill)
            if process.poll() is not None or not running:
                raise SystemExit("no executor was at work when one was to be killed")
            os.kill(running[0], signal.SIGKILL)
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{job.remote or job.master} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    """Run everywhere, print, and end with status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transactions", type=int, default=20_000, help="of the fleet (%(default)s)")
    parser.add_argument("--anomalies", type=int, default=100, help="of each of the ten kinds (%(default)s)")
    parser.add_argument("--lines", type=int, default=100_000, help="of the journal (%(default)s)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.job:
        print(json.dumps(Job(**json.loads(words.job)).do()))
        return
    print(machine())
    with short_directory("cluster") as directory, environment() as env, server() as url:
        fill(url, words.lines)
        fleet = str(directory / "fleet")
        with open_session(SessionOptions(memory=_GIB, partitions=8)) as spark:
            write(generate(spark, Plan(transactions=words.transactions, anomalies=words.anomalies)), fleet)
        told = {"fleet": fleet, "url": url, "anomalies": words.anomalies, "transactions": words.transactions}
        table = Table((f"{words.transactions:,} transactions", 34), ["reconcile s", "archive s", "verdicts", "lines"])
        expected: list[Any] | None = None
        failed: list[str] = []

        def row(name: str, **more: Any) -> None:
            nonlocal expected
            kill = more.pop("kill", None)
            found = perform(Job(out=str(directory / name.replace(" ", "-")), **told, **more), env, kill=kill)
            expected = found["same"] if expected is None else expected
            failed.extend(f"{name}: {sentence}" for sentence in found["wrong"])
            same = [one == other for one, other in zip(found["same"], expected, strict=True)]
            if not all(same):
                failed.append(f"{name}: {found['same']}, and in this process {expected}")
            cells = [f"{seconds:.1f}" for seconds in found["seconds"]]
            cells += ["same" if same[0] and same[1] else "DIFFER", "same" if same[2] else "DIFFER"]
            table.row(name, cells)

        row("this process")
        with psycopg.connect(url) as connection:
            counted = connection.execute("SELECT count(*) FROM dtx.journal").fetchone()
        assert counted is not None
        if expected is not None and expected[2][0] != counted[0]:
            failed.append(f"the lake has {expected[2][0]:,} lines, the journal {counted[0]:,}")
        with cluster(directory, env) as (master, workers):
            row("two workers", master=master)
            row("two workers, one executor killed", master=master, kill=workers)
        with connect(directory, env) as remote:
            row("Spark Connect", remote=remote)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()

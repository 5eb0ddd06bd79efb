"""A fleet with faults, and the pipeline that finds them: archive, reconcile, report.

There are two dtx, each with its own queues and log, and a transaction manager with work in both. One dtx is killed
during a transaction. Most transactions end correctly; into others the program injects known faults. Then
`dtx pipeline run` reads journals, branches in doubt and the decisions of the transaction manager. It must find exactly
the injected faults; otherwise the program ends with status 1.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import pika
import psycopg
from pika.exceptions import AMQPError

from dtx import telemetry
from dtx.client import XAException, XAResource, Xid
from dtx.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError
from examples.demo.stage import DemoError, free_port

FORMAT_ID: Final = 0x0D7C0DE
USER: Final = "guest"
OTHER: Final = "bob"
COMMITTED: Final = 30
ROLLED_BACK: Final = 6


class Manager:
    """One dtx process.

    Args:
        name: name of the resource manager.
        database: URL of its log.
        directory: directory for its output.
    """

    def __init__(self, name: str, database: str, directory: Path) -> None:
        self.name = name
        self.database = database
        self._directory = directory
        self._port, self._admin = free_port(), free_port()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait for its READY line."""
        log = self._directory / f"{self.name}.log"
        words = ["--listen", f"127.0.0.1:{self._port}", "--data-dir", str(self._directory / self.name)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command("serve", *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(),
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("READY"):
                return
        raise DemoError(f"{self.name} did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """End it with kill -9."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def operate(self, *words: str, text: str | None = None) -> None:
        """Run a command of dtx, as an operator would."""
        done = subprocess.run(
            self._command(*words), input=text, capture_output=True, text=True, env=_environment(), check=False
        )
        if done.returncode:
            raise DemoError(f"dtx {' '.join(words)} on {self.name}: {done.stderr.strip()}")

    @contextmanager
    def resource(self, user: str = USER) -> Iterator[XAResource]:
        """A channel of *user* that is selected for distributed transactions."""
        url = f"amqp://{user}:{user}@127.0.0.1:{self._port}/"
        connection = pika.BlockingConnection(pika.URLParameters(url))
        try:
            channel = connection.channel()
            channel.queue_declare("transfers", durable=True)
            resource = XAResource(channel)
            resource.select()
            yield resource
        finally:
            with suppress(AMQPError):
                connection.close()

    def _command(self, *words: str) -> list[str]:
        here = ["--database", self.database, "--rm", self.name, "--admin-listen", f"127.0.0.1:{self._admin}"]
        return [sys.executable, "-m", "dtx", *words, *here]


class Decisions:
    """The log of the transaction manager, which has its decisions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, gtrid: bytes, decision: str, *, finished: bool = True) -> None:
        """Decide. When this returns, the decision is on disk."""
        row = {"gtrid": gtrid.hex(), "decision": decision, "time": datetime.now(UTC).isoformat()}
        with self._path.open("a") as log:
            print(json.dumps({**row, "format_id": FORMAT_ID, "finished": finished}), file=log, flush=True)
            os.fsync(log.fileno())


class Fleet:
    """Two resource managers and a transaction manager."""

    def __init__(self, directory: Path, managers: Sequence[Manager]) -> None:
        self.directory = directory
        self.a, self.b = managers
        self.log = Decisions(directory / "decisions.jsonl")
        self.injected: Counter[str] = Counter()
        self._count = 0

    def name(self, what: str) -> bytes:
        """Make a gtrid."""
        self._count += 1
        return f"{what}-{self._count}".encode()

    def vote(self, gtrid: bytes, *, other: str = USER) -> None:
        """Work in both, and prepare both branches."""
        for manager, user in ((self.a, USER), (self.b, other)):
            with manager.resource(user) as resource:
                xid = branch(gtrid, manager)
                resource.start(xid)
                resource.channel.basic_publish("", "transfers", gtrid)
                resource.end(xid)
                resource.prepare(xid)

    def finish(self, gtrid: bytes, manager: Manager, decision: str, *, user: str = USER) -> None:
        """Carry out the second phase of one branch."""
        with manager.resource(user) as resource:
            (resource.commit if decision == "commit" else resource.rollback)(branch(gtrid, manager))

    def whole(self, gtrid: bytes, decision: str, *, other: str = USER) -> None:
        """Run a transaction without a fault."""
        self.vote(gtrid, other=other)
        self.log.write(gtrid, decision)
        self.finish(gtrid, self.a, decision)
        self.finish(gtrid, self.b, decision, user=other)

    # -- faults -------------------------------------------------------------------------------------------------------

    def orphan(self) -> None:
        """The transaction manager never decides."""
        self.vote(self.name("orphan"))

    def unfinished(self) -> None:
        """The decision is commit, but one branch never gets it."""
        gtrid = self.name("unfinished")
        self.vote(gtrid)
        self.log.write(gtrid, "commit", finished=False)
        self.finish(gtrid, self.a, "commit")

    def mixed(self) -> None:
        """The transaction manager commits one branch and rolls the other back."""
        gtrid = self.name("mixed")
        self.vote(gtrid)
        self.log.write(gtrid, "commit")
        self.finish(gtrid, self.a, "commit")
        self.finish(gtrid, self.b, "rollback")

    def against_decision(self) -> None:
        """The decision is commit, but both branches are rolled back."""
        gtrid = self.name("against")
        self.vote(gtrid)
        self.log.write(gtrid, "commit")
        self.finish(gtrid, self.a, "rollback")
        self.finish(gtrid, self.b, "rollback")

    def heuristic_damage(self) -> None:
        """An operator commits one branch, and the transaction manager then decides to roll back."""
        gtrid = self.name("damage")
        self.vote(gtrid)
        self.a.operate("commit", str(branch(gtrid, self.a)), "--reason", "it has waited too long", "--yes")
        self.log.write(gtrid, "rollback")
        self.finish(gtrid, self.b, "rollback")

    def forgotten_early(self) -> None:
        """An operator commits and forgets one branch while the other still waits for the transaction manager."""
        gtrid = self.name("forgotten")
        self.vote(gtrid)
        xid = str(branch(gtrid, self.a))
        self.a.operate("commit", xid, "--reason", "it has waited too long", "--yes")
        self.a.operate("forget", xid, "--reason", "tidying up", "--yes")

    def owner_mismatch(self) -> None:
        """The two branches belong to different users."""
        self.whole(self.name("owners"), "commit", other=OTHER)

    def xid_reused(self) -> None:
        """The same xid is used twice."""
        gtrid = self.name("reused")
        self.whole(gtrid, "commit")
        self.whole(gtrid, "commit")

    def killed(self) -> None:
        """Kill one dtx between decision and commit, and start it again. The transaction commits."""
        gtrid = self.name("killed")
        self.vote(gtrid)
        self.log.write(gtrid, "commit")
        self.a.kill()
        self.a.start()
        self.finish(gtrid, self.a, "commit")
        self.finish(gtrid, self.b, "commit")


FAULTS: Final = {
    "orphan": (Fleet.orphan, 3),
    "unfinished": (Fleet.unfinished, 2),
    "mixed": (Fleet.mixed, 2),
    "against-decision": (Fleet.against_decision, 2),
    "heuristic-damage": (Fleet.heuristic_damage, 1),
    "forgotten-early": (Fleet.forgotten_early, 1),
    "owner-mismatch": (Fleet.owner_mismatch, 2),
    "xid-reused": (Fleet.xid_reused, 2),
}
"""Faults by their verdicts, and their numbers."""


def branch(gtrid: bytes, manager: Manager) -> Xid:
    """The branch of a transaction in a resource manager."""
    return Xid(FORMAT_ID, gtrid, manager.name.encode())


def _environment() -> dict[str, str]:
    """The environment without settings of dtx."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DTX_")}


def say(text: str) -> None:
    """Print a step."""
    print(text, flush=True)


def live(fleet: Fleet) -> None:
    """Run all transactions, with and without faults."""
    fleet.b.operate("user", "add", OTHER, "--password-stdin", text=f"{OTHER}\n")
    fleet.b.operate("user", "grant", OTHER, "--all")
    say(f"{COMMITTED} transactions commit and {ROLLED_BACK} roll back; then faults:")
    for _ in range(COMMITTED - 1):
        fleet.whole(fleet.name("transfer"), "commit")
    fleet.killed()
    for _ in range(ROLLED_BACK):
        fleet.whole(fleet.name("refused"), "rollback")
    for verdict, (inject, times) in FAULTS.items():
        say(f"    {verdict:<17} {times} times: {(inject.__doc__ or '').strip()}")
        for _ in range(times):
            inject(fleet)
        fleet.injected[verdict] += times
    fleet.injected["committed"] += COMMITTED
    fleet.injected["rolled-back"] += ROLLED_BACK


def look(fleet: Fleet, words: Sequence[str]) -> Path:
    """Run the pipeline and return the directory of its report."""
    databases = "".join(
        f'[[database]]\nname = "{manager.name}"\nurl = {json.dumps(manager.database)}\n\n'
        for manager in (fleet.a, fleet.b)
    )
    (fleet.directory / "pipeline.toml").write_text(
        'lake = "lake"\nresults = "results"\n'
        'orphan_after = "1s"  # instead of an hour\nskew = "0s"  # one machine, one clock\n\n'
        f'{databases}[[decisions]]\nname = "transfers"\nformat = "json"\npath = "decisions.jsonl"\n'
    )
    command = [
        sys.executable,
        "-m",
        "dtx",
        "pipeline",
        "run",
        "--fleet",
        str(fleet.directory / "pipeline.toml"),
        *words,
    ]
    say("\n$ dtx pipeline run")
    done = subprocess.run(command, env=_environment(), check=False)
    if done.returncode:
        raise DemoError(f"dtx pipeline run ended with {done.returncode}")
    return fleet.directory / "results" / "report"


def compare(fleet: Fleet, report: Path) -> bool:
    """Print found and injected verdicts. Return whether they are the same."""
    with (report / "verdicts.csv").open(newline="") as file:
        found = Counter({row["verdict"]: int(row["transactions"]) for row in csv.DictReader(file)})
    say(f"\n{'verdict':<20}{'injected':>10}{'found':>10}")
    for verdict in sorted(set(found) | set(fleet.injected), key=lambda name: (name not in FAULTS, name)):
        if found[verdict] or fleet.injected[verdict]:
            wrong = "" if found[verdict] == fleet.injected[verdict] else "   <- differs"
            say(f"{verdict:<20}{fleet.injected[verdict]:>10}{found[verdict]:>10}{wrong}")
    return +found == +fleet.injected


def run(directory: Path, words: Sequence[str]) -> bool:
    """Run the demo. Return whether exactly the injected faults were found."""
    with ExitStack() as stack:
        server = EmbeddedPostgres(directory / "postgres")
        stack.callback(server.stop)
        url = server.start()
        managers = []
        for name in ("bank-a", "bank-b"):
            with psycopg.connect(url, autocommit=True) as database:
                database.execute(f'CREATE DATABASE "{name}"'.encode())
            base = urlsplit(url)
            managers.append(Manager(name, urlunsplit(base._replace(path=f"/{name}")), directory))
            stack.callback(managers[-1].kill)
            managers[-1].start()
        say("two dtx run, bank-a and bank-b")
        fleet = Fleet(directory, managers)
        live(fleet)
        report = look(fleet, words)
        same = compare(fleet, report)
        say(
            f"\nExactly the injected faults were found. The report: {report / 'report.html'}"
            if same
            else "\nFound and injected verdicts differ."
        )
        return same


def main() -> int:
    """Run the demo. Return 0 if exactly the injected faults were found."""
    parser = argparse.ArgumentParser(prog="make pipeline-demo", description=__doc__)
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep lake, results and report in this directory"
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    parser.add_argument(
        "--spark", nargs=argparse.REMAINDER, default=[], help="options for dtx pipeline run; must be last"
    )
    given = parser.parse_args()
    telemetry.configure("error")
    directory = given.keep or Path(tempfile.mkdtemp(prefix="dtx-pipeline-"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Under root, PostgreSQL runs as another user, which needs access to its data directory.
        directory.chmod(0o711)
        same = run(directory.absolute(), given.spark)
        if given.open and same:
            import webbrowser

            webbrowser.open((directory.absolute() / "results/report/report.html").as_uri())
        if not given.keep:
            say(f"lake, results and report are in {directory}; remove it afterwards")
    except (DemoError, EmbeddedPostgresError, XAException, AMQPError) as error:
        print(f"demo: {error or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(directory / "postgres", ignore_errors=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

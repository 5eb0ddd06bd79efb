"""What the log demands of a PostgreSQL server, and what sessions set for themselves."""

from dataclasses import dataclass
from typing import Final

import psycopg

from dtx.log.api import LogError, LogUnavailable
from dtx.log.connecting import Dsn, connect_now

MINIMUM_VERSION: Final = 130_000
"""13: the type xid8, and the last one that anybody still supports."""

WRITER_SETTINGS: Final = {
    # The tables are empty when plans are made and have 100,000 rows a minute later. Every hot statement finds its
    # rows by primary key: only that plan is ever right, and planning again for each group would cost more than
    # running it. Bitmap scans alone are left, since they always have a condition on the index. An index scan can read
    # a whole table, and does so for each group once autovacuum has found the table empty.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_indexscan": "off",
    "enable_indexonlyscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""Of the session that writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One demand and what was found.

    Args:
        name: of the setting or fact.
        found: its value.
        fault: lower case, what to do about it; ``None`` where all is well.
        unsafe_only: whether ``--unsafe`` accepts the fault.
    """

    name: str
    found: str
    fault: str | None = None
    unsafe_only: bool = False


def examine(dsn: Dsn) -> list[Check]:
    """Look at the server.

    Raises:
        LogUnavailable: no connection.
    """
    try:
        # a pooler may lose what was prepared before it is known that there is one
        with connect_now(dsn, autocommit=True, prepare_threshold=None) as connection:
            return [*_examine(connection), _pooling(connection, dsn)]
    except (psycopg.Error, OSError) as error:
        raise LogUnavailable(f"cannot connect to {dsn.shown}: {dsn.explain(error)}") from None


def _examine(connection: psycopg.Connection) -> list[Check]:
    def show(setting: str) -> str:
        row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
        assert row is not None
        return str(row[0])

    version = connection.info.server_version
    checks = [
        Check(
            name="server_version",
            found=show("server_version"),
            fault=None if version >= MINIMUM_VERSION else "dtx needs PostgreSQL 13 or later",
        )
    ]
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        value = show(setting)
        fault = (
            f"{setting} = off loses prepared branches when the machine fails: turn it on" if value == "off" else None
        )
        checks.append(Check(name=setting, found=value, fault=fault, unsafe_only=True))
    encoding = show("server_encoding")
    checks.append(
        Check(
            name="server_encoding",
            found=encoding,
            fault=None if encoding == "UTF8" else "vhosts and user names are UTF-8: make a database with encoding UTF8",
        )
    )
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    standby = bool(row and row[0])
    checks.append(
        Check(
            name="role",
            found="standby" if standby else "primary",
            fault="this server is a read-only standby: connect to the primary" if standby else None,
        )
    )
    return checks


def _pooling(connection: psycopg.Connection, dsn: Dsn) -> Check:
    """Whether a session of PostgreSQL is ours from one transaction to the next: the writer sets and prepares for it."""
    question = "SELECT pg_backend_pid()"
    before = connection.execute(question).fetchone()
    if before == (connection.info.backend_pid,):
        return Check(name="pooling", found="none")
    with connect_now(dsn, autocommit=True, prepare_threshold=None) as other:
        theirs = other.execute(question).fetchone()
        after = connection.execute(question).fetchone()
    if before == after != theirs:
        return Check(name="pooling", found="by session")
    return Check(
        name="pooling",
        found="by transaction",
        fault="a pooler gives PostgreSQL's sessions to others between two transactions: connect past it, "
        "or let it pool by session",
    )


def require_safe(dsn: Dsn, *, unsafe: bool = False) -> None:
    """Refuse a server that would lose what it has promised.

    Args:
        dsn: the database.
        unsafe: accept settings that lose commits in a crash.

    Raises:
        LogError: one sentence with the fault.
        LogUnavailable: no connection.
    """
    for check in examine(dsn):
        if check.fault is not None and not (unsafe and check.unsafe_only):
            hint = ", or give --unsafe" if check.unsafe_only else ""
            raise LogError(f"{check.fault}{hint} ({check.name} is {check.found})")

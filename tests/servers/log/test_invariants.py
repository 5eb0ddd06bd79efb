"""The tables that every branch writes refuse rows that recovery could not read, from any writer."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import CheckViolation

from dtx.db import migrate
from dtx.db.connections import Dsn
from dtx.log import tables
from dtx.log.records import WITH_OUTCOME, Fate, JournalEvent, LogState, UnitState, WorkKind
from dtx.xa.codes import Heuristic

Row = dict[str, Any]
LATER = datetime.now(UTC) + timedelta(days=20)


def _xid() -> Row:
    return {"rm": "rm", "vhost": "/", "format_id": 1, "gtrid": uuid4().bytes, "bqual": b"", "owner": "guest"}


def _good(table: str) -> Row:
    counts = {"publishes": 0, "consumes": 0, "bytes": 0, "one_phase": False}
    match table:
        case "branch":
            more = {
                "version": 1,
                "timeout": 0,
                "started_at": "now",
                "published": b"",
                "consumed": None,
                "outcome": None,
            }
            return {"id": uuid4(), "state": "prepared", **_xid(), **counts, **more}
        case "work":
            key = {"branch_id": uuid4(), "position": 0, "rm": "rm", "kind": "consume", "queue": b"q", "unit": 1}
            return {
                **key,
                "exchange": b"",
                "routing_key": b"",
                "flags": 0,
                "properties": b"",
                "body": b"",
                "fate": None,
            }
        case "unit":
            more = {"lock": "l", "nonce": uuid4(), "receipt": True, "state": "done"}
            return {"branch_id": uuid4(), "number": 0, "rm": "rm", **more}
        case _:
            more = {
                "id": uuid4(),
                "at": "now",
                "event": "prepared",
                "branch_id": uuid4(),
                "actor": "a",
                "outcome": None,
            }
            return {**_xid(), **counts, **more}


ALLOWED: list[tuple[str, Row]] = [
    *(("branch", {"state": state, "outcome": "mixed" if state in WITH_OUTCOME else None}) for state in LogState),
    *(("branch", {"state": "heuristic", "outcome": outcome}) for outcome in Heuristic),
    ("branch", {"format_id": 2**32 - 1, "gtrid": bytes(64), "bqual": bytes(64)}),
    ("branch", {"published": bytes(32), "consumed": bytes(16)}),
    ("branch", {"published": None}),
    *(("work", {"kind": kind, "queue": queue, "unit": unit}) for kind, queue, unit in (
        (WorkKind.PUBLISH, None, None), (WorkKind.CONSUME, b"", None),
    )),
    *(("work", {"fate": fate}) for fate in Fate),
    *(("unit", {"state": state}) for state in UnitState),
    *(("journal", {"event": event}) for event in JournalEvent),
    *(("journal", {"outcome": outcome}) for outcome in Heuristic),
    ("journal", {"at": "1999-12-31"}),
]  # fmt: skip
REFUSED: list[tuple[str, Row]] = [
    *(
        (table, changes)
        for table in ("branch", "journal")
        for changes in (
            {"format_id": -1},
            {"format_id": 2**32},
            {"gtrid": b""},
            {"gtrid": bytes(65)},
            {"bqual": bytes(65)},
            {"outcome": "commited"},
        )
    ),
    ("branch", {"state": "Prepared"}),
    *(("branch", {"state": state}) for state in sorted(WITH_OUTCOME)),
    *(("branch", {"state": state, "outcome": "mixed"}) for state in LogState if state not in WITH_OUTCOME),
    ("branch", {"state": "heuristic", "outcome": "unknown"}),
    *(("branch", {column: -1}) for column in ("timeout", "publishes", "consumes", "bytes")),
    ("branch", {"version": 0}),
    *(("branch", {column: octets}) for column in ("published", "consumed") for octets in (bytes(15), bytes(17))),
    ("work", {"position": -1}),
    ("work", {"kind": "take"}),
    ("work", {"kind": "publish"}),
    ("work", {"queue": None}),
    ("work", {"kind": "publish", "queue": None}),
    ("work", {"fate": "lost"}),
    ("unit", {"number": -1}),
    ("unit", {"state": "perhaps"}),
    ("journal", {"event": "happened"}),
    ("journal", {"at": "1999-12-31", "event": "happened"}),
]


def _insert(connection: psycopg.Connection, table: str, row: Mapping[str, Any]) -> None:
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(
        sql.Identifier("dtx", table),
        sql.SQL(", ").join(map(sql.Identifier, row)),
        sql.SQL(", ").join([sql.Placeholder()] * len(row)),
    )
    with connection.transaction():
        connection.execute(statement, list(row.values()))


def _is_refused(connection: psycopg.Connection, table: str, changes: Row) -> bool:
    try:
        _insert(connection, table, _good(table) | changes)
    except CheckViolation:
        return True
    return False


def test_rows_obey_the_invariants_of_the_core(migrated_postgres_url: str) -> None:
    """Constraints repeat the core's invariants: rows that break one are refused, valid rows are not."""
    with psycopg.connect(migrated_postgres_url) as connection:
        assert [case for case in ALLOWED if _is_refused(connection, *case)] == []
        assert [case for case in REFUSED if not _is_refused(connection, *case)] == []
        _insert(connection, "branch", _good("branch"))
        for change in ("state = 'heuristic'", "version = 0", "outcome = 'mixed'"):
            with pytest.raises(CheckViolation), connection.transaction():
                connection.execute(sql.SQL("UPDATE dtx.branch SET {}").format(sql.SQL(change)))


def test_constraints_change_their_form_with_rows_in_place(postgres_url: str) -> None:
    """The same rows are refused before and after, in old and in new partitions, and after a downgrade."""
    names = (
        "SELECT conrelid::regclass::text, conname FROM pg_constraint WHERE contype = 'c' AND connamespace = "
        "'dtx'::regnamespace AND conname ~ '^(branch|work|unit|journal)_' ORDER BY 1, 2"
    )
    migrate.upgrade(postgres_url, "0011")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        before = connection.execute(names).fetchall()
        for table in tables.INVARIANTS:
            _insert(connection, table, _good(table))
        assert [case for case in REFUSED if not _is_refused(connection, *case)] == []
        migrate.upgrade(postgres_url)
        # a later day gets its own partition
        migrate.maintain(Dsn(postgres_url), LATER)
        _insert(connection, "journal", _good("journal") | {"at": LATER})
        assert _is_refused(connection, "journal", {"at": LATER, "event": "happened"})
        assert {name for _, name in connection.execute(names).fetchall()} == {
            f"{table}_check" for table in tables.INVARIANTS
        }
        assert [case for case in REFUSED if not _is_refused(connection, *case)] == []
        migrate.downgrade(postgres_url, "0011")
        after = connection.execute(names).fetchall()
        assert {row for row in after if not row[0].endswith(f"{LATER:%m%d}")} >= set(before)
        assert {name for _, name in after} == {name for _, name in before}
        assert [case for case in REFUSED if not _is_refused(connection, *case)] == []

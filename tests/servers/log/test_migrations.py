"""Migrations make what the metadata define; they run up, down, concurrently, and from an installed wheel."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import CheckConstraint
from sqlalchemy.dialects.postgresql.base import PGDialect

from dtx.auth import operators
from dtx.auth.users import account
from dtx.db import migrate
from dtx.db.columns import SCHEMA, metadata
from dtx.db.connections import Dsn, engine
from dtx.log import tables
from dtx.log.api import LogError, LogUnavailable
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.wheels import CLIENT, SERVER, Environment, build_wheel

HEAD = "0017"


def ours(_object: object, name: str | None, kind: str, *_: object) -> bool:
    """Partitions and Alembic's own table are not in the metadata."""
    return not (kind == "table" and name is not None and name.startswith(("journal_", "alembic_")))


def _plain(source: str) -> list[str]:
    """The words of *source*, with lists sorted, because their order does not matter."""
    lists = re.compile(r"\bIN \(([^)]*)\)")
    listed = lists.sub(lambda found: f"IN ({', '.join(sorted(found[1].split(', ')))})", " ".join(source.split()))
    return re.findall(r"[\w.']+|[^\s\w]", listed)


def query(url: str, sql: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.filterwarnings("ignore:Can't validate argument 'dialect_options'")  # SQLAlchemy, about NOT VALID
def test_upgrade_head_equals_the_metadata(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PGDialect.ischema_names, "xid8", tables.Xid8)
    with engine(Dsn(migrated_postgres_url)).connect() as connection:
        # the tests' role is named dtx: with its search path, the targets of foreign keys would have no schema
        connection.exec_driver_sql("SET search_path = public")
        connection.dialect.default_schema_name = "public"
        context = MigrationContext.configure(
            connection,
            opts={
                "include_schemas": True,
                "include_object": ours,
                "compare_type": True,
                "compare_server_default": True,
                "version_table_schema": SCHEMA,
            },
        )
        differences = [difference for difference in compare_metadata(context, metadata) if "dtx" in repr(difference)]
    assert differences == []


def test_the_view_equals_the_metadata(migrated_postgres_url: str) -> None:
    found = query(
        migrated_postgres_url,
        "SELECT column_name, data_type FROM information_schema.columns "
        "WHERE table_schema = 'dtx' AND table_name = 'in_doubt' ORDER BY ordinal_position",
    )
    dialect = PGDialect()  # type: ignore[no-untyped-call]
    assert found == [(column.name, column.type.compile(dialect).lower()) for column in tables.in_doubt.columns]


def test_constraints_and_storage_equal_the_metadata(migrated_postgres_url: str) -> None:
    """Constraints repeat the core's invariants."""
    found = dict(
        query(
            migrated_postgres_url,
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE contype = 'c' AND conrelid IN ("
            "SELECT oid FROM pg_class WHERE relnamespace = 'dtx'::regnamespace AND NOT relispartition)",
        )
    )
    checks = {
        str(constraint.name): constraint
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }
    assert account.metadata is metadata
    assert operators.audit.metadata is metadata
    assert tables.verdict.metadata is metadata
    assert found.keys() == checks.keys()
    assert "'committed'" in found["heuristic_outcome_outcome_check"]
    functions = dict(query(migrated_postgres_url, "SELECT proname, prosrc FROM pg_proc WHERE proname LIKE '%\\_holds'"))
    assert {name.removesuffix("_holds") for name in functions} == tables.INVARIANTS.keys()
    for name, invariants in tables.INVARIANTS.items():
        assert _plain(functions[f"{name}_holds"]) == _plain(f"BEGIN RETURN {' AND '.join(invariants)}; END"), name
        asked = str(checks[f"{name}_check"].sqltext).removeprefix(f"{SCHEMA}.")  # in the role's search path
        assert found[f"{name}_check"] == f"CHECK ({asked}) NOT VALID"
    collations = query(
        migrated_postgres_url,
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'dtx' AND table_name = 'branch' AND collation_name = 'C'",
    )
    assert {column for _, column in collations} == {"rm", "vhost", "state", "owner", "outcome"}
    options = dict(
        query(
            migrated_postgres_url,
            "SELECT relname, array_to_string(reloptions, ' ') FROM pg_class "
            "WHERE relnamespace = 'dtx'::regnamespace AND relkind = 'r' AND reloptions IS NOT NULL",
        )
    )
    for table in metadata.tables.values():
        wanted = table.dialect_options["postgresql"]["with"] or {}
        assert all(f"{key}={value}" in options[table.name] for key, value in wanted.items())


def test_the_journal_has_partitions_for_the_days_to_come(migrated_postgres_url: str) -> None:
    rows = query(
        migrated_postgres_url,
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'dtx.journal'::regclass AND inhrelid::regclass::text "
        r"~ 'journal_\d{8}'",
    )
    assert rows == [(9,)]


def test_down_and_up_again(postgres_url: str) -> None:
    assert migrate.current(postgres_url) is None
    assert migrate.upgrade(postgres_url) == HEAD
    assert migrate.current(postgres_url) == HEAD
    assert migrate.downgrade(postgres_url, "base") is None
    left = "SELECT relname FROM pg_class WHERE relnamespace = 'dtx'::regnamespace AND relkind IN ('r', 'p', 'v')"
    assert query(postgres_url, left) == [("alembic_version",)]
    assert query(postgres_url, "SELECT proname FROM pg_proc WHERE pronamespace = 'dtx'::regnamespace") == []
    assert migrate.upgrade(postgres_url) == HEAD
    assert migrate.upgrade(postgres_url) == HEAD


def test_messages_are_vacuumed_in_step_with_their_number(postgres_url: str) -> None:
    """A threshold that ignores the number of messages would have the whole index of a deep queue read too often."""

    def found() -> tuple[set[str], int]:
        options = query(postgres_url, "SELECT unnest(reloptions) FROM pg_class WHERE oid = 'dtx.message'::regclass")
        body = "SELECT coalesce(attstattarget, -1) FROM pg_attribute WHERE attrelid = 'dtx.message'::regclass"
        return {option for (option,) in options}, int(query(postgres_url, f"{body} AND attname = 'body'")[0][0])

    migrate.upgrade(postgres_url)
    options, statistics = found()
    assert {"autovacuum_vacuum_scale_factor=0.05", "autovacuum_vacuum_threshold=20000"} < options
    assert statistics == 0
    migrate.downgrade(postgres_url, "0003")
    options, statistics = found()
    assert "autovacuum_vacuum_scale_factor=0" in options
    assert statistics == -1


_NEW_MESSAGES = """
INSERT INTO dtx.body (id, rm, uses, content) VALUES (9, 'rm', 2, 'shared');
INSERT INTO dtx.message (queue, position, rm, exchange, routing_key, flags, properties, body, shared)
VALUES (1, 2, 'rm', '', 'q', 1, '', NULL, 9), (2, 3, 'rm', '', 'q', 1, '', NULL, 9),
    (1, 4, 'rm', '', 'q', 1, '', 'own', NULL)
"""


def test_messages_keep_their_bodies_through_upgrade_and_downgrade(postgres_url: str) -> None:
    """Expand first: rows of an older dtx are unchanged, and its statements still work."""
    bodies = "SELECT queue, position, body FROM dtx.message ORDER BY queue, position"
    old = (
        "INSERT INTO dtx.message (queue, position, rm, exchange, routing_key, flags, properties, body) "
        "VALUES (1, {}, 'rm', '', 'q', 1, '', 'old')"
    )
    migrate.upgrade(postgres_url, "0013")
    with psycopg.connect(postgres_url) as connection:
        connection.execute(old.format(1))
    assert migrate.upgrade(postgres_url) == HEAD
    assert query(postgres_url, bodies) == [(1, 1, b"old")]
    with psycopg.connect(postgres_url) as connection:
        connection.execute(_NEW_MESSAGES)
        connection.execute(old.format(5))
    migrate.downgrade(postgres_url, "0013")
    expected = [(1, 1, b"old"), (1, 2, b"shared"), (1, 4, b"own"), (1, 5, b"old"), (2, 3, b"shared")]
    assert query(postgres_url, bodies) == expected


def test_a_shared_body_goes_with_its_last_message(migrated_postgres_url: str) -> None:
    uses = "SELECT uses FROM dtx.body"
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute(_NEW_MESSAGES)
        connection.execute("DELETE FROM dtx.message WHERE position = 4")
        assert query(migrated_postgres_url, uses) == [(2,)]
        with connection.transaction(force_rollback=True):
            connection.execute("DELETE FROM dtx.message")
        assert query(migrated_postgres_url, uses) == [(2,)]
        connection.execute("DELETE FROM dtx.message WHERE position = 2")
        assert query(migrated_postgres_url, uses) == [(1,)]
        connection.execute("DELETE FROM dtx.message")
    assert query(migrated_postgres_url, uses) == []


def test_upgrades_at_once_wait_for_each_other(postgres_url: str) -> None:
    """Migrations run at start under an advisory lock."""
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(migrate.upgrade, [postgres_url] * 4)) == [HEAD] * 4
    assert query(postgres_url, "SELECT count(*) FROM dtx.alembic_version") == [(1,)]


def test_a_migration_that_waits_for_a_reader_stops_no_writes(postgres_url: str) -> None:
    """A lock that waits behind a backup would stop the writes of the dtx that serves, and its lease would run out."""
    migrate.upgrade(postgres_url, "0016")
    tries = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LOCK TABLE%'"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(postgres_url) as reader,
        psycopg.connect(postgres_url, autocommit=True) as writer,
    ):
        reader.execute("SELECT FROM dtx.branch")
        upgraded = pool.submit(migrate.upgrade, postgres_url)
        wait_until(lambda: writer.execute(tries).fetchone() == (1,), what="a migration that waits")
        writer.execute("SET lock_timeout = '500ms'")
        for _ in range(50):
            writer.execute("DELETE FROM dtx.branch")
        assert not upgraded.done()
        reader.rollback()
        assert upgraded.result(60) == HEAD


def test_a_database_of_a_newer_dtx_is_refused(migrated_postgres_url: str) -> None:
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.alembic_version SET version_num = '9999'")
    with pytest.raises(LogError, match="of a newer dtx"):
        migrate.upgrade(migrated_postgres_url)


def test_an_unreachable_database_is_named_without_its_password() -> None:
    with pytest.raises(LogUnavailable) as caught:
        migrate.upgrade("postgresql://me:s3cret@127.0.0.1:1/nowhere")
    assert "postgresql://me@127.0.0.1:1/nowhere" in str(caught.value)
    assert "s3cret" not in repr(caught.value)


def test_a_user_without_create_permission_gets_the_grant_named(postgres_url: str, postgres: PostgresServer) -> None:
    with postgres.connection(postgres_url) as connection:
        connection.execute("DROP ROLE IF EXISTS no_tables")
        connection.execute("CREATE ROLE no_tables LOGIN PASSWORD 'x'")
        url = re.sub("//[^@]*@", "//no_tables:x@", postgres_url)
        with pytest.raises(LogUnavailable, match=r"permission denied for database .*; .* grant CREATE on"):
            migrate.upgrade(url)
        connection.execute("DROP ROLE no_tables")


@pytest.mark.timeout(400)  # pip downloads its build tools
def test_migrations_run_from_an_installed_wheel(postgres_url: str, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    wheels = [build_wheel(project, tmp_path / project.name) for project in (CLIENT, SERVER)]
    environment.pip("install", "--quiet", "--no-deps", *wheels)
    # its dependencies come from this environment, which has dtx itself only as a checkout in another directory
    others = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    script = (
        "import sys, dtx.db.migrate as m; "
        "print(m.script_location()); print(m.upgrade(sys.argv[1]), m.current(sys.argv[1]))"
    )
    done = subprocess.run(
        [environment.python, "-P", "-c", script, postgres_url],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{others}"},
    )
    location, revisions = done.stdout.splitlines()[-2:]
    assert location.startswith(str(tmp_path))
    assert revisions == f"{HEAD} {HEAD}"

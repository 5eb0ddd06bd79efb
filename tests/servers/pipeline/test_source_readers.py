"""Who else has branches in doubt, and what transaction managers say: real servers, real files, some of them damaged."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pymysql
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame, SparkSession

from dtx.pipeline.decisions import read
from dtx.pipeline.fleet import Decisions, Participant
from dtx.pipeline.participants import connection_arguments, look, observe
from dtx.pipeline.source import SourceError, Waits, register
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.support.mariadb import SERVER, mariadb
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.seed import heuristic, in_doubt, seed

WAITS = Waits(connect=2, stall=20, retries=0)
AT = datetime(2026, 11, 21, 12, 0, 0, 250_000, tzinfo=UTC)


@pytest.fixture(scope="module")
def two_phase() -> Iterator[PostgresServer]:
    """A PostgreSQL that can prepare transactions."""
    with PostgresServer("twophase") as server:
        server.configure(max_prepared_transactions=10)
        yield server


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    return sorted(frame.toArrow().to_pylist(), key=lambda row: bytes(row["gtrid"]))


def test_everybody_in_doubt_is_observed(
    spark: SparkSession, two_phase: PostgresServer, migrated_postgres_url: str
) -> None:
    """dtx, PostgreSQL by psycopg and by others, MariaDB; who is away, and what is no xid, is named and counted."""
    register(spark)
    seed(
        migrated_postgres_url, [in_doubt(Xid(1, b"g1", b"queue")), heuristic(Xid(1, b"g2", b"q"), Heuristic.COMMITTED)]
    )
    with closing(psycopg.connect(two_phase.url)) as connection:
        connection.tpc_begin(connection.xid(1, "g1", "database"))
        connection.execute("SELECT pg_current_xact_id()")
        connection.tpc_prepare()
    with two_phase.connection() as connection:
        connection.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION '_sa_1é'")
    beside = two_phase.create_database()  # of the same server, whose view has the transactions of all its databases
    with closing(psycopg.connect(beside)) as connection:
        connection.tpc_begin(connection.xid(1, "g3", "database"))
        connection.execute("SELECT pg_current_xact_id()")
        connection.tpc_prepare()
    with mariadb() if SERVER else _ignore_answer() as url:
        participants = [
            Participant(name="orders", url=two_phase.url),
            Participant(name="beside", url=beside),
            Participant(name="gone", url=f"postgresql://x:pw1@127.0.0.1:{free_port()}/x"),
            Participant(name="lost", url=f"mysql://x:pw2@127.0.0.1:{free_port()}"),
        ]
        if SERVER:
            arguments = connection_arguments(url)
            with closing(pymysql.connect(**arguments)) as connection, connection.cursor() as cursor:
                for statement in ("START", "END", "PREPARE"):
                    cursor.execute(f"XA {statement} 0x6731ff00, 0x6d, 5")
            participants.append(Participant(name="stock", url=url))
        frame, wrong = observe(spark, {"queues": migrated_postgres_url}, participants, waits=WAITS)
        found = rows(frame)
    keys = ("source", "kind", "rm", "vhost", "format_id", "gtrid", "bqual", "state")
    expected: list[tuple[Any, ...]] = [
        ("beside", "postgresql", "beside", conninfo_to_dict(beside)["dbname"], 1, b"g3", b"database", "prepared"),
        ("orders", "postgresql", "orders", "dtx", None, "_sa_1é".encode(), b"", "prepared"),
        ("orders", "postgresql", "orders", "dtx", 1, b"g1", b"database", "prepared"),
        ("queues", "dtx", "dtx", "/", 1, b"g1", b"queue", "prepared"),
        ("queues", "dtx", "dtx", "/", 1, b"g2", b"q", "heuristic-committed"),
    ]
    if SERVER:
        expected.append(("stock", "mysql", "stock", None, 5, b"g1\xff\0", b"m", "prepared"))
    assert sorted((tuple(row[key] for key in keys) for row in found), key=str) == sorted(expected, key=str)
    assert all((row["since"] is None) is (row["kind"] == "mysql") for row in found)
    named = {one.source: one for one in wrong}
    assert set(named) == {"orders", "gone", "lost"}
    assert (named["orders"].count, named["orders"].sample) == (1, "_sa_1é")
    assert named["gone"].count is named["lost"].count is None
    assert not any("pw1" in str(one) or "pw2" in str(one) for one in wrong)


class _ignore_answer:  # noqa: N801 - a context manager
    def __enter__(self) -> str:
        return ""

    def __exit__(self, *_: object) -> None:
        pass


def test_a_url_of_mysql_may_ask_for_tls() -> None:
    """Who asks for it has the server's name checked, too: a parameter that is misspelt is no encryption."""
    found = connection_arguments("mysql://u:p%40w@h:77/?ssl_ca=/etc/ca.pem&ssl_key=/k")
    assert found == {
        "host": "h", "port": 77, "user": "u", "password": "p@w", "ssl_ca": "/etc/ca.pem", "ssl_key": "/k",
        "ssl_verify_cert": True, "ssl_verify_identity": True,
    }  # fmt: skip
    with pytest.raises(SourceError, match="parameter 'ssl-ca': there are unix_socket, ssl_ca"):
        connection_arguments("mysql://h/?ssl-ca=/etc/ca.pem")


def test_a_login_without_its_package_fails_one_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyMySQL says so with an error that is none of its own."""

    def connect(**_: object) -> None:
        raise RuntimeError("'cryptography' package is required")

    monkeypatch.setattr(pymysql, "connect", connect)
    (seen, (wrong,)) = look(Participant(name="stock", url="mysql://u:pw@h"), WAITS)
    assert (seen, wrong.source, wrong.is_away) == ([], "stock", True)
    assert "'cryptography' package is required" in wrong.reason


@pytest.mark.parametrize("url", ["postgresql://x", "mysql://h:port", "x"])
def test_a_url_that_is_none_of_mysql_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="the url"):
        connection_arguments(url)


GOOD = {"gtrid": b"\xff\0g".hex(), "decision": "commit", "time": AT.isoformat()}


def test_malformed_json_lines_are_named_with_their_number(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        json.dumps(GOOD | {"format_id": 4294967295, "tm": "tm-1", "finished": True, "other": [1]}),
        "",
        '{"gtrid": "6', "[1]", '{"gtrid": "6"}',
        json.dumps(GOOD | {"gtrid": "zz"}),
        json.dumps(GOOD | {"gtrid": "61" * 65}),
        json.dumps(GOOD | {"gtrid": "62", "decision": "COMMIT?"}),
        json.dumps(GOOD | {"gtrid": "63", "time": "yesterday"}),
        json.dumps(GOOD | {"gtrid": "64", "format_id": -1}),
        json.dumps(GOOD | {"gtrid": "65", "decision": "rollback", "time": "2026-11-21 12:00:00.25"}),
        json.dumps(GOOD | {"gtrid": "66", "finished": "perhaps"}),
        json.dumps(GOOD | {"gtrid": "67", "time": "2026-13-41T12:00:00Z"}),
        "\x1b[2J" * 1_000,
    ]  # fmt: skip
    path = tmp_path / "tm.jsonl"
    path.write_text("\n".join(lines))
    frame, wrong = read(spark, [Decisions(format="json", name="bank", path=str(path))])
    assert [tuple(row.values()) for row in rows(frame)] == [
        ("bank", None, b"e", "rollback", AT, None, "bank"),
        ("tm-1", 4294967295, b"\xff\0g", "commit", AT, True, "bank"),
    ]
    found = {one.reason: (int(one.item.rpartition(":")[2]), one.count) for one in wrong}
    assert found == {
        "not a JSON object": (3, 3),
        "gtrid is not 1 to 64 bytes in hexadecimal": (5, 3),
        "decision is not commit or rollback": (8, 1),
        "time is not in ISO 8601": (9, 2),
        "format_id is not an unsigned 32 bit number": (10, 1),
        "finished is not true or false": (12, 1),
    }
    assert all("\x1b" not in one.sample and len(one.sample) <= 200 for one in wrong)


def test_no_object_of_a_line_is_passed_over(spark: SparkSession, tmp_path: Path) -> None:
    """Of several on one line, and of a list, Spark reads the first and says nothing of the rest."""
    one, two = (json.dumps(GOOD | {"gtrid": gtrid}) for gtrid in ("61", "62"))
    alone = [json.dumps(GOOD | {"gtrid": gtrid}) for gtrid in ("63", "64", "65", "66")]
    lines = [
        f"[{one}, {two}]", f"{one}{two}", f"{one}, {two}", f"{one} and more", "null", '"text"',
        "[", f"  {alone[0]},", f"\t{alone[1]} ,\t", alone[2], "]", alone[3],
    ]  # fmt: skip
    (tmp_path / "tm.jsonl").write_text("\n".join(lines))
    frame, (wrong,) = read(spark, [Decisions(format="json", name="bank", path=str(tmp_path / "tm.jsonl"))])
    assert [bytes(row["gtrid"]) for row in rows(frame)] == [b"c", b"d", b"e", b"f"]
    assert (wrong.reason, wrong.item.rpartition(":")[2], wrong.count) == ("not a JSON object", "1", 8)
    entry = json.dumps({"id": "tm1", "wasCommitted": True, "participants": []})
    (tmp_path / "tmlog1.log").write_text(f"{entry}{entry.replace('tm1', 'tm2')}\n{entry}\n")
    logs = [Decisions(format="atomikos", name="shop", path=str(tmp_path / "tmlog1.log"))]
    frame, (wrong,) = read(spark, logs)
    assert [bytes(row["gtrid"]) for row in rows(frame)] == [b"tm1"]
    assert (wrong.item.rpartition(":")[2], wrong.count) == ("1", 1)


def test_a_line_far_into_a_divided_file_has_its_number(spark: SparkSession, tmp_path: Path) -> None:
    """Spark reads a large file in blocks: the number counts through all of them."""
    path = tmp_path / "large.jsonl"
    good = json.dumps(GOOD) + "\n"
    path.write_text(good * 4_000 + "broken\n" + good * 10)
    before = str(spark.conf.get("spark.sql.files.maxPartitionBytes"))
    spark.conf.set("spark.sql.files.maxPartitionBytes", "65536")
    try:
        frame, (wrong,) = read(spark, [Decisions(format="json", name="bank", path=str(path))])
        assert frame.count() == 4_010
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", before)
    assert (wrong.item.rpartition(":")[2], wrong.count, wrong.sample) == ("4001", 1, "broken")


def test_csv_columns_have_any_order_and_each_file_its_header(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'decision,gtrid,time,comment\ncommit,61,{AT.isoformat()},"x, y"\ncommit,62\n')
    (tmp_path / "b.csv").write_text(f"\ufeffgtrid,time,decision,tm\n63,{AT.isoformat()},rollback,other\n")
    (tmp_path / "c.csv").write_text("gtrid,when\n64,now\n65,now\n")
    frame, wrong = read(spark, [Decisions(format="csv", name="bank", path=str(tmp_path))])
    assert [(row["tm"], bytes(row["gtrid"]), row["decision"], row["at"]) for row in rows(frame)] == [
        ("bank", b"a", "commit", AT),
        ("other", b"c", "rollback", AT),
    ]
    found = {one.item.rpartition("/")[2]: (one.reason, one.count, one.is_away) for one in wrong}
    assert found == {
        "a.csv:3": ("time is not in ISO 8601", 1, False),
        "c.csv:1": ("the header lacks decision, time, or has it twice", 2, True),
    }


def test_a_truncated_parquet_file_is_named_and_others_are_read(spark: SparkSession, tmp_path: Path) -> None:
    table = pa.table({"gtrid": [b"a", b"b", b""], "decision": ["commit"] * 3, "time": pa.array([AT] * 3)})
    pq.write_table(table, tmp_path / "whole.parquet")
    pq.write_table(table, tmp_path / "cut.parquet")
    whole = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    damaged = bytearray(whole)
    damaged[4:40] = bytes(36)
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    frame, wrong = read(spark, [Decisions(format="parquet", name="bank", path=str(tmp_path))])
    assert [bytes(row["gtrid"]) for row in rows(frame)] == [b"a", b"b"]
    names = sorted(one.item.rpartition("/")[2] for one in wrong)
    assert names == ["cut.parquet", "damaged.parquet", "whole.parquet"]
    assert {one.count for one in wrong if one.item.endswith("whole.parquet")} == {1}


def test_a_parquet_file_may_have_columns_that_others_have_not(spark: SparkSession, tmp_path: Path) -> None:
    """Whichever Spark looks at first: ``finished`` that came with a new release must not be lost."""
    most = {"gtrid": [b"a"], "decision": ["commit"], "time": pa.array([AT])}
    others: list[dict[str, Any]] = [{}, {"gtrid": [b"b"], "finished": [False]}, {"gtrid": [b"c"]}]
    for name, columns in enumerate(others):
        pq.write_table(pa.table(most | columns), tmp_path / f"{name}.parquet")
    frame, wrong = read(spark, [Decisions(format="parquet", name="bank", path=str(tmp_path))])
    assert wrong == []
    assert [(bytes(row["gtrid"]), row["finished"]) for row in rows(frame)] == [
        (b"a", None),
        (b"b", False),
        (b"c", None),
    ]


def test_each_parquet_file_with_other_types_is_judged_alone(spark: SparkSession, tmp_path: Path) -> None:
    """What others have chosen stops nobody: neither when it is looked at nor when it is read."""
    most = {"gtrid": [b"a"], "decision": ["commit"], "time": pa.array([AT])}
    for name, columns in {
        "numbers": {"gtrid": [b"n"], "tm": [7], "finished": [True], "format_id": ["8"]},
        "words": {"gtrid": [b"w"], "tm": ["tm"], "finished": ["false"], "format_id": pa.array([9], pa.int32())},
        "odd": {"gtrid": [b"o"], "finished": ["perhaps"]},
        "text": {"gtrid": ["text"]},
        "lacking": {"decision": None},
    }.items():
        table = {column: values for column, values in (most | columns).items() if values is not None}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    frame, wrong = read(spark, [Decisions(format="parquet", name="bank", path=str(tmp_path))])
    assert [(row["tm"], row["format_id"], bytes(row["gtrid"]), row["finished"]) for row in rows(frame)] == [
        ("7", 8, b"n", True),
        ("tm", 9, b"w", False),
    ]
    named = {one.item.rpartition("/")[2]: (one.reason, one.count, one.is_away) for one in wrong}
    assert named == {
        "odd.parquet": ("finished is not true or false", 1, False),
        "text.parquet": ("column gtrid is string, not binary", 1, True),
        "lacking.parquet": ("there is no column decision", 1, True),
    }


@pytest.mark.parametrize("others", [(), ("whole",), ("whole", "cut")], ids=["alone", "beside sound", "beside cut off"])
def test_an_empty_parquet_file_is_named(spark: SparkSession, tmp_path: Path, others: tuple[str, ...]) -> None:
    """Spark passes over it without a word: a file lost to a full disk looked like no decisions at all."""
    (tmp_path / "empty.parquet").write_bytes(b"")
    table = pa.table({"gtrid": [b"a"], "decision": ["commit"], "time": pa.array([AT])})
    for name in others:
        pq.write_table(table, tmp_path / f"{name}.parquet")
    if "cut" in others:
        (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-20])
    frame, wrong = read(spark, [Decisions(format="parquet", name="bank", path=str(tmp_path))])
    assert len(rows(frame)) == ("whole" in others)
    named = {one.item.rpartition("/")[2]: one.reason for one in wrong}
    assert named.pop("empty.parquet") == "the file is empty"
    assert named.keys() == {f"{name}.parquet" for name in others if name == "cut"}


def test_logs_of_atomikos_are_read_in_both_forms(spark: SparkSession, tmp_path: Path) -> None:
    """The last entry of a transaction says whether it is finished; how one was decided is never guessed."""

    def entry(id_: str, *states: str, committed: bool = False) -> str:
        participants = [
            {"uri": f"r{number}", "state": state, "expires": 1, "resourceName": "x"}
            for number, state in enumerate(states)
        ]
        return json.dumps({"id": id_, "wasCommitted": committed, "participants": participants})

    (tmp_path / "tmlog9.log").write_text(
        "\n".join([entry("tm1", "COMMITTING", "COMMITTING"), entry("tm2", "COMMITTING"), entry("tm4", "ABORTING")])
    )
    (tmp_path / "tmlog10.log").write_text(
        "\n".join(
            [
                entry("tm1", "TERMINATED", "TERMINATED"),
                "tm3|COMMITTING|1700000000000|domain|",
                "tm5|TERMINATED|1700000000000|domain|",
                "tm6|FLYING|1700000000000|domain|",
                '{"id":"tm7","wasComm',
                "rubbish",
            ]
        )
    )
    frame, wrong = read(spark, [Decisions(format="atomikos", name="shop", path=str(tmp_path))])
    assert [(bytes(row["gtrid"]), row["decision"], row["finished"], row["at"]) for row in rows(frame)] == [
        (b"tm1", "commit", True, None),
        (b"tm2", "commit", False, None),
        (b"tm3", "commit", False, None),
        (b"tm4", "rollback", False, None),
    ]
    assert sorted((one.item.rpartition("/")[2], one.count) for one in wrong)[1:] == [
        ("tmlog10.log:4", 1),
        ("tmlog10.log:5", 2),
    ]
    assert [one.sample for one in wrong if "terminated" in one.reason] == ["tm5"]


def test_the_log_of_the_own_transaction_manager_is_read(
    spark: SparkSession, tmp_path: Path, postgres: PostgresServer
) -> None:
    """Table decision: of a SQLite file, and of schema dtx_tm."""
    path = tmp_path / "tm.sqlite"
    columns = "gtrid {bytes} PRIMARY KEY, format_id bigint, node text, decision text, at {time}, finished {time}"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(f"CREATE TABLE decision ({columns.format(bytes='BLOB', time='TEXT')})")
        values = [
            (b"a\xff", 1, "n1", "commit", AT.isoformat(), AT.isoformat()),
            (b"b", 2, "n1", "rollback", AT.isoformat(), AT.isoformat()),
            (b"fence", 2, "n1", "rollback", AT.isoformat(), None),
            (b"c", 3, "n1", "perhaps", AT.isoformat(), None),
            ("text", 3, "n1", "commit", AT.isoformat(), None),
            (b"d", 3, "n1", "commit", "noon", None),
        ]
        file.executemany("INSERT INTO decision VALUES (?, ?, ?, ?, ?, ?)", values)
    url = postgres.create_database()
    with postgres.connection(url) as connection:
        connection.execute(
            f"CREATE SCHEMA dtx_tm; CREATE TABLE dtx_tm.decision ({columns.format(bytes='bytea', time='timestamptz')})"
        )
        connection.execute("INSERT INTO dtx_tm.decision VALUES ('p', 4, 'n2', 'commit', %s, NULL)", [AT])
    logs = [
        Decisions(format="dtx", name="file", path=str(path)),
        Decisions(format="dtx", name="base", url=url),
        Decisions(format="dtx", name="none", path=str(tmp_path / "none.db")),
        Decisions(format="json", name="away", path=str(tmp_path / "away.json")),
    ]
    frame, wrong = read(spark, logs, waits=WAITS)
    assert [tuple(row.values()) for row in rows(frame)] == [
        ("n1", 1, b"a\xff", "commit", AT, True, "file"),
        ("n1", 2, b"b", "rollback", AT, True, "file"),
        ("n2", 4, b"p", "commit", AT, False, "base"),
    ]
    assert sorted((one.source, one.count) for one in wrong if one.count is not None) == [("file", 1)] * 3
    assert sorted((one.source, one.reason) for one in wrong if one.count is None) == [
        ("away", "there is no such file or directory"),
        ("none", "there is no such file"),
    ]
    postgres.drop_database(url)

"""``dtx in-doubt``, ``show``, ``migrate`` and ``doctor`` on a real database, with rows written by the log."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import yaml

from dtx.admin.safe_text import iso_time
from dtx.cli import run
from dtx.db import migrate as migrations
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import (
    Advance,
    BranchRecord,
    CompleteWrite,
    DuplicateWrite,
    Insert,
    JournalEntry,
    JournalEvent,
    LogState,
    LogWrite,
    Unit,
    WorkKind,
    WorkRow,
)
from dtx.wire.amqp09 import properties
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.support.branches import a_commit, a_completion, a_duplicate, a_replay
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port

# Within the retention of the journal, and older than all lines that a test writes now.
NOW = float(int(time.time()) - 7200)
PLAIN = Xid(1, b"gt", b"b1")
BINARY = Xid(0xFFFFFFFE, b"\x00\x1b" * 32, b"\xff" * 64)
ATTACK = b"\x1b[2J\x1b]0;owned\x07gone\r\nforged line"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def branch(xid: Xid, **more: Any) -> BranchRecord:
    values: dict[str, Any] = {
        "id": uuid4(), "vhost": "/", "xid": xid, "state": LogState.PREPARED, "owner": "alice",
        "started_at": NOW, "prepared_at": NOW + 1,
    }  # fmt: skip
    return BranchRecord(**{**values, **more})


def entry(of: BranchRecord, event: JournalEvent, **more: Any) -> JournalEntry:
    values: dict[str, Any] = {
        "event": event, "branch_id": of.id, "vhost": of.vhost, "xid": of.xid, "owner": of.owner, "at": NOW + 1,
        "actor": of.owner, "publishes": of.publishes, "consumes": of.consumes, "bytes": of.bytes,
    }  # fmt: skip
    return JournalEntry(**{**values, **more})


def publish(position: int, body: bytes, **more: Any) -> WorkRow:
    values: dict[str, Any] = {
        "position": position, "kind": WorkKind.PUBLISH, "exchange": b"orders", "routing_key": b"new",
        "properties": properties.EMPTY, "body": body,
    }  # fmt: skip
    return WorkRow(**{**values, **more})


def write(url: str, *records: LogWrite, rm: str = "dtx") -> None:
    async def all_of_them() -> None:
        log = PostgresTransactionLog(url, rm, holder="test-host:1")
        await log.open()
        try:
            for record in records:
                await log.write(record)
        finally:
            await log.close()

    asyncio.run(all_of_them())


class Answer:
    """The output and the exit code of a command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def objects(self) -> list[Any]:
        """The JSON objects of the output, one on each line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """Runs commands on one database."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys

    def __call__(self, *words: str) -> Answer:
        self._capsys.readouterr()
        code = run([*words, "--database", self.url])
        said = self._capsys.readouterr()
        return Answer(code, said.out, said.err)


@pytest.fixture
def dtx(migrated_postgres_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(migrated_postgres_url, capsys)


@pytest.fixture
def three(dtx: Command) -> Command:
    """A plain branch, a stuck one with hostile bytes in all fields, and one that an operator decided."""
    plain = branch(PLAIN, publishes=2, bytes=11, started_at=NOW)
    stuck = branch(
        BINARY, id=UUID(int=7), vhost="v\x1b[31m", owner="bob\n", state=LogState.COMMITTING, consumes=1, publishes=1,
        bytes=len(ATTACK) * 2, started_at=NOW + 10, decided_at=NOW + 11, stuck="404 NOT_FOUND \x1b[2J",
        units=(Unit(number=0, lock="dtx.lock.1", nonce=UUID(int=9)),),
    )  # fmt: skip
    decided = branch(Xid(5, b"h"), publishes=1, bytes=1, started_at=time.time())
    raw = properties.build({Property.CONTENT_TYPE: ATTACK, Property.DELIVERY_MODE: b"\x02"})
    write(
        dtx.url,
        Insert(
            branch=plain,
            work=[publish(0, b"hello"), publish(1, b"world!", exchange=b"", routing_key=b"q", flags=1)],
            journal=entry(plain, JournalEvent.PREPARED),
        ),
        Insert(
            branch=stuck,
            work=[
                publish(0, ATTACK, exchange=b"ex\xff", properties=raw),
                WorkRow(
                    position=1, kind=WorkKind.CONSUME, exchange=b"", routing_key=b"k", queue=b"q\x1b", flags=1,
                    properties=b"\xff\xff", body=ATTACK, unit=1,
                ),
            ],
            journal=entry(stuck, JournalEvent.STUCK, reason="the broker says \x1b[2J", actor="dtx"),
        ),
        Insert(branch=decided, work=[publish(0, b"x")], journal=entry(decided, JournalEvent.PREPARED)),
        Advance(
            id=decided.id, expect=LogState.PREPARED, version=1, to=LogState.HEURISTIC, outcome=Heuristic.ROLLED_BACK,
            decided_at=NOW + 5,
            journal=entry(
                decided, JournalEvent.HEURISTIC, outcome=Heuristic.ROLLED_BACK, actor="op", reason="lost tm", at=NOW + 5
            ),
        ),
    )  # fmt: skip
    return dtx


def test_in_doubt_lists_the_oldest_first_as_json(three: Command) -> None:
    answer = three("in-doubt", "--json")
    assert answer.code == 0
    first, second, third = answer.objects
    assert first["xid"] == "1:6774:6231"
    assert (first["format_id"], first["gtrid"], first["bqual"], first["readable"]) == (1, "6774", "6231", "gt/b1")
    assert (first["rm"], first["vhost"], first["state"], first["owner"]) == ("dtx", "/", "prepared", "alice")
    assert (first["messages"], first["publishes"], first["consumes"], first["bytes"]) == (2, 2, 0, 11)
    assert (first["exchanges"], first["queues"], first["stuck"]) == (["", "orders"], [], None)
    assert first["started_at"] == iso_time(NOW)
    assert 7200 <= first["age"] < time.time() - NOW + 60
    assert (second["state"], second["stuck"], second["vhost"]) == ("committing", "404 NOT_FOUND \x1b[2J", "v\x1b[31m")
    assert (second["queues"], second["exchanges"]) == (["q\x1b"], ["ex\\xff"])
    assert (third["state"], third["outcome"]) == ("heuristic", "rolled-back")


def test_in_doubt_is_a_table_with_a_sum_below(three: Command) -> None:
    answer = three("in-doubt")
    lines = answer.out.splitlines()
    assert lines[0].split() == [
        "xid", "vhost", "state", "owner", "age", "messages", "bytes", "queues", "destinations", "exchanges", "stuck",
    ]  # fmt: skip
    assert "1:6774:6231 gt/b1" in lines[1]
    assert "(default), orders" in lines[1]
    assert "heuristic (rolled-back)" in lines[3]
    assert lines[-1] == "3 in doubt: 1 committing, 1 heuristic, 1 prepared; 1 stuck"


def test_long_xids_are_whole_in_wide_tables_only(three: Command) -> None:
    assert str(BINARY) not in three("branches").out
    wide = three("branches", "--output", "wide", "--sort", "-xid").out
    assert wide.index(str(BINARY)) < wide.index("1:6774:6231")


@pytest.mark.parametrize(
    "words", [("in-doubt",), ("show", str(BINARY)), ("show", str(BINARY), "--json"), ("in-doubt", "--json")]
)
def test_no_control_character_of_a_client_reaches_the_terminal(three: Command, words: tuple[str, ...]) -> None:
    answer = three(*words)
    assert answer.code == 0
    assert all(line.isprintable() for line in answer.out.split("\n"))
    assert "forged line" not in answer.out.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--state", "prepared"), ["1:6774:6231"]),
        (("--state", "taking"), []),
        (("--owner", "alice"), ["1:6774:6231", "5:68:"]),
        (("--vhost", "v\x1b[31m"), [str(BINARY)]),
        (("--older-than", "1h"), ["1:6774:6231", str(BINARY)]),
        (("--older-than", "1h", "--limit", "1"), ["1:6774:6231"]),
        (("--rm", "other"), []),
    ],
)
def test_in_doubt_can_be_narrowed(three: Command, words: tuple[str, ...], expected: list[str]) -> None:
    answer = three("in-doubt", "--json", *words)
    assert answer.code == 0
    assert [found["xid"] for found in answer.objects] == expected


def test_a_truncated_table_reports_it(three: Command) -> None:
    assert three("in-doubt", "--limit", "2").out.endswith("; the first 2 are shown\n")


def test_an_empty_list_is_no_error(dtx: Command) -> None:
    assert (dtx("in-doubt").code, dtx("in-doubt").out) == (0, "no branch is in doubt\n")
    assert (dtx("in-doubt", "--json").code, dtx("in-doubt", "--json").out) == (0, "")


def test_an_empty_filtered_list_reports_the_filter(three: Command) -> None:
    """Branches in doubt may not match the filter."""
    answer = three("branches", "--queue", "no-such-queue")
    assert (answer.code, answer.out) == (0, "no branch in doubt matches the filter\n")


def test_a_list_is_filtered_by_destination_and_shows_it(three: Command) -> None:
    """For the default exchange, the routing key is the name of the queue."""
    (found,) = three("branches", "--queue", "q", "--json").objects
    assert (found["xid"], found["destinations"]) == (str(PLAIN), ["q"])
    assert "destinations" in three("branches").out


def test_an_empty_audit_log_reports_whether_a_filter_applied(dtx: Command) -> None:
    assert dtx("audit").out == "the audit log is empty\n"
    for words in (("--actor", "olga"), ("--action", "view"), ("--subject", "1:61:"), ("--about", "1:61:")):
        assert dtx("audit", *words).out == "no line matches the filter\n"


def test_show_lists_state_history_and_messages(three: Command) -> None:
    out = three("show", str(PLAIN)).out
    for expected in (
        "1:6774:6231 gt/b1", "prepared", "alice", str(iso_time(NOW)), "2 published, 0 consumed, 11 B",
        "publish to exchange orders key new", "publish to exchange (default) key q, mandatory", "hello", "world!",
    ):  # fmt: skip
        assert expected in out, expected
    assert f"rolled-back by op at {iso_time(NOW + 5)}: lost tm" in three("show", "5:68:").out


def test_show_as_json_has_everything(three: Command) -> None:
    (shown,) = three("show", str(BINARY), "--json").objects
    logged = shown["in_log"]
    assert shown["vhost"] == "v\x1b[31m"
    assert (logged["state"], logged["branch"]) == ("committing", str(UUID(int=7)))
    assert logged["units"] == [
        {
            "number": 0,
            "state": "pending",
            "lock": "dtx.lock.1",
            "nonce": str(UUID(int=9)),
            "incarnation": None,
            "receipt": True,
            "attempt": 1,
        }
    ]
    published, consumed = logged["work"]
    assert published["properties"]["content_type"] == ATTACK.decode().encode("unicode_escape").decode()
    assert published["preview"].startswith("\\x1b[2J")
    assert (consumed["queue"], consumed["redelivered"], consumed["unit"]) == ("q\\x1b", True, 1)
    assert "undecodable" in consumed["properties"]
    assert [(line["event"], line["actor"]) for line in shown["history"]] == [("stuck", "dtx")]
    (operator,) = three("show", "5:68:", "--json").objects
    assert operator["in_log"]["decision"] == {
        "outcome": "rolled-back", "actor": "op", "reason": "lost tm", "at": iso_time(NOW + 5),
    }  # fmt: skip


@pytest.mark.parametrize("xid", [str(BINARY), "5:68:"])
def test_show_as_yaml_has_the_same_as_json(three: Command, xid: str) -> None:
    assert yaml.safe_load(three("show", xid, "--output", "yaml").out) == three("show", xid, "--json").objects


def test_show_counts_messages_sent_again_also_after_the_end(dtx: Command) -> None:
    sent = branch(PLAIN, publishes=2, bytes=11)
    copy = a_duplicate(sent)
    write(
        dtx.url,
        Insert(branch=sent, work=[publish(0, b"a"), publish(1, b"b")], journal=entry(sent, JournalEvent.PREPARED)),
        a_commit(sent, replays=(a_replay(0), a_replay(1))),
        DuplicateWrite(duplicate=copy),
    )
    counts = [{"branch": str(sent.id), "replayed": 2, "suppressed": 1}]
    for ending in (None, a_completion(sent, expect=LogState.COMMITTING, version=2)):
        if ending is not None:
            write(dtx.url, ending)
        assert "2 messages; 1 duplicates not delivered" in dtx("show", str(PLAIN)).out
        (shown,) = dtx("show", str(PLAIN), "--json").objects
        assert (shown["in_log"] is None, shown["copies"]) == (ending is not None, counts)


def test_show_limits_the_messages_and_names_the_option(three: Command) -> None:
    out = three("show", str(PLAIN), "--messages", "1").out
    assert "hello" in out
    assert "world!" not in out
    assert "1 more messages: --messages 2 or --json shows them" in out


def test_show_knows_a_branch_that_is_completed_from_the_journal(dtx: Command) -> None:
    done = branch(PLAIN, publishes=1, bytes=5)
    write(
        dtx.url,
        Insert(branch=done, work=[publish(0, b"hello")], journal=entry(done, JournalEvent.PREPARED)),
        CompleteWrite(
            id=done.id, expect=LogState.PREPARED, version=1, journal=entry(done, JournalEvent.COMMITTED, at=NOW + 3)
        ),
    )
    out = dtx("show", str(PLAIN)).out
    assert "not in the log any more" in out
    assert out.index("prepared") < out.index("committed")
    (shown,) = dtx("show", str(PLAIN), "--json").objects
    assert shown["in_log"] is None
    assert [line["event"] for line in shown["history"]] == ["prepared", "committed"]


def test_the_same_xid_in_two_vhosts_is_shown_twice(dtx: Command) -> None:
    """A vhost is one resource manager: the same Xid may exist in two vhosts."""
    write(dtx.url, *(Insert(branch=branch(PLAIN, vhost=vhost)) for vhost in ("a", "b")))
    assert [shown["vhost"] for shown in dtx("show", str(PLAIN), "--json").objects] == ["a", "b"]
    assert [shown["vhost"] for shown in dtx("show", str(PLAIN), "--json", "--vhost", "b").objects] == ["b"]


def test_an_unknown_xid_is_one_sentence_and_exit_code_1(dtx: Command) -> None:
    answer = dtx("show", "9:aa:")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == "dtx: nothing is known about 9:aa:: it is neither in the log nor in the journal\n"


@pytest.mark.parametrize("text", ["", "1", "1:zz:", "1::", "1:aa:bb:cc", "-1:aa:", "1:" + "aa" * 65 + ":", "\x1b[2J"])
def test_an_invalid_xid_is_a_usage_error(dtx: Command, text: str) -> None:
    answer = dtx("show", "--", text) if text.startswith("-") else dtx("show", text)
    assert answer.code == 2
    assert "\x1b" not in answer.err


def test_commands_work_while_the_log_is_served(dtx: Command) -> None:
    """The commands read the database without a lease."""

    async def served() -> None:
        log = PostgresTransactionLog(dtx.url, "dtx", holder="busy-host:1")
        await log.open()
        try:
            await log.write(Insert(branch=branch(PLAIN)))
            assert [found["xid"] for found in (await asyncio.to_thread(dtx, "in-doubt", "--json")).objects] == [
                str(PLAIN)
            ]
            assert (await asyncio.to_thread(dtx, "show", str(PLAIN))).code == 0
            doctor = (await asyncio.to_thread(dtx, "doctor", "--json")).objects
            (lease,) = [check["sentence"] for check in doctor if check["check"] == "lease"]
            assert re.fullmatch(r"busy-host:1 \(epoch \d+\): active as dtx", lease)
            down = await asyncio.to_thread(dtx, "migrate", "down", "--yes")
            assert down.code == 1
            assert "dtx is serving on these tables (busy-host:1): stop it first" in down.err
        finally:
            await log.close()

    asyncio.run(served())


def test_a_database_without_tables_exits_with_3(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Command(postgres_url, capsys)("in-doubt")
    assert answer.code == 3
    assert "run dtx migrate" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("words", [("in-doubt",), ("in-doubt", "--json"), ("show", "1:aa:"), ("migrate", "current")])
def test_an_unreachable_database_is_reported_without_the_password(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    answer = Command(f"postgresql://u:s3cret-word@127.0.0.1:{free_port()}/x", capsys)(*words)
    assert answer.code == 3
    assert answer.err.count("\n") == 1
    assert "s3cret-word" not in answer.err


def test_migrate_reports_the_remedy_for_an_unreachable_database(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Command(f"postgresql://u@127.0.0.1:{free_port()}/x", capsys)("migrate", "current")
    assert answer.code == 3
    assert answer.err.rstrip().endswith("start PostgreSQL, or correct the database URL")


def test_migrate_goes_up_and_down_and_reports_the_revision(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dtx = Command(postgres_url, capsys)
    assert dtx("migrate", "current").out.startswith("none (the newest is ")
    up = dtx("migrate")
    assert up.code == 0
    assert up.out.endswith("(the newest)\n")
    assert dtx("migrate", "current").out == up.out
    refused = dtx("migrate", "down")
    assert (refused.code, refused.out) == (2, "")
    assert "--yes" in refused.err
    assert dtx("migrate", "down", "--to", "base", "--yes").out.startswith("none")
    assert migrations.current(postgres_url) is None
    assert dtx("migrate", "down", "--yes").code == 1
    assert dtx("migrate", "--to", "base").code == 2


def test_a_version_that_does_not_exist_is_one_sentence(dtx: Command) -> None:
    answer = dtx("migrate", "down", "--to", "nowhere", "--yes")
    assert answer.code == 3
    assert answer.err.count("\n") == 1


def checks(answer: Answer) -> dict[str, tuple[str, str]]:
    return {found["check"]: (found["status"], found["sentence"]) for found in answer.objects}


def test_doctor_finds_nothing_wrong_with_a_good_database(three: Command) -> None:
    answer = three("doctor", "--json")
    found = checks(answer)
    assert answer.code == 0
    assert {name: status for name, (status, _) in found.items() if status != "ok"} == {
        "in-doubt": "warning", "in-doubt.mode": "warning",
    }  # fmt: skip
    assert found["in-doubt"][1].startswith("1 of 3 branches in doubt are stuck")
    assert found["in-doubt.mode"][1].startswith("the messages of 3 branches in doubt are in a broker")
    assert "no dtx is active as dtx; the last one was test-host:1" in found["lease"][1]
    assert {
        "database.reachable",
        "database.server_version",
        "database.fsync",
        "database.migrations",
        "clock",
    } <= found.keys()


def test_doctor_is_a_table_for_people(dtx: Command) -> None:
    out = dtx("doctor").out
    assert any(line.split()[:2] == ["ok", "database.reachable"] for line in out.splitlines())


def test_doctor_fails_on_unsafe_settings_unless_they_are_wanted(postgres_url: str, dtx: Command) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dtx.url)["dbname"]
    with psycopg.connect(dtx.url, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off'.encode())
    answer = dtx("doctor", "--json")
    assert answer.code == 1
    assert checks(answer)["database.synchronous_commit"][0] == "failed"
    unsafe = dtx("doctor", "--json", "--unsafe")
    assert unsafe.code == 0
    assert checks(unsafe)["database.synchronous_commit"][0] == "warning"


def test_doctor_distinguishes_old_missing_and_newer_tables(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dtx = Command(postgres_url, capsys)
    assert "there are no tables yet" in checks(dtx("doctor", "--json"))["database.migrations"][1]
    dtx("migrate")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE dtx.alembic_version SET version_num = '9999'")
    answer = dtx("doctor", "--json")
    assert answer.code == 1
    assert "of a newer dtx" in checks(answer)["database.migrations"][1]


def test_doctor_reports_an_unreachable_database(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Command(f"postgresql://u:s3cret-word@127.0.0.1:{free_port()}/x", capsys)("doctor", "--json")
    assert answer.code == 1
    assert checks(answer)["database.reachable"][0] == "failed"
    assert "s3cret-word" not in answer.out + answer.err


def test_commands_use_the_socket_of_a_running_embedded_database(
    own_postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--data-dir", str(own_postgres.data_dir)]
    assert run(["migrate", *where]) == 0
    assert run(["in-doubt", *where]) == 0
    assert "no branch is in doubt" in capsys.readouterr().out
    own_postgres.stop()
    assert run(["branches", *where]) == 0  # if dtx is down, the command starts its database temporarily
    assert "no branch is in doubt" in capsys.readouterr().out
    assert run(["branches", "--data-dir", str(own_postgres.data_dir / "mistyped")]) == 3
    said = capsys.readouterr().err
    assert "no dtx with an embedded PostgreSQL is running" in said
    assert "name its --data-dir" in said
    assert said.count("\n") == 1
    assert not (own_postgres.data_dir / "mistyped").exists()
    assert run(["doctor", *where, "--json"]) == 0
    assert "was not checked" in capsys.readouterr().out


def test_migrate_starts_a_stopped_embedded_database(
    own_postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    own_postgres.stop()
    assert run(["migrate", "--data-dir", str(own_postgres.data_dir)]) == 0
    own_postgres.start()
    assert migrations.current(own_postgres.url) is not None


def test_a_reader_that_has_enough_is_no_error(dtx: Command) -> None:
    write(dtx.url, *(Insert(branch=branch(Xid(1, f"{number:064}".encode()))) for number in range(500)))
    command = [sys.executable, "-m", "dtx", "in-doubt", "--json", "--database", dtx.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"{")
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(30), said) == (0, b"")

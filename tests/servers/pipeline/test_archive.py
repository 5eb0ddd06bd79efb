"""The lake: every line once, whatever dies or is lost; files joined, old lines removed, other tables refused."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from pyarrow import parquet
from pyspark.sql import SparkSession

from dtx.pipeline import archive as journals
from dtx.pipeline.archive import Archived, archive, follow, maintain, pause
from dtx.pipeline.delta import Table
from dtx.pipeline.files import LakeError
from dtx.pipeline.lake import LOCK, LOCK_SECONDS, SCHEMA, Lake
from dtx.pipeline.source import SourceError
from dtx.pipeline.source.datasource import StreamReader
from dtx.pipeline.source.server import Server
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
MONDAY = datetime(2026, 3, 2, 12, tzinfo=UTC)
NAMES = ("007", "bank/a=b c%d", "é.1")
_NOT_COMPARED = {"source", "branch_id", "batch", "month"}

_LINE = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, one_phase,
    publishes, consumes, bytes, started_at)
SELECT gen_random_uuid(), %(at)s + make_interval(secs => n), %(rm)s, 'committed', gen_random_uuid(), '/', 4294967295,
    int4send(n), '\\x00ff', 'alice', 'alice', n %% 2 = 0, n, 0, 10, %(at)s
FROM generate_series(1, %(count)s) n
"""


def write(url: str, count: int, *, rm: str = "rm", at: datetime = MONDAY) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(_LINE, {"at": at, "rm": rm, "count": count})


def journal(url: str) -> list[tuple[Any, ...]]:
    """Every line, as the lake has to have it."""
    columns = ", ".join(
        f"{name}::text" if name == "id" else "xid8::text::bigint" if name == "xid8" else name
        for name in SCHEMA.names
        if name not in _NOT_COMPARED
    )
    with psycopg.connect(url) as connection:
        connection.execute("SET timezone = 'UTC'")
        return sorted(tuple(row) for row in connection.execute(f"SELECT {columns} FROM dtx.journal").fetchall())


def in_lake(lake: Path | str) -> list[tuple[Any, ...]]:
    """Every line, as another reader than ours has it."""
    names = [name for name in SCHEMA.names if name not in _NOT_COMPARED]
    table = DeltaTable(lake).to_pyarrow_table(columns=names)
    return sorted(tuple(row.values()) for row in table.to_pylist())


def run(lake: Path | str, url: str, source: str = "prod", **more: str) -> int:
    result = result_of(lake, url, source, **more)
    assert result.error is None, result.error
    return result.rows


def result_of(lake: Path | str, url: str, source: str = "prod", **more: str) -> Archived:
    (result,) = archive(str(lake), {source: {"url": url, "name": source, **more}})
    return result


def test_each_journal_line_is_archived_once(database: str, tmp_path: Path) -> None:
    lake = tmp_path / "a lake, 100%"
    for number, name in enumerate(NAMES):
        write(database, 20, rm=name, at=MONDAY + timedelta(days=20 * number))
    assert run(lake, database) == 60
    assert in_lake(lake) == journal(database)
    assert len(DeltaTable(lake).file_uris()) == 2, "one file for each month, however many resource managers"
    write(database, 5, rm="007")
    before = time.time_ns() // 1000
    assert run(lake, database) == 5
    assert run(lake, database) == 0
    assert before <= Lake(str(lake)).archived()["prod"] <= time.time_ns() // 1000
    assert in_lake(lake) == journal(database)
    session = shared_spark()
    frame, token = Lake(str(lake)).frame(session)
    assert (frame.count(), token) == (65, 2)
    assert {row.rm for row in frame.select("rm").distinct().collect()} == set(NAMES)
    assert Lake(str(lake)).frame(session, since=1)[0].count() == 5
    assert Lake(str(lake)).frame(session, since=2)[0].count() == 0
    assert Lake(str(lake)).table.load().count() == 65
    april = MONDAY + timedelta(days=30)
    assert Lake(str(lake)).frame(session, between=(april, april + timedelta(days=30)))[0].count() == 20


def test_databases_with_few_lines_share_a_commit(database: str, tmp_path: Path) -> None:
    write(database, 3)
    sources = {name: {"url": database, "name": name} for name in ("a", "b/c", "d.e")}
    assert [result.rows for result in archive(str(tmp_path), sources)] == [3, 3, 3]
    table = DeltaTable(tmp_path)
    assert (table.version(), len(table.file_uris())) == (1, 1)
    assert [table.transaction_version(f"dtx/{name}") for name in sources] == [1, 1, 1]
    assert set(Lake(str(tmp_path)).archived()) == set(sources)


@pytest.mark.parametrize("dies", ["before the commit", "behind the commit"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_archive_that_dies_is_made_good_by_the_next(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str, is_streamed: bool
) -> None:
    if is_streamed:
        monkeypatch.setattr(journals, "_GATHERED", 10)
        monkeypatch.setattr(journals, "_CHUNK", 7)
    write(database, 30)
    run(tmp_path, database)
    write(database, 40, rm="other")
    with monkeypatch.context() as patch:
        if dies == "before the commit":
            patch.setattr("dtx.pipeline.archive.write_deltalake", _die)
        else:
            patch.setattr(Lake, "note", _die)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, database)
    assert len(in_lake(tmp_path)) == (30 if dies == "before the commit" else 70)
    write(database, 2)
    assert run(tmp_path, database) == (42 if dies == "before the commit" else 2)
    assert in_lake(tmp_path) == journal(database)


def _die(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_a_transaction_that_commits_late_is_archived(database: str, tmp_path: Path) -> None:
    with psycopg.connect(database) as late:
        late.execute(_LINE, {"at": MONDAY, "rm": "late", "count": 4})
        write(database, 6)
        assert run(tmp_path, database) == 6
        late.commit()
    write(database, 1)
    assert run(tmp_path, database) == 5
    assert in_lake(tmp_path) == journal(database)


@pytest.mark.parametrize("lost", ["the checkpoint", "the commits, too"])
def test_a_lost_place_repeats_no_line(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """And says how many were really new."""
    monkeypatch.setattr(journals, "_CHUNK", 7)
    lake = tmp_path / "lake"
    write(database, 30)
    run(lake, database)
    if lost == "the checkpoint":  # the commit has it still
        shutil.rmtree(lake / "_checkpoints")
    else:  # somebody has written the table anew
        table = DeltaTable(lake).to_pyarrow_table()
        shutil.rmtree(lake)
        write_deltalake(lake, table, partition_by=["month"])
    write(database, 7, at=MONDAY + timedelta(days=1))
    write(database, 2)
    result = result_of(lake, database)
    assert (result.rows, result.again) == (9, 0 if lost == "the checkpoint" else 30)
    assert in_lake(lake) == journal(database)
    assert Lake(str(lake)).frame(shared_spark(), since=1)[0].count() == 9
    assert run(lake, database) == 0


def test_two_that_archive_at_once_do_not_double_a_line(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine a lock keeps the second one out; elsewhere Delta refuses its commit."""
    write(database, 3)
    run(tmp_path, database)
    write(database, 5)
    with Lake(str(tmp_path)).files.alone(LOCK), pytest.raises(LakeError, match="another process uses"):
        run(tmp_path, database)
    monkeypatch.setattr("dtx.pipeline.files.Files.is_local", False)
    real = write_deltalake

    def slowly(*given: Any, **more: Any) -> None:
        monkeypatch.setattr("dtx.pipeline.archive.write_deltalake", real)
        assert run(tmp_path, database) == 5, "the other one is quicker"
        real(*given, **more)

    monkeypatch.setattr("dtx.pipeline.archive.write_deltalake", slowly)
    with pytest.raises(LakeError, match=r"another process has written .* at the same time: run again"):
        run(tmp_path, database)
    assert in_lake(tmp_path) == journal(database)
    # it has read before the other one committed, and commits behind it
    write(database, 2)
    look = journals._Run._read

    def late(self: Any, journal: Any) -> Any:
        found = look(self, journal)
        monkeypatch.setattr(journals._Run, "_read", look)
        assert run(tmp_path, database) == 2
        return found

    monkeypatch.setattr(journals._Run, "_read", late)
    with pytest.raises(LakeError, match="another process has archived prod into"):
        run(tmp_path, database)
    assert in_lake(tmp_path) == journal(database)


def test_a_database_that_is_away_does_not_stop_the_others(database: str, tmp_path: Path) -> None:
    write(database, 3)
    away = {"url": "postgresql://nobody@127.0.0.1:1/none", "name": "away", "retries": "0"}
    results = archive(str(tmp_path / "lake"), {"away": away, "prod": {"url": database, "name": "prod"}})
    assert [(result.source, result.rows, result.error is None) for result in results] == [
        ("away", 0, False),
        ("prod", 3, True),
    ]
    assert results[0].error is not None
    assert "away" in results[0].error
    assert "\n" not in results[0].error
    archived = Lake(str(tmp_path / "lake")).archived()
    assert archived["prod"] > archived.get("away", 0) == 0


def test_a_database_lost_while_reading_leaves_no_lines(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_GATHERED", 10)
    write(database, 30)
    read = StreamReader.read

    def cut(self: Any, part: Any) -> Any:
        for batch in read(self, part):
            yield from (batch.slice(start, 5) for start in range(0, 15, 5))
            raise SourceError("prod: it is away")

    with monkeypatch.context() as patch:
        patch.setattr(StreamReader, "read", cut)
        result = result_of(tmp_path, database)
    assert (result.rows, result.error) == (0, "prod: it is away")
    assert in_lake(tmp_path) == []
    assert run(tmp_path, database) == 30


def test_batches_of_a_given_size_bring_the_whole_journal(database: str, tmp_path: Path) -> None:
    for number in range(5):
        write(database, 4, at=MONDAY + timedelta(days=number))
    assert run(tmp_path, database, maxRowsPerBatch="4") == 20
    assert DeltaTable(tmp_path).transaction_version("dtx") == 5
    assert in_lake(tmp_path) == journal(database)
    assert Lake(str(tmp_path)).archived()["prod"] > 0


def test_archive_follow_records_how_current_the_lake_is(database: str, tmp_path: Path) -> None:
    """Though nothing comes: a quiet journal is read to its end all the time. Small files are joined on the way."""
    write(database, 3)
    lake = Lake(str(tmp_path / "lake"))
    done = _following(lake, database, maintain_every=0)
    for number in range(10):
        write(database, 1, rm=str(number), at=datetime.now(UTC))
        _wait(lambda wanted=number + 4: len(in_lake(tmp_path / "lake")) == wanted)  # type: ignore[misc]
    since = time.time_ns() // 1000 + 1_000_000
    _wait(lambda: lake.archived().get("prod", 0) > since)
    (result,) = done()
    assert (result.rows, result.error) == (13, None)
    assert len(DeltaTable(tmp_path / "lake").file_uris()) < 8


def test_other_commands_archive_and_remove_lines_during_follow(database: str, tmp_path: Path) -> None:
    """The lock of the lake is free between two looks."""
    write(database, 3)
    lake = Lake(str(tmp_path / "lake"))
    done = _following(lake, database)
    rows = 0
    for number in range(5):
        write(database, 4, rm=str(number), at=datetime.now(UTC))
        rows += run(lake.files.uri, database)
        with lake.files.alone(LOCK, LOCK_SECONDS):
            time.sleep(0.2)
    with lake.files.alone(LOCK, LOCK_SECONDS):
        assert lake.table.remove_before(MONDAY.date() + timedelta(days=1), "at", dry_run=False) == 3
    _wait(lambda: len(in_lake(tmp_path / "lake")) == 20)
    (result,) = done()
    assert (result.rows + rows, result.again, result.error) == (23, 0, None)
    assert len({line[0] for line in in_lake(tmp_path / "lake")}) == 20


def _following(lake: Lake, url: str, **more: Any) -> Callable[[], list[Archived]]:
    over = threading.Event()
    found: list[Archived] = []

    def go() -> None:
        sources = {"prod": {"url": url, "name": "prod"}}
        found.extend(follow(lake.files.uri, sources, interval=0.1, until=over.is_set, **more))

    thread = threading.Thread(target=go)
    thread.start()

    def end() -> list[Archived]:
        over.set()
        thread.join(60)
        return found

    _wait(lambda: lake.table.exists)
    return end


def _wait(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_database_lost_for_weeks_is_still_tried() -> None:
    """The pause is twice as long each time: after a thousand times there was no number for it."""
    assert [pause(10.0, failures) for failures in (0, 1, 2, 100_000)] == [10, 20, 40, 300]
    assert pause(0.1, 3) == pytest.approx(0.8)
    assert pause(3_600, 5) == 3_600


def _small_files(database: str, lake: Path) -> None:
    for _ in range(9):
        write(database, 2)
        run(lake, database)


def test_small_files_are_joined_and_archive_goes_on(database: str, tmp_path: Path) -> None:
    _small_files(database, tmp_path)
    write(database, 3, rm="lonely", at=MONDAY + timedelta(days=40))
    run(tmp_path, database)
    lake, session = Lake(str(tmp_path)), shared_spark()
    older, token = lake.frame(session)
    assert maintain(str(tmp_path)) == []
    assert len(DeltaTable(tmp_path).file_uris()) == 2
    assert in_lake(tmp_path) == journal(database)
    assert older.count() == 21, "who reads the version before it has its files"
    assert lake.frame(session, token)[0].count() == 0, "nothing is new"
    write(database, 7)
    run(tmp_path, database)
    assert in_lake(tmp_path) == journal(database)
    assert lake.frame(session, token)[0].count() == 7
    DeltaTable(tmp_path).alter.set_table_properties({"delta.deletedFileRetentionDuration": "interval 0 days"})
    maintain(str(tmp_path))
    assert len(list(tmp_path.rglob("part-*.parquet"))) == 3, "nobody reads the others any more"
    assert in_lake(tmp_path) == journal(database)
    assert run(tmp_path, database) == 0


def test_a_concurrent_compaction_repeats_no_line(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two compactions by ``deltalake`` alone would: it does not see that the files are gone."""
    _small_files(database, tmp_path)
    create = DeltaTable.create_write_transaction

    def late(table: DeltaTable, *given: Any, **more: Any) -> None:
        DeltaTable(tmp_path).optimize.compact()
        create(table, *given, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    with pytest.raises(LakeError, match="another process has written"):
        maintain(str(tmp_path))
    assert in_lake(tmp_path) == journal(database)


def test_a_damaged_file_is_named_and_the_others_are_read(database: str, tmp_path: Path) -> None:
    """One file stops nobody. It is read again when it is whole."""
    assert run(tmp_path, database) == 0
    lake, session = Lake(str(tmp_path)), shared_spark()
    assert lake.frame(session)[0].count() == 0
    for number, name in enumerate(("sound", "cut", "gone")):
        write(database, 2, rm=name, at=MONDAY + timedelta(days=40 * number))
    run(tmp_path, database)
    cut, gone = (next(tmp_path.glob(f"month={month}/*.parquet")) for month in ("2026-04", "2026-05"))
    whole = cut.read_bytes()
    cut.write_bytes(whole[:100])
    gone.unlink()
    assert {row["rm"] for row in lake.frame(session)[0].collect()} == {"sound"}
    assert sorted((told.item, told.reason) for told in lake.quarantined) == [
        (str(cut.relative_to(tmp_path)), f"damaged: it has 100 bytes instead of {len(whole):,}"),
        (str(gone.relative_to(tmp_path)), "it is missing, and the table's log names it"),
    ]
    cut.write_bytes(whole)
    assert {row["rm"] for row in lake.frame(session)[0].collect()} == {"sound", "cut"}


def test_a_month_with_a_damaged_file_is_kept_and_named(database: str, tmp_path: Path) -> None:
    _small_files(database, tmp_path)
    damaged = next(tmp_path.rglob("part-*.parquet"))
    damaged.write_bytes(b"PAR1" * (damaged.stat().st_size // 4) + b"1" * (damaged.stat().st_size % 4))
    files = DeltaTable(tmp_path).file_uris()
    (told,) = maintain(str(tmp_path))
    assert (told.source, told.item) == ("lake", "2026-03")
    assert DeltaTable(tmp_path).file_uris() == files


def test_old_lines_leave_and_do_not_come_again(database: str, tmp_path: Path) -> None:
    for number in range(3):
        write(database, 4, at=MONDAY + timedelta(days=number))
    run(tmp_path, database)
    table = Lake(str(tmp_path)).table
    kept = date(2026, 3, 4)
    assert table.remove_before(kept, "at", dry_run=True) == 8
    assert len(in_lake(tmp_path)) == 12
    assert table.remove_before(kept, "at", dry_run=False) == 8
    assert {line[1].date() for line in in_lake(tmp_path)} == {kept}
    assert table.remove_before(kept, "at", dry_run=False) == 0
    write(database, 1, at=MONDAY + timedelta(days=2))
    assert run(tmp_path, database) == 1


def test_an_unusable_lake_is_refused_in_one_sentence(database: str, tmp_path: Path) -> None:
    session = shared_spark()
    with pytest.raises(LakeError, match="is no lake: dtx pipeline archive makes one"):
        Lake(str(tmp_path)).frame(session)
    run(tmp_path / "lake", database)
    table = DeltaTable(tmp_path / "lake")
    table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    for use in (lambda: run(tmp_path / "lake", database), lambda: Lake(str(tmp_path / "lake")).frame(session)):
        with pytest.raises(LakeError, match="needs version 3 of Delta's reader protocol, and dtx knows version 1"):
            use()
    (tmp_path / "other/_checkpoints").mkdir(parents=True)
    (tmp_path / "other/_checkpoints/prod.json").write_text('{"vers')
    with pytest.raises(LakeError, match="is damaged"):
        run(tmp_path / "other", database)


def map_columns(table: Path) -> None:
    """Change a table as ``ALTER TABLE … SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')`` of Spark does."""
    log = table / "_delta_log"
    actions = [json.loads(line) for line in (log / f"{0:020}.json").read_text().splitlines()]
    (metadata,) = (action["metaData"] for action in actions if "metaData" in action)
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
    properties = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": str(len(schema["fields"]))}
    metadata |= {"schemaString": json.dumps(schema), "configuration": properties}
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    newest = max(int(path.stem) for path in log.glob("*.json"))
    (log / f"{newest + 1:020}.json").write_text(
        "".join(json.dumps(action) + "\n" for action in ({"protocol": protocol}, {"metaData": metadata}))
    )


def test_a_lake_with_mapped_columns_is_refused(database: str, tmp_path: Path) -> None:
    """Its files may name columns otherwise. Nothing is written to it."""
    write(database, 2)
    run(tmp_path, database)
    map_columns(tmp_path)
    version = DeltaTable(tmp_path).version()
    for use in (
        lambda: run(tmp_path, database),
        lambda: Lake(str(tmp_path)).frame(shared_spark()),
        lambda: maintain(str(tmp_path)),
    ):
        with pytest.raises(LakeError, match=r"needs version 2 of Delta's reader protocol.*column mapping"):
            use()
    assert DeltaTable(tmp_path).version() == version


def test_a_moved_lake_is_recognised_and_a_replaced_one_refused(database: str, tmp_path: Path) -> None:
    assert Lake(str(tmp_path / "here")).identity is None
    for name in ("here", "there"):
        run(tmp_path / name, database)
    here, there = (Lake(str(tmp_path / name)).identity for name in ("here", "there"))
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    assert Lake(str(tmp_path / "elsewhere")).identity == here != there
    write(database, 4)
    assert run(tmp_path / "elsewhere", database) == 4


@pytest.mark.parametrize("name", ["prod", "bank a/b", "..", "a.b", "é%", "_x", ".hidden", "北" * 23])
def test_every_source_name_is_a_valid_file_name(tmp_path: Path, name: str) -> None:
    lake = Lake(str(tmp_path))
    lake.note(name, batch=1, place={}, read_at=5)
    assert lake.archived() == {name: 5}
    (file,) = (tmp_path / "_checkpoints").iterdir()
    assert json.loads(file.read_text())["source"] == name


def test_a_commit_based_on_an_older_version_is_refused(tmp_path: Path) -> None:
    """Two programs that give verdicts at the same time: one of them counts."""
    table = Table(str(tmp_path), SCHEMA, "")
    first = table.create()
    table.commit(first, [], [], {"run": 1})
    for known in (first, table.load()):
        with pytest.raises(LakeError, match="another process has written"):
            table.commit(known, [], [], {"run": 1})
    table.commit(table.load(), [], [], {"run": 2})


def test_spark_reads_a_session_of_its_own(database: str, tmp_path: Path) -> None:
    write(database, 2)
    run(tmp_path, database)
    session: SparkSession = shared_spark()
    assert Lake(str(tmp_path)).frame(session)[0].columns == [*SCHEMA.names[:-2]]


def _written_anew(lake: Path) -> None:
    """As another program may do it: the table does not say any more how far it goes."""
    table = DeltaTable(lake).to_pyarrow_table()
    shutil.rmtree(lake)
    write_deltalake(lake, table, partition_by=["month"])


def test_a_lost_place_is_made_good_in_one_commit(database: str, tmp_path: Path) -> None:
    """Half of it, with ``maxRowsPerBatch``, would not say that lines of the other half are there, too."""
    for number in range(5):
        write(database, 4, at=MONDAY + timedelta(days=number))
    lake = tmp_path / "lake"
    run(lake, database, maxRowsPerBatch="4")
    _written_anew(lake)
    write(database, 3)
    result = result_of(lake, database, maxRowsPerBatch="4")
    assert (result.rows, result.again) == (3, 20)
    assert in_lake(lake) == journal(database)


def test_a_position_lost_after_a_compaction_repeats_no_line(database: str, tmp_path: Path) -> None:
    _small_files(database, tmp_path / "lake")
    maintain(str(tmp_path / "lake"))
    lake = Lake(str(tmp_path / "lake"))
    lake.note("prod", batch=None, place=None, read_at=0)
    result = result_of(tmp_path / "lake", database)
    assert (result.rows, result.again) == (0, 18)
    assert in_lake(tmp_path / "lake") == journal(database)


def test_joined_files_answer_questions_as_the_small_ones_did(database: str, tmp_path: Path) -> None:
    """Readers pass over files by what the log says of them: text, columns with some nulls and with nothing else."""

    def ask() -> list[int]:
        dataset: Any = DeltaTable(tmp_path).to_pyarrow_dataset()
        conditions = [
            pc.field("rm") == "rm",
            pc.field("rm") == "r" * 300,
            pc.field("reason") == "why",
            pc.field("reason").is_null(),
            pc.field("outcome").is_null() & (pc.field("rm") == "rm"),
            pc.field("source") == "prod",
            pc.field("at") >= MONDAY + timedelta(hours=4),
            pc.field("one_phase"),
        ]
        return [dataset.count_rows(filter=condition) for condition in conditions]

    for number in range(9):
        write(database, 2, at=MONDAY + timedelta(hours=number), rm="r" * 300 if number == 3 else "rm")
        if number % 2:
            with psycopg.connect(database) as connection:
                connection.execute("UPDATE dtx.journal SET reason = 'why' WHERE at = (SELECT max(at) FROM dtx.journal)")
        run(tmp_path, database)
    before = ask()
    maintain(str(tmp_path))
    (file,) = DeltaTable(tmp_path).file_uris()
    assert ask() == before
    assert parquet.read_metadata(file).num_row_groups == 1


@pytest.mark.parametrize("between", ["another program joins files", "lines are removed"])
def test_files_are_compacted_by_month_despite_gaps(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    for _ in range(9):
        write(database, 2)
        write(database, 2, at=MONDAY + timedelta(days=40))
        run(tmp_path, database)
    swap = Table.commit

    def late(table: Table, *given: Any, **more: Any) -> None:
        swap(table, *given, **more)
        monkeypatch.setattr(Table, "commit", swap)
        if between == "lines are removed":
            Lake(str(tmp_path)).table.remove_before(date(2026, 6, 1), "at", dry_run=False)
        else:
            DeltaTable(tmp_path).optimize.compact()

    monkeypatch.setattr(Table, "commit", late)
    maintain(str(tmp_path))
    assert in_lake(tmp_path) == ([] if between == "lines are removed" else journal(database))


def test_few_databases_are_in_memory_at_once(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(database, 50)
    monkeypatch.setattr(journals, "_GATHERED", 20)
    looked: list[int] = []
    held: list[int] = []
    look, commit = journals._Run._read, journals._Run._commit

    def count(self: Any, journal: Any) -> Any:
        looked.append(1)
        return look(self, journal)

    def note(self: Any, news: Any) -> None:
        held.append(len(looked) - len(held))
        commit(self, news)

    monkeypatch.setattr(journals._Run, "_read", count)
    monkeypatch.setattr(journals._Run, "_commit", note)
    archive(str(tmp_path), {f"s{number}": {"url": database, "name": f"s{number}"} for number in range(20)})
    assert max(held) <= 2 * journals._AT_ONCE


def test_lines_arriving_during_batches_do_not_count_as_read(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(database, 8)
    later: list[int] = []
    prepare = StreamReader.prepareForTriggerAvailableNow

    def and_write(self: StreamReader) -> None:
        prepare(self)
        write(database, 1, rm="later")
        later.append(time.time_ns() // 1000)

    monkeypatch.setattr(StreamReader, "prepareForTriggerAvailableNow", and_write)
    result = result_of(tmp_path, database, maxRowsPerBatch="100")
    assert result.rows == 8
    assert 0 < result.read_at < later[0]


def test_a_restored_database_is_archived_after_it_was_ordered(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(database, 3)
    run(tmp_path, database)
    identity = Server.identity
    monkeypatch.setattr(Server, "identity", lambda self: identity(self)._replace(system="another"))
    shutil.rmtree(tmp_path / "_checkpoints")
    refused = result_of(tmp_path, database).error
    assert refused is not None
    assert "dtx pipeline archive --again" in refused
    write(database, 2)
    Lake(str(tmp_path)).note("prod", batch=None, place=None, read_at=0)
    result = result_of(tmp_path, database)
    assert (result.rows, result.again) == (2, 3)
    assert in_lake(tmp_path) == journal(database)


def test_a_missing_file_is_named_before_removal_or_reread(database: str, tmp_path: Path) -> None:
    for number in range(2):
        write(database, 4, at=MONDAY + timedelta(days=number))
        run(tmp_path, database)
    for file in tmp_path.glob("month=*/*.parquet"):
        file.unlink()
    with pytest.raises(LakeError):
        Lake(str(tmp_path)).table.remove_before(date(2026, 3, 3), "at", dry_run=False)
    Lake(str(tmp_path)).note("prod", batch=None, place=None, read_at=0)
    with pytest.raises(LakeError, match="is damaged or missing: restore it first"):
        run(tmp_path, database)

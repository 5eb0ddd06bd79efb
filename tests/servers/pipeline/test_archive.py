"""The lake: everything once, whatever dies; small files joined, old days removed, other columns kept."""

import json
import shutil
import subprocess
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from dtx.pipeline import java
from dtx.pipeline.archive import Lake, LakeError, archive, compact, follow, read_lake, retain, writing
from dtx.pipeline.archive.layout import EVENTS, MARKER, Batch, path_word
from dtx.pipeline.source import register
from tests.support.spark import shared_spark

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute
MONDAY = datetime(2026, 3, 2, 12, tzinfo=UTC)
NAMES = ("007", "bank/a=b c%d", "é.1")
"""Names of resource managers that a directory cannot have as they are, or that look like numbers."""

_LINE = """
INSERT INTO dtx.journal (id, at, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, one_phase,
    publishes, consumes, bytes, started_at)
SELECT gen_random_uuid(), %(at)s + make_interval(secs => n), %(rm)s, 'committed', gen_random_uuid(), '/', 4294967295,
    int4send(n), '\\x00ff', 'alice', 'alice', n %% 2 = 0, n, 0, 10, %(at)s
FROM generate_series(1, %(count)s) n
"""


@pytest.fixture(scope="module")
def session() -> SparkSession:
    spark = shared_spark()
    register(spark)
    return spark


def write(url: str, count: int, *, rm: str = "rm", at: datetime = MONDAY) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(_LINE, {"at": at, "rm": rm, "count": count})


def journal(url: str) -> list[tuple[Any, ...]]:
    """Every line, as the lake has to have it."""
    columns = ", ".join(
        f"{name}::text" if name == "id" else "xid8::text::bigint" if name == "xid8" else name
        for name in EVENTS.names
        if name not in {"source", "day", "branch_id"}
    )
    with psycopg.connect(url) as connection:
        connection.execute("SET timezone = 'UTC'")
        return sorted(tuple(row) for row in connection.execute(f"SELECT {columns} FROM dtx.journal").fetchall())


def in_lake(spark: SparkSession, lake: Path | str) -> list[tuple[Any, ...]]:
    frame = read_lake(spark, str(lake)).drop("source", "day", "branch_id")
    return sorted(tuple(row[name] for name in frame.columns) for row in frame.toArrow().to_pylist())


def run(spark: SparkSession, lake: Path | str, url: str, source: str = "prod", **more: str) -> int:
    (result,) = archive(spark, str(lake), {source: {"url": url, "name": source, **more}})
    assert result.error is None, result.error
    return result.rows


def test_a_journal_comes_into_the_lake_row_for_row_and_once(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    for number, name in enumerate(NAMES):
        write(database, 20, rm=name, at=MONDAY + timedelta(days=number))
    assert run(session, tmp_path / "lake", database) == 60
    assert in_lake(session, tmp_path / "lake") == journal(database)
    write(database, 5, rm="007")
    before = time.time_ns() // 1000
    assert run(session, tmp_path / "lake", database) == 5
    assert before <= Lake(str(tmp_path / "lake")).archived()["prod"] <= time.time_ns() // 1000
    assert in_lake(session, tmp_path / "lake") == journal(database)
    days = read_lake(session, str(tmp_path / "lake")).select("rm", "day", "source").distinct().collect()
    assert sorted(map(tuple, days)) == [
        ("007", date(2026, 3, 2), "prod"),
        ("bank/a=b c%d", date(2026, 3, 3), "prod"),
        ("é.1", date(2026, 3, 4), "prod"),
    ]


def test_a_batch_that_was_written_but_not_committed_is_there_once(
    session: SparkSession, database: str, tmp_path: Path
) -> None:
    """A crash between the write and the checkpoint's commit: the commit is taken away, as if it had never been made."""
    write(database, 30)
    write(database, 5, rm="other")
    assert run(session, tmp_path / "lake", database) == 35
    (commit,) = (tmp_path / "lake/_checkpoints/prod").glob("*/commits/0")
    commit.unlink()
    commit.with_name(".0.crc").unlink()
    # nobody sees a batch that is not whole, and compaction leaves it alone
    assert in_lake(session, tmp_path / "lake") == []
    assert compact(session, str(tmp_path / "lake"), least_files=1).days == 0
    # half of it is gone, too: the directory of one resource manager
    shutil.rmtree(tmp_path / "lake/rm=other")
    write(database, 7)
    run(session, tmp_path / "lake", database)
    assert in_lake(session, tmp_path / "lake") == journal(database)


def test_a_lost_checkpoint_repeats_nothing(session: SparkSession, database: str, tmp_path: Path) -> None:
    write(database, 30)
    run(session, tmp_path / "lake", database)
    _, seen = Lake(str(tmp_path / "lake")).frame(session)
    shutil.rmtree(tmp_path / "lake/_checkpoints")
    write(database, 7, at=MONDAY + timedelta(days=1))
    write(database, 2)
    run(session, tmp_path / "lake", database)
    assert in_lake(session, tmp_path / "lake") == journal(database)
    new, _ = Lake(str(tmp_path / "lake")).frame(session, since=seen)
    assert new.count() == 9


def test_days_that_are_over_leave_and_others_stay(session: SparkSession, database: str, tmp_path: Path) -> None:
    for number in range(3):
        write(database, 4, at=MONDAY + timedelta(days=number))
    run(session, tmp_path / "lake", database)
    assert retain(str(tmp_path / "lake"), before=date(2026, 3, 4), dry_run=True).days == 2
    done = retain(str(tmp_path / "lake"), before=date(2026, 3, 4))
    assert done.days == 2
    assert [row.day for row in read_lake(session, str(tmp_path / "lake")).select("day").distinct().collect()] == [
        date(2026, 3, 4)
    ]
    assert retain(str(tmp_path / "lake"), before=date(2026, 3, 4)).days == 0


def test_what_cannot_be_used_is_refused_with_a_sentence(session: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="is no lake: dtx pipeline archive makes one"):
        read_lake(session, str(tmp_path))
    with pytest.raises(LakeError, match="is no lake"):
        compact(session, str(tmp_path))
    (tmp_path / MARKER).write_text('{"version": 99}')
    with pytest.raises(LakeError, match="has layout 99 and this dtx knows 1: use the newer dtx"):
        Lake(str(tmp_path))
    (tmp_path / MARKER).write_text('{"vers')
    with pytest.raises(LakeError, match="is damaged"):
        Lake(str(tmp_path))
    lake = Lake(str(tmp_path / "other"))
    with (
        lake.files.alone("lock"),
        pytest.raises(LakeError, match="another process is at work"),
        lake.files.alone("lock"),
    ):
        pass


def test_who_follows_notes_how_fresh_the_lake_is(session: SparkSession, database: str, tmp_path: Path) -> None:
    """Though nothing comes: a quiet journal is read to its end all the time."""
    write(database, 3)
    lake = Lake(str(tmp_path / "lake"))
    since = time.time_ns() // 1000 + 2_000_000
    ends = time.monotonic() + 120

    def is_fresh() -> bool:
        assert time.monotonic() < ends
        return lake.archived().get("prod", 0) > since

    (result,) = follow(
        session, lake.files.uri, {"prod": {"url": database, "name": "prod"}}, interval=0.2, until=is_fresh
    )
    assert (result.rows, result.error) == (3, None)


def test_a_database_that_is_away_does_not_stop_the_others(session: SparkSession, database: str, tmp_path: Path) -> None:
    write(database, 3)
    away = {"url": "postgresql://nobody@127.0.0.1:1/none", "name": "away", "retries": "0"}
    results = archive(session, str(tmp_path / "lake"), {"away": away, "prod": {"url": database, "name": "prod"}})
    assert [(result.source, result.rows, result.error is None) for result in results] == [
        ("away", 0, False),
        ("prod", 3, True),
    ]
    assert results[0].error is not None
    assert "away" in results[0].error
    archived = Lake(str(tmp_path / "lake")).archived()
    assert archived["prod"] > archived.get("away", 0) == 0
    assert "\n" not in results[0].error


def test_a_spark_that_lives_longer_than_its_program_is_waited_for(
    session: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill -9 of the program: Spark may be about to move the files of a batch into their places."""
    write(database, 3)
    assert run(session, tmp_path / "lake", database) == 3
    noted = tmp_path / "lake/_checkpoints/java.json"
    assert json.loads(noted.read_text())["pid"] == java.running()
    write(database, 4)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as left_behind:
        noted.write_text(json.dumps({"pid": left_behind.pid, "started": writing._started(left_behind.pid)}))
        monkeypatch.setattr(writing, "LONGEST_LIFE", 0.0)
        with pytest.raises(LakeError, match=f"process {left_behind.pid}, is still at work"):
            run(session, tmp_path / "lake", database)
    assert run(session, tmp_path / "lake", database) == 4
    assert in_lake(session, tmp_path / "lake") == journal(database)


def test_a_lake_is_the_same_wherever_it_is_moved_and_another_in_its_place_is_not(tmp_path: Path) -> None:
    here, there = (Lake(str(tmp_path / name)) for name in ("here", "there"))
    for lake in (here, there):
        assert lake.identity is None
        lake.create()
    (tmp_path / "here").rename(tmp_path / "elsewhere")
    assert Lake(str(tmp_path / "elsewhere")).identity == here.identity != there.identity
    assert here.identity is not None


def test_who_has_been_away_for_weeks_is_still_tried() -> None:
    """The pause is twice as long each time: after a thousand times there was no number for it."""
    assert [writing._pause(10.0, failures) for failures in (1, 2, 100_000)] == [20, 40, writing._LONGEST_WAIT]
    assert writing._pause(0.1, 3) == pytest.approx(0.8)


def test_what_java_says_is_its_last_cause_and_no_stack() -> None:
    stack = "An error occurred while calling o7.parquet.\n: a.SparkException: Job aborted\n\tat a.b(c)\n"
    assert writing.explain(Exception(f"{stack}Caused by: a.A: first\n\tat d\nCaused by: a.B: disk full\n\tat e")) == (
        "a.B: disk full"
    )
    assert (
        writing.explain(Exception(stack))
        == "An error occurred while calling o7.parquet. : a.SparkException: Job aborted"
    )
    assert writing.explain(
        Exception("[STREAM_FAILED] it\n\tat x\ndtx.a.b.SourceAway: bank: gone\n SQLSTATE: 38000")
    ) == ("bank: gone")
    assert writing.explain(Exception("")) == "Exception"


@pytest.mark.parametrize("name", ["prod", "bank a/b", "..", "a.b", "é%", "_x", ".hidden"])
def test_every_name_of_a_source_is_the_name_of_a_directory(name: str) -> None:
    word = path_word(name)
    assert "/" not in word
    assert "." not in word
    assert not word.startswith("_")
    batch = Batch(f"{word}.1a2b", 7)
    assert Batch.parse(str(batch)) == batch

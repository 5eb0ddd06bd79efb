"""``format("dtx")`` on real databases: what it reads, that nothing is lost or doubled, what it says when it cannot.

Its readers are asked here as Spark asks them, pickled and with offsets as JSON, but without Spark, which takes minutes.
:mod:`tests.servers.pipeline.test_source_spark` has the same through Spark.
"""

import json
import pickle
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
import pytest
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from dtx.pipeline.source import DtxDataSource, SourceAway, SourceError, Waits, reachable
from dtx.pipeline.source.datasource import StreamReader
from dtx.pipeline.source.server import connected
from dtx.pipeline.source.snapshot import SourceSnapshot, between, shown
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.support.journal import write
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.seed import heuristic, in_doubt, seed

WAITS: Final = Waits(connect=2, stall=20, retries=0)
Row = dict[str, Any]
SOURCE: Final = StructField("source", StringType())
NUMBER: Final = StructType([StructField("publishes", IntegerType())])


@pytest.fixture
def url(migrated_postgres_url: str) -> str:
    """A database with the log's tables."""
    return migrated_postgres_url


@pytest.fixture
def writer(url: str) -> Iterator[psycopg.Connection]:
    """A connection to it in autocommit mode."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def parts(url: str, table: str = "journal", schema: StructType | None = None, **options: Any) -> list[list[Row]]:
    """The rows of each task, planned in one process and read in others."""
    source = DtxDataSource({"url": url, "table": table} | {name: str(value) for name, value in options.items()})
    reader = source.reader(schema or source.schema())
    planned = pickle.loads(pickle.dumps([*reader.partitions()]))
    reader = pickle.loads(pickle.dumps(reader))
    return [[row for batch in reader.read(part) for row in batch.to_pylist()] for part in planned]


def load(url: str, table: str = "journal", **options: Any) -> list[Row]:
    """The rows of all tasks."""
    return [row for part in parts(url, table, **options) for row in part]


def numbers(rows: list[Row]) -> list[int]:
    """What :func:`write` counted."""
    return sorted(row["publishes"] for row in rows)


class Stream:
    """A streaming query: each run goes on where the last one has ended.

    Args:
        options: of the source.
    """

    def __init__(self, **options: Any) -> None:
        self.options = {name: str(value) for name, value in options.items()}
        self.offset: dict[str, Any] | None = None
        self.batches: list[list[int]] = []
        self.last: tuple[dict[str, Any], dict[str, Any]] | None = None

    def reader(self) -> StreamReader:
        """As a query gets it that begins."""
        source = DtxDataSource(self.options)
        found = source.streamReader(source.schema())
        assert isinstance(found, StreamReader)
        if self.offset is None:
            self.offset = json.loads(json.dumps(found.initialOffset()))
        return found

    def step(self, reader: StreamReader) -> bool:
        """One micro-batch; whether there was anything new."""
        assert self.offset is not None
        limit: ReadLimit = reader.getDefaultReadLimit()
        end = json.loads(json.dumps(reader.latestOffset(self.offset, limit)))
        if end == self.offset:
            return False
        self.last = (self.offset, end)
        self.batches.append(self.rows(reader, *self.last))
        self.offset = end
        return True

    def rows(self, reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
        """The numbers between two offsets."""
        planned = pickle.loads(pickle.dumps([*reader.partitions(start, end)]))
        return numbers([row for part in planned for batch in reader.read(part) for row in batch.to_pylist()])

    def run(self) -> list[int]:
        """With Trigger.AvailableNow, to its end; all numbers since the first run."""
        reader = self.reader()
        reader.prepareForTriggerAvailableNow()
        while self.step(reader):
            pass
        return sorted(number for batch in self.batches for number in batch)


def test_every_column_comes_as_it_is(url: str, writer: psycopg.Connection) -> None:
    """Binary stays binary, times are UTC with microseconds, xid8 and counts are numbers, null stays null."""
    write(writer, 1, 2)
    names = (
        "id", "at", "rm", "branch_id", "format_id", "gtrid", "bqual", "actor", "reason", "outcome", "one_phase",
        "bytes", "started_at", "decided_at", "xid8",
    )  # fmt: skip
    expected = writer.execute(
        "SELECT id::text, at, rm, branch_id::text, format_id, gtrid, bqual, actor, reason, outcome, one_phase, bytes, "
        "started_at, decided_at, xid8::text::bigint FROM dtx.journal ORDER BY publishes"
    ).fetchall()
    rows = sorted(load(url, name="bank-a"), key=lambda row: int(row["publishes"]))
    assert [tuple(row[name] for name in names) for row in rows] == expected
    assert {row["source"] for row in rows} == {"bank-a"}


def test_ranges_have_every_line_once_in_any_partition(url: str, writer: psycopg.Connection) -> None:
    """Lines of days without a partition, of clocks that are far off, and at the edges of days."""
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    write(writer, 1, 2000, today - timedelta(days=400))
    write(writer, 2001, 4000, today - timedelta(seconds=3000))
    write(writer, 4001, 4300, today + timedelta(days=90))
    writer.execute("UPDATE dtx.journal SET at = 'infinity' WHERE publishes = 4300")
    given: tuple[dict[str, Any], ...] = ({}, {"partitions": 7}, {"rowsPerPartition": 300})
    for options in given:
        found = parts(url, schema=NUMBER, **options)
        assert numbers([row for part in found for row in part]) == list(range(1, 4301)), options
        if options:
            assert max(map(len, found)) < 2000
            assert len(found) >= 5


def test_days_without_lines_make_no_ranges(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 4000, datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0))
    writer.execute("VACUUM ANALYZE dtx.journal")
    found = parts(url, schema=NUMBER, partitions=4)
    assert len(found) == 4
    assert all(found)


def test_columns_are_chosen_by_schema(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 3)
    assert sorted(load(url, schema=StructType([SOURCE, StructField("gtrid", BinaryType())])), key=str) == [
        {"source": "dtx", "gtrid": bytes((0, 0, 0, number))} for number in (1, 2, 3)
    ]
    assert load(url, schema=StructType([SOURCE])) == [{"source": "dtx"}] * 3
    for name, words in (("nothing", "has no column 'nothing'"), ("gtrid", "is binary, not string")):
        with pytest.raises(SourceError, match=words):
            load(url, schema=StructType([StructField(name, StringType())]))


def test_every_task_reads_the_snapshot_of_the_plan(url: str, writer: psycopg.Connection) -> None:
    """A transaction that was under way at that moment is not in it, though its number is lower than others that are."""
    source = DtxDataSource({"url": url, "partitions": "4"})
    reader = source.reader(source.schema())
    with psycopg.connect(url) as slow:
        write(slow, 1, 10)
        write(writer, 11, 20)
        planned = reader.partitions()
        assert len(planned) > 1
        write(writer, 21, 30)
        slow.commit()
    batches = [batch for part in planned for batch in reader.read(part)]
    found = [row for batch in batches for row in batch.to_pylist()]  # type: ignore[union-attr]
    assert numbers(found) == list(range(11, 21))
    assert numbers(load(url)) == list(range(1, 31))


def test_a_table_updated_in_place_is_read_by_one_task(url: str) -> None:
    """Rows of one moment: several tasks would see several."""
    seed(url, [in_doubt(Xid(1, number.to_bytes(2, "big"), b"b")) for number in range(1, 400)])
    (rows,) = parts(url, "branch", partitions=4)
    assert len({row["id"] for row in rows}) == len(rows) == 399


def test_snapshot_conditions_in_sql_agree_with_postgresql(writer: psycopg.Connection) -> None:
    """Against PostgreSQL's own pg_visible_in_snapshot, of every transaction around."""
    moments_ = [
        SourceSnapshot(1),
        SourceSnapshot(20),
        SourceSnapshot(20, frozenset({3, 7, 19})),
        SourceSnapshot(25, frozenset({7, 22})),
    ]
    rows = "(SELECT i::text::xid8 AS xid8 FROM generate_series(1, 30) i) lines"
    for start in moments_:
        for end in (moment for moment in moments_ if moment.contains(start)):
            own = writer.execute(f"SELECT array_agg(xid8::text::int) FROM {rows} WHERE {between(start, end)}")
            theirs = writer.execute(
                f"SELECT array_agg(xid8::text::int) FROM {rows} WHERE pg_visible_in_snapshot(xid8, %s::pg_snapshot) "
                "AND NOT pg_visible_in_snapshot(xid8, %s::pg_snapshot)",
                [str(end), str(start)],
            )
            assert own.fetchone() == theirs.fetchone(), (start, end)
        own = writer.execute(f"SELECT array_agg(xid8::text::int) FROM {rows} WHERE {shown(start)}")
        theirs = writer.execute(
            f"SELECT array_agg(xid8::text::int) FROM {rows} WHERE pg_visible_in_snapshot(xid8, %s::pg_snapshot)",
            [str(start)],
        )
        assert own.fetchone() == theirs.fetchone(), start


def test_branches_and_outcomes_are_read(url: str) -> None:
    seed(url, [in_doubt(Xid(7, b"\xff\0", b"")), heuristic(Xid(7, b"h", b"1"), Heuristic.MIXED)])
    rows = {row["gtrid"]: row for row in load(url, "branch")}
    assert rows[b"\xff\0"]["state"] == "prepared"
    assert rows[b"h"]["outcome"] == "mixed"
    (outcome,) = load(url, "heuristic_outcome")
    assert (outcome["branch_id"], outcome["outcome"], outcome["actor"]) == (rows[b"h"]["id"], "mixed", "an operator")
    assert len(load(url, "work")) == 2


def test_a_stream_gets_late_commits_and_nothing_twice(url: str, writer: psycopg.Connection) -> None:
    """max(id) and max(xid8) lose the slow one; pg_snapshot_xmin alone would let the others wait for it."""
    stream = Stream(url=url)
    with psycopg.connect(url) as slow:
        write(slow, 1, 10)
        write(writer, 11, 20)
        assert stream.run() == list(range(11, 21))
        write(writer, 21, 30)
        assert stream.run() == list(range(11, 31))
        slow.commit()
    with psycopg.connect(url) as aborted:
        write(aborted, 100, 110)
        aborted.rollback()
    assert stream.run() == list(range(1, 31))
    assert stream.run() == list(range(1, 31))


def test_a_micro_batch_that_is_repeated_has_the_same_lines(url: str, writer: psycopg.Connection) -> None:
    """After a crash Spark asks for the last one again, by its offsets: by then more has been committed."""
    stream = Stream(url=url, rowsPerPartition=3)
    write(writer, 1, 5)
    stream.run()
    with psycopg.connect(url) as slow:
        write(slow, 6, 9)
        write(writer, 10, 20)
        stream.run()
        slow.commit()
    write(writer, 21, 30)
    assert stream.last is not None
    assert stream.rows(stream.reader(), *stream.last) == stream.batches[-1] == list(range(10, 21))


def test_a_stream_gets_lines_of_clocks_that_are_wrong(url: str, writer: psycopg.Connection) -> None:
    """Days that are over are looked at when a run begins, and every sweepInterval; those to come always."""
    stream = Stream(url=url, pollInterval=0)
    write(writer, 1, 3)
    reader = stream.reader()
    assert stream.step(reader)
    write(writer, 4, 4, "1999-01-01")
    write(writer, 5, 5, "2999-01-01")
    write(writer, 6, 6)
    assert stream.step(reader)  # the first look sweeps
    write(writer, 7, 7, "1999-01-01")
    write(writer, 8, 8)
    assert stream.step(reader)
    assert stream.batches == [[1, 2, 3], [4, 5, 6], [8]]
    assert not stream.step(reader)
    assert stream.run() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_with_an_index_by_transaction_every_look_sees_all_days(url: str, writer: psycopg.Connection) -> None:
    writer.execute("CREATE INDEX ON dtx.journal (xid8)")
    stream = Stream(url=url, pollInterval=0)
    reader = stream.reader()
    for number in range(1, 5):
        write(writer, number, number, "1999-01-01")
        assert stream.step(reader)
    assert stream.batches == [[1], [2], [3], [4]]


def test_micro_batches_keep_their_size_and_divide_no_transaction(url: str, writer: psycopg.Connection) -> None:
    stream = Stream(url=url, maxRowsPerBatch=25)
    for first in range(0, 100, 10):
        write(writer, first + 1, first + 10)
    with psycopg.connect(url) as slow:
        write(slow, 101, 103)
        write(writer, 104, 150)  # larger than a batch: it comes alone
        assert stream.run() == [*range(1, 101), *range(104, 151)]
        assert list(map(len, stream.batches)) == [20, 20, 20, 20, 20, 47]
        slow.commit()
    stream.options["maxRowsPerBatch"] = "1"
    assert stream.run() == list(range(1, 151))


def test_a_run_ends_with_the_lines_of_its_start(url: str, writer: psycopg.Connection) -> None:
    """Trigger.AvailableNow beside a writer that never rests."""
    stream = Stream(url=url, maxRowsPerBatch=10)
    for first in range(0, 30, 10):
        write(writer, first + 1, first + 10)
    reader = stream.reader()
    reader.prepareForTriggerAvailableNow()
    count = 100
    while stream.step(reader):
        write(writer, count, count + 9)
        count += 10
    assert sorted(number for batch in stream.batches for number in batch) == list(range(1, 31))


def test_transactions_without_lines_make_no_micro_batches(url: str, writer: psycopg.Connection) -> None:
    """Every lease that is renewed is a transaction, too."""
    stream = Stream(url=url, pollInterval=0)
    reader = stream.reader()
    for number in (1, 2):
        write(writer, number, number)
        assert stream.step(reader)
        for _ in range(3):
            writer.execute("SELECT pg_current_xact_id()")
            assert not stream.step(reader)
    assert stream.batches == [[1], [2]]


def test_a_stream_may_begin_with_new_lines(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 5)
    stream = Stream(url=url, startingOffsets="latest")
    stream.reader()
    write(writer, 6, 6, "1999-01-01")
    write(writer, 7, 7)
    assert stream.run() == [6, 7]


def test_another_database_under_an_old_checkpoint_is_refused(
    postgres: PostgresServer, url: str, writer: psycopg.Connection
) -> None:
    write(writer, 1, 3)
    stream = Stream(url=url)
    stream.run()
    stream.options["url"] = other = postgres.create_migrated_database()
    try:
        with pytest.raises(SourceError, match="not the database that was read before"):
            stream.run()
    finally:
        postgres.drop_database(other)


def test_only_the_journal_is_streamed(url: str) -> None:
    with pytest.raises(SourceError, match="only the journal can be streamed"):
        Stream(url=url, table="branch").reader()


def test_numbers_of_transactions_that_a_crash_forgot_lose_no_line() -> None:
    """PostgreSQL gives numbers once more whose records it had not written to disk: a snapshot waits for the disk.

    Without that, the next line has a number below what the snapshot calls ended, and is never read.
    """
    with PostgresServer("crash") as server:
        server.configure(wal_writer_delay=10_000)  # so nobody else writes them soon
        url = server.create_migrated_database()
        with psycopg.connect(url) as aborted:
            aborted.execute("SELECT pg_current_xact_id()")
            aborted.rollback()
            with connected("a", url, WAITS) as one:
                seen = one.snapshot()
        server.kill9()
        server.wait_ready()
        with server.connection(url) as writer:
            write(writer, 1, 1)
            row = writer.execute("SELECT xid8::text::bigint FROM dtx.journal").fetchone()
        assert row is not None
        assert row[0] >= seen.xmax


def test_an_unreachable_database_is_named_and_others_are_read(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 3)
    both = {"here": url, "gone": f"postgresql://dtx:hunter2@127.0.0.1:{free_port()}/dtx"}
    options = {"sources": json.dumps(both), "connectTimeout": "2"}
    source = DtxDataSource(options)
    with pytest.raises(SourceAway, match="gone: ") as caught:
        source.reader(source.schema()).partitions()
    assert "hunter2" not in str(caught.value)
    there, wrong = reachable(both, waits=WAITS)
    assert list(there) == ["here"]
    assert [(one.source, one.item, one.count) for one in wrong] == [("gone", "database", None)]
    assert "hunter2" not in wrong[0].reason
    with pytest.raises(SourceAway, match="gone: "):
        Stream(**options).run()
    assert Stream(**options, unavailable="wait").run() == [1, 2, 3]


def test_a_source_that_comes_later_is_read_from_its_beginning(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 2)
    stream = Stream(sources=json.dumps({"a": url}))
    stream.run()
    stream.options["sources"] = json.dumps({"a": url, "b": url})
    assert stream.run() == [1, 1, 2, 2]
    stream.options["sources"] = json.dumps({"b": url})
    write(writer, 3, 3)
    assert stream.run() == [1, 1, 2, 2, 3]


def test_a_journal_of_a_newer_dtx_is_not_read(url: str, writer: psycopg.Connection) -> None:
    """What a line means may have changed: named, counted, left alone."""
    write(writer, 1, 5)
    writer.execute("UPDATE dtx.alembic_version SET version_num = '9999'")
    with pytest.raises(SourceError, match="a newer dtx"):
        load(url)
    _, (wrong,) = reachable({"dtx": url}, waits=WAITS)
    assert (wrong.item, wrong.count) == ("journal", 5)
    assert "update this dtx first" in wrong.reason


def test_a_database_without_a_journal_is_named(postgres_url: str) -> None:
    with pytest.raises(SourceError, match="no journal of dtx here"):
        load(postgres_url)


def test_a_silent_database_fails_its_task_with_its_name(
    postgres: PostgresServer, url: str, writer: psycopg.Connection
) -> None:
    """Neither the peer's silence nor TCP ends a read: the task does."""
    write(writer, 1, 10)
    source = DtxDataSource({"url": url, "name": "bank-a", "stallTimeout": "1", "connectTimeout": "2", "retries": "0"})
    reader = source.reader(source.schema())
    (part,) = reader.partitions()
    postgres.pause()
    try:
        with pytest.raises(SourceAway, match="bank-a: journal, all rows: no row for 1 seconds"):
            list(reader.read(part))
    finally:
        postgres.resume()
    postgres.wait_ready()
    assert numbers(load(url)) == list(range(1, 11))


def test_a_database_that_comes_back_within_moments_is_read(
    postgres: PostgresServer, url: str, writer: psycopg.Connection
) -> None:
    """What has had no row yet asks again by itself."""
    write(writer, 1, 10)
    source = DtxDataSource({"url": url, "retries": "8"})
    reader = source.reader(source.schema())
    (part,) = reader.partitions()
    postgres.kill9()
    assert sum(batch.num_rows for batch in reader.read(part)) == 10  # type: ignore[union-attr]
    postgres.wait_ready()


def test_a_refused_read_is_not_repeated(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 1)
    source = DtxDataSource({"url": url, "retries": "1000"})
    reader = source.reader(source.schema())
    (part,) = reader.partitions()
    writer.execute("ALTER TABLE dtx.journal RENAME COLUMN owner TO possessor")
    with pytest.raises(SourceError, match="owner"):
        list(reader.read(part))


def test_a_read_only_user_is_enough(url: str, writer: psycopg.Connection) -> None:
    write(writer, 1, 3)
    name = f"reader_{uuid.uuid4().hex[:8]}"
    own = re.sub("//[^@]*@", f"//{name}:r@", url)
    writer.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'r'")
    try:
        writer.execute(f"GRANT USAGE ON SCHEMA dtx TO {name}")
        with pytest.raises(SourceError, match="permission denied"):
            load(own)
        writer.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA dtx TO {name}")
        assert numbers(load(own, partitions=2)) == [1, 2, 3]
        assert Stream(url=own).run() == [1, 2, 3]
        assert load(own, "branch") == []
    finally:
        writer.execute(f"DROP OWNED BY {name}")
        writer.execute(f"DROP ROLE {name}")

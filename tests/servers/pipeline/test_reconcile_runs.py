"""From run to run: what has changed is judged again, what arrives late corrects, and what is found is published."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.log.reading import LogReader
from dtx.log.verdicts import found, reconciled
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import PublishingFailed, Run, StateDamaged, current, publish, run, runs
from dtx.pipeline.reference import Decision, Event, Observation
from dtx.pipeline.report import collect
from dtx.pipeline.report.page import render
from dtx.pipeline.verdicts import Choice, Kind, Rules
from tests.servers.pipeline.test_reconcile import expected, require_same
from tests.support.fleets import Fleet, decisions_frame, events_frame, fleet_of, observations_frame

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute


class Batches:
    """A lake that grows by batches; the token is how many of them have been read."""

    def __init__(self) -> None:
        self.batches: list[DataFrame] = []
        self.damaged: set[int] = set()
        self.identity = "lake 1"

    def frame(self, spark: SparkSession, since: Mapping[str, int] | None = None) -> tuple[DataFrame, dict[str, int]]:
        found = events_frame(spark, ())
        for number, batch in enumerate(self.batches):
            if number >= (since["batches"] if since else 0) and number not in self.damaged:
                found = found.unionByName(batch)
        return found, {"batches": len(self.batches)}

    @property
    def quarantined(self) -> list[Quarantined]:
        return [Quarantined(source="lake", item=str(number), reason="cut off", count=None) for number in self.damaged]


def test_run_after_run_says_what_one_run_would(spark: SparkSession, tmp_path: Path) -> None:
    whole, lake, out = fleet_of(1, 300), Batches(), str(tmp_path / "verdicts")
    # a format id that a decision once took from an observation stays known, which the reference cannot know
    whole = replace(
        whole,
        decisions=tuple(replace(made, format_id=made.format_id or 1) for made in whole.decisions),
        # nor since when something was prepared that was there the last time, and its participant does not say it
        observations=tuple(replace(seen, since=seen.since or seen.observed_at) for seen in whole.observations),
    )
    third = len(whole.events) // 3

    def day(number: int) -> tuple[Fleet, Run]:
        lines = whole.events[number * third : None if number == 2 else (number + 1) * third]
        made = whole.decisions[: (number + 1) * len(whole.decisions) // 3]
        # a participant that has nothing in doubt any more says nothing
        known = Fleet(whole.events[: number * third] + lines, whole.observations[number::3], made)
        lake.batches.append(events_frame(spark, lines, 1 + number * third))
        return known, again(known, Rules(as_of=2_000_000_000 + number * 250_000_000, orphan_after=500_000_000))

    def again(known: Fleet, rules: Rules, *, full: bool = False) -> Run:
        seen, made = observations_frame(spark, known.observations), decisions_frame(spark, known.decisions)
        done = run(spark, lake, seen, made, out, rules, full=full)
        require_same(current(spark, out), known, rules)
        assert done.lines == len(known.events)
        assert done.transactions == len(expected(known, rules))
        return done

    first, second, (known, third_day) = day(0), day(1), day(2)
    assert [done.base for done in (first[1], second[1], third_day)] == [1, 1, 1]
    assert [done.lines_read for done in (first[1], second[1], third_day)] == [
        third,
        third,
        len(whole.events) - 2 * third,
    ]
    anew = again(known, Rules(as_of=2_500_000_000, orphan_after=500_000_000), full=True)
    assert (anew.totals, anew.fingerprint) == (third_day.totals, third_day.fingerprint)
    assert [(each.number, each.base) for each in runs(spark, out)] == [(1, 1), (2, 1), (3, 1), (4, 4)]


def _line(gtrid: bytes, event: str, at: int, **more: object) -> Event:
    told = {
        "source": "db", "rm": "rm", "vhost": "/", "format_id": 1, "gtrid": gtrid, "bqual": b"", "branch_id": "life",
        "id": f"{gtrid!r} {event}", "event": event, "at": at, "owner": "ann", "actor": "ann",
    }  # fmt: skip
    return Event(**(told | more))  # type: ignore[arg-type]


def test_what_leaves_its_log_and_what_nobody_sees_any_more(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Managers drop what is finished; a prepared transaction of a database is gone when it has ended."""
    monkeypatch.setattr("dtx.pipeline.reconcile.running.MOST_LAYERS", 2)
    lake, out, rules = Batches(), str(tmp_path / "verdicts"), Rules(as_of=10_000_000_000)
    lake.batches.append(
        events_frame(
            spark, [_line(b"kept", "prepared", 1), _line(b"quiet", "prepared", 1), _line(b"quiet", "committed", 2)]
        )
    )
    made = Decision(source="log", tm="tm", format_id=1, gtrid=b"kept", decision=Choice.COMMIT, at=2, finished=False)
    foreign = Observation(
        source="bank", kind=Kind.POSTGRESQL, rm="bank", vhost="bank", format_id=1, gtrid=b"gone", bqual=b"", owner="x",
        state="prepared", since=1, observed_at=2,
    )  # fmt: skip
    nobody, nothing = observations_frame(spark, ()), decisions_frame(spark, ())

    def verdicts() -> dict[bytes, tuple[str, int]]:
        return {bytes(row.gtrid): (row.verdict, row.run) for row in current(spark, out).collect()}

    with pytest.raises(StateDamaged, match="nothing has been reconciled"):
        current(spark, out)
    run(spark, lake, observations_frame(spark, [foreign]), decisions_frame(spark, [made]), out, rules)
    assert verdicts() == {b"kept": ("unfinished", 1), b"quiet": ("committed", 1), b"gone": ("orphan", 1)}
    lake.batches.append(events_frame(spark, [_line(b"kept", "committed", 3)], 10))
    # the log could not be read: it is as it was
    run(spark, lake, nobody, nothing, out, rules)
    assert verdicts() == {b"kept": ("unfinished", 2), b"quiet": ("committed", 1)}
    # it was read, is empty, and so the transaction is finished; and this is the run that writes down all that counts
    last = run(spark, lake, nobody, nothing, out, rules, logs_read=["log"])
    assert last.base == 3
    assert verdicts() == {b"kept": ("committed", 3), b"quiet": ("committed", 3)}
    row = current(spark, out).where("decision is not null").collect()
    assert [(bytes(each.gtrid), each.decision, each.tm) for each in row] == [(b"kept", "commit", "tm")]


def test_what_is_under_way_is_not_called_unfinished_and_is_looked_at_again(spark: SparkSession, tmp_path: Path) -> None:
    """Lines are older than the log that is read after them: what commits in between is open, and is decided."""
    lake, out, at = Batches(), str(tmp_path / "verdicts"), 1_000_000_000
    begun = [_line(b"open", "prepared", at - 1), _line(b"ended", "prepared", at - 1), _line(b"ended", "committed", at)]
    lake.batches.append(events_frame(spark, begun))
    made = [
        Decision(source="log", tm="tm", format_id=1, gtrid=gtrid, decision=Choice.COMMIT, at=at, finished=False)
        for gtrid in (b"open", b"ended")
    ]

    def verdicts(later: int) -> dict[bytes, str]:
        rules = Rules(as_of=at + later, skew=1_000)
        run(spark, lake, observations_frame(spark, ()), decisions_frame(spark, made), out, rules, logs_read=["log"])
        return {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}

    assert verdicts(0) == {b"open": "in-doubt", b"ended": "committed"}
    assert verdicts(999) == {b"open": "in-doubt", b"ended": "committed"}
    assert verdicts(1_000) == {b"open": "unfinished", b"ended": "unfinished"}
    lake.batches.append(events_frame(spark, [_line(b"open", "committed", at + 1)], 10))
    made = [replace(each, finished=True) for each in made]
    assert verdicts(5_000) == {b"open": "committed", b"ended": "committed"}


def test_who_cannot_be_asked_has_in_doubt_what_was_there_the_last_time(spark: SparkSession, tmp_path: Path) -> None:
    """A database that is down has lost nothing; a log of which a part was read has finished nothing."""
    lake, out, rules = Batches(), str(tmp_path / "verdicts"), Rules(as_of=10_000_000_000)
    lake.batches.append(events_frame(spark, [_line(b"kept", "committed", 1)]))
    foreign = Observation(
        source="bank", kind=Kind.POSTGRESQL, rm="bank", vhost="bank", format_id=1, gtrid=b"gone", bqual=b"", owner="x",
        state="prepared", since=1, observed_at=2,
    )  # fmt: skip
    made = Decision(source="log", tm="tm", format_id=1, gtrid=b"kept", decision=Choice.COMMIT, at=2, finished=False)
    nobody = observations_frame(spark, ())

    def verdicts(*decisions: Decision, seen: DataFrame = nobody, **more: Any) -> dict[bytes, str]:
        run(spark, lake, seen, decisions_frame(spark, decisions), out, rules, **more)
        return {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}

    both = {b"kept": "unfinished", b"gone": "orphan"}
    assert verdicts(made, seen=observations_frame(spark, [foreign]), logs_read=["log"]) == both
    # its second file, which had the decision, is cut off
    first_file = replace(made, gtrid=b"other", finished=True)
    for _ in range(2):
        assert verdicts(first_file, away=["bank"], logs_read=[]) == both | {b"other": "committed"}
    assert spark.read.parquet(f"{out}/asked/run=3").count() == 3
    assert verdicts(first_file, away=["bank"], logs_read=["log"], full=True)[b"gone"] == "orphan"
    assert verdicts(first_file, logs_read=["log"]) == {b"kept": "committed", b"other": "committed"}


def test_what_is_in_doubt_since_nobody_says_when_is_so_since_it_was_seen_first(
    spark: SparkSession, tmp_path: Path
) -> None:
    """XA RECOVER of MySQL and MariaDB has no times; without one nothing there ever was an orphan."""
    lake, out = Batches(), str(tmp_path / "verdicts")
    lake.batches.append(events_frame(spark, ()))
    nothing = decisions_frame(spark, ())

    def verdict(at: int, *, of: bytes = b"lost") -> tuple[str, int | None]:
        seen = Observation(
            source="stock", kind=Kind.MYSQL, rm="stock", vhost=None, format_id=1, gtrid=of, bqual=b"",  # type: ignore[arg-type]
            owner=None, state="prepared", since=None, observed_at=at,  # type: ignore[arg-type]
        )  # fmt: skip
        rules = Rules(as_of=at, orphan_after=100)
        run(spark, lake, observations_frame(spark, [seen]), nothing, out, rules, logs_read=["log"])
        (row,) = current(spark, out).select("verdict", sf.unix_micros("since").alias("since")).collect()
        return row.verdict, row.since

    assert verdict(1_000) == ("in-doubt", None)
    assert verdict(1_050) == ("in-doubt", 1_000)
    assert verdict(1_101) == ("orphan", 1_000)
    assert verdict(1_102, of=b"other") == ("in-doubt", None)


def test_what_is_known_is_read_anew_where_the_lake_is_not_what_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """A file that was damaged and is not any more, and another lake in the place of the one before."""
    lake, out, at = Batches(), str(tmp_path / "verdicts"), 1_000_000
    rules = Rules(as_of=10_000_000_000, skew=0)
    lines = [
        [_line(b"a", "prepared", at), _line(b"a", "heuristic", at, outcome="committed", actor="op")],
        [_line(b"a", "forgotten", at + 1, outcome="committed", actor="op"), _line(b"b", "committed", at)],
    ]
    lake.batches += [events_frame(spark, some, number * 10) for number, some in enumerate(lines)]
    decided = Decision(source="log", tm="tm", format_id=1, gtrid=b"a", decision=Choice.COMMIT, at=at + 2, finished=True)

    def verdicts(rules: Rules = rules) -> tuple[Run, dict[bytes, str]]:
        done = run(spark, lake, observations_frame(spark, ()), decisions_frame(spark, [decided]), out, rules)
        return done, {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}

    lake.damaged = {1}
    done, found = verdicts()
    assert (done.lines, done.damaged, found) == (2, ["1"], {b"a": "committed"})
    done, _ = verdicts()
    assert (done.lines, done.lines_read, done.base) == (2, 0, 1)
    lake.damaged = set()
    done, found = verdicts()
    assert (done.lines, done.lines_read, found) == (4, 4, {b"a": "forgotten-early", b"b": "committed"})
    # clocks that may differ by more: judged again, though nothing has come
    done, found = verdicts(replace(rules, skew=1))
    assert (done.lines_read, done.base, found[b"a"]) == (0, 3, "committed")
    # somebody has removed it and had it archived anew
    lake.identity = "lake 2"
    done, found = verdicts()
    assert (done.lines, done.lines_read, found[b"a"]) == (4, 4, "forgotten-early")


def test_a_decision_of_a_log_without_times_is_published_and_shown(
    spark: SparkSession, tmp_path: Path, migrated_postgres_url: str
) -> None:
    """Atomikos writes none; where no branch is known either, nothing of the transaction has a time."""
    lake, out, rules = Batches(), str(tmp_path / "verdicts"), Rules(as_of=1_767_225_600_000_001)
    lake.batches.append(events_frame(spark, ()))
    made = Decision(
        source="log", tm="a\0b", format_id=None, gtrid=b"tm1", decision=Choice.COMMIT, at=None, finished=False
    )
    seen = Observation(
        source="s\0", kind=Kind.MYSQL, rm="r\0", vhost=None, format_id=1, gtrid=b"tm2", bqual=b"", owner=None,  # type: ignore[arg-type]
        state="prepared", since=None, observed_at=rules.as_of,
    )  # fmt: skip
    done = run(spark, lake, observations_frame(spark, [seen]), decisions_frame(spark, [made]), out, rules)
    figures = collect(current(spark, out), events_frame(spark, ()))
    assert set(figures.days) == {(date(2026, 1, 1), "in-doubt", 1), (None, "unfinished", 1)}
    page = render(figures)
    assert "tm2" in page
    assert publish(current(spark, out), done, migrated_postgres_url) == 2
    with LogReader(migrated_postgres_url) as log:
        told = {one.gtrid: one for one in found(log)}
    assert (told[b"tm1"].last_at, told[b"tm1"].tm) == (datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), "a\ufffdb")
    assert told[b"tm2"].rms == ("r\ufffd",)
    for one in told.values():
        (line,) = one.evidence
        assert set(line) == {"source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "id"}


def test_what_is_found_goes_into_a_database_all_at_once(
    spark: SparkSession, tmp_path: Path, migrated_postgres_url: str, postgres_url: str
) -> None:
    lake, out = Batches(), str(tmp_path / "verdicts")
    at = 1_767_225_600_000_001
    fine = [_line(b"fine", "prepared", at), _line(b"fine", "committed", at)]
    mixed = [
        _line(b"mixed", "committed", at, owner='o"\\{},'),
        _line(b"mixed", "rolled-back", at + 1, rm="rm2", bqual=b"\0\xff"),
    ]
    lake.batches.append(events_frame(spark, [*fine, *mixed]))
    gid = Observation(
        source="bank", kind=Kind.POSTGRESQL, rm="bank", vhost="bank", format_id=None, gtrid=b"x" * 200, bqual=b"",
        owner="x", state="prepared", since=None, observed_at=at,
    )  # fmt: skip
    seen, nothing = observations_frame(spark, [gid]), decisions_frame(spark, ())
    done = run(spark, lake, seen, nothing, out, Rules(as_of=at))
    assert publish(current(spark, out), done, migrated_postgres_url) == 2
    assert publish(current(spark, out), done, migrated_postgres_url) == 2, "once more is no harm"
    with LogReader(migrated_postgres_url) as log:
        shown = reconciled(log)
        assert shown is not None
        assert (shown.number, shown.lines, shown.shown) == (1, 4, 2)
        assert {word: total["transactions"] for word, total in shown.totals.items() if total["transactions"]} == {
            "mixed": 1, "in-doubt": 1, "committed": 1,
        }  # fmt: skip
        told = {one.gtrid: one for one in found(log)}
    assert told[b"x" * 200].format_id is None
    one = told[b"mixed"]
    assert (one.verdict, one.rms, one.owners, one.branches) == ("mixed", ("rm", "rm2"), ("ann", 'o"\\{},'), 2)
    assert [(line["event"], line["bqual"], line["at"]) for line in one.evidence] == [
        ("committed", "", "2026-01-01 00:00:00.000001Z"),
        ("rolled-back", "00ff", "2026-01-01 00:00:00.000002Z"),
    ]
    with pytest.raises(PublishingFailed, match="dtx migrate"):
        publish(current(spark, out), done, postgres_url)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE dtx.reconciliation ADD CONSTRAINT full_up CHECK (shown < 2) NOT VALID")
        with pytest.raises(PublishingFailed, match="full_up"):
            publish(current(spark, out), done, migrated_postgres_url)
        assert connection.execute("SELECT count(*) FROM dtx.verdict").fetchone() == (2,)

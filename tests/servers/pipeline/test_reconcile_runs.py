"""From run to run: what has changed is judged again, what arrives late corrects, and what is found is published."""

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from dtx.log.pages import last_reconciliation, verdict_page
from dtx.log.reader import LogReader
from dtx.pipeline.delta import Table
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import PublishingFailed, Results, Run, current, publish, run
from dtx.pipeline.report import collect
from dtx.pipeline.report.page import render
from dtx.pipeline.session import _QUICK_NAME
from dtx.pipeline.verdicts import Choice, Rules, SourceKind
from tests.servers.pipeline.test_reconcile import expected, require_same
from tests.support.fleets import Fleet, decisions_frame, events_frame, fleet_of, line, observations_frame
from tests.support.reference import Decision, Observation

pytestmark = pytest.mark.timeout(900)  # a first job of Spark can take a minute where many others compute


class Batches:
    """A lake that grows by batches; the token is how many of them have been read."""

    def __init__(self) -> None:
        self.batches: list[DataFrame] = []
        self.damaged: set[int] = set()
        self.identity = "lake 1"

    def frame(self, spark: SparkSession, since: int | None = None, between: object = None) -> tuple[DataFrame, int]:
        found = events_frame(spark, ())
        for number, batch in enumerate(self.batches):
            if number >= (since or 0) and number not in self.damaged:
                found = found.unionByName(batch)
        return found, len(self.batches)

    @property
    def quarantined(self) -> list[Quarantined]:
        return [Quarantined(source="lake", item=str(number), reason="cut off", count=None) for number in self.damaged]


@pytest.mark.parametrize("many", [0, 40, 1_000_000], ids=["by Spark", "more rows than expected", "few rows"])
def test_incremental_runs_give_the_verdicts_of_one_run(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, many: int
) -> None:
    """The process itself writes the files of a small lake."""
    if many:
        monkeypatch.setattr("dtx.pipeline.session._FEW_LINES", many)
        spark.conf.set(_QUICK_NAME, "true")
        request.addfinalizer(lambda: spark.conf.unset(_QUICK_NAME))
    whole, lake, out = fleet_of(1, 300), Batches(), str(tmp_path / "results")
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
    assert [done.lines_read for done in (first[1], second[1], third_day)] == [
        third,
        third,
        len(whole.events) - 2 * third,
    ]
    anew = again(known, Rules(as_of=2_500_000_000, orphan_after=500_000_000), full=True)
    assert (anew.totals, anew.fingerprint) == (third_day.totals, third_day.fingerprint)
    assert [each.number for each in Results(out).runs()] == [1, 2, 3, 4]


def test_vanished_decisions_and_observations_are_handled(spark: SparkSession, tmp_path: Path) -> None:
    """Managers drop what is finished; a prepared transaction of a database is gone when it has ended."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000)
    lake.batches.append(
        events_frame(
            spark, [line(b"kept", "prepared", 1), line(b"quiet", "prepared", 1), line(b"quiet", "committed", 2)]
        )
    )
    made = Decision(source="log", tm="tm", format_id=1, gtrid=b"kept", decision=Choice.COMMIT, at=2, finished=False)
    foreign = Observation(
        source="bank", kind=SourceKind.POSTGRESQL, rm="bank", vhost="bank", format_id=1, gtrid=b"gone", bqual=b"",
        owner="x", state="prepared", since=1, observed_at=rules.as_of,
    )  # fmt: skip
    nobody, nothing = observations_frame(spark, ()), decisions_frame(spark, ())

    def verdicts() -> dict[bytes, tuple[str, int]]:
        return {bytes(row.gtrid): (row.verdict, row.run) for row in current(spark, out).collect()}

    with pytest.raises(LakeError, match="has no verdicts yet: dtx pipeline reconcile"):
        current(spark, out)
    run(spark, lake, observations_frame(spark, [foreign]), decisions_frame(spark, [made]), out, rules)
    assert verdicts() == {b"kept": ("unfinished", 1), b"quiet": ("committed", 1), b"gone": ("orphan", 1)}
    lake.batches.append(events_frame(spark, [line(b"kept", "committed", 3)], 10))
    # the log could not be read: it is as it was
    run(spark, lake, nobody, nothing, out, rules)
    assert verdicts() == {b"kept": ("unfinished", 2), b"quiet": ("committed", 1)}
    # it was read, is empty, and so the transaction is finished
    run(spark, lake, nobody, nothing, out, rules, logs_read=["log"])
    assert verdicts() == {b"kept": ("committed", 3), b"quiet": ("committed", 1)}
    row = current(spark, out).where("decision is not null").collect()
    assert [(bytes(each.gtrid), each.decision, each.tm) for each in row] == [(b"kept", "commit", "tm")]


def test_an_old_lake_with_branches_missing_in_dtx(spark: SparkSession, tmp_path: Path) -> None:
    """A branch that dtx has no more is no orphan, also while that dtx is away; its end corrects what was said."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000, asked=frozenset({"db"}))
    lake.batches.append(events_frame(spark, [line(b"g", "prepared", 1), line(b"young", "prepared", 9_000_000_000)]))
    own = Observation(
        source="db", kind=SourceKind.DTX, rm="rm", vhost="/", format_id=1, gtrid=b"g", bqual=b"", owner="ann",
        state="prepared", since=1, observed_at=rules.as_of, branch_id="life",
    )  # fmt: skip
    young = replace(own, gtrid=b"young", since=9_000_000_000)
    nothing = decisions_frame(spark, ())

    def again(*seen: Observation, away: bool = False, full: bool = False) -> dict[bytes, str]:
        said = replace(rules, asked=frozenset(), archived={"db": 9_500_000_000}) if away else rules
        run(spark, lake, observations_frame(spark, seen), nothing, out, said, away=["db"] if away else [], full=full)
        return {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}

    assert again(own, young) == {b"g": "orphan", b"young": "in-doubt"}
    assert again(away=True) == {b"g": "orphan", b"young": "in-doubt"}, "it has what it had the last time"
    gone = {b"g": "not-archived", b"young": "in-doubt"}
    assert again(young) == again(away=True) == again(away=True, full=True) == again(away=True) == gone
    assert again(own, young) == {b"g": "orphan", b"young": "in-doubt"}, "the dtx that answered was not up to date"
    assert again(young, full=True) == gone
    lake.batches.append(events_frame(spark, [line(b"g", "committed", 5)], 10))
    assert again(young) == again(away=True, full=True) == {b"g": "committed", b"young": "in-doubt"}


def test_a_run_knows_when_each_source_was_last_read(
    spark: SparkSession, tmp_path: Path, migrated_postgres_url: str
) -> None:
    lake, out = Batches(), str(tmp_path / "results")
    names: Any = {"participants": ["bank", "db"], "logs": ["tm"]}
    lake.batches.append(events_frame(spark, [line(b"g", "prepared", 1)]))
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())
    first, second = (datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2))
    rules = Rules(as_of=round(first.timestamp()) * 1_000_000, archived={"db": 5_000_000})
    run(spark, lake, none, nothing, out, rules, logs_read=["tm"], away=["bank"], **names)
    rules = replace(rules, as_of=round(second.timestamp()) * 1_000_000)
    done = run(spark, lake, none, nothing, out, rules, logs_read=[], **names)
    archived = datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)
    assert Results(out).last() == done
    assert done.sources == [
        ("db", "journal", archived, False),
        ("bank", "branches in doubt", second, False),
        ("db", "branches in doubt", second, False),
        ("tm", "decisions", first, True),
    ]
    publish(current(spark, out), done, migrated_postgres_url)
    with LogReader(migrated_postgres_url) as log:
        shown = last_reconciliation(log)
        (one,) = verdict_page(log)
    assert shown is not None
    assert [tuple(source.values()) for source in shown.sources] == done.sources
    assert one.known_at == archived, "its branch was open when its journal was read"


def test_rows_kept_by_another_dtx_are_not_merged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are read again; decisions that their logs have dropped since stay known."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000)
    lake.batches.append(events_frame(spark, [line(b"g", "prepared", 1), line(b"g", "committed", 2)]))
    made = Decision(source="log", tm="tm", format_id=1, gtrid=b"g", decision=Choice.COMMIT, at=2)
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())
    assert run(spark, lake, none, decisions_frame(spark, [made]), out, rules).lines_read == 2
    monkeypatch.setattr("dtx.pipeline.reconcile.incremental.FORM", 99)
    assert run(spark, lake, none, nothing, out, rules, logs_read=["log"]).lines_read == 2
    (row,) = current(spark, out).collect()
    assert (row.verdict, row.decision, row.tm) == ("committed", "commit", "tm")
    monkeypatch.undo()
    assert run(spark, lake, none, nothing, out, rules, logs_read=["log"]).lines_read == 0


def test_verdicts_and_their_history_are_readable_tables(spark: SparkSession, tmp_path: Path) -> None:
    """Read without Spark: one row for each transaction, one for each change, and nothing that Spark alone knows."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000)
    day = 86_400_000_000
    lake.batches.append(events_frame(spark, [line(b"late", "prepared", day), line(b"fine", "committed", day)]))
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())

    def rows(table: str, *names: str) -> list[tuple[Any, ...]]:
        found = DeltaTable(tmp_path / "results" / table).to_pyarrow_table(columns=list(names)).to_pylist()
        return sorted(tuple(row.values()) for row in found)

    for number in range(2):
        run(spark, lake, none, nothing, out, replace(rules, as_of=40 * day + number), logs_read=["log"])
    assert rows("verdicts", "gtrid", "verdict", "settled", "run") == [
        (b"fine", "committed", "1970-01", 1),
        (b"late", "orphan", "open", 2),
    ]
    assert [len(told) for (told,) in rows("verdicts", "evidence")] == [0, 1]
    lake.batches.append(events_frame(spark, [line(b"late", "committed", 32 * day), line(b"fine", "committed", 1)], 10))
    run(spark, lake, none, nothing, out, replace(rules, as_of=41 * day), logs_read=["log"])
    assert rows("verdicts", "gtrid", "verdict", "settled", "run") == [
        (b"fine", "committed", "1970-01", 3),
        (b"late", "committed", "1970-02", 3),
    ]
    assert rows("history", "run", "gtrid", "was", "verdict") == [
        (1, b"late", None, "orphan"),
        (3, b"late", "orphan", "committed"),
    ]
    assert DeltaTable(tmp_path / "results/verdicts").metadata().partition_columns == ["settled"]
    assert len(list((tmp_path / "results/state").iterdir())) == 1, "no run needs an older one"


def test_a_run_that_dies_is_made_good_by_the_next(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its writes: the next run has its number, and says what it would have said."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000)
    none, nothing = observations_frame(spark, ()), decisions_frame(spark, ())
    lake.batches.append(events_frame(spark, [line(b"a", "prepared", 1)]))

    def again() -> Run:
        return run(spark, lake, none, nothing, out, rules, logs_read=["log"])

    expected = again().number
    steps = ("history.write", "history.commit", "verdicts.commit", "Files.write", "Files.remove")
    for number, step in enumerate(steps, 2):
        lake.batches.append(events_frame(spark, [line(b"%d" % number, "prepared", 1)], 10 * number))
        room, _, name = step.partition(".")
        kind = Files if room == "Files" else Table
        whole = getattr(kind, name)

        def die(of: Any, *given: Any, whole: Any = whole, room: str = room, **more: Any) -> Any:
            """At the table; at the file of the run; or when older states are removed, which is the last step."""
            is_it = given[0].startswith(("runs/", "state/")) if room == "Files" else of.files.uri.endswith(room)
            if is_it and not str(given[0]).endswith(("_written.json", ".parquet")):
                raise KeyboardInterrupt
            return whole(of, *given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, die)
            with pytest.raises(KeyboardInterrupt):
                again()
        done = again()
        expected += 2 if room == "Files" else 1  # its commit had come: it counts
        assert (done.number, done.lines, done.transactions) == (expected, number, number)
        found = current(spark, out).select("gtrid").collect()
        assert len(found) == len(set(found)) == number
    changes = DeltaTable(tmp_path / "results/history").to_pyarrow_table().num_rows
    assert changes == len(lake.batches), "each was new once"


def test_a_decision_without_times_is_published_and_shown(
    spark: SparkSession, tmp_path: Path, migrated_postgres_url: str
) -> None:
    """Atomikos writes none; where no branch is known either, nothing of the transaction has a time."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=1_767_225_600_000_001)
    lake.batches.append(events_frame(spark, ()))
    made = Decision(
        source="log", tm="a\0b", format_id=None, gtrid=b"tm1", decision=Choice.COMMIT, at=None, finished=False
    )
    seen = Observation(
        source="s\0", kind=SourceKind.MYSQL, rm="r\0", vhost=None, format_id=1, gtrid=b"tm2", bqual=b"", owner=None,  # type: ignore[arg-type]
        state="prepared", since=None, observed_at=rules.as_of,
    )  # fmt: skip
    done = run(spark, lake, observations_frame(spark, [seen]), decisions_frame(spark, [made]), out, rules)
    figures = collect(current(spark, out), events_frame(spark, ()))
    assert set(figures.days) == {(date(2026, 1, 1), "in-doubt", 1), (None, "unfinished", 1)}
    page = render(figures)
    assert "tm2" in page
    assert publish(current(spark, out), done, migrated_postgres_url) == 2
    with LogReader(migrated_postgres_url) as log:
        told = {one.gtrid: one for one in verdict_page(log)}
    assert (told[b"tm1"].last_at, told[b"tm1"].tm) == (datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC), "a\ufffdb")
    assert told[b"tm2"].rms == ("r\ufffd",)
    for one in told.values():
        (line,) = one.evidence
        assert set(line) == {"source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "id"}


def test_findings_are_published_in_one_transaction(
    spark: SparkSession, tmp_path: Path, migrated_postgres_url: str, postgres_url: str
) -> None:
    lake, out = Batches(), str(tmp_path / "results")
    at = 1_767_225_600_000_001
    fine = [line(b"fine", "prepared", at), line(b"fine", "committed", at)]
    mixed = [
        line(b"mixed", "committed", at, owner='o"\\{},'),
        line(b"mixed", "rolled-back", at + 1, rm="rm2", bqual=b"\0\xff"),
    ]
    lake.batches.append(events_frame(spark, [*fine, *mixed]))
    gid = Observation(
        source="bank", kind=SourceKind.POSTGRESQL, rm="bank", vhost="bank", format_id=None, gtrid=b"x" * 200, bqual=b"",
        owner="x", state="prepared", since=None, observed_at=at,
    )  # fmt: skip
    seen, nothing = observations_frame(spark, [gid]), decisions_frame(spark, ())
    done = run(spark, lake, seen, nothing, out, Rules(as_of=at))
    assert publish(current(spark, out), done, migrated_postgres_url) == 2
    assert publish(current(spark, out), done, migrated_postgres_url) == 2, "once more is no harm"
    with LogReader(migrated_postgres_url) as log:
        shown = last_reconciliation(log)
        assert shown is not None
        assert (shown.number, shown.lines, shown.shown) == (1, 4, 2)
        assert {word: total["transactions"] for word, total in shown.totals.items() if total["transactions"]} == {
            "mixed": 1, "in-doubt": 1, "committed": 1,
        }  # fmt: skip
        told = {one.gtrid: one for one in verdict_page(log)}
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

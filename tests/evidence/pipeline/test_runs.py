"""Longer sequences of runs. The servers tier has the shorter ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.reconcile import Run, current, run
from dtx.pipeline.verdicts import Choice, Rules, SourceKind
from tests.servers.pipeline.test_reconcile_runs import Batches
from tests.support.fleets import decisions_frame, events_frame, line, observations_frame
from tests.support.reference import Decision, Observation


def test_running_transactions_are_checked_again_before_they_are_called_unfinished(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The log is read after the lines, so a decided branch without an end is in doubt until the skew has passed."""
    lake, out, at = Batches(), str(tmp_path / "results"), 1_000_000_000
    begun = [line(b"open", "prepared", at - 1), line(b"ended", "prepared", at - 1), line(b"ended", "committed", at)]
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
    lake.batches.append(events_frame(spark, [line(b"open", "committed", at + 1)], 10))
    made = [replace(each, finished=True) for each in made]
    assert verdicts(5_000) == {b"open": "committed", b"ended": "committed"}


def test_an_unreachable_participant_keeps_the_branches_of_its_last_observation(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Branches of an unreachable database are kept, and decisions of a partly read log stay unfinished."""
    lake, out, rules = Batches(), str(tmp_path / "results"), Rules(as_of=10_000_000_000)
    lake.batches.append(events_frame(spark, [line(b"kept", "committed", 1)]))
    foreign = Observation(
        source="bank", kind=SourceKind.POSTGRESQL, rm="bank", vhost="bank", format_id=1, gtrid=b"gone", bqual=b"",
        owner="x", state="prepared", since=1, observed_at=rules.as_of,
    )  # fmt: skip
    made = Decision(source="log", tm="tm", format_id=1, gtrid=b"kept", decision=Choice.COMMIT, at=2, finished=False)
    nobody = observations_frame(spark, ())

    def verdicts(*decisions: Decision, seen: DataFrame = nobody, **more: Any) -> dict[bytes, str]:
        run(spark, lake, seen, decisions_frame(spark, decisions), out, rules, **more)
        return {bytes(row.gtrid): row.verdict for row in current(spark, out).collect()}

    both = {b"kept": "unfinished", b"gone": "orphan"}
    assert verdicts(made, seen=observations_frame(spark, [foreign]), logs_read=["log"]) == both
    # its second file, with the decision, is missing
    first_file = replace(made, gtrid=b"other", finished=True)
    for _ in range(2):
        assert verdicts(first_file, away=["bank"], logs_read=[]) == both | {b"other": "committed"}
    (kept,) = Path(out, "state").glob("*/decided")
    assert spark.read.parquet(str(kept)).count() == 2
    assert verdicts(first_file, away=["bank"], logs_read=["log"], full=True)[b"gone"] == "orphan"
    assert verdicts(first_file, logs_read=["log"]) == {b"kept": "committed", b"other": "committed"}


def test_branches_without_a_start_time_count_from_the_first_observation(spark: SparkSession, tmp_path: Path) -> None:
    """XA RECOVER of MySQL and MariaDB has no times; without a time, no branch would become an orphan."""
    lake, out = Batches(), str(tmp_path / "results")
    lake.batches.append(events_frame(spark, ()))
    nothing = decisions_frame(spark, ())

    def verdict(at: int, *, of: bytes = b"lost") -> tuple[str, int | None]:
        seen = Observation(
            source="stock", kind=SourceKind.MYSQL, rm="stock", vhost=None, format_id=1, gtrid=of, bqual=b"",  # type: ignore[arg-type]
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


def test_a_changed_lake_is_read_anew(spark: SparkSession, tmp_path: Path) -> None:
    """After a damaged file is repaired, and after the lake is replaced, all lines are read again."""
    lake, out, at = Batches(), str(tmp_path / "results"), 1_000_000
    rules = Rules(as_of=10_000_000_000, skew=0)
    lines = [
        [line(b"a", "prepared", at), line(b"a", "heuristic", at, outcome="committed", actor="op")],
        [line(b"a", "forgotten", at + 1, outcome="committed", actor="op"), line(b"b", "committed", at)],
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
    assert (done.lines, done.lines_read, done.touched) == (2, 0, 0)
    lake.damaged = set()
    done, found = verdicts()
    assert (done.lines, done.lines_read, found) == (4, 4, {b"a": "forgotten-early", b"b": "committed"})
    # a larger skew of clocks: verdicts are computed again without new lines
    done, found = verdicts(replace(rules, skew=1))
    assert (done.lines_read, done.touched, found[b"a"]) == (0, 2, "committed")
    # the lake was removed and archived again
    lake.identity = "lake 2"
    done, found = verdicts()
    assert (done.lines, done.lines_read, found[b"a"]) == (4, 4, "forgotten-early")

"""Incremental runs: each run reads the lines that are new since the last one, and judges what has changed.

A run judges these transactions again:

- those with new lines
- those whose decision is new, has changed, or has left its manager's log
- those that a participant has or had in doubt
- those that were open, since their age changes

It folds their new rows into the folded rows of earlier runs, so a late line corrects the verdict. All other verdicts
stay, and their lines are not read again. With another ``skew`` all transactions are judged again, without reading their
lines. All lines are read again if the known ones may be wrong. This is so if the lake is another one, or if a damaged
file of it is whole again or was removed.

The table of verdicts changes by files: a file that has a transaction that is judged again is replaced.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from functools import reduce
from typing import Final, Protocol
from uuid import uuid4

from deltalake.transaction import AddAction
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.delta import DataFile, Table
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile.folded_rows import (
    KEPT,
    KEY,
    bits,
    has,
    rows_of,
    rows_of_decisions,
    rows_of_events,
    rows_of_observations,
    with_format_ids,
)
from dtx.pipeline.reconcile.judged_rows import (
    TYPE,
    VERDICT_COLUMNS,
    is_finding,
    judge_rows,
    may_change_with_time,
    with_evidence,
)
from dtx.pipeline.reconcile.state import FORM, OPEN, UNDATED, VERDICTS, Results, Run, StateDamaged, TableChange, Total
from dtx.pipeline.session import few_rows
from dtx.pipeline.verdicts import Mark, Rules

_FEW: Final = 1_000_000
"""Gtrids, of up to 64 bytes each, that every process of Spark may keep in memory."""
_PREPARED: Final = ("source", "rm", "vhost", "format_id", "gtrid", "bqual")
"""The key of an observation."""


class Lines(Protocol):
    """The lines of all journals; :class:`dtx.pipeline.lake.Lake` has this interface."""

    @property
    def identity(self) -> str | None:
        """The id of the lake; ``None`` if it has none."""

    @property
    def quarantined(self) -> Sequence[Quarantined]:
        """Files that the last read left out."""

    def frame(
        self, spark: SparkSession, since: int | None = None, between: tuple[datetime, datetime] | None = None
    ) -> tuple[DataFrame, int]:
        """Return lines that came after *since*, and the *since* for the next call."""


def run(
    spark: SparkSession,
    lines: Lines,
    observations: DataFrame,
    decisions: DataFrame,
    out: str,
    rules: Rules,
    *,
    logs: Collection[str] = (),
    logs_read: Collection[str] | None = None,
    participants: Collection[str] = (),
    away: Collection[str] = (),
    full: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Run:
    """Give verdicts on the transactions that have changed, and store them in *out*, the directory of the results.

    A decision that has left its log is remembered as finished. *logs* are the sources of all decision logs, and
    *logs_read* those that were read as a whole, also empty ones; ``None``: the sources of *decisions*. Earlier
    decisions of other logs stay unchanged. *participants* are the sources of all participants, databases of dtx
    included. For those in *away*, which could not be read, the last known branches in doubt are used. With *full*, all
    lines are read again, and earlier decisions are remembered nevertheless.
    """
    state = Results(out)
    last = _last(state, full=full)
    number, kept_as = state.number() + 1, uuid4().hex
    anew = full or last is None or lines.identity != last.lake or last.form != FORM
    new_lines, token = lines.frame(spark, None if anew or last is None else last.token)
    damaged = _damaged(lines)
    if last is not None and not anew and not damaged.issuperset(last.damaged):
        anew = True
        new_lines, token = lines.frame(spark)
        damaged = _damaged(lines)
    read = (
        {row.source for row in decisions.select("source").distinct().collect()} if logs_read is None else set(logs_read)
    )
    seen_before, digests = observations, _digests(decisions)
    decided_before = digests
    if last is not None:
        seen_before = state.read(spark, last.state, "observed", observations.schema)
        observations = _since_when(observations, seen_before, away)
    # stored: if Spark computed them again, a participant might report other branches
    observations = state.write(observations, kept_as, "observed")
    if last is not None:
        decided_before = state.read(spark, last.state, "decided", digests.schema)
        # a log of several files may have been read in part
        unread = decided_before.where(~sf.col("log").isin(*sorted(read)))
        digests = digests.unionByName(_without(unread, digests))
    digests = state.write(digests, kept_as, "decided")
    new_rows = rows_of_events(new_lines)
    rows = new_rows.unionByName(rows_of_observations(observations))
    decided = rows_of_decisions(decisions)
    table = state.verdicts.create()
    files = state.verdicts.data_files(table)
    replaced, count, known = files, 0, 0
    if anew or last is None:
        old = state.verdicts.frame(spark, files)
        rest = old.limit(0)
        kept = _not_in_lines(_facts(old), state.retained())
        note("judging all transactions from all lines")
    else:
        note("looking for changes")
        changed = _changed(decided_before.where(sf.col("log").isin(*sorted(read))), digests)
        changed = changed.union(seen_before.select("gtrid")).union(observations.select("gtrid"))
        # verdicts of ended transactions depend on no other parameter
        ageing = files if last.skew != rules.skew else [file for file in files if file.partition == OPEN]
        gtrids = new_rows.select("gtrid").union(changed).union(state.verdicts.frame(spark, ageing).select("gtrid"))
        touched = gtrids.distinct()
        few = few_rows(touched)
        touched = touched.persist() if few is None else spark.createDataFrame(few, touched.schema)
        count = touched.count() if few is None else few.num_rows
        again = touched if count > _FEW else sf.broadcast(touched)
        replaced, known = _with(state.verdicts, files, again)
        found = state.verdicts.frame(spark, replaced)
        old = found.join(again, "gtrid", "left_semi").select(found.columns)
        rest = found.join(again, "gtrid", "left_anti").select(found.columns)
        kept = _facts(old)
        decided = decided.join(again, "gtrid", "left_semi").select(*new_rows.columns)
        note(f"judging {count:,} transactions again")
    remembered = _remembered(kept, read, rules.asked)
    rows = rows.unionByName(decided).unionByName(remembered.select(*new_rows.columns))
    judged = judge_rows(with_format_ids(rows), rules)
    plain, found_files = _judged(state.verdicts, judged, number)
    added = plain
    if found_files or any(file.partition != OPEN for file in replaced):
        findings = state.verdicts.frame(spark, state.verdicts.written(found_files))
        note("collecting evidence")
        full_findings = _findings_with_evidence(spark, findings, lines, observations, decisions)
        added = plain + state.verdicts.write(full_findings.unionByName(_stored(rest)), f"run-{number}")

    written = state.verdicts.written(added)
    remaining = [file for file in files if file not in replaced]
    totals, fingerprint, lines_now, rested = _totals(
        state.verdicts.frame(spark, written), state.verdicts.frame(spark, remaining)
    )
    read_now = new_lines.count()
    if rested != known + read_now:
        raise StateDamaged(
            f"verdicts rest on {rested:,} lines, but {known:,} were known and {read_now:,} are new: reconcile once"
            " with --full, and check the lake if this happens again"
        )
    done = Run(
        number=number,
        as_of=rules.as_of,
        token=token,
        lines_read=read_now,
        lines=lines_now,
        touched=count,
        totals=totals,
        fingerprint=fingerprint,
        skew=rules.skew,
        lake=lines.identity,
        damaged=sorted(damaged),
        archived=dict(rules.archived),
        asked=_read_at(participants, away, {} if last is None else last.asked, rules.as_of),
        logs_read=_read_at(logs, set(logs) - read, {} if last is None else last.logs_read, rules.as_of),
        state=kept_as,
    )
    now = state.verdicts.frame(spark, written).where(sf.col("run") == number)
    changes = state.history.write(_changes(now, old, done), f"run-{number}")
    history = state.history.create()
    # files of an earlier run with this number that died
    stale = [file for file in state.history.data_files(history) if file.name.startswith(f"data/run-{number}-")]
    state.complete(done, TableChange(table, added, replaced), TableChange(history, changes, stale))
    for file in found_files:
        state.verdicts.files.remove(file.path)
    return done


def current(spark: SparkSession, out: str) -> DataFrame:
    """Return the current verdicts with evidence and the number of the ``run`` that gave each."""
    table = Results(out).verdicts
    return table.frame(spark, table.data_files(table.load())).select(*VERDICT_COLUMNS, "run", "evidence")


def _with(table: Table, files: list[DataFile], gtrids: DataFrame) -> tuple[list[DataFile], int]:
    """Return the files with one of *gtrids*, and the number of lines that all transactions in these files rest on."""
    wanted = gtrids.select("gtrid", sf.lit(True).alias("wanted"))
    found = (
        table.frame(gtrids.sparkSession, files, named=True)
        .select("gtrid", "lines", "file")
        .join(wanted, "gtrid", "left")
    )
    grouped = found.groupBy("file").agg(sf.sum("lines").alias("lines"), sf.max("wanted").alias("wanted"))
    rows = grouped.where("wanted").collect()
    names = table.names_of(row.file for row in rows)
    matched = [file for file in files if file.name in names]
    if len(matched) != len(rows):
        raise StateDamaged(f"Spark names files of {table.files.uri} differently: use another directory for the results")
    return matched, sum(row.lines for row in rows)


def _stored(frame: DataFrame) -> DataFrame:
    """Return rows of files with the partition column, which files do not have."""
    # these transactions are settled: all in the files of the partition "open" are judged again
    return frame.withColumn("settled", _month()).select(*VERDICTS.names)


def _month() -> Column:
    return sf.coalesce(sf.date_format("last_at", "yyyy-MM"), sf.lit(UNDATED))


def _judged(table: Table, judged: DataFrame, number: int) -> tuple[list[AddAction], list[AddAction]]:
    """Write verdicts; return the files of plain ones, and those of findings, which have no evidence yet."""
    found = judged.select(
        *VERDICT_COLUMNS,
        sf.lit(number).cast("bigint").alias("run"),
        sf.array().cast(TYPE).alias("evidence"),
        "lines",
        "facts",
        sf.when(may_change_with_time(judged), sf.lit(OPEN)).otherwise(_month()).alias("settled"),
        (~is_finding()).alias("plain"),
    )
    added = table.write(found, f"run-{number}", further=["plain"])
    return [file for file in added if "/plain=true/" in file.path], [
        file for file in added if "/plain=false/" in file.path
    ]


def _last(state: Results, *, full: bool) -> Run | None:
    """Return the last run; ``None`` if there is none with a usable state, so that all lines are read."""
    try:
        last = state.last()
    except StateDamaged:
        if not full:
            raise
        return None
    return last if last is not None and state.is_kept(last) else None


def _read_at(names: Collection[str], unread: Collection[str], before: Mapping[str, int], now: int) -> dict[str, int]:
    return {name: before.get(name, 0) if name in unread else now for name in names}


def _damaged(lines: Lines) -> set[str]:
    return {row.item for row in lines.quarantined}


def _since_when(now: DataFrame, before: DataFrame, away: Collection[str]) -> DataFrame:
    """Return the branches in doubt of all participants, with the earliest known time of each.

    A participant that cannot be read has its branches of the last run. MySQL and MariaDB do not report the time of a
    prepared branch: it is the time of the first run that saw the branch.
    """
    if away:
        now = now.unionByName(before.where(sf.col("source").isin(*sorted(away))))
    first = before.groupBy(*(sf.col(name).alias(f"known_{name}") for name in _PREPARED)).agg(
        sf.min(sf.coalesce("since", "observed_at")).alias("seen_first")
    )
    same = reduce(lambda one, other: one & other, (now[name].eqNullSafe(first[f"known_{name}"]) for name in _PREPARED))
    since = sf.coalesce("since", "seen_first").alias("since")
    return now.join(first, same, "left").select(*(since if name == "since" else name for name in now.columns))


def _facts(transactions: DataFrame) -> DataFrame:
    return transactions.select(*KEY, sf.explode("facts").alias("fact")).select(*KEY, "fact.*")


def _not_in_lines(facts: DataFrame, retained: int) -> DataFrame:
    """Return the part of folded rows that the lines do not have: decisions, the mark ``GONE``, and branches from before
    *retained*, whose lines may have been removed.
    """
    is_branch, marks = sf.col("is_branch"), sf.col("marks")
    gone = is_branch & has(marks, Mark.GONE)
    removed = is_branch & sf.coalesce(sf.col("first_at") < retained, sf.lit(False))
    whole = ~is_branch | removed
    emptied = {name: sf.when(whole, sf.col(name)) for name in ("opened_at", "forgotten_at", "first_at", "last_at")}
    emptied["marks"] = sf.when(whole, marks).otherwise(bits(Mark.GONE))
    emptied["lines"] = sf.lit(0).cast("bigint")
    return facts.where(whole | gone).withColumns(emptied)


def _remembered(facts: DataFrame, read: Collection[str], asked: Collection[str]) -> DataFrame:
    """Return folded rows of earlier runs, to fold with the new rows.

    Decisions of logs that are read now lose ``UNDONE``. Branches of a dtx that is read now lose ``GONE``. The new rows
    give these marks again if they still apply.
    """
    source, marks = sf.col("source"), sf.col("marks")
    again = sf.when(sf.col("is_branch"), source.isin(*sorted(asked))).otherwise(source.isin(*sorted(read)))
    stale = bits(~int(Mark.UNDONE | Mark.GONE))
    known = {name: sf.col(name) for name in KEPT}
    return rows_of(facts, known | {"marks": sf.when(again, marks.bitwiseAND(stale)).otherwise(marks)})


def _digests(decisions: DataFrame) -> DataFrame:
    """Return a hash of each decision, to compare it with the next run's."""
    return decisions.select(
        sf.col("source").alias("log"),
        "gtrid",
        sf.xxhash64("tm", "format_id", "decision", "at", "finished").alias("digest"),
    )


def _changed(before: DataFrame, now: DataFrame) -> DataFrame:
    """Return the gtrids of decisions that differ."""
    return _without(before, now).union(_without(now, before)).select("gtrid")


def _without(digests: DataFrame, others: DataFrame) -> DataFrame:
    """Return the *digests* that *others* do not have."""
    return digests.join(others, digests.columns, "left_anti")


def _findings_with_evidence(
    spark: SparkSession, findings: DataFrame, lines: Lines, observations: DataFrame, decisions: DataFrame
) -> DataFrame:
    """Add evidence and the partition column to the stored *findings*."""
    edges = findings.agg(sf.min("first_at").alias("first"), sf.max("last_at").alias("last"), sf.count("*").alias("n"))
    row = edges.first()
    assert row is not None
    if row["n"]:
        between = None if row["first"] is None else (row["first"].astimezone(UTC), row["last"].astimezone(UTC))
        evidence_lines, _ = lines.frame(spark, None, between)
        if between is not None:
            # lets Spark skip older and newer parts of files
            evidence_lines = evidence_lines.where(sf.col("at").between(*map(sf.lit, between)))
        keys = findings.select(*KEY)
        wanted = sf.broadcast(keys) if row["n"] <= _FEW else keys
        findings = with_evidence(findings.drop("evidence"), wanted, evidence_lines, observations, decisions)
    settled = sf.when(may_change_with_time(findings), sf.lit(OPEN)).otherwise(_month())
    return findings.withColumn("settled", settled).select(*VERDICTS.names)


def _totals(written: DataFrame, others: DataFrame) -> tuple[dict[str, Total], int, int, int]:
    """Return the totals by verdict, the hashed fingerprints joined by "exclusive or", and the numbers of lines that all
    verdicts and those of this run (*written*) rest on.
    """
    both = written.withColumn("written", sf.lit(True)).unionByName(others.withColumn("written", sf.lit(False)))
    found = (
        both.groupBy("verdict", "written")
        .agg(
            sf.count(sf.lit(1)).alias("transactions"),
            sf.sum("branches").alias("branches"),
            sf.sum("lines").alias("lines"),
            sf.bit_xor(sf.xxhash64("fingerprint")).alias("fingerprint"),
        )
        .collect()
    )
    totals: dict[str, Total] = {}
    for row in found:
        total = totals.get(row.verdict, Total())
        totals[row.verdict] = Total(
            transactions=total.transactions + row.transactions, branches=total.branches + row.branches
        )
    fingerprint = reduce(lambda one, other: one ^ other, (row.fingerprint for row in found), 0)
    return totals, fingerprint, sum(row.lines for row in found), sum(row.lines for row in found if row.written)


def _changes(now: DataFrame, old: DataFrame, run: Run) -> DataFrame:
    """Return the rows of the history for a run: changed verdicts of which the old or the new one is a finding."""
    was = old.select(
        sf.col("format_id").alias("old_format_id"), sf.col("gtrid").alias("old_gtrid"), sf.col("verdict").alias("was")
    )
    same = now["format_id"].eqNullSafe(was["old_format_id"]) & (now["gtrid"] == was["old_gtrid"])
    changes = now.join(was, same, "full").where(
        ~sf.col("was").eqNullSafe(sf.col("verdict")) & (is_finding() | is_finding("was"))
    )
    as_of = sf.timestamp_micros(sf.lit(run.as_of))
    return changes.select(
        sf.lit(run.number).cast("bigint").alias("run"),
        as_of.alias("as_of"),
        sf.coalesce("format_id", "old_format_id").alias("format_id"),
        sf.coalesce("gtrid", "old_gtrid").alias("gtrid"),
        "was",
        "verdict",
        "findings",
        sf.date_format(as_of, "yyyy-MM").alias("month"),
    )

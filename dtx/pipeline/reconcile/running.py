"""From run to run: today's reads the lines that have come since the last one, and judges what they are about.

What is looked at again: transactions with new lines; those whose decision has come, changed, or left its manager's log;
those that a participant has in doubt, or had; and those that were open, since they age. For these the folded rows of
earlier runs are taken up and folded on, so a line that arrives late corrects what was said about its time. All other
verdicts stand as they are, and their lines are not read again. With another ``skew`` all are judged again, and no line
is read again. All lines are read again where what is known of them may be wrong: the lake is another one, or a file of
it that was damaged is not any more, or is gone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Final, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile.folding import (
    KEPT,
    KEY,
    rows_of_decisions,
    rows_of_events,
    rows_of_observations,
    with_format_ids,
)
from dtx.pipeline.reconcile.judging import VERDICT_COLUMNS, Evidence, ages, evidence_of, findings, judged_of
from dtx.pipeline.reconcile.state import FORM, MOST_LAYERS, Run, State, StateDamaged, Total
from dtx.pipeline.verdicts import Kind, Mark, Rules

_FEW: Final = 1_000_000
"""Gtrids, of up to 64 octets each, that every process of Spark may keep in memory."""
_PREPARED: Final = ("source", "rm", "vhost", "format_id", "gtrid", "bqual")
"""What tells one observation from the others."""
_KEPT_COLUMNS: Final = (*VERDICT_COLUMNS, "lines", "facts")


class Lines(Protocol):
    """Where the lines of all journals are: :class:`dtx.pipeline.archive.Lake`."""

    @property
    def identity(self) -> str | None:
        """Whether it is the one that was read before; ``None`` where nobody says so."""
        ...

    @property
    def quarantined(self) -> Sequence[Quarantined]:
        """What of it the last look has not read."""
        ...

    def frame(self, spark: SparkSession, since: Mapping[str, int] | None = None) -> tuple[DataFrame, dict[str, int]]:
        """Lines that came after *since* (``None``: all), and what to ask with the next time."""
        ...


def run(
    spark: SparkSession,
    lines: Lines,
    observations: DataFrame,
    decisions: DataFrame,
    out: str,
    rules: Rules,
    *,
    logs_read: Collection[str] | None = None,
    away: Collection[str] = (),
    full: bool = False,
    evidence: Evidence = Evidence.FINDINGS,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """Reconcile, and keep the verdicts under *out*.

    Args:
        spark: the session.
        lines: of all journals.
        observations: what participants have in doubt now.
        decisions: what logs of transaction managers have now. What a log had and has no more is finished, and is
            remembered.
        out: a directory that Spark can write to: the verdicts, and what the next run needs (see ``state``).
        rules: what verdicts depend on beside this.
        logs_read: ``source`` of the decision logs that were read as a whole, also of those that are empty; ``None``: of
            those that *decisions* has lines of. What is known of the others stays as it was.
        away: ``source`` of participants that could not be asked: they have in doubt what they had the last time.
        full: read all lines again. Decisions are remembered all the same.
        evidence: which verdicts come with their lines.
        say: is told what is being done.

    Raises:
        StateDamaged: the control totals do not agree, or a line of ``runs`` cannot be read.
    """
    state = State(spark, out)
    before = state.runs()
    last = before[-1] if before else None
    number = last.number + 1 if last else 1
    anew = full or last is None or lines.identity != last.lake or last.form != FORM
    new_lines, token = lines.frame(spark, None if anew or last is None else last.token)
    damaged = _damaged(lines)
    if last is not None and not anew and not damaged.issuperset(last.damaged):
        anew = True
        new_lines, token = lines.frame(spark, None)
        damaged = _damaged(lines)
    if last is not None and not anew:
        token = {**(last.token or {}), **token}  # a checkpoint that is lost says nothing of what it has brought
    read = (
        {row.source for row in decisions.select("source").distinct().collect()} if logs_read is None else set(logs_read)
    )
    if last is not None and state.has("observed", last.number):
        observations = _since_when(observations, state.read("observed", last.number), away)
    # once for all: whoever asks again may hear something else
    observations = state.write(observations, "observed", number)
    given = _asked(observations, decisions)
    if last is not None:
        unread = ~sf.col("is_observation") & ~sf.col("log").isin(*sorted(read))
        were = state.read("asked", last.number).where(unread)
        if not were.isEmpty():
            given = given.unionByName(were.exceptAll(given))  # of a log of several files some may have been read
    asked = state.write(given, "asked", number)
    told = rows_of_events(new_lines)
    decided = rows_of_decisions(decisions)
    seen = rows_of_observations(observations)
    kept = state.latest("transactions", last) if last is not None else None

    if anew:
        remembered = [] if kept is None else [_remembered(_not_in_lines(_facts(kept)), read, rules.asked)]
        say("folding all lines, and judging all transactions")
        rows = told.unionByName(seen).unionByName(decided)
        for each in remembered:
            rows = rows.unionByName(each.select(*rows.columns))
        touched = state.write(rows.select("gtrid").limit(0), "touched", number)
        count = 0
        replaced: dict[str, Total] = {}
        lines_before = fingerprint_before = 0
    else:
        assert last is not None
        assert kept is not None
        say("looking for what has changed")
        changed = _changed(state.read("asked", last.number), asked, read)
        # what has ended depends on no other rule
        is_due = ages(kept) if last.rules.get("skew") == rules.skew else sf.lit(True)
        ageing = kept.where(is_due).select("gtrid")
        gtrids = told.select("gtrid").union(changed).union(ageing).distinct()
        touched = state.write(gtrids, "touched", number)
        count = touched.count()
        again = touched if count > _FEW else sf.broadcast(touched)
        old = kept.join(again, "gtrid", "left_semi")
        replaced, lines_before, fingerprint_before = _totals(old)
        rows = told.unionByName(seen).unionByName(decided.join(again, "gtrid", "left_semi").select(*told.columns))
        rows = rows.unionByName(_remembered(_facts(old), read, rules.asked).select(*rows.columns))
        say(f"folding on, and judging {count:,} transactions again")

    judged = judged_of(with_format_ids(rows), rules).select(*_KEPT_COLUMNS)
    base = number
    if not anew and last is not None and kept is not None and number - last.base < MOST_LAYERS:
        base = last.base
    elif not anew and kept is not None:
        judged = judged.unionByName(kept.join(touched, "gtrid", "left_anti").select(*_KEPT_COLUMNS))
    written = state.write(judged, "transactions", number)
    say("gathering evidence")
    _write_evidence(spark, state, number, written, lines, observations, decisions, evidence)
    totals, lines_now, fingerprint = _totals(written)
    if base != number and last is not None:
        totals = _sum(_sum(last.totals, replaced, -1), totals, 1)
        lines_now += last.lines - lines_before
        fingerprint ^= last.fingerprint ^ fingerprint_before
    read_now, known = new_lines.count(), last.lines if last is not None and not anew else 0
    if lines_now != known + read_now:
        raise StateDamaged(
            f"verdicts rest on {lines_now:,} lines, and {known:,} were known and {read_now:,} have come: reconcile once"
            " with --full, and look at the lake if this comes again"
        )
    done = Run(
        number=number,
        base=base,
        as_of=rules.as_of,
        token=token,
        lines_read=read_now,
        lines=lines_now,
        touched=count,
        totals=totals,
        fingerprint=fingerprint,
        rules={
            "orphan_after": rules.orphan_after,
            "skew": rules.skew,
            "decisions_read": int(rules.decisions_read),
        },
        lake=lines.identity,
        damaged=sorted(damaged),
        form=FORM,
        archived=dict(rules.archived),
    )
    state.complete(done)
    return done


def runs(spark: SparkSession, out: str) -> list[Run]:
    """All runs that are complete, in order.

    Args:
        spark: the session.
        out: as for :func:`run`.
    """
    return State(spark, out).runs()


def current(spark: SparkSession, out: str) -> DataFrame:
    """The verdicts as they stand, with their evidence and the number of the ``run`` that gave each.

    Args:
        spark: the session.
        out: as for :func:`run`.

    Raises:
        StateDamaged: there has been no run.
    """
    state = State(spark, out)
    found = state.runs()
    if not found:
        raise StateDamaged(f"nothing has been reconciled into {out} yet: dtx pipeline reconcile")
    kept = state.latest("transactions", found[-1])
    # an older dtx kept less
    columns = [name if name in kept.columns else sf.lit(None).cast("timestamp").alias(name) for name in VERDICT_COLUMNS]
    verdicts = kept.select(*columns, "run")
    evidence = state.latest("evidence", found[-1]).select(
        sf.col("format_id").alias("found_format_id"), sf.col("gtrid").alias("found_gtrid"), "evidence"
    )
    same = verdicts["format_id"].eqNullSafe(evidence["found_format_id"]) & (
        verdicts["gtrid"] == evidence["found_gtrid"]
    )
    joined = verdicts.join(evidence, same, "left").drop("found_format_id", "found_gtrid")
    nothing = sf.array().cast(evidence.schema["evidence"].dataType)
    return joined.withColumn("evidence", sf.coalesce("evidence", nothing))


def _damaged(lines: Lines) -> set[str]:
    """What of the lines was not read."""
    return {row.item for row in lines.quarantined}


def _since_when(now: DataFrame, before: DataFrame, away: Collection[str]) -> DataFrame:
    """What participants have in doubt, since when at least.

    Who cannot be asked now has what it had the last time. Of who does not say since when something is prepared (MySQL,
    MariaDB), it is what it was when it was seen first.
    """
    if away:
        known = before.where(sf.col("source").isin(*sorted(away)))
        if "branch_id" not in before.columns:  # of an older dtx: it does not say in which life it was seen
            known = known.where(sf.col("kind") != str(Kind.DTX))
        now = now.unionByName(known, allowMissingColumns=True)
    first = before.groupBy(*(sf.col(name).alias(f"known_{name}") for name in _PREPARED)).agg(
        sf.min(sf.coalesce("since", "observed_at")).alias("seen_first")
    )
    same = reduce(lambda one, other: one & other, (now[name].eqNullSafe(first[f"known_{name}"]) for name in _PREPARED))
    since = sf.coalesce("since", "seen_first").alias("since")
    return now.join(first, same, "left").select(*(since if name == "since" else name for name in now.columns))


def _facts(transactions: DataFrame) -> DataFrame:
    """The folded rows that transactions were judged by."""
    return transactions.select(*KEY, sf.explode("facts").alias("fact")).select(*KEY, "fact.*")


def _not_in_lines(facts: DataFrame) -> DataFrame:
    """Of folded rows, what reading all lines again does not tell: decisions, and which branches were gone."""
    if "source" not in facts.columns:  # of an older dtx, which kept the name of a decision's log elsewhere
        return facts.where(~sf.col("is_branch")).withColumns({"source": sf.col("owner"), "owner": sf.lit(None)})
    told, mark = sf.col("is_branch"), sf.lit(int(Mark.GONE)).cast("int")
    gone = told & (sf.col("marks").bitwiseAND(mark) != 0)
    emptied = {name: sf.when(~told, sf.col(name)) for name in ("opened_at", "forgotten_at", "first_at", "last_at")}
    emptied["marks"] = sf.when(told, mark).otherwise(sf.col("marks"))
    emptied["lines"] = sf.when(told, sf.lit(0).cast("bigint")).otherwise(sf.col("lines"))
    return facts.where(~sf.col("is_branch") | gone).withColumns(emptied)


def _remembered(facts: DataFrame, read: Collection[str], asked: Collection[str]) -> DataFrame:
    """Folded rows of earlier runs, to be folded on.

    Decisions of logs that are read now are as these say now: until one says so again, what is remembered is finished.
    What a dtx that is asked now has no more, it says anew.
    """
    source, marks, nothing = sf.col("source"), sf.col("marks"), sf.lit(None).cast("bigint")
    again = sf.when(sf.col("is_branch"), source.isin(*sorted(asked))).otherwise(source.isin(*sorted(read)))
    stale = sf.lit(~int(Mark.UNDONE | Mark.GONE)).cast("int")
    return facts.select(
        *KEY,
        *(sf.col(name) if name in facts.columns else nothing.alias(name) for name in KEPT if name != "marks"),
        sf.when(again, marks.bitwiseAND(stale)).otherwise(marks).alias("marks"),
        sf.lit(0).alias("seen"),
        nothing.alias("known_at"),
        nothing.alias("seen_since"),
        nothing.alias("seen_at"),
        nothing.alias("seen_last"),
    )


def _asked(observations: DataFrame, decisions: DataFrame) -> DataFrame:
    """What was given, as short as it can be compared."""
    seen = observations.select(
        sf.lit(True).alias("is_observation"),
        sf.col("source").alias("log"),
        "gtrid",
        sf.lit(0).cast("bigint").alias("digest"),
    )
    made = decisions.select(
        sf.lit(False).alias("is_observation"),
        sf.col("source").alias("log"),
        "gtrid",
        sf.xxhash64("tm", "format_id", "decision", "at", "finished").alias("digest"),
    )
    return seen.unionByName(made)


def _changed(before: DataFrame, now: DataFrame, read: Collection[str]) -> DataFrame:
    """Gtrids of all observations, then and now, and of decisions that differ."""
    observed = before.unionByName(now).where("is_observation").select("gtrid")
    was = before.where(~sf.col("is_observation") & sf.col("log").isin(*sorted(read)))
    is_ = now.where(~sf.col("is_observation"))
    differ = was.exceptAll(is_).union(is_.exceptAll(was))
    return observed.union(differ.select("gtrid"))


def _write_evidence(
    spark: SparkSession,
    state: State,
    number: int,
    written: DataFrame,
    lines: Lines,
    observations: DataFrame,
    decisions: DataFrame,
    evidence: Evidence,
) -> None:
    wanted = written if evidence is Evidence.ALL else findings(written)
    edges = wanted.agg(
        sf.unix_micros(sf.min("first_at")), sf.unix_micros(sf.max("last_at")), sf.count(sf.lit(1))
    ).first()
    assert edges is not None
    told, _ = lines.frame(spark, None)
    if edges[0] is not None and evidence is Evidence.FINDINGS:
        # not more of the lake than can be needed: files and parts of files that are older or newer are passed over
        first, last = (sf.timestamp_micros(sf.lit(edge)) for edge in edges[:2])
        told = told.where(sf.col("at").between(first, last))
        if "day" in told.columns:
            told = told.where(sf.col("day").between(sf.to_date(first), sf.to_date(last)))
    keys = wanted.select(*KEY)
    found = evidence_of(sf.broadcast(keys) if edges[2] <= _FEW else keys, told, observations, decisions)
    state.write(
        found.select(sf.col("found_format_id").alias("format_id"), sf.col("found_gtrid").alias("gtrid"), "evidence"),
        "evidence",
        number,
    )


def _totals(transactions: DataFrame) -> tuple[dict[str, Total], int, int]:
    """By verdict; the lines that all of them rest on; and their fingerprints, hashed and joined by "exclusive or"."""
    found = (
        transactions.groupBy("verdict")
        .agg(
            sf.count(sf.lit(1)).alias("transactions"),
            sf.sum("branches").alias("branches"),
            sf.sum("lines").alias("lines"),
            sf.bit_xor(sf.xxhash64("fingerprint")).alias("fingerprint"),
        )
        .collect()
    )
    totals = {row.verdict: Total(transactions=row.transactions, branches=row.branches) for row in found}
    fingerprint = reduce(lambda one, other: one ^ other, (row.fingerprint for row in found), 0)
    return totals, sum(row.lines for row in found), fingerprint


def _sum(one: Mapping[str, Total], other: Mapping[str, Total], sign: int) -> dict[str, Total]:
    nothing = Total()
    summed = {
        verdict: Total(
            transactions=one.get(verdict, nothing).transactions + sign * other.get(verdict, nothing).transactions,
            branches=one.get(verdict, nothing).branches + sign * other.get(verdict, nothing).branches,
        )
        for verdict in {*one, *other}
    }
    return {verdict: total for verdict, total in summed.items() if total.transactions}

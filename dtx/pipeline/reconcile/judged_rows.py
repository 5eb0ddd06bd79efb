"""Applies the rules to the folded rows of each transaction, and collects the evidence of its verdict.

It uses only Spark's own functions, which are compiled: no row passes through Python. Tests on random fleets compare
these rules with others that are written in Python.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf

from dtx.pipeline.reconcile.folded_rows import HASH, KEPT, KEY, OF_DTX, bits, folded, has
from dtx.pipeline.verdicts import (
    DECIDED,
    DIRECTIONS,
    ENDED,
    OPENED,
    PLAIN,
    TO_COMMIT,
    TO_ROLL_BACK,
    Choice,
    Mark,
    Rules,
    Verdict,
)

MOST: Final = 1_000
"""Limit of lines of evidence of one verdict, the oldest first: millions of lines must not fill a reader's memory."""
EVIDENCE: Final = {
    "source": "string", "rm": "string", "vhost": "string", "bqual": "binary", "event": "string", "outcome": "string",
    "at": "timestamp", "actor": "string", "journal_id": "string",
}  # fmt: skip
"""Columns of a line of evidence."""
_ORDER: Final = ("at", *(name for name in EVIDENCE if name != "at"))
TYPE: Final = f"array<struct<{','.join(f'{name}:{kind}' for name, kind in EVIDENCE.items())}>>"
VERDICT_COLUMNS: Final = (
    "format_id", "gtrid", "verdict", "findings", "since", "first_at", "last_at", "rms", "owners", "branches",
    "decision", "tm", "fingerprint", "known_at",
)  # fmt: skip
"""Columns of a verdict, without its evidence."""


def with_evidence(
    judged: DataFrame, wanted: DataFrame, events: DataFrame, observations: DataFrame, decisions: DataFrame
) -> DataFrame:
    """Add the column ``evidence`` to verdicts, oldest line first; an empty list for those that are not in *wanted*."""
    keys = wanted.select(sf.col("format_id").alias("found_format_id"), sf.col("gtrid").alias("found_gtrid"))

    def of(lines: DataFrame, **columns: Column) -> DataFrame:
        # a decision without a format id applies to every transaction with its gtrid
        here = lines.join(
            keys,
            (lines["gtrid"] == keys["found_gtrid"])
            & (lines["format_id"].isNull() | lines["format_id"].eqNullSafe(keys["found_format_id"])),
        )
        named = (columns.get(name, sf.col(name)).alias(name) for name in _ORDER)
        return here.select("found_format_id", "found_gtrid", *named)

    nothing = sf.lit(None).cast("string")
    from_journal = of(events, journal_id=sf.col("id"))
    seen = of(
        observations, at=sf.coalesce("since", "observed_at"), event=sf.concat(sf.lit("observed: "), sf.col("state")),
        outcome=nothing, actor=sf.col("owner"), journal_id=nothing,
    )  # fmt: skip
    decided = of(
        decisions, rm=sf.col("tm"), vhost=sf.lit(""), bqual=sf.lit(b""),
        event=sf.concat(sf.lit("decided: "), sf.col("decision")),
        outcome=sf.when(sf.col("finished"), sf.lit("finished")).when(~sf.col("finished"), sf.lit("not finished")),
        actor=sf.col("tm"), journal_id=nothing,
    )  # fmt: skip
    lines = from_journal.unionByName(seen).unionByName(decided)
    # limits the lines before they are collected: Spark sorts the others on disk, and drops them there
    oldest = sf.row_number().over(Window.partitionBy("found_format_id", "found_gtrid").orderBy(*_ORDER))
    ordered = sf.array_sort(sf.collect_list(sf.struct(*_ORDER)))
    found = (
        lines.withColumn("nth", oldest)
        .where(sf.col("nth") <= MOST)
        .groupBy("found_format_id", "found_gtrid")
        .agg(ordered.alias("ordered"))
        .select(
            "found_format_id",
            "found_gtrid",
            sf.transform("ordered", lambda line: sf.struct(*(line[name].alias(name) for name in EVIDENCE)))
            .cast(TYPE)
            .alias("evidence"),
        )
    )
    same = judged["format_id"].eqNullSafe(found["found_format_id"]) & (judged["gtrid"] == found["found_gtrid"])
    return (
        judged.join(found, same, "left")
        .drop("found_format_id", "found_gtrid")
        .withColumn("evidence", sf.coalesce(sf.col("evidence"), sf.array().cast(TYPE)))
    )


def evidence_json() -> Column:
    """Return the column ``evidence`` as a JSON list: bquals in hexadecimal, times as text in UTC, nulls included."""

    def shown(line: Column) -> Column:
        at = sf.date_format(line["at"], "yyyy-MM-dd HH:mm:ss.SSSSSS'Z'")
        columns = {name: line[name] for name in EVIDENCE} | {"bqual": sf.lower(sf.hex(line["bqual"])), "at": at}
        return sf.struct(*(value.alias("id" if name == "journal_id" else name) for name, value in columns.items()))

    return sf.to_json(sf.transform("evidence", shown), {"ignoreNullFields": "false"})


def may_change_with_time(transactions: DataFrame) -> Column:
    """Return whether a verdict of :func:`judge_rows` may change with time alone: it is open, or not finished yet."""
    waits = sf.exists(
        transactions["facts"],
        lambda fact: (
            has(fact["marks"], Mark.GONE)
            | (~fact["is_branch"] & has(fact["marks"], Mark.UNDONE) & ~has(fact["marks"], Mark.DONE))
        ),
    )
    return transactions["since"].isNotNull() | waits


def is_finding(column: str = "verdict") -> Column:
    """Return whether a verdict needs attention."""
    return ~sf.col(column).isin(*(str(verdict) for verdict in sorted(PLAIN)))


def judge_rows(rows: DataFrame, rules: Rules) -> DataFrame:
    """Return verdicts without evidence, each with the folded rows that the next run needs (``facts``)."""
    return _judged(_facts(folded(rows), rules), rules)


def _archived(rules: Rules) -> Column:
    """Return when the journal of a row's source was last read to its end; null if not known."""
    known = [sf.lit(word) for pair in rules.archived.items() for word in pair]
    found = sf.create_map(*known)[sf.col("source")] if known else sf.lit(None)
    return found.cast("bigint")


def _facts(branches: DataFrame, rules: Rules) -> DataFrame:
    """Return one row for each transaction, with the columns that the rules read."""
    marks, seen, is_branch = sf.col("marks"), sf.col("seen"), sf.col("is_branch")
    # the journal may have been read after the participant: if it has the end of the branch, the observation is older
    now = sf.when(has(marks, ENDED), marks).otherwise(marks.bitwiseOR(seen))
    open_in_journal = is_branch & has(now, OPENED) & ~has(now, ENDED)
    gone = open_in_journal & (seen == 0) & (has(marks, Mark.GONE) | sf.col("source").isin(*sorted(rules.asked)))
    branches = branches.withColumns({"now": now, "is_open": open_in_journal & ~gone, "gone": gone})
    branches = branches.withColumn("marks", sf.when(sf.col("gone"), marks.bitwiseOR(bits(Mark.GONE))).otherwise(marks))
    now, is_open = sf.col("now"), sf.col("is_open")
    # a journal that was read after its dtx, and has no end of the branch, also shows that the branch was open
    known = sf.coalesce(sf.greatest("known_at", _archived(rules)), sf.lit(rules.as_of))
    normally = Mark.COMMITTED | Mark.ROLLED_BACK
    unknown = (has(now, Mark.HEURISTIC_HAZARD) & ~has(now, normally)) | (
        has(now, Mark.FORGOTTEN) & ~has(now, DIRECTIONS)
    )
    branches = branches.select(
        HASH,
        *KEY,
        *KEPT,
        "seen_at",
        "seen_last",
        "now",
        "is_open",
        "gone",
        sf.when(is_open, sf.coalesce("opened_at", "seen_since")).alias("since"),
        sf.when(is_open, known).alias("known_at"),
        sf.when(is_open, known - sf.coalesce("opened_at", "seen_since")).alias("age"),
        (is_branch & unknown).alias("unknown"),
        (has(now, Mark.UNDONE) & ~has(now, Mark.DONE)).alias("undone"),
    )
    names = sf.when(sf.col("is_branch"), sf.col("name"))
    owners = sf.when(sf.col("is_branch"), sf.col("owner"))
    of_dtx = sf.when(sf.col("is_branch") & has(sf.col("marks"), OF_DTX), sf.col("owner"))
    managers = sf.when(~sf.col("is_branch"), sf.col("name"))
    marked = has(sf.col("marks"), ~(Mark.GONE | OF_DTX))
    kept = sf.when((sf.col("lines") > 0) | marked | ~sf.col("is_branch"), sf.struct(*KEPT))
    return branches.groupBy(HASH, *KEY).agg(
        sf.bit_or("now").alias("marks"),
        sf.max("unknown").alias("unknown"),
        sf.sum(sf.col("is_open").cast("int")).cast("int").alias("open"),
        sf.min("since").alias("since"),
        sf.max("known_at").alias("known_at"),
        sf.max("age").alias("age"),
        sf.max("gone").alias("gone"),
        sf.min("forgotten_at").alias("forgotten_at"),
        (sf.min(of_dtx) != sf.max(of_dtx)).alias("owners_differ"),
        sf.max(sf.when(~sf.col("is_branch"), sf.col("last_at"))).alias("decided_at"),
        sf.max("undone").alias("undone"),
        sf.min(sf.least("first_at", "seen_at")).alias("first_at"),
        sf.max(sf.greatest("last_at", "seen_last")).alias("last_at"),
        sf.sum(sf.col("is_branch").cast("int")).cast("int").alias("rows"),
        sf.size(sf.collect_set(sf.when(sf.col("is_branch"), sf.col("place")))).alias("branches"),
        sf.array_sort(sf.collect_set(names)).alias("rms"),
        sf.array_sort(sf.collect_set(owners)).alias("owners"),
        sf.array_sort(sf.collect_set(managers)).alias("managers"),
        sf.sum("lines").alias("lines"),
        sf.collect_list(kept).alias("facts"),
    )


def _judged(facts: DataFrame, rules: Rules) -> DataFrame:
    matching = rule_columns(rules)
    found = [
        sf.when(sf.coalesce(matching[verdict], sf.lit(False)), sf.lit(str(verdict)))
        for verdict in Verdict
        if verdict not in PLAIN
    ]
    plain = sf.when(
        sf.coalesce(matching[Verdict.ROLLED_BACK], sf.lit(False)), sf.lit(str(Verdict.ROLLED_BACK))
    ).otherwise(sf.lit(str(Verdict.COMMITTED)))
    to_commit, to_roll_back = (has(sf.col("marks"), mark) for mark in (Mark.DECIDED_COMMIT, Mark.DECIDED_ROLLBACK))
    decision = (
        sf.when(to_commit & to_roll_back, sf.lit("conflict"))
        .when(to_commit, sf.lit(str(Choice.COMMIT)))
        .when(to_roll_back, sf.lit(str(Choice.ROLLBACK)))
    )
    # most transactions have no findings: for them no array must be made and compacted
    is_plain = sf.coalesce(*found).isNull()
    findings = sf.when(is_plain, sf.array(plain)).otherwise(sf.array_compact(sf.array(*found)))
    judged = facts.withColumn("findings", findings).withColumns(
        {
            "verdict": sf.get("findings", sf.lit(0)),
            "decision": decision,
            "tm": sf.when(sf.size("managers") > 0, sf.array_join("managers", ",")),
        }
    )
    times = {name: sf.timestamp_micros(name) for name in ("since", "first_at", "last_at", "known_at")}
    return (
        judged.withColumn("fingerprint", _fingerprint()).withColumns(times).select(*VERDICT_COLUMNS, "lines", "facts")
    )


def rule_columns(rules: Rules) -> dict[Verdict, Column]:
    """Return the condition of each verdict; :data:`~dtx.pipeline.verdicts.RULES` has them in words."""
    marks, open_ = sf.col("marks"), sf.col("open")
    committed, rolled_back = has(marks, Mark.COMMITTED), has(marks, Mark.ROLLED_BACK)
    timed_out = has(marks, Mark.TIMED_OUT)
    to_commit, to_roll_back = has(marks, Mark.DECIDED_COMMIT), has(marks, Mark.DECIDED_ROLLBACK)
    by_hand, back_by_hand = has(marks, Mark.HEURISTIC_COMMITTED), has(marks, Mark.HEURISTIC_ROLLED_BACK)
    decided = has(marks, DECIDED | TO_COMMIT | TO_ROLL_BACK)

    def is_quiet(until: Column) -> Column:
        return sf.coalesce(until - sf.col("last_at") >= rules.skew, sf.lit(True))

    return {
        Verdict.XID_REUSED: sf.col("rows") > sf.col("branches"),
        Verdict.MIXED: committed & rolled_back,
        Verdict.AGAINST_DECISION: (committed & to_roll_back)
        | (rolled_back & to_commit)
        | (timed_out & has(marks, Mark.DECIDED_COMMIT | TO_COMMIT)),
        Verdict.HEURISTIC_DAMAGE: has(marks, Mark.HEURISTIC_MIXED)
        | (by_hand & back_by_hand)
        | (by_hand & has(marks, Mark.DECIDED_ROLLBACK | TO_ROLL_BACK | Mark.TIMED_OUT))
        | (back_by_hand & has(marks, Mark.DECIDED_COMMIT | TO_COMMIT)),
        Verdict.HAZARD: sf.col("unknown"),
        Verdict.FORGOTTEN_EARLY: sf.col("forgotten_at").isNotNull()
        & (
            (open_ > 0)
            | sf.col("undone")
            | sf.coalesce(sf.col("decided_at") > sf.col("forgotten_at") + sf.lit(rules.skew), sf.lit(False))
        ),
        Verdict.UNFINISHED: (sf.col("undone") & is_quiet(sf.lit(rules.as_of)))
        | ((open_ > 0) & decided & is_quiet(sf.col("known_at"))),
        Verdict.NOT_ARCHIVED: sf.col("gone"),
        Verdict.ORPHAN: sf.lit(rules.decisions_read)
        & ~decided
        & ~sf.col("gone")
        & sf.coalesce(sf.col("age") > rules.orphan_after, sf.lit(False)),
        Verdict.OWNER_MISMATCH: sf.col("owners_differ"),
        Verdict.IN_DOUBT: open_ > 0,
        Verdict.ROLLED_BACK: ~has(marks, Mark.COMMITTED | Mark.HEURISTIC_COMMITTED)
        & (has(marks, Mark.ROLLED_BACK | Mark.TIMED_OUT | Mark.HEURISTIC_ROLLED_BACK) | (to_roll_back & ~to_commit)),
        Verdict.COMMITTED: sf.lit(True),
    }


def _words(words: Column) -> Column:
    """Return a list as text, each word after its length, so that no two lists give the same text."""
    return sf.array_join(sf.transform(words, lambda word: sf.concat(sf.length(word), sf.lit(":"), word)), ",")


def _fingerprint() -> Column:
    """Return the fingerprint of a verdict; the columns of times still are microseconds."""

    def text(name: str) -> Column:
        return sf.coalesce(sf.col(name).cast("string"), sf.lit(""))

    canonical = sf.concat_ws(
        "|",
        text("format_id"),
        sf.hex("gtrid"),
        sf.array_join("findings", ","),
        *map(text, ("since", "first_at", "last_at")),
        _words(sf.col("rms")),
        _words(sf.col("owners")),
        *map(text, ("branches", "decision")),
        sf.concat(sf.length(text("tm")), sf.lit(":"), text("tm")),
    )
    return sf.unhex(sf.substring(sf.sha2(canonical.cast("binary"), 256), 1, 32))

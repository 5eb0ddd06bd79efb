"""Makes rows of one schema of all facts, and folds the rows of one branch into one.

Lines of journals, observations and decisions become the same kind of row. So one shuffle, without a join, brings all
facts of a transaction together. A fold is made of ``bit_or``, ``min``, ``max`` and, for numbers of lines, ``sum``:
folding earlier folded rows with newer rows gives the same as folding all rows at once.

Names that only distinguish places within one transaction are kept as 64-bit hashes. Two places are confused only if
they are of the same transaction and have the same hash.
"""

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from dtx.log.records import JournalEvent
from dtx.pipeline.verdicts import (
    EVENT_MARK,
    HEURISTIC_MARK,
    OPENED,
    STATE_MARK,
    WITH_OUTCOME,
    Choice,
    Mark,
    SourceKind,
)

KEY: Final = ("format_id", "gtrid")
"""The key of a global transaction."""
PLACE: Final = ("is_branch", "source", "place", "name", "owner", "life")
"""The key of a row within a transaction. *name* is the resource manager, or the transaction manager of a decision.
*life* is a hash of the id of the branch, if it has one: another use of the same xid has another id."""
OF_DTX: Final = 1 << 20
"""A bit in addition to :class:`~dtx.pipeline.verdicts.Mark`: the branch is in dtx, so its owner is a user of dtx."""
KEPT: Final = (
    *PLACE, "marks", "opened_at", "forgotten_at", "first_at", "last_at", "lines",
)  # fmt: skip
"""Columns that are stored for the next run: all but those of observations, which each run reads again."""
_FEW: Final = 500_000
"""Gtrids, of up to 64 bytes each, that every process of Spark may keep in memory."""
_FOLDS: Final = {
    "marks": sf.bit_or,
    "opened_at": sf.min,
    "forgotten_at": sf.min,
    "first_at": sf.min,
    "last_at": sf.max,
    "lines": sf.sum,
    "seen": sf.bit_or,
    "known_at": sf.max,
    "seen_since": sf.max,
    "seen_at": sf.min,
    "seen_last": sf.max,
}


def _int(value: int) -> Column:
    return sf.lit(value).cast("int")


def _nothing(kind: str = "bigint") -> Column:
    return sf.lit(None).cast(kind)


def _word_mark(word: Column, marks: Mapping[str, Mark]) -> Column:
    """Return the mark of *word*, 0 for words that *marks* lacks."""
    found = _int(0)
    for each, mark in marks.items():
        found = sf.when(word == each, _int(int(mark))).otherwise(found)
    return found


def place(*columns: str) -> Column:
    """Return the hash of the columns that identify a place within a transaction."""
    return sf.xxhash64(*(sf.col(column) for column in columns))


def rows_of_events(events: DataFrame) -> DataFrame:
    """Return lines of journals as rows.

    Args:
        events: with the columns of the table ``journal``, and ``source``.
    """
    event, outcome = sf.col("event"), sf.col("outcome")
    mark = _word_mark(event, {str(each): mark for each, mark in EVENT_MARK.items()})
    told = _word_mark(outcome, {str(each): mark for each, mark in HEURISTIC_MARK.items()})
    with_outcome = event.isin(*(str(each) for each in WITH_OUTCOME))
    mark = sf.when(with_outcome & outcome.isNotNull(), mark.bitwiseOR(told)).otherwise(
        sf.when(event == str(JournalEvent.HEURISTIC), _int(int(Mark.HEURISTIC_HAZARD))).otherwise(mark)
    )
    prepared = events.select(
        sf.col("format_id").cast("bigint").alias("format_id"),
        "gtrid",
        place("source", "rm", "vhost", "bqual").alias("place"),
        "source",
        sf.col("rm").alias("name"),
        "owner",
        mark.alias("mark"),
        sf.xxhash64("branch_id").alias("life"),
        sf.unix_micros("at").alias("at"),
        ((event == str(JournalEvent.FORGOTTEN)) & (sf.col("actor") != sf.col("owner"))).alias("taken_away"),
    )
    opened = sf.col("mark").bitwiseAND(_int(int(OPENED))) != 0
    at = sf.col("at")
    return prepared.select(
        *KEY,
        sf.lit(True).alias("is_branch"),
        "source",
        "place",
        "name",
        "owner",
        "life",
        sf.col("mark").bitwiseOR(_int(OF_DTX)).alias("marks"),
        sf.when(opened, at).alias("opened_at"),
        sf.when(sf.col("taken_away"), at).alias("forgotten_at"),
        at.alias("first_at"),
        at.alias("last_at"),
        sf.lit(1).cast("bigint").alias("lines"),
        _int(0).alias("seen"),
        _nothing().alias("known_at"),
        _nothing().alias("seen_since"),
        _nothing().alias("seen_at"),
        _nothing().alias("seen_last"),
    )


def rows_of_observations(observations: DataFrame) -> DataFrame:
    """Return observations as rows; branches that have not voted are left out.

    Args:
        observations: with the columns of :data:`~dtx.pipeline.participants.OBSERVATIONS`.
    """
    since = sf.unix_micros("since")
    return observations.where(sf.col("state").isin(*STATE_MARK)).select(
        sf.col("format_id").cast("bigint").alias("format_id"),
        "gtrid",
        sf.lit(True).alias("is_branch"),
        "source",
        place("source", "rm", "vhost", "bqual").alias("place"),
        sf.col("rm").alias("name"),
        "owner",
        sf.when(sf.col("branch_id").isNotNull(), sf.xxhash64("branch_id")).alias("life"),
        sf.when(sf.col("kind") == str(SourceKind.DTX), _int(OF_DTX)).otherwise(_int(0)).alias("marks"),
        *(_nothing().alias(name) for name in ("opened_at", "forgotten_at", "first_at", "last_at")),
        sf.lit(0).cast("bigint").alias("lines"),
        _word_mark(sf.col("state"), STATE_MARK).alias("seen"),
        sf.unix_micros("observed_at").alias("known_at"),
        since.alias("seen_since"),
        sf.coalesce(since, sf.unix_micros("observed_at")).alias("seen_at"),
        sf.coalesce(since, sf.unix_micros("observed_at")).alias("seen_last"),
    )


def rows_of_decisions(decisions: DataFrame) -> DataFrame:
    """Return decisions as rows; the format id is null if the log does not have it.

    Args:
        decisions: with the columns of :data:`~dtx.pipeline.decisions.DECISIONS`.
    """
    at = sf.unix_micros("at")
    decided = sf.when(sf.col("decision") == str(Choice.COMMIT), _int(int(Mark.DECIDED_COMMIT))).otherwise(
        _int(int(Mark.DECIDED_ROLLBACK))
    )
    done = (
        sf.when(sf.col("finished").isNull(), _int(0))
        .when(sf.col("finished"), _int(int(Mark.DONE)))
        .otherwise(_int(int(Mark.UNDONE)))
    )
    return decisions.select(
        sf.col("format_id").cast("bigint").alias("format_id"),
        "gtrid",
        sf.lit(False).alias("is_branch"),
        "source",  # tells later which log no longer has the decision
        place("source", "tm", "decision").alias("place"),
        sf.col("tm").alias("name"),
        _nothing("string").alias("owner"),
        _nothing().alias("life"),
        decided.bitwiseOR(done).alias("marks"),
        *(_nothing().alias(name) for name in ("opened_at", "forgotten_at")),
        at.alias("first_at"),
        at.alias("last_at"),
        sf.lit(0).cast("bigint").alias("lines"),
        _int(0).alias("seen"),
        _nothing().alias("known_at"),
        _nothing().alias("seen_since"),
        _nothing().alias("seen_at"),
        _nothing().alias("seen_last"),
    )


def with_format_ids(rows: DataFrame) -> DataFrame:
    """Give decisions without a format id the format ids of other rows with the same gtrid; one row for each of several.

    This counts such decisions at once; if they are few, no shuffle is needed for them.

    Args:
        rows: all rows of the transactions to judge.
    """
    without = sf.col("format_id").isNull() & ~sf.col("is_branch")
    nameless = rows.where(without)
    count = nameless.limit(_FEW + 1).count()
    if not count:
        return rows
    named = rows.where(~without)
    gtrids = nameless.select("gtrid").distinct()
    known = (
        named.join(sf.broadcast(gtrids) if count <= _FEW else gtrids, "gtrid", "left_semi")
        .select("gtrid", sf.col("format_id").alias("found"))
        .distinct()
    )
    found = nameless.join(known, "gtrid", "left").withColumn("format_id", sf.col("found")).select(*rows.columns)
    return named.unionByName(found)


def folded(rows: DataFrame) -> DataFrame:
    """Fold the rows of each key :data:`PLACE`; all rows of one transaction are then in one partition."""
    together = rows.repartition(*KEY)
    found = together.groupBy(*KEY, *PLACE).agg(*(fold(column).alias(column) for column, fold in _FOLDS.items()))
    # a branch of which only GONE is known has no verdict
    return found.where(~sf.col("is_branch") | is_known())


def is_known() -> Column:
    """Whether lines (also removed ones) or an observation of a branch are known."""
    marks = sf.col("marks").bitwiseAND(_int(~(int(Mark.GONE) | OF_DTX)))
    return (sf.col("lines") > 0) | (sf.col("seen") != 0) | (marks != 0)

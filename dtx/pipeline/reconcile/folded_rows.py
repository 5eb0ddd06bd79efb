"""Makes rows of one schema of all facts, and folds the rows of one branch into one.

Lines of journals, observations and decisions become the same kind of row. So one shuffle, without a join, brings all
facts of a transaction together. A fold is made of ``bit_or``, ``min``, ``max`` and, for numbers of lines, ``sum``.
So folding earlier folded rows with newer rows gives the same as folding all rows at once.

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
HASH: Final = "hash"
"""The hash of the gtrid. Spark sorts by the first eight bytes of the first column: it must differ in most rows."""
PLACE: Final = ("is_branch", "source", "place", "name", "owner", "life")
"""The key of a row within a transaction. *name* is the resource manager, or the transaction manager of a decision.
*life* is a hash of the id of the branch, if it has one: another use of the same xid has another id."""
OF_DTX: Final = 1 << 20
"""A bit in addition to :class:`~dtx.pipeline.verdicts.Mark`: the branch is in dtx, so its owner is a user of dtx."""
KEPT: Final = {
    "is_branch": "boolean", "source": "string", "place": "bigint", "name": "string", "owner": "string",
    "life": "bigint", "marks": "int", "opened_at": "bigint", "forgotten_at": "bigint", "first_at": "bigint",
    "last_at": "bigint", "lines": "bigint",
}  # fmt: skip
"""Columns that are stored for the next run: all but those of observations, which each run reads again."""
_ROW: Final = {"format_id": "bigint", "gtrid": "binary"} | KEPT | {
    "seen": "int", "known_at": "bigint", "seen_since": "bigint", "seen_at": "bigint", "seen_last": "bigint",
}  # fmt: skip
_NUMBERS: Final = ("lines", "seen")
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


def rows_of(frame: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Return a row for each row of *frame*, which has the key and the source.

    Of the other columns, those that are not given are 0 for numbers, else null.
    """

    def column(name: str) -> Column:
        if name in columns:
            return columns[name]
        return sf.col(name) if name in {*KEY, "source"} else sf.lit(0 if name in _NUMBERS else None)

    return frame.select(*(column(name).cast(kind).alias(name) for name, kind in _ROW.items()))


def bits(marks: int) -> Column:
    """Return *marks* as a column."""
    return sf.lit(int(marks)).cast("int")


def has(marks: Column, wanted: int) -> Column:
    """Return whether *marks* has any mark of *wanted*."""
    return marks.bitwiseAND(bits(wanted)) != 0


def _word_mark(word: Column, marks: Mapping[str, Mark]) -> Column:
    """Return the mark of *word*, 0 for words that *marks* lacks."""
    found = bits(0)
    for each, mark in marks.items():
        found = sf.when(word == each, bits(mark)).otherwise(found)
    return found


def place(*columns: str) -> Column:
    """Return the hash of the columns that identify a place within a transaction."""
    return sf.xxhash64(*(sf.col(column) for column in columns))


def rows_of_events(events: DataFrame) -> DataFrame:
    """Return lines of journals, with the columns of the table ``journal`` and the source, as rows."""
    event, outcome = sf.col("event"), sf.col("outcome")
    mark = _word_mark(event, {str(each): mark for each, mark in EVENT_MARK.items()})
    outcome_mark = _word_mark(outcome, {str(each): mark for each, mark in HEURISTIC_MARK.items()})
    with_outcome = event.isin(*(str(each) for each in WITH_OUTCOME))
    mark = sf.when(with_outcome & outcome.isNotNull(), mark.bitwiseOR(outcome_mark)).otherwise(
        sf.when(event == str(JournalEvent.HEURISTIC), bits(Mark.HEURISTIC_HAZARD)).otherwise(mark)
    )
    taken_away = (event == str(JournalEvent.FORGOTTEN)) & (sf.col("actor") != sf.col("owner"))
    at = sf.col("micros")
    return rows_of(
        events.withColumns({"mark": mark, "micros": sf.unix_micros("at"), "taken_away": taken_away}),
        {
            "is_branch": sf.lit(True),
            "place": place("source", "rm", "vhost", "bqual"),
            "name": sf.col("rm"),
            "owner": sf.col("owner"),
            "life": sf.xxhash64("branch_id"),
            "marks": sf.col("mark").bitwiseOR(bits(OF_DTX)),
            "opened_at": sf.when(has(sf.col("mark"), OPENED), at),
            "forgotten_at": sf.when(sf.col("taken_away"), at),
            "first_at": at,
            "last_at": at,
            "lines": sf.lit(1),
        },
    )


def rows_of_observations(observations: DataFrame) -> DataFrame:
    """Return :data:`~dtx.pipeline.participants.OBSERVATIONS` as rows; branches that have not voted are left out."""
    since, observed_at = sf.unix_micros("since"), sf.unix_micros("observed_at")
    return rows_of(
        observations.where(sf.col("state").isin(*STATE_MARK)),
        {
            "is_branch": sf.lit(True),
            "place": place("source", "rm", "vhost", "bqual"),
            "name": sf.col("rm"),
            "owner": sf.col("owner"),
            "life": sf.when(sf.col("branch_id").isNotNull(), sf.xxhash64("branch_id")),
            "marks": sf.when(sf.col("kind") == str(SourceKind.DTX), bits(OF_DTX)).otherwise(bits(0)),
            "seen": _word_mark(sf.col("state"), STATE_MARK),
            "known_at": observed_at,
            "seen_since": since,
            "seen_at": sf.coalesce(since, observed_at),
            "seen_last": sf.coalesce(since, observed_at),
        },
    )


def rows_of_decisions(decisions: DataFrame) -> DataFrame:
    """Return :data:`~dtx.pipeline.decisions.DECISIONS` as rows; the format id is null if the log does not have it."""
    at, commits, finished = sf.unix_micros("at"), sf.col("decision") == str(Choice.COMMIT), sf.col("finished")
    decided = sf.when(commits, bits(Mark.DECIDED_COMMIT)).otherwise(bits(Mark.DECIDED_ROLLBACK))
    done = sf.when(finished.isNull(), bits(0)).when(finished, bits(Mark.DONE)).otherwise(bits(Mark.UNDONE))
    return rows_of(
        decisions,  # column source tells later which log no longer has the decision
        {
            "is_branch": sf.lit(False),
            "place": place("source", "tm", "decision"),
            "name": sf.col("tm"),
            "marks": decided.bitwiseOR(done),
            "first_at": at,
            "last_at": at,
        },
    )


def with_format_ids(rows: DataFrame) -> DataFrame:
    """Give decisions without a format id the format ids of other rows with the same gtrid; one row for each of several.

    This counts such decisions at once; if they are few, no shuffle is needed for them.
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
    """Fold the rows of each key :data:`PLACE`, and add :data:`HASH`; all rows of a transaction are in one partition."""
    together = rows.repartition(*KEY).withColumn(HASH, sf.xxhash64("gtrid"))
    found = together.groupBy(HASH, *KEY, *PLACE).agg(*(fold(column).alias(column) for column, fold in _FOLDS.items()))
    is_marked = has(sf.col("marks"), ~(int(Mark.GONE) | OF_DTX))
    # a branch of which only GONE is known has no verdict
    return found.where(~sf.col("is_branch") | (sf.col("lines") > 0) | (sf.col("seen") != 0) | is_marked)

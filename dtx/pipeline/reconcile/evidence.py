"""The lines that a verdict rests on."""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

MOST: Final = 1_000
"""Lines of evidence that one verdict carries, the oldest first: a gtrid of millions of lines must not fill the memory
of whoever looks at it."""
_ORDER: Final = ("at", "source", "rm", "vhost", "bqual", "event", "outcome", "actor", "journal_id")
_NAMED: Final = ("source", "rm", "vhost", "bqual", "event", "outcome", "at", "actor", "journal_id")
TYPE: Final = (
    "array<struct<source:string,rm:string,vhost:string,bqual:binary,event:string,outcome:string,at:timestamp,"
    "actor:string,journal_id:string>>"
)


def with_evidence(
    judged: DataFrame, wanted: DataFrame, events: DataFrame, observations: DataFrame, decisions: DataFrame
) -> DataFrame:
    """Verdicts with a column ``evidence``, oldest line first; an empty list for those that are not in *wanted*."""
    found = evidence_of(wanted, events, observations, decisions)
    same = judged["format_id"].eqNullSafe(found["found_format_id"]) & (judged["gtrid"] == found["found_gtrid"])
    return (
        judged.join(found, same, "left")
        .drop("found_format_id", "found_gtrid")
        .withColumn("evidence", sf.coalesce(sf.col("evidence"), sf.array().cast(TYPE)))
    )


def evidence_of(wanted: DataFrame, events: DataFrame, observations: DataFrame, decisions: DataFrame) -> DataFrame:
    """For each of the transactions *wanted*: ``found_format_id``, ``found_gtrid``, ``evidence``."""
    keys = wanted.select(sf.col("format_id").alias("found_format_id"), sf.col("gtrid").alias("found_gtrid"))

    def of(lines: DataFrame, **columns: Column | str) -> DataFrame:
        # a decision without a format id is about whatever has its gtrid
        here = lines.join(
            keys,
            (lines["gtrid"] == keys["found_gtrid"])
            & (lines["format_id"].isNull() | lines["format_id"].eqNullSafe(keys["found_format_id"])),
        )
        named = {name: sf.col(column) if isinstance(column, str) else column for name, column in columns.items()}
        return here.select("found_format_id", "found_gtrid", *(named[name].alias(name) for name in _ORDER))

    nothing = sf.lit(None).cast("string")
    told = of(
        events, at="at", source="source", rm="rm", vhost="vhost", bqual="bqual", event="event", outcome="outcome",
        actor="actor", journal_id="id",
    )  # fmt: skip
    seen = of(
        observations, at=sf.coalesce("since", "observed_at"), source="source", rm="rm", vhost="vhost", bqual="bqual",
        event=sf.concat(sf.lit("observed: "), sf.col("state")), outcome=nothing, actor="owner", journal_id=nothing,
    )  # fmt: skip
    decided = of(
        decisions, at="at", source="source", rm="tm", vhost=sf.lit(""), bqual=sf.lit(b""),
        event=sf.concat(sf.lit("decided: "), sf.col("decision")),
        outcome=sf.when(sf.col("finished"), sf.lit("finished")).when(~sf.col("finished"), sf.lit("not finished")),
        actor="tm", journal_id=nothing,
    )  # fmt: skip
    lines = told.unionByName(seen).unionByName(decided)
    ordered = sf.slice(sf.array_sort(sf.collect_list(sf.struct(*_ORDER))), 1, MOST)
    return (
        lines.groupBy("found_format_id", "found_gtrid")
        .agg(ordered.alias("ordered"))
        .select(
            "found_format_id",
            "found_gtrid",
            sf.transform("ordered", lambda line: sf.struct(*(line[name].alias(name) for name in _NAMED)))
            .cast(TYPE)
            .alias("evidence"),
        )
    )

"""The log of Atomikos: ``tmlog*.log``, one entry to a line, later entries of a transaction after earlier ones.

Release 4 writes JSON (``{"id":…,"wasCommitted":…,"participants":[{"uri":…,"state":…}]}``), later ones
``id|state|expires|domain|superior``. A line is written when a transaction is COMMITTING, and another one when it is
TERMINATED; a checkpoint drops what is terminated. There is no time of a decision in it, and none is made up.
"""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from dtx.pipeline.decisions.lines import LINE, lines, one_object, quarantined, written
from dtx.pipeline.quarantine import Quarantined

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ENTRY: Final = (
    "id STRING, wasCommitted BOOLEAN, participants ARRAY<STRUCT<uri: STRING, state: STRING>>, _corrupt STRING"
)
_STATES: Final = (
    "ACTIVE", "MARKED_ABORT", "LOCALLY_DONE", "PREPARING", "IN_DOUBT", "ABORTING", "COMMITTING", "SUSPENDED",
    "HEUR_COMMITTED", "HEUR_ABORTED", "HEUR_MIXED", "HEUR_HAZARD", "TERMINATED", "COMMITTED", "ABORTED", "ABANDONED",
)  # fmt: skip
_UNDECIDED: Final = "it is terminated, and how it was decided stands in no line of this log"


def atomikos(spark: "SparkSession", name: str, place: str) -> "tuple[DataFrame, list[Quarantined]]":
    """One decision for each transaction; the last state counts for whether it is finished."""
    every = lines(spark, place)
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "_corrupt"}
    number = sf.coalesce(sf.regexp_extract("path", r"(\d+)[^/\d]*$", 1).try_cast("bigint"), sf.lit(0))
    states = sf.array(*map(sf.lit, _STATES))
    entries = (
        every.where(written())
        .withColumn("json", sf.from_json(LINE, _ENTRY, options))
        .withColumn("bars", sf.split(LINE, r"\|"))
        .withColumn("is_json", sf.ltrim(LINE).startswith("{"))
        .withColumn("id", sf.when(sf.col("is_json"), sf.col("json.id")).otherwise(sf.col("bars")[0]))
        .withColumn(
            "states",
            sf.when(
                sf.col("is_json"), sf.coalesce("json.participants.state", sf.array().cast("array<string>"))
            ).otherwise(sf.array(sf.get("bars", sf.lit(1)))),
        )
        .withColumn("log_number", number)
    )
    no_json = ~one_object() | sf.col("json").isNull() | sf.col("json._corrupt").isNotNull()
    broken = sf.when(sf.col("is_json"), no_json).otherwise(
        (sf.size("bars") < 3) | sf.get("bars", sf.lit(2)).try_cast("bigint").isNull()
    )
    length = sf.coalesce(sf.octet_length("id"), sf.lit(0))
    judged = entries.withColumn(
        "reason",
        sf.when(broken, "neither JSON nor id|state|expires|…: no entry of Atomikos")
        .when(~length.between(1, 64), "the id is not of 1 to 64 octets")
        .when(~sf.forall("states", lambda state: sf.coalesce(sf.array_contains(states, state), sf.lit(False))),
              "a state that Atomikos does not have"),
    )  # fmt: skip
    order = sf.struct("log_number", "path", "block", "seq")
    whole = (
        judged.where("reason IS NULL")
        .groupBy("id")
        .agg(
            sf.max(sf.arrays_overlap("states", sf.array(sf.lit("COMMITTING"), sf.lit("HEUR_COMMITTED")))).alias(
                "commits"
            ),
            sf.max(sf.coalesce("json.wasCommitted", sf.lit(False))).alias("was_committed"),
            sf.max(sf.arrays_overlap("states", sf.array(sf.lit("ABORTING"), sf.lit("HEUR_ABORTED")))).alias("aborts"),
            sf.max_by("states", order).alias("last"),
        )
        .withColumn(
            "decision",
            sf.when(sf.col("commits") | sf.col("was_committed"), "commit").when(sf.col("aborts"), "rollback"),
        )
        .withColumn("finished", sf.forall("last", lambda state: state == "TERMINATED"))
    )
    found = whole.where("decision IS NOT NULL").select(
        sf.lit(name).alias("tm"),
        sf.lit(None).cast("bigint").alias("format_id"),
        sf.encode("id", "UTF-8").alias("gtrid"),
        "decision",
        sf.lit(None).cast("timestamp").alias("at"),
        "finished",
        sf.lit(name).alias("source"),
    )
    return found, [*quarantined(name, every, judged), *_unknown(name, place, whole)]


def _unknown(name: str, place: str, whole: "DataFrame") -> list[Quarantined]:
    """Ended by a superior or after a checkpoint: no decision is guessed for these."""
    terminated = whole.where("decision IS NULL AND finished")
    count, first = terminated.agg(sf.count("*"), sf.min("id")).collect()[0]
    if not count:
        return []
    return [Quarantined(source=name, item=place, reason=_UNDECIDED, count=count, sample=first)]

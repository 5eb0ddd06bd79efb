"""Who has what in doubt, now: dtx itself, PostgreSQL, MySQL and MariaDB.

The lists of databases are read by the program (they are short, or somebody has trouble enough); dtx's own by Spark.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dtx.pipeline.participants import mysql, postgresql
from dtx.pipeline.participants.kinds import OBSERVATIONS, Observation, Participant, ParticipantKind
from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.source import Waits, reachable
from dtx.pipeline.source.batch import AT_ONCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["OBSERVATIONS", "Observation", "Participant", "ParticipantKind", "observe"]


def observe(
    spark: "SparkSession", participants: Sequence[Participant], *, waits: Waits | None = None
) -> "tuple[DataFrame, list[Quarantined]]":
    """Every branch in doubt, as :data:`OBSERVATIONS`, and which participants could not be asked.

    Args:
        spark: a session that knows ``format("dtx")``.
        participants: whom to ask; names are unique.
        waits: how long each may take.

    Raises:
        ValueError: two participants have the same name.
    """
    names = [participant.name for participant in participants]
    if len(set(names)) != len(names):
        raise ValueError(f"two participants have the same name: {', '.join(sorted(names))}")
    waits = waits or Waits()
    own = {one.name: one.url for one in participants if one.kind is ParticipantKind.DTX}
    others = [one for one in participants if one.kind is not ParticipantKind.DTX]
    there, wrong = reachable(own, waits=waits)
    found: list[Observation] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for seen, quarantined in pool.map(lambda one: _look(one, waits), others):
            found += seen
            wrong += quarantined
    frame = spark.createDataFrame([tuple(row) for row in found], OBSERVATIONS)
    return (frame.unionByName(_own(spark, there)) if there else frame), wrong


def _look(one: Participant, waits: Waits) -> tuple[list[Observation], list[Quarantined]]:
    return mysql.look(one, waits) if one.kind is ParticipantKind.MYSQL else postgresql.look(one, waits)


def _own(spark: "SparkSession", sources: dict[str, str]) -> "DataFrame":
    from pyspark.sql import functions as sf

    branches = spark.read.format("dtx").option("sources", json.dumps(sources)).load("branch")
    return branches.select(
        "source",
        sf.lit(ParticipantKind.DTX.value).alias("kind"),
        "rm",
        "vhost",
        "format_id",
        "gtrid",
        "bqual",
        sf.when(sf.col("state") == "heuristic", sf.concat(sf.lit("heuristic-"), "outcome"))
        .otherwise(sf.col("state"))
        .alias("state"),
        "owner",
        sf.col("prepared_at").alias("since"),
        sf.lit(datetime.now(UTC)).alias("observed_at"),
    )

"""The columns of decisions, and the check of their neutral format.

The neutral format, for any transaction manager: one decision in each row, in Parquet, CSV with a header, or JSON lines.

=============  ============================  ==========================================================================
column         CSV and JSON                  Parquet
=============  ============================  ==========================================================================
``gtrid``      hexadecimal, 1 to 64 bytes    binary
``decision``   ``commit`` or ``rollback``    the same
``time``       ISO 8601; UTC without a zone  timestamp
``format_id``  unsigned 32 bit, optional     the same
``tm``         text, optional                the same; without it the log's configured name
``finished``   true or false, optional       boolean: whether every branch has been completed
=============  ============================  ==========================================================================
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf

from dtx.pipeline.source.columns import spark_schema

DECISIONS: Final = spark_schema(
    tm="string", format_id="bigint", gtrid="binary", decision="string", at="timestamp", finished="boolean",
    source="string",
)  # fmt: skip
NO_CHOICE: Final = "decision is not commit or rollback"
NO_FORMAT_ID: Final = "format_id is not an unsigned 32 bit number"
MOST_FORMAT_ID: Final = 0xFFFFFFFF


def checked(
    rows: DataFrame, name: str, gtrid: tuple[Column, str], time: tuple[Column, str], finished: Column
) -> DataFrame:
    """Add to rows of the neutral format a ``reason``, which is null for valid rows, and the ``valid`` decision.

    Args:
        rows: with the columns of the neutral format, and any others.
        name: of the log.
        gtrid: the value, null if it is not valid, and the reason for that.
        time: the same.
        finished: the value, null if it is not valid.
    """
    format_id = sf.col("format_id").try_cast("bigint")
    in_range = sf.coalesce(format_id.between(0, MOST_FORMAT_ID), sf.lit(False))
    is_choice = sf.coalesce(sf.col("decision").isin("commit", "rollback"), sf.lit(False))
    reason = (
        sf.when(gtrid[0].isNull(), gtrid[1])
        .when(~is_choice, NO_CHOICE)
        .when(time[0].isNull(), time[1])
        .when(sf.col("format_id").isNotNull() & ~in_range, NO_FORMAT_ID)
        .when(sf.col("finished").isNotNull() & finished.isNull(), "finished is not true or false")
    )
    valid = sf.struct(
        sf.coalesce(sf.col("tm").try_cast("string"), sf.lit(name)).alias("tm"),
        format_id.alias("format_id"),
        gtrid[0].alias("gtrid"),
        "decision",
        time[0].alias("at"),
        finished.alias("finished"),
        sf.lit(name).alias("source"),
    )
    return rows.withColumns({"reason": reason, "valid": valid})


def decisions(judged: DataFrame) -> DataFrame:
    """Return the valid rows of :func:`checked`, as :data:`DECISIONS`."""
    return judged.where("reason IS NULL").select("valid.*")

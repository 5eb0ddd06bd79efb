"""Reconciles one transaction of many lines and branches with a heap of 1 GiB; prints verdict, branches, evidence.

Usage: python -m tests.evidence.pipeline.one_transaction LINES BRANCHES
"""

import sys

from pyspark.sql import functions as sf

from dtx.pipeline.session import SessionOptions, open_session
from dtx.pipeline.verdicts import Rules
from tests.support.fleets import decisions_frame, observations_frame, verdicts_of

lines, branches = map(int, sys.argv[1:])
with open_session(SessionOptions(memory=1 << 30)) as spark:
    number = sf.col("id")
    branch = (number % branches).cast("string")
    events = spark.range(lines).select(
        sf.md5(number.cast("string")).alias("id"),
        sf.timestamp_micros(number + 1).alias("at"),
        sf.lit("rm").alias("rm"),
        sf.lit("prepared").alias("event"),
        sf.md5(branch).alias("branch_id"),
        sf.lit("/").alias("vhost"),
        sf.lit(1).cast("bigint").alias("format_id"),
        sf.lit("g").cast("binary").alias("gtrid"),
        branch.cast("binary").alias("bqual"),
        sf.lit("ann").alias("owner"),
        sf.lit("ann").alias("actor"),
        sf.lit(None).cast("string").alias("outcome"),
        sf.lit("db").alias("source"),
    )
    nothing = observations_frame(spark, ()), decisions_frame(spark, ())
    (row,) = verdicts_of(events, *nothing, Rules(as_of=10_000_000_000_000)).collect()
    print(row.verdict, row.branches, len(row.evidence))

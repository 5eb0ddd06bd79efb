"""Files of lines by Spark: each line with its file, and its number where somebody has to find it."""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from dtx.pipeline.quarantine import Quarantined, sample

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

LINE: Final = "value"
_BLOCK: Final = ("path", "block")
_MOST_REASONS: Final = 1_000
"""Files and reasons that are named, of one log: more are counted together."""


def lines(spark: "SparkSession", place: str) -> "DataFrame":
    """The lines of a file or directory that are not blank; ``seq`` grows within each ``block`` of a ``path``."""
    return spark.read.text(place).select(
        LINE,
        sf.col("_metadata.file_path").alias("path"),
        sf.col("_metadata.file_block_start").alias("block"),
        sf.monotonically_increasing_id().alias("seq"),
    )


def written(column: str = LINE) -> "Column":
    """Whether there is anything on a line."""
    return sf.length(sf.trim(sf.col(column))) > 0


def one_object(column: str = LINE) -> "Column":
    """Whether a line is one JSON object: of several, or of a list, Spark reads the first and says nothing of the rest.

    A comma behind it is passed over: so stands an object on its line in a list of many lines.
    """
    text = sf.rtrim(sf.ltrim(sf.col(column), sf.lit(" \t")), sf.lit(" \t,"))
    count = sf.json_array_length(sf.concat(sf.lit("["), text, sf.lit("]")))
    return sf.coalesce(text.startswith("{") & text.endswith("}") & (count == 1), sf.lit(False))


def quarantined(name: str, every: "DataFrame", judged: "DataFrame") -> list[Quarantined]:
    """The lines that have a ``reason``: for each file and reason how many, and number and text of the first.

    Args:
        name: configured name of the log.
        every: what :func:`lines` gave, for the numbers.
        judged: some of these lines, with ``reason``: null of those that are right.
    """
    first = sf.min(sf.struct("block", "seq", LINE)).alias("first")
    found = (
        judged.where("reason IS NOT NULL")
        .groupBy("path", "reason")
        .agg(sf.count("*").alias("count"), first)
        .orderBy("path", "reason")
        .limit(_MOST_REASONS)
        .collect()
    )
    if not found:
        return []
    paths = sorted({row["path"] for row in found})
    blocks: dict[str, list[tuple[int, int, int]]] = {}
    counted = every.where(sf.col("path").isin(paths)).groupBy(*_BLOCK).agg(sf.count("*").alias("n"), sf.min("seq"))
    for path, block, count, least in counted.collect():
        blocks.setdefault(path, []).append((block, count, least))
    return [
        Quarantined(
            source=name,
            item=f"{row['path']}:{_number(blocks[row['path']], row['first']['block'], row['first']['seq'])}",
            reason=row["reason"],
            count=row["count"],
            sample=sample(row["first"][LINE]),
        )
        for row in found
    ]


def _number(blocks: list[tuple[int, int, int]], block: int, seq: int) -> int:
    """The line's number, from 1: those of the blocks before it, and its place in its own."""
    before = sum(count for start, count, _ in blocks if start < block)
    least = next(least for start, _, least in blocks if start == block)
    return before + seq - least + 1

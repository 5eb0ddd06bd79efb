"""Where things are in a lake, and what is in its files.

::

    LAKE/rm=<resource manager>/day=<date of at, UTC>/batch=<batch>/part-….parquet
    LAKE/_checkpoints/<source>/<epoch>/     how far each database has been read; Spark's own checkpoint
    LAKE/_checkpoints/<source>/read.json    when it was last read to its end
    LAKE/_upkeep/                           compaction and retention under way (:mod:`dtx.pipeline.archive.upkeep`)
    LAKE/_lake.json                         the version of this layout, and a number that no other lake has
    LAKE/delta/                             where asked for, the same lines as a Delta table with its own checkpoints

A *batch* is what one database had new at one moment: ``<source>.<epoch>.<number>``. Its rows are the same whenever it
is written, and writing it replaces what is there of it: therefore a batch that is written again after a crash is there
once. An *epoch* is the life of one checkpoint; where a checkpoint is lost, a new epoch begins, and its batches leave
out what earlier epochs have brought.
"""

from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from pyspark.sql.types import DateType, StringType, StructField, StructType

from dtx.pipeline.source.columns import TABLES

VERSION: Final = 1
"""Of the layout; it goes up when an older dtx must not write here any more."""
EVENTS: Final = StructType([*TABLES["journal"].schema.fields, StructField("day", DateType())])
"""The columns of the lake as it is read: those of the journal, where it was read from, and the day."""
ORIGIN: Final = StructField("origin", StringType())
"""In the files alone: the batch that brought the row, also after compaction."""
BATCH: Final = StructField("batch", StringType())
STORED: Final = StructType([*EVENTS.fields, ORIGIN, BATCH])
"""The columns of the files and of the directories that they are in."""
PARTITIONS: Final = ("rm", "day", "batch")
CHECKPOINTS: Final = "_checkpoints"
UPKEEP: Final = "_upkeep"
MARKER: Final = "_lake.json"
COMPACTED: Final = "_compacted"
"""Begins the name of a batch that compaction has made of others; no source is called like that."""


class Form(StrEnum):
    """What the archive writes."""

    PARQUET = "parquet"
    DELTA = "delta"


class LakeError(Exception):
    """The lake cannot be used as it is; the sentence says what to do."""


class Batch(NamedTuple):
    """The name of a batch.

    Args:
        stream: source and epoch.
        number: counted from 0 by Spark.
    """

    stream: str
    number: int

    @classmethod
    def parse(cls, name: str) -> "Batch | None":
        """What *name* says; ``None`` for what compaction has made."""
        stream, _, number = name.rpartition(".")
        return cls(stream, int(number)) if stream and number.isdigit() else None

    def __str__(self) -> str:
        return f"{self.stream}.{self.number:09d}"


def stream_name(source: str, epoch: str) -> str:
    """The part of a batch's name that all batches of one checkpoint have in common."""
    return f"{path_word(source)}.{epoch}"


def path_word(name: str) -> str:
    """*name* as the name of a file: letters, digits, ``_`` and ``-``, the rest as ``%XX``; never hidden."""
    return quote(name, safe="").replace(".", "%2E").replace("~", "%7E").replace("_", "%5F")


def from_path_word(word: str) -> str:
    """What :func:`path_word` has made *word* of."""
    return unquote(word)

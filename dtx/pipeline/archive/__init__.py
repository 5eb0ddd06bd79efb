"""The lake: every line of every journal of a fleet, once, as Parquet by resource manager and day."""

from dtx.pipeline.archive.delta import DeltaLake
from dtx.pipeline.archive.delta_upkeep import compact_table, retain_table
from dtx.pipeline.archive.layout import EVENTS, Form, LakeError
from dtx.pipeline.archive.reading import Lake, read_lake
from dtx.pipeline.archive.upkeep import compact, retain
from dtx.pipeline.archive.writing import Archived, archive, follow

__all__ = [
    "EVENTS", "Archived", "DeltaLake", "Form", "Lake", "LakeError", "archive", "compact", "compact_table", "follow",
    "read_lake", "retain", "retain_table",
]  # fmt: skip

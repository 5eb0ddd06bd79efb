"""Converts a lake of Parquet files, as older versions of dtx wrote it, into a Delta table in the same place.

The old lake has ``rm=…/day=…/batch=…/*.parquet``, plans of interrupted compactions (``_upkeep/plan-*.json``), and
Spark's checkpoints. Lines of an incomplete batch are copied too: ``archive`` then reads the journals from their
beginning, and leaves out the lines of the lake. Lines that only the Delta table in ``LAKE/delta`` has are copied too.
"""

from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, write_deltalake

from dtx.pipeline.delta import Table, refused
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.lake import BATCH, LOCK, MONTH, OLDER, SCHEMA, unknown

_UPKEEP: Final = "_upkeep"
_DELTA: Final = "delta"
_OF_OLDER: Final = ("_checkpoints", _UPKEEP, _DELTA, OLDER[0])


def migrate(root: str, watch: Callable[[int], None] = lambda _: None) -> int:
    """Make the table, then remove the files of the older lake; return the number of lines.

    Args:
        root: of the lake.
        watch: called with the number of lines copied so far.
    """
    files = Files(root)
    if not any(map(files.exists, OLDER)):
        raise LakeError(f"{root} is no lake of an older dtx: there is nothing to migrate")
    with files.alone(LOCK):
        table = Table(root, SCHEMA, "")
        if not table.exists:
            _finish_plans(files)
            other = None  # deltalake cannot open it while it writes
            if files.exists(OLDER[1]):
                tree = Files(files.path(_DELTA)).tree
                other = DeltaTable(f"{files.place}/{_DELTA}").to_pyarrow_dataset(filesystem=tree)
            lines = pa.RecordBatchReader.from_batches(SCHEMA, _converted(files, other, watch))
            with refused(files.uri):
                # one commit: an interrupted migration has made no table
                write_deltalake(files.place, lines, partition_by=[MONTH])
        for name in [*(name for name in files.names() if name.startswith("rm=")), *_OF_OLDER]:
            files.remove(name)
    return int(table.load().count())


def _finish_plans(files: Files) -> None:
    """Finish interrupted compactions; each of their steps may be repeated."""
    for name in files.names(_UPKEEP, directories=False):
        if not name.startswith("plan-"):
            continue
        plan = files.read(f"{_UPKEEP}/{name}")
        for each in plan["remove"]:
            files.remove(each)
        for source, target in plan["move"]:
            for file in files.data(source):
                to = f"{target}{file[len(source) :]}"
                files.tree.create_dir(to.rpartition("/")[0], recursive=True)
                files.tree.move(file, to)
        files.remove(f"{_UPKEEP}/{name}")


def _converted(files: Files, other: ds.Dataset | None, watch: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    copied = 0
    for lines in _lines(files, other):
        columns = {name: lines[name] for name in lines.column_names}
        columns[BATCH] = pa.repeat(pa.scalar(0, pa.int64()), lines.num_rows)
        columns[MONTH] = pc.strftime(columns["at"], format="%Y-%m")
        copied += lines.num_rows
        watch(copied)
        yield from pa.table([columns[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA).to_batches()


def _lines(files: Files, other: ds.Dataset | None) -> Iterator[pa.Table]:
    """Yield the lines of all files, then those that the *other* table, with its own checkpoints, has alone."""
    schema = pa.schema([field for field in SCHEMA if field.name not in {"rm", BATCH, MONTH}])
    copied = []
    for directory in (name for name in files.names() if name.startswith("rm=")):
        dataset = ds.dataset(directory, schema, "parquet", files.tree)
        copied.append(dataset)
        # Spark wrote names in UTF-8, and most bytes other than letters and digits as %XX
        rm = pa.scalar(unquote(directory.removeprefix("rm=")))
        for batch in _batches(dataset):
            yield batch.append_column("rm", pa.repeat(rm, batch.num_rows))
    for batch in () if other is None else _batches(other):
        yield unknown(batch, ds.dataset(copied)) if copied else batch


def _batches(dataset: ds.Dataset) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in dataset.to_batches() if batch.num_rows)

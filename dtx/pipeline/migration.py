"""Converts a lake of Parquet files, as older versions of dtx wrote it, into a Delta table in the same place.

The old lake has ``rm=…/day=…/batch=…/*.parquet``, plans of interrupted compactions (``_upkeep/plan-*.json``), and
Spark's checkpoints. Lines of an incomplete batch are copied too: ``archive`` then reads the journals from their
beginning, and leaves out the lines of the lake. Lines that only the Delta table in ``LAKE/delta`` has are copied too.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from dtx.pipeline.delta import Table, refused
from dtx.pipeline.files import Files, LakeError
from dtx.pipeline.lake import BATCH, LOCK, MONTH, OLDER, SCHEMA

_UPKEEP: Final = "_upkeep"
_DELTA: Final = "delta"
_OF_OLDER: Final = ("_checkpoints", _UPKEEP, _DELTA, OLDER[0])


def migrate(root: str, watch: Callable[[int], None] = lambda _: None) -> int:
    """Make the table, then remove the files of the older lake.

    Args:
        root: of the lake.
        watch: called with the number of lines copied so far.

    Returns:
        The number of lines in the table.

    Raises:
        LakeError: there is no older lake.
        LakeBusy: another process uses the lake.
    """
    from deltalake import DeltaTable, write_deltalake

    files = Files(root)
    if not any(map(files.exists, OLDER)):
        raise LakeError(f"{root} is no lake of an older dtx: there is nothing to migrate")
    with files.alone(LOCK):
        table = Table(root, SCHEMA, "")
        if not table.exists:
            _finish_plans(files)
            datasets = list(_datasets(files))
            if files.exists(OLDER[1]):
                tree = Files(files.path(_DELTA)).tree
                known = [dataset for dataset, _ in datasets]
                there = DeltaTable(f"{files.place}/{_DELTA}").to_pyarrow_dataset(filesystem=tree)
                datasets.append((_Others(there, known), None))
            lines = pa.RecordBatchReader.from_batches(SCHEMA, _lines(datasets, watch))
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


def _datasets(files: Files) -> Iterator[tuple[Any, str | None]]:
    """Yield the lines of each resource manager, and its name, which its files do not have."""
    for directory in (name for name in files.names() if name.startswith("rm=")):
        schema = pa.schema([field for field in SCHEMA if field.name not in {"rm", BATCH, MONTH}])
        # Spark wrote names in UTF-8, and most bytes other than letters and digits as %XX
        yield ds.dataset(directory, schema, "parquet", files.tree), unquote(directory.removeprefix("rm="))


class _Others:
    """Lines of a dataset that *known* ones do not have: the table in ``delta`` had its own checkpoints."""

    def __init__(self, dataset: Any, known: list[Any]) -> None:
        self._dataset = dataset
        self._known = known

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        for batch in self._dataset.to_batches():
            lines = pa.Table.from_batches([batch])
            if not lines.num_rows:
                continue
            edges = pc.min_max(lines["at"])
            of_then = (pc.field("at") >= edges["min"]) & (pc.field("at") <= edges["max"])
            found = [dataset.to_table(columns=["id", "source"], filter=of_then) for dataset in self._known]
            if found:
                there = _named(pa.concat_tables(found)).combine_chunks()
                lines = lines.filter(pc.invert(pc.is_in(_named(lines), value_set=there)))
            yield from lines.to_batches()


def _named(lines: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(pc.cast(lines["source"], "string"), pc.cast(lines["id"], "string"), "/")


def _lines(datasets: list[tuple[Any, str | None]], watch: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    copied = 0
    for dataset, rm in datasets:
        for batch in dataset.to_batches():
            if not batch.num_rows:
                continue
            columns = {name: batch.column(name) for name in batch.schema.names}
            if rm is not None:
                columns["rm"] = pa.repeat(pa.scalar(rm), batch.num_rows)
            columns[BATCH] = pa.repeat(pa.scalar(0, pa.int64()), batch.num_rows)
            columns[MONTH] = pc.strftime(columns["at"], format="%Y-%m")
            copied += batch.num_rows
            watch(copied)
            arrays = [columns[field.name].cast(field.type) for field in SCHEMA]
            yield pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)

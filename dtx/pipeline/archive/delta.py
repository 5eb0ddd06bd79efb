"""The lines of the journals as a Delta table, for those who read with other engines. Without a jar: ``deltalake``.

Each batch is one commit of the table, and names its stream and its number in it (Delta's protocol, "Transaction
Identifiers": ``txn`` with ``appId`` and ``version``). A batch that comes once more after a crash is one that the table
has, and is left out; a commit is there as a whole or not at all.
"""

from typing import TYPE_CHECKING, Any, Final

from dtx.pipeline.archive.layout import EVENTS, ORIGIN, Batch, LakeError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

TABLE: Final = "delta"
"""The directory of the table in the lake."""
MOST_ROWS: Final = 500_000
"""Of a batch, about, where the fleet does not say: it is written by one process, which has all of it in memory."""
_PARTITIONS: Final = ("rm", "day")
_LOCAL: Final = "file://"


def write_batch(frame: "DataFrame", number: int, *, root: str, stream: str, source: str, rejoin: bool) -> None:
    """Commit one batch to the table, unless the table has it.

    Args:
        frame: its rows, columns of the journal and ``source``.
        number: of the batch.
        root: URI of the table.
        stream: see :func:`~dtx.pipeline.archive.layout.stream_name`.
        source: the configured name of the database.
        rejoin: whether the table may have some of the rows already, from an earlier epoch.

    Raises:
        LakeError: the package ``deltalake`` is not installed.
    """
    from deltalake import CommitProperties, Transaction, write_deltalake
    from pyspark.sql import functions as sf

    table = opened(root)
    known = None if table is None else table.transaction_version(stream)
    if known is not None and known >= number:
        return
    events = frame.withColumn("day", sf.to_date("at")).withColumn(ORIGIN.name, sf.lit(str(Batch(stream, number))))
    rows = events.select(*EVENTS.names, ORIGIN.name).toArrow()
    if rejoin and table is not None:
        rows = _new(rows, table, source)
    if rows.num_rows:
        write_deltalake(
            _place(root) if table is None else table,
            rows,
            mode="append",
            partition_by=list(_PARTITIONS),
            schema_mode=None if table is None else "merge",
            commit_properties=CommitProperties(app_transactions=[Transaction(stream, number)]),
        )


def opened(root: str) -> "DeltaTable | None":
    """The table as it is now; ``None`` where there is none yet.

    Args:
        root: its URI.

    Raises:
        LakeError: the package ``deltalake`` is not installed.
    """
    try:
        from deltalake import DeltaTable
    except ImportError as error:
        raise LakeError(f"a Delta table needs deltalake ({error}): pip install 'dtx[pipeline]'") from error
    place = _place(root)
    return DeltaTable(place) if DeltaTable.is_deltatable(place) else None


def last(root: str, source: str) -> dict[str, int]:
    """The last batch of each stream that has brought rows of *source*."""
    table = opened(root)
    found: dict[str, int] = {}
    if table is None:
        return found
    scanned: Any = table.to_pyarrow_dataset().scanner(columns=[ORIGIN.name], filter=_of(source))
    for name in {name for batch in scanned.to_batches() for name in batch.column(0).unique().to_pylist()}:
        batch = Batch.parse(name)
        if batch is not None:
            found[batch.stream] = max(batch.number, found.get(batch.stream, -1))
    return found


def _new(rows: "pa.Table", table: "DeltaTable", source: str) -> "pa.Table":
    """Those that the table does not have; only days are read that there are rows of."""
    import pyarrow.compute as pc

    days = pc.unique(rows["day"])
    dataset: Any = table.to_pyarrow_dataset()
    there = dataset.to_table(columns=["id"], filter=_of(source) & pc.field("day").isin(days))["id"]
    return rows.filter(pc.invert(pc.is_in(rows["id"], value_set=there.combine_chunks())))


def _of(source: str) -> Any:
    import pyarrow.compute as pc

    return pc.field("source") == source


def _place(root: str) -> str:
    """The same place for deltalake: of this machine a path, which has no signs that mean something else."""
    return root.removeprefix(_LOCAL)

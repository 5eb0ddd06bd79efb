"""Compaction and retention of the Delta table. Without Spark: ``deltalake`` does it in this process.

Each change is one commit of the table: it is there as a whole or not at all. Files that a commit takes out of the table
stay where they are for as long as the table says (``delta.deletedFileRetentionDuration``, a week unless it is set), for
whoever reads an older version of it; whoever looks after the table next removes those whose time is over.

Two compactions of the same files at once are not told of each other by ``deltalake`` (seen with 1.6), and double their
rows. On this machine a lock keeps others of ours out; elsewhere, and from other programs, nothing does: what came
between is looked at afterwards.

Rows keep the name of their batch, and the table the number of each stream's last one, so :class:`DeltaLake` and
``archive`` go on as if nothing had happened.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Final

from dtx.pipeline.archive.delta import DeltaLake
from dtx.pipeline.archive.layout import LakeError
from dtx.pipeline.archive.reading import LOCK
from dtx.pipeline.archive.upkeep import FILE_BYTES, Upkeep
from dtx.pipeline.quarantine import Quarantined

if TYPE_CHECKING:
    from deltalake import DeltaTable

_AT_ONCE: Final = 1
"""Files that are written at the same time: each is in memory."""
_OURS: Final = "OPTIMIZE"
_HARMLESS: Final = {"WRITE", "VACUUM START", "VACUUM END"}
"""What others may do to the table during a compaction, as its log calls it."""


@dataclass(slots=True)
class _Day:
    """Files of a day of a resource manager, and rows in them."""

    files: int = 0
    rows: int = 0


def compact_table(
    root: str,
    *,
    least_files: int = 4,
    file_bytes: int = FILE_BYTES,
    watch: Callable[[int, int], None] | None = None,
) -> Upkeep:
    """Join the small files of each day. A day with a damaged file stays as it is: somebody may mend it yet.

    Readers and ``archive`` may go on meanwhile; no other compaction of the table may.

    Args:
        root: of the lake.
        least_files: leave days alone that have fewer files.
        file_bytes: about how large files become.
        watch: called with days done and days in all.

    Raises:
        LakeError: there is no table, another upkeep is under way, or the table was changed by something else.
    """
    from deltalake.exceptions import CommitFailedError, DeltaError

    with _alone(root) as table:
        due = [(key, day) for key, day in sorted(_days(table).items()) if day.files >= least_files]
        done = Upkeep()
        for number, ((rm, day_), day) in enumerate(due, 1):
            table.update_incremental()
            version = table.version()
            try:
                told = table.optimize.compact(
                    partition_filters=[("rm", "=", rm), ("day", "=", str(day_))],
                    target_size=file_bytes,
                    max_concurrent_tasks=_AT_ONCE,
                )
            except CommitFailedError:
                raise  # the files are sound: somebody else has taken them out of the table
            except DeltaError as error:
                damaged = Quarantined(source="lake", item=f"rm={rm}/day={day_}", reason=_first(error), count=None)
                done += Upkeep(quarantined=(damaged,))
            else:
                _check(table, version)
                if told["numFilesRemoved"]:
                    kept = told["totalFilesSkipped"]
                    done += Upkeep(days=1, before=day.files, after=told["numFilesAdded"] + kept, rows=day.rows)
            if watch is not None:
                watch(number, len(due))
        _sweep(table)
        return done


def retain_table(root: str, *, before: date, dry_run: bool = False) -> Upkeep:
    """Take the days before *before* out of the table.

    Args:
        root: of the lake.
        before: the first day that stays.
        dry_run: count them, and remove nothing.

    Raises:
        LakeError: there is no table, another upkeep is under way, or the table was changed by something else.
    """
    with _alone(root) as table:
        old = [day for (_, day_), day in _days(table).items() if day_ < before]
        if old and not dry_run:
            table.delete(f"day < '{before}'")
        if not dry_run:
            _sweep(table)
        return Upkeep(days=len(old), before=sum(day.files for day in old))


@contextmanager
def _alone(root: str) -> Iterator["DeltaTable"]:
    """The table, while nobody else on this machine looks after it."""
    from deltalake.exceptions import DeltaError

    lake = DeltaLake(root)
    table = lake.table()
    with lake.files.alone(LOCK):
        table.update_incremental()
        try:
            yield table
        except DeltaError as error:
            raise LakeError(f"{lake.files.uri}: {_first(error)}") from error


def _check(table: "DeltaTable", version: int) -> None:
    """See whether anything but ``archive`` has changed the table since *version*, beside us."""
    table.update_incremental()
    changes = [entry["operation"] for entry in table.history(table.version() - version)]
    others = [change for change in changes if change not in _HARMLESS]
    if others not in ([], [_OURS]):
        raise LakeError(
            f"something else has changed {table.table_uri} while it was compacted ({', '.join(others)}), and lines may "
            "be in it twice: move the table away, and dtx pipeline archive --format delta writes it anew"
        )


def _days(table: "DeltaTable") -> dict[tuple[str, date], _Day]:
    """What there is of each day of each resource manager."""
    import pyarrow as pa

    found: dict[tuple[str, date], _Day] = defaultdict(_Day)
    for file in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        day = found[file["partition.rm"], file["partition.day"]]
        day.files += 1
        day.rows += file["num_records"] or 0
    return found


def _sweep(table: "DeltaTable") -> None:
    """Remove files which the table has not named for longer than it keeps them for its readers."""
    if table.vacuum(dry_run=True):
        table.vacuum(dry_run=False)


def _first(error: Exception) -> str:
    """The sentence of an error, without what it was in."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""A log of decisions in a SQLite file that several threads open at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from dtx.client.tm.databases import SqliteLog

OPENERS = 8


def test_a_new_log_is_opened_by_many_at_once(tmp_path: Path) -> None:
    """SQLite answers "database is locked" at once when two connections choose the journal mode together."""
    for number in range(30):
        together = Barrier(OPENERS)

        def open_log(path: Path, together: Barrier = together) -> None:
            together.wait()
            SqliteLog(path).close()

        with ThreadPoolExecutor(OPENERS) as threads:
            list(threads.map(open_log, [tmp_path / f"{number}.db"] * OPENERS))

"""Which process runs which file of tests, and when, where several processes share a run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final
from zlib import crc32

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

_SLOW_PART: Final = 0.6
"""Part of a run within which files with slow tests begin."""


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """A file is run by one process, as with ``--dist loadfile``; those that need Spark by one all together.

    A JVM and Spark in it take as long to start and to warm up as many of these tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "pipeline" if "/pipeline/" in nodeid else str(super()._split_scope(nodeid))


def order(files: Iterable[Path], slow: set[Path]) -> list[Path]:
    """The order in which *files* begin, the same in every process.

    The simulation and Spark, which are long computations, begin at once. The others are mixed: those that wait for
    servers leave the processor to others. Files with slow tests are spread over the first part of the run: one of them
    at its end would be waited for by all processes but one.

    Args:
        files: with tests.
        slow: those of them that have slow tests.
    """
    mixed = sorted(files, key=lambda path: (crc32(path.name.encode()), path))
    place: dict[Path, float] = {}
    for part, kind in (
        (_SLOW_PART, [path for path in mixed if path in slow]),
        (1.0, [path for path in mixed if path not in slow]),
    ):
        place |= {path: part * index / len(kind) for index, path in enumerate(kind)}
    return sorted(mixed, key=lambda path: (_rank(path), place[path]))


def _rank(path: Path) -> int:
    if "sim" in path.parts:
        return 0
    return 1 if "pipeline" in path.parts else 2

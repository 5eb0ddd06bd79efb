"""Processor time of process trees, from /proc (Linux)."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> set[int]:
    """Return the process ids of *root* and its running descendants."""
    found: set[int] = set()
    fresh = [root]
    while fresh:
        pid = fresh.pop()
        found.add(pid)
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended
        for thread in threads:
            try:
                fresh += map(int, (thread / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended
    return found


def seconds(root: int) -> float:
    """Return user and system time so far, in seconds, of *root*, its descendants and their ended children."""
    ticks = 0
    for pid in tree(root):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # utime, stime, cutime, cstime are fields 14 to 17, after the name in parentheses, which may have any characters
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks * _TICK


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Processor time of some process trees.

    Args:
        elapsed: elapsed seconds.
        busy: processor seconds by name.
    """

    elapsed: float
    busy: Mapping[str, float]

    def share(self, name: str) -> float:
        """Return the share of one processor: 1.0 is all of it."""
        return self.busy[name] / self.elapsed


def machine_seconds() -> float:
    """Return the busy seconds of all processors of the machine so far."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) * _TICK


class Meter:
    """Measures process trees from its creation to ``read``; "others" has all other work of the machine.

    Args:
        roots: process ids by name; several of one name are added up.
    """

    def __init__(self, roots: Mapping[str, tuple[int, ...]]) -> None:
        self._roots = roots
        self._began = time.monotonic()
        self._first = self._now()

    def _now(self) -> dict[str, float]:
        busy = {name: sum(map(seconds, pids)) for name, pids in self._roots.items()}
        return {**busy, "others": machine_seconds() - sum(busy.values())}

    def read(self) -> Usage:
        """Return the usage since the creation."""
        busy = {name: later - self._first[name] for name, later in self._now().items()}
        return Usage(elapsed=time.monotonic() - self._began, busy=busy)

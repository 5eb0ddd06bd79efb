"""Processor time of process trees, from /proc (Linux)."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


def tree(root: int) -> set[int]:
    """*root* and everything below it that lives."""
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
    """User and system time so far of *root* and everything below it, children that were waited for included."""
    ticks = 0
    for pid in tree(root):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # behind the name, which may hold anything: utime, stime, cutime, cstime are fields 14 to 17
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks * _TICK


def resident(pid: int) -> int:
    """Memory that a process has in RAM, octets."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some process trees used in a time.

    Args:
        elapsed: seconds of the clock on the wall.
        busy: seconds of a processor, by name.
    """

    elapsed: float
    busy: Mapping[str, float]

    def share(self, name: str) -> float:
        """How much of one processor: 1.0 is all of it."""
        return self.busy[name] / self.elapsed


def machine_seconds() -> float:
    """What all processors of the machine have worked so far, whoever they worked for."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) * _TICK


class Meter:
    """Measures process trees from its making to ``read``; what else went on is there under the name "others".

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
        """What they used since."""
        busy = {name: later - self._first[name] for name, later in self._now().items()}
        return Usage(elapsed=time.monotonic() - self._began, busy=busy)

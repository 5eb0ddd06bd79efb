"""Who a process is, so that its successor on the same machine knows that it is dead without waiting for its lease.

A process id alone is reused. With the machine's boot, the namespace of process ids and the time of its start it names
one process for ever. What cannot be told (another machine, another container, a system without ``/proc``) counts as
alive.
"""

import os
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_DEAD: Final = frozenset("ZXx")  # a zombie has no threads any more: it writes nothing


def this_process() -> str | None:
    """The identity of this process, ``None`` where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        state, started = _state(os.getpid())
    except (OSError, ValueError):
        return None
    assert state not in _DEAD
    return f"{boot}/{namespace}/{os.getpid()}/{started}"


def is_dead(process: str | None) -> bool:
    """Whether the process that had this identity is certainly gone."""
    mine = this_process()
    if process is None or mine is None:
        return False
    boot, namespace, pid, started = process.split("/")
    if mine.split("/")[:2] != [boot, namespace]:
        return False
    try:
        state, found = _state(int(pid))
    except FileNotFoundError:
        return not _there(int(pid))
    except (OSError, ValueError):
        return False
    return state in _DEAD or found != started


def _there(pid: int) -> bool:
    """Whether a process of which ``/proc`` says nothing exists: it may hide those of other users (``hidepid``)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _state(pid: int) -> tuple[str, str]:
    """State and start time (clock ticks since boot) of a process; the name before them may hold anything."""
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]

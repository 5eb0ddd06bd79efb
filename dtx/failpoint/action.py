"""What happens at a failpoint: the process dies, stops or holds still; and the trace of what was reached."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, assert_never

from dtx.failpoint import DIED, Point

_POLL: Final = 0.002
"""Seconds between two looks at the file that holds the process."""


class Action(StrEnum):
    """What a process does at its failpoint."""

    DIE = "die"
    """End at once: nothing is cleaned up, flushed or said."""
    STOP = "stop"
    """SIGSTOP: connections stay open, nothing is answered, until somebody sends SIGCONT."""
    HOLD = "hold"
    """Hold the whole event loop until a file is removed: whoever made dtx wait can kill something else meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointTarget:
    """At which failpoint what is done.

    Args:
        point: where.
        number: the how-manieth time that it is reached, from 1.
        action: what.
        file: for ``HOLD``: it has the name of the point as long as the process waits, until it is removed.
    """

    point: Point
    number: int = 1
    action: Action = Action.DIE
    file: Path | None = None

    @classmethod
    def read(cls, text: str, action: Action, file: Path | None) -> "FailpointTarget":
        """Read ``name``, ``name#3`` or a point's number.

        Raises:
            ValueError: there is no such point, or the count is none.
        """
        name, separator, count = text.partition("#")
        number = int(count) if separator else 1
        if number < 1:
            raise ValueError(f"{text}: a point is reached for the first time at #1")
        return cls(point=Point.named(name), number=number, action=action, file=file)


def reaching(target: FailpointTarget | None, trace: Path | None) -> Callable[[Point], None]:
    """What is called at each point.

    Args:
        target: where something is to happen, once; ``None`` for nowhere.
        trace: gets a line with the name of each point that is reached, before anything happens there.
    """
    line = None if trace is None else os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    times = 0

    def reached(point: Point) -> None:
        nonlocal times
        if line is not None:
            os.write(line, f"{point.label}\n".encode())
        if target is not None and point is target.point:
            times += 1
            if times == target.number:
                _act(target)

    return reached


def _act(target: FailpointTarget) -> None:
    match target.action:
        case Action.DIE:
            os._exit(DIED)
        case Action.STOP:
            _say(target)
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.HOLD:
            assert target.file is not None, "a process that holds still has a file to look at"
            unfinished = target.file.with_name(f"{target.file.name}.tmp")
            unfinished.write_text(target.point.label)
            unfinished.rename(target.file)
            _say(target)
            while target.file.exists():
                time.sleep(_POLL)
        case _:
            assert_never(target.action)


def _say(target: FailpointTarget) -> None:
    sys.stderr.write(f"FAILPOINT {target.point.label}\n")
    sys.stderr.flush()

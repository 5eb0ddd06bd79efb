"""Actions at a failpoint: the process dies, stops or waits; and a trace of the points that were reached."""

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
"""Seconds between two checks of the file that holds the process."""


class Action(StrEnum):
    """The action of a process at its failpoint."""

    DIE = "die"
    """End at once: nothing is cleaned up, flushed or sent."""
    STOP = "stop"
    """SIGSTOP: connections stay open and nothing is answered until SIGCONT."""
    HOLD = "hold"
    """Block the event loop until a file is removed. A test can kill another process meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointTarget:
    """A failpoint and its action.

    Args:
        point: the failpoint.
        number: the occurrence number, from 1.
        action: the action.
        file: for ``HOLD``: dtx writes the name of the point to it, and waits until it is removed.
    """

    point: Point
    number: int = 1
    action: Action = Action.DIE
    file: Path | None = None

    @classmethod
    def read(cls, text: str, action: Action, file: Path | None) -> "FailpointTarget":
        """Read ``name``, ``name#3`` or a point's number.

        Raises:
            ValueError: there is no such point, or the number is not valid.
        """
        name, separator, count = text.partition("#")
        number = int(count) if separator else 1
        if number < 1:
            raise ValueError(f"{text}: a point is reached for the first time at #1")
        return cls(point=Point.named(name), number=number, action=action, file=file)


def point_handler(target: FailpointTarget | None, trace: Path | None) -> Callable[[Point], None]:
    """A function for :func:`dtx.failpoint.arm`.

    Args:
        target: the failpoint and its action, which happens once; ``None`` for none.
        trace: a file that gets a line with the name of each point, before its action.
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
            _announce(target)
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.HOLD:
            assert target.file is not None, "HOLD needs a file"
            unfinished = target.file.with_name(f"{target.file.name}.tmp")
            unfinished.write_text(target.point.label)
            unfinished.rename(target.file)
            _announce(target)
            while target.file.exists():
                time.sleep(_POLL)
        case _:
            assert_never(target.action)


def _announce(target: FailpointTarget) -> None:
    sys.stderr.write(f"FAILPOINT {target.point.label}\n")
    sys.stderr.flush()

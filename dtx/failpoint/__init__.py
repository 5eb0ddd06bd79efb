"""Failpoints: named instants at which a test lets this process die, stop or wait.

Theory of operation. The guarantees of dtx must hold whenever it dies. :class:`~dtx.failpoint.points.Point` lists the
instants that matter: before and after every durable write, every send to the broker, every answer, and during a
restart. The code marks them with ``failpoint.at(Point.X)``. This does nothing, unless the process was started as
``python -m dtx.failpoint``. Neither a setting nor the environment arms a ``dtx serve``.

On hot paths the code checks first: ``if failpoint.armed:`` costs 5 ns, the call without it 100 ns.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from dtx.failpoint.points import Point

__all__ = ["DIED", "Point", "arm", "armed", "at", "when_written"]

DIED: Final = 86
"""Exit status of a process that died at a failpoint."""

armed: bool = False
"""Whether failpoints are armed. Read it as ``failpoint.armed``: an imported name keeps its first value."""


def _nothing(point: Point) -> None:
    """Do nothing: failpoints are not armed."""


_reached: Callable[[Point], None] = _nothing


def at(point: Point) -> None:
    """Mark *point*: in an armed process, the action of a test may happen here."""
    _reached(point)


def when_written(point: Point) -> None:
    """Mark *point* when the output of this turn of the event loop is in the sockets.

    Answers are joined until the end of a turn. At the end of the next turn they are written in any case.
    """
    if armed:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, at, point)


def arm(reached: Callable[[Point], None]) -> None:
    """Call *reached* at each point from now on. For ``python -m dtx.failpoint``, and tests of this package."""
    global armed, _reached
    armed, _reached = True, reached

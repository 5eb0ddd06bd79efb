"""Failpoints: named instants at which a test lets this process die, stop or hold still.

Theory of operation. What dtx promises must hold whenever it dies. The instants that matter are listed in one place
(:class:`~dtx.failpoint.points.Point`): before and after every durable write, every send to the broker, every answer,
and on the way through a restart. The code says where it is with ``failpoint.at(Point.X)``, and nothing happens, unless
the process was started as ``python -m dtx.failpoint``. Neither a setting nor the environment arms a ``dtx serve``.

Where a branch passes in microseconds, the code asks first: ``if failpoint.armed:`` costs 5 ns, the call without it 100.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from dtx.failpoint.points import Point

__all__ = ["DIED", "Point", "arm", "armed", "at", "when_written"]

DIED: Final = 86
"""Exit status of a process that died at a failpoint."""

armed: bool = False
"""Whether this process is a test's. To be read as ``failpoint.armed``: a name that was imported stays as it was."""


def _nothing(point: Point) -> None:
    """What happens at a point of a process that nobody armed."""


_reached: Callable[[Point], None] = _nothing


def at(point: Point) -> None:
    """This is *point*."""
    _reached(point)


def when_written(point: Point) -> None:
    """This will be *point* when what was said in this turn of the event loop is in the sockets.

    Answers are joined until the end of a turn; the end of the next one has them written in any case.
    """
    if armed:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, at, point)


def arm(reached: Callable[[Point], None]) -> None:
    """From now on *reached* is called at each point. For ``python -m dtx.failpoint``, and tests of this package."""
    global armed, _reached
    armed, _reached = True, reached

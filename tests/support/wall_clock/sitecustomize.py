"""A process whose wall clock is wrong by as many seconds as a file of its directory says, from one call to the next.

Python imports this at start where its directory is on PYTHONPATH. What measures time without the wall clock
(``time.monotonic``, the event loop, CLOCK_BOOTTIME) stays right, as it does when somebody sets a machine's clock.
"""

import contextlib
import time
from pathlib import Path

_right = time.time


def _wrong() -> float:
    with contextlib.suppress(FileNotFoundError):
        return _right() + float(Path("clock-offset").read_text())
    return _right()


time.time = _wrong

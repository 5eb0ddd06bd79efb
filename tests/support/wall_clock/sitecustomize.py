"""Changes the wall clock of a process by the number of seconds in a file of its working directory, at each call.

Python imports this at start if its directory is on PYTHONPATH. Clocks other than the wall clock
(``time.monotonic``, the event loop, CLOCK_BOOTTIME) stay right, as when an administrator sets the clock of a machine.
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

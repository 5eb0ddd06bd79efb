"""Wrong clocks: processes that are started with libfaketime see an earlier or later time.

Only the wall clock (CLOCK_REALTIME) is skewed. Monotonic clocks are those of the machine, as on a machine whose clock
is set.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.debian import install

_PLACES: Final = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


def find_faketime() -> Path | None:
    """Return the library; install it if necessary and possible (Debian: ``libfaketime``)."""
    if (found := _installed()) is None:
        install("libfaketime", "library that makes clocks wrong")
        found = _installed()
    return found


def _installed() -> Path | None:
    return next((found for pattern in _PLACES for found in Path("/").glob(pattern[1:])), None)


class Clock:
    """The clock of some processes.

    Args:
        path: a file with the error of the clock, which the processes can read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.library = find_faketime()
        self.skew(0)
        path.chmod(0o644)

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables for the processes; empty without the library."""
        if self.library is None:
            return {}
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_CACHE_DURATION": "1",  # seconds until a change is noticed
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def skew(self, seconds: float) -> None:
        """Set the error of the clock in seconds; 0 corrects it."""
        self._path.write_text(f"{seconds:+.3f}\n")

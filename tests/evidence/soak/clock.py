"""Clocks that are wrong: processes that are started with libfaketime believe that it is earlier or later than it is.

Only what people call the time is skewed (CLOCK_REALTIME); the clocks that merely go on are those of the machine, as
they are where somebody sets a real machine's clock.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.debian import install

_PLACES: Final = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


def find_faketime() -> Path | None:
    """The library, where it is installed, or can be (Debian: ``libfaketime``)."""
    if (found := _installed()) is None:
        install("libfaketime", "library that makes clocks wrong")
        found = _installed()
    return found


def _installed() -> Path | None:
    return next((found for pattern in _PLACES for found in Path("/").glob(pattern[1:])), None)


class Clock:
    """The clock of some processes.

    Args:
        path: a file that the processes can read, which tells them how wrong their clock is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.library = find_faketime()
        self.skew(0)
        path.chmod(0o644)

    @property
    def environment(self) -> Mapping[str, str]:
        """What processes have to be started with; empty without the library."""
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
        """Set it wrong by so much; 0: right again."""
        self._path.write_text(f"{seconds:+.3f}\n")

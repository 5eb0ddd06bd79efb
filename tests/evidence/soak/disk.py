"""A small disk that can be filled: a file system of its own in memory. Only root can make one."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE: int = 640 << 20
"""Octets: a cluster with its log of changes, and a copy of the programs where their account needs one."""


class SmallDisk:
    """A tmpfs at *place*. Use as a context manager.

    Args:
        place: an existing directory.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.real = False
        """Whether it is one: else *place* is a directory like any other, and cannot be filled."""
        self._heir: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0711", "dtx-soak", str(self.place)]
        with contextlib.suppress(OSError):
            self.real = subprocess.run(words, capture_output=True, check=False).returncode == 0
        if self.real:
            # Reads until we let go of the other end, or are dead: a file system would stay for ever.
            self._heir = subprocess.Popen(
                ["sh", "-c", 'cat; exec umount --lazy "$0"', str(self.place)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._heir is not None:
            self._heir.communicate()

    def fill(self) -> None:
        """Leave no octet free."""
        room = os.statvfs(self.place)
        free = room.f_bavail * room.f_frsize
        with (self._ballast).open("wb") as file, contextlib.suppress(OSError):
            while free > 0:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(free, 1 << 20))
                free -= 1 << 20

    def free(self) -> None:
        """Give the room back. Idempotent."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.place / "ballast"

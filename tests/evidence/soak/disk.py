"""A small disk that can be filled: a separate file system in memory. Only root can make one."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE: int = 640 << 20
"""Bytes: room for a cluster with its WAL, and a copy of the programs if its account needs one."""


class SmallDisk:
    """A tmpfs at *place*. Use as a context manager.

    Args:
        place: an existing directory.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.real = False
        """Whether the file system exists; otherwise *place* is an ordinary directory and must not be filled."""
        self._heir: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0711", "dtx-soak", str(self.place)]
        with contextlib.suppress(OSError):
            self.real = subprocess.run(words, capture_output=True, check=False).returncode == 0
        if self.real:
            # It reads until this process closes the pipe or dies. Otherwise a kill would leave the file system.
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
        """Fill the disk completely."""
        room = os.statvfs(self.place)
        free = room.f_bavail * room.f_frsize
        with (self._ballast).open("wb") as file, contextlib.suppress(OSError):
            while free > 0:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), min(free, 1 << 20))
                free -= 1 << 20

    def free(self) -> None:
        """Free the space again. Idempotent."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.place / "ballast"

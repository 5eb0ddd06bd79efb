"""The faults of the nemesis have the intended effects."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evidence.soak.clock import Clock
from tests.evidence.soak.disk import SmallDisk
from tests.support.processes import short_directory, wait_until

HERE = Path(__file__).parents[3]
_CLOCKS = "import time; print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))"


def test_a_full_disk_takes_nothing_until_it_is_freed(left_out: Callable[[str], None]) -> None:
    with short_directory("disk") as place, SmallDisk(place) as disk:
        if not disk.real:
            left_out("a full disk: only root can make a small file system")
            return
        disk.fill()
        with pytest.raises(OSError, match="No space left") as full:
            (place / "more").write_bytes(b"x" * 8192)
        assert full.value.errno == errno.ENOSPC
        disk.free()
        assert (place / "more").write_bytes(b"x" * 8192) == 8192


def test_the_disk_goes_away_with_its_directory(left_out: Callable[[str], None]) -> None:
    with short_directory("disk") as place:
        with SmallDisk(place) as disk:
            if not disk.real:
                left_out("a full disk: only root can make a small file system")
            (place / "file").touch()
        assert disk.real is not (place / "file").exists()


def test_the_disk_is_removed_with_its_creator(left_out: Callable[[str], None]) -> None:
    """Also after a kill."""
    with short_directory("disk") as place:
        program = f"""
import os, signal
from pathlib import Path
from tests.evidence.soak.disk import SmallDisk
with SmallDisk(Path({str(place)!r})) as disk:
    print(disk.real, os.path.ismount({str(place)!r}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
        died = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=HERE)
        assert died.returncode == -signal.SIGKILL, died.stderr
        if died.stdout != "True True\n":
            left_out("a full disk: only root can make a small file system")
        wait_until(lambda: not place.is_mount(), what="the end of the file system")


def test_a_clock_is_wrong_by_the_given_offset(left_out: Callable[[str], None]) -> None:
    """Monotonic clocks are right, as on a machine whose clock is set."""
    with short_directory("clock") as place:
        clock = Clock(place / "clock")
        if clock.library is None:
            left_out("a wrong clock: install libfaketime")
            return
        for skew in (3600.0, -86400.0, 0.0):
            clock.skew(skew)
            before = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
            said = subprocess.run(
                [sys.executable, "-c", _CLOCKS], env=dict(clock.environment), capture_output=True, text=True, check=True
            ).stdout
            off = [float(there) - here for there, here in zip(said.split(), before, strict=True)]
            assert off == pytest.approx([skew, 0, 0], abs=30)

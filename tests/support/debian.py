"""Debian's packages, for programs that tests need and this machine does not have."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")


def install(package: str, what: str) -> None:
    """Install *package* where this is root on Debian; elsewhere, or where that fails, nothing comes of it.

    Args:
        package: its name.
        what: is missing, for whoever waits.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get") or not Path("/etc/debian_version").exists():
        return
    say(f"no {what} on this machine: installing the Debian package (a minute or two)")
    with _no_service_started(), _unhurried():
        for words in (("update",), ("install", "--yes", "--no-install-recommends", package)):
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(
                ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words],
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
            if done.returncode != 0:
                say(f"apt-get {words[0]} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """The time of a test is not for installing: an interrupted dpkg would leave nothing installable at all."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


@contextlib.contextmanager
def _no_service_started() -> Iterator[None]:
    """Debian starts what it installs, unless this script says no."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)


def say(sentence: str) -> None:
    """Past pytest's capture: somebody waits."""
    print(sentence, file=sys.__stderr__, flush=True)

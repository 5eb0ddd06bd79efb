"""Packages of npm's registry, for tests that use one."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

RHEA: Final = "rhea@3.0.5"
"""A client of AMQP 1.0."""
AXE: Final = "axe-core@4.14.1"
"""Checks the accessibility of pages."""
SECONDS: Final = 120.0


def with_package(package: str, directory: Path) -> Path:
    """Install *package* into *directory*. Without Node.js or the registry, the test is skipped."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip(f"{package} needs node and npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory)]
    try:
        subprocess.run([*command, package], check=True, capture_output=True, timeout=SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"{package} cannot be had from npm's registry")
    return directory

"""rhea, a client of AMQP 1.0 for Node.js, from npm's registry."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

VERSION: Final = "3.0.5"
SECONDS: Final = 120.0


def with_rhea(directory: Path) -> Path:
    """Install rhea into *directory*. Without Node.js or npm's registry, the test is skipped."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("rhea needs node and npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(directory)]
    try:
        subprocess.run([*command, f"rhea@{VERSION}"], check=True, capture_output=True, timeout=SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("rhea cannot be had from npm's registry")
    return directory

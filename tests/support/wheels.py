"""The wheels of dtx and dtx-client, and clean virtual environments for them."""

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from tests.support.processes import unmeasured

SERVER: Final = Path(__file__).parents[2]
"""The project of the distribution dtx."""
CLIENT: Final = SERVER / "deploy/client"


def build_wheel(project: Path, into: Path) -> Path:
    """Build the wheel of one distribution, without its dependencies.

    Args:
        project: a directory or an sdist.
        into: the directory for the wheel, one for each project.
    """
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with unmeasured():  # pip and what it starts
        subprocess.run([*pip, "--wheel-dir", into, project], check=True, stdin=subprocess.DEVNULL, timeout=300)
    (wheel,) = into.glob("*.whl")
    return wheel


class Environment:
    """A clean virtual environment.

    Args:
        directory: for the environment.
    """

    def __init__(self, directory: Path) -> None:
        self.python = directory / "bin/python"
        venv.create(directory, with_pip=True, symlinks=True)
        self.packages = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"

    def start(self, *words: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run its Python outside of the project."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DTX_"))}
        return subprocess.run(
            [self.python, *words],
            cwd=self.python.parent,
            env=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def run(self, *words: str | Path) -> str:
        """Run its Python outside of the project; return the output."""
        done = self.start(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pip(self, *words: str | Path) -> str:
        """Run its pip; return the output."""
        return self.run("-m", "pip", *words)

"""The RabbitMQ that the tests run: one that is installed, one that can be installed, or a container.

Tests that need a broker are never skipped: without one, the run fails. ``--rabbitmq 4`` runs them against RabbitMQ 4,
of Debian 13, in a separate system below ``/var/cache/dtx`` that this module makes once::

    python -m tests.support.rabbitmq_install
"""

import enum
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.support.debian import install, make_system, say

OPTION: Final = "DTX_TEST_RABBITMQ"
"""The variable of the environment that has the major version, for processes that tests start as well."""
KHEPRI: Final = "4-khepri"
"""The option for RabbitMQ 4 with its newer metadata store, Khepri."""
CLUSTERS: Final = "3-cluster", "4-cluster"
"""The options for three nodes, of which the tests and dtx know the first."""
VERSIONS: Final = {"3": "rabbitmq:3.13-management", "4": "rabbitmq:4.0-management"}
"""Major versions and their container images."""
SYSTEM: Final = Path("/var/cache/dtx/rabbitmq-4")
"""A small Debian 13 with RabbitMQ 4.0 and Erlang 27."""
_PROGRAMS: Final = Path("usr/lib/rabbitmq/bin")
# The mounts belong to one process and end with it. The directory of the node has the same path inside.
_ENTER: Final = (
    'root=$1 directory=$2 && shift 2 && mount -t proc proc "$root/proc" && mount --rbind /dev "$root/dev" &&'
    ' mkdir -p "$root$directory" && mount --bind "$directory" "$root$directory" &&'
    ' exec chroot "$root" /bin/sh -c \'cd "$0" && exec "$@"\' "$directory" "$@"'
)


class Kind(enum.Enum):
    """The way to run nodes."""

    PROGRAM = enum.auto()
    DOCKER = enum.auto()


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed RabbitMQ.

    Args:
        kind: the way to run its nodes.
        programs: the directory of its programs, or the name of the container image.
        root: the root directory of the system with the programs; ``None``: this system.
    """

    kind: Kind
    programs: Path
    root: Path | None = None

    def command(self, directory: Path, program: str, *words: str) -> Sequence[str | Path]:
        """The command line of one of its programs, for a node whose files are in *directory*."""
        if self.root is None:
            return [self.programs / program, *words]
        enter: list[str | Path] = ["unshare", "--mount", "sh", "-c", _ENTER, "enter", self.root, directory]
        return [*enter, self.programs / program, *words]

    def epmd(self) -> Path | None:
        """The path of Erlang's port mapper, inside the system that has it."""
        found = shutil.which("epmd") if self.root is None else None
        root = self.root or Path("/")
        paths = [Path(found)] if found else sorted(root.glob("usr/lib/erlang/erts-*/bin/epmd"))
        return Path("/", paths[0].relative_to(root)) if paths else None


@functools.cache
def find_rabbitmq(version: str) -> Installation:
    """The RabbitMQ of a major version.

    Installs the Debian package if there is none and this is root on Debian. Ends the test run with a message
    if nothing works.
    """
    found = _installed(version)
    if found is None:
        if version == "3":
            install("rabbitmq-server", "rabbitmq-server")
        else:
            make_system(SYSTEM, "trixie", "rabbitmq-server")
        found = _installed(version)
    if found is not None:
        return found
    image = VERSIONS[version]
    if shutil.which("docker"):
        say(f"no RabbitMQ {version} on this machine: using the container image {image}")
        done = subprocess.run(["docker", "pull", "--quiet", image], capture_output=True, check=False)
        if done.returncode == 0:
            return Installation(Kind.DOCKER, Path(image))
        say(f"docker pull failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    means = "install rabbitmq-server (Debian: apt install rabbitmq-server)" if version == "3" else "run them as root"
    pytest.exit(f"the tests need RabbitMQ {version}: {means}, set RABBITMQ_HOME, or start Docker", returncode=4)


def chosen() -> str:
    """The major version that this run is about."""
    return os.environ.get(OPTION, "3").partition("-")[0]


def chosen_khepri() -> bool:
    """Whether the nodes of this run use Khepri."""
    return os.environ.get(OPTION) == KHEPRI


def chosen_cluster() -> bool:
    """Whether the shared node of this run is one of three."""
    return os.environ.get(OPTION) in CLUSTERS


def is_asked() -> bool:
    """Whether this run is about one version: long tests without a broker are left out then."""
    return OPTION in os.environ


def is_there(version: str) -> bool:
    """Whether nodes of *version* can run without an installation."""
    return chosen() == version or _installed(version) is not None


def _installed(version: str) -> Installation | None:
    home = os.environ.get("RABBITMQ_HOME")
    if home is not None:
        return Installation(Kind.PROGRAM, Path(home, "sbin"))
    if version != "3":
        there = (SYSTEM / _PROGRAMS / "rabbitmq-server").exists() and os.geteuid() == 0
        return Installation(Kind.PROGRAM, "/" / _PROGRAMS, SYSTEM) if there else None
    # Debian's programs on the PATH change the user and the directory; the real ones are beside the library.
    if ("/" / _PROGRAMS / "rabbitmq-server").exists():
        return Installation(Kind.PROGRAM, "/" / _PROGRAMS)
    found = shutil.which("rabbitmq-server")
    return Installation(Kind.PROGRAM, Path(found).resolve().parent) if found else None


if __name__ == "__main__":
    sys.stdout.write(f"{find_rabbitmq('4')}\n")

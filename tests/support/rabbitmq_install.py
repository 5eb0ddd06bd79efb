"""Where the tests' RabbitMQ comes from: installed, installable, or in a container. Without one the run fails."""

import enum
import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.debian import install, say

IMAGE = "rabbitmq:3.13-management"


class Kind(enum.Enum):
    """How nodes are run."""

    PROGRAM = enum.auto()
    DOCKER = enum.auto()


@functools.cache
def find_rabbitmq() -> tuple[Kind, Path]:
    """How to run a node: the directory of the programs, or the image of a container.

    Installs the Debian package where there is none and this is root on Debian. Ends the test run with one sentence
    where nothing works: tests that need a broker are never skipped.
    """
    found = _installed()
    if found is None:
        install("rabbitmq-server", "rabbitmq-server")
        found = _installed()
    if found is not None:
        return Kind.PROGRAM, found
    if shutil.which("docker"):
        say(f"no rabbitmq-server on this machine: using the container image {IMAGE}")
        done = subprocess.run(["docker", "pull", "--quiet", IMAGE], capture_output=True, check=False)
        if done.returncode == 0:
            return Kind.DOCKER, Path(IMAGE)
        say(f"docker pull failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    pytest.exit(
        "the tests need RabbitMQ: install rabbitmq-server (Debian: apt install rabbitmq-server) or start Docker",
        returncode=4,
    )


def _installed() -> Path | None:
    # Debian's programs on the PATH change the user and the directory; the real ones are beside the library.
    if Path("/usr/lib/rabbitmq/bin/rabbitmq-server").exists():
        return Path("/usr/lib/rabbitmq/bin")
    found = shutil.which("rabbitmq-server")
    return Path(found).resolve().parent if found else None

"""Where the tests' RabbitMQ comes from: installed, installable, or in a container. Without one the run fails."""

import contextlib
import enum
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

IMAGE = "rabbitmq:3.13-management"
POLICY = Path("/usr/sbin/policy-rc.d")


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
    if found is None and os.geteuid() == 0 and shutil.which("apt-get") and Path("/etc/debian_version").exists():
        _say("no rabbitmq-server on this machine: installing the Debian package (a minute or two)")
        with _no_service_started():
            for words in (("update",), ("install", "--yes", "--no-install-recommends", "rabbitmq-server")):
                env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
                done = subprocess.run(
                    ["apt-get", "-q", *words], env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
                )
                if done.returncode != 0:
                    _say(f"apt-get {words[0]} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
        found = _installed()
    if found is not None:
        return Kind.PROGRAM, found
    if shutil.which("docker"):
        _say(f"no rabbitmq-server on this machine: using the container image {IMAGE}")
        done = subprocess.run(["docker", "pull", "--quiet", IMAGE], capture_output=True, check=False)
        if done.returncode == 0:
            return Kind.DOCKER, Path(IMAGE)
        _say(f"docker pull failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
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
        POLICY.unlink()


def _say(sentence: str) -> None:
    # past pytest's capture: somebody waits
    print(sentence, file=sys.__stderr__, flush=True)

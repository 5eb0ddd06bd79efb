"""How the tests find or install RabbitMQ. A missing RabbitMQ never skips tests."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import rabbitmq_install
from tests.support.rabbitmq_install import SYSTEM, VERSIONS, Installation, Kind

find = rabbitmq_install.find_rabbitmq.__wrapped__
HERE = Installation(Kind.PROGRAM, Path("/usr/lib/rabbitmq/bin"))


class Machine:
    """A machine that has only the given programs. It records the commands that run.

    Args:
        programs: names of the programs.
        root: whether the tests run as root.
        failing: name of a program that fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *programs: str, root: bool, failing: str = "") -> None:
        self.run: list[str] = []
        self.hurried: list[bool] = []
        self.failing = failing
        self.installed: Installation | None = None
        monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in programs else None)
        monkeypatch.setattr(Path, "exists", lambda _: True)  # Debian, with a policy-rc.d that must not be changed
        monkeypatch.setattr(rabbitmq_install, "_installed", lambda _: self.installed)
        monkeypatch.setattr(rabbitmq_install, "make_system", lambda *_: None)
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, words: Sequence[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.run.append(" ".join(words))
        self.hurried.append(signal.getitimer(signal.ITIMER_REAL)[0] > 0)
        done = words[0] != self.failing
        if done and "install" in words:
            self.installed = HERE
        return subprocess.CompletedProcess(words, 0 if done else 100, b"", b"no network")


def test_root_on_debian_installs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, "apt-get", "docker", root=True)
    assert find("3") == HERE
    update, install = machine.run
    assert update.startswith("apt-get ")
    assert update.endswith(" update")
    assert install.startswith("apt-get ")
    assert install.endswith(" rabbitmq-server")


def test_the_installation_does_not_count_against_the_first_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-timeout would interrupt dpkg, and later installations would fail."""
    limited = signal.getitimer(signal.ITIMER_REAL)[0] > 0  # off in a debugger
    machine = Machine(monkeypatch, "apt-get", root=True)
    find("3")
    assert machine.hurried == [False, False]
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is limited


@pytest.mark.parametrize("root", [False, True], ids=["not root", "apt-get fails"])
def test_else_docker_has_it(monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    machine = Machine(monkeypatch, "apt-get", "docker", root=root, failing="apt-get")
    for version, image in VERSIONS.items():
        assert find(version) == Installation(Kind.DOCKER, Path(image))
        assert machine.run[-1] == f"docker pull --quiet {image}"


@pytest.mark.parametrize("programs", [(), ("docker",)], ids=["nothing", "docker fails"])
def test_otherwise_one_sentence_names_the_remedy_and_the_run_fails(
    monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...]
) -> None:
    Machine(monkeypatch, *programs, root=False, failing="docker")
    with pytest.raises(pytest.exit.Exception, match=r"need RabbitMQ 4: run them as root, .* or start Docker"):
        find("4")
    with pytest.raises(pytest.exit.Exception, match="apt install rabbitmq-server") as ended:
        find("3")
    assert ended.value.returncode == 4


def test_programs_of_another_system_run_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's directory has the same path there."""
    assert HERE.command(Path("/d"), "rabbitmqctl", "status") == [Path("/usr/lib/rabbitmq/bin/rabbitmqctl"), "status"]
    words = Installation(Kind.PROGRAM, Path("/usr/lib/rabbitmq/bin"), SYSTEM).command(Path("/d"), "rabbitmqctl", "x")
    assert words[0] == "unshare"
    assert words[-4:] == [SYSTEM, Path("/d"), Path("/usr/lib/rabbitmq/bin/rabbitmqctl"), "x"]
    monkeypatch.setenv("RABBITMQ_HOME", "/opt/rabbit")
    assert find("4") == Installation(Kind.PROGRAM, Path("/opt/rabbit/sbin"))

"""A successor on the same machine knows that its predecessor is dead."""

import os
import signal
import subprocess
import sys

import pytest

from dtx.log import lease

TELL = "from dtx.log.lease import this_process; print(this_process(), flush=True); input()"


def another() -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen([sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.communicate()


def test_this_process_lives() -> None:
    assert not lease.is_dead(lease.this_process())


def test_a_stopped_process_is_alive_and_a_zombie_is_dead() -> None:
    child, identity = another()
    try:
        child.send_signal(signal.SIGSTOP)
        assert not lease.is_dead(identity)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert lease.is_dead(identity)
    finally:
        end(child)
    assert lease.is_dead(identity)


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    mine = lease.this_process()
    assert mine is not None
    assert lease.is_dead(mine + "0")


@pytest.mark.parametrize("part", [0, 1], ids=["boot", "namespace"])
def test_an_unknown_process_counts_as_alive(part: int) -> None:
    child, identity = another()
    end(child)
    parts = identity.split("/")
    parts[part] += "0"
    assert lease.is_dead(identity)
    assert not lease.is_dead("/".join(parts))
    assert not lease.is_dead(None)


def test_a_process_that_is_hidden_from_us_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``hidepid``, /proc does not show processes of other users."""
    child, identity = another()
    state = lease._state

    def hides(pid: int) -> tuple[str, str]:
        if pid == child.pid:
            raise FileNotFoundError
        return state(pid)

    monkeypatch.setattr(lease, "_state", hides)
    assert not lease.is_dead(identity)
    monkeypatch.setattr(os, "kill", refuses)
    assert not lease.is_dead(identity)
    monkeypatch.undo()
    end(child)
    assert lease.is_dead(identity)


def refuses(pid: int, number: int) -> None:
    """The system's error for processes of other users."""
    raise PermissionError

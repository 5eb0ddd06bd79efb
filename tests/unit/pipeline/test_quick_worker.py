"""A worker calls back before it loads anything, so that Spark's ten seconds are enough however busy the machine is."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
from dtx.pipeline.session import quick_python

SECRET = b"s3cr3t"
GATE = "gate"
HELD = f"""
import importlib, os, sys
with open({GATE!r}) as gate:  # until somebody else opens it
    gate.read()
os.remove("pyspark.py")
importlib.invalidate_caches()
del sys.modules["pyspark"]
import pyspark
"""
WORKER = """
import sys
from pyspark.worker_util import get_sock_file_to_executor
with get_sock_file_to_executor(timeout=None) as file:
    file.write(" ".join([__name__, *sys.argv[1:]]).encode())
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory in which PySpark is not to be had before somebody opens the gate."""
    os.mkfifo(tmp_path / GATE)
    (tmp_path / "pyspark.py").write_text(HELD)
    (tmp_path / "worker.py").write_text(WORKER)
    return tmp_path


@pytest.fixture(params=["port", "path"])
def listener(request: pytest.FixtureRequest, here: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Where Spark waits for the worker, and what it tells it."""
    if request.param == "path":
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind(str(here / "socket"))
            waiting.listen(1)
            yield waiting, {"PYTHON_WORKER_FACTORY_SOCK_PATH": str(here / "socket")}
    else:
        with socket.create_server(("127.0.0.1", 0), backlog=1) as waiting:
            told = {"PYTHON_WORKER_FACTORY_PORT": str(waiting.getsockname()[1])}
            yield waiting, told | {"PYTHON_WORKER_FACTORY_SECRET": SECRET.decode()}


def start(here: Path, told: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    words = [str(quick_python()), "-m", "worker", "word"]
    return subprocess.Popen(words, cwd=here, env=environment | told, stderr=subprocess.PIPE)


def exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = connection.recv(count - len(got))
        assert more, f"closed after {got!r}"
        got += more
    return got


def test_a_worker_has_called_back_before_it_loads_pyspark(
    here: Path, listener: tuple[socket.socket, dict[str, str]]
) -> None:
    waiting, told = listener
    with start(here, told) as worker:
        connection, _ = waiting.accept()
        with connection:
            if "PYTHON_WORKER_FACTORY_SECRET" in told:
                assert exactly(connection, 4 + len(SECRET)) == len(SECRET).to_bytes(4, "big") + SECRET
                connection.sendall(b"\0\0\0\2ok")
            (here / GATE).open("w").close()  # opens when the worker waits there: it has PySpark from now on only
            assert int.from_bytes(exactly(connection, 4), "big") == worker.pid
            assert exactly(connection, 13) == b"__main__ word"
        assert worker.wait() == 0


def test_a_worker_that_is_refused_ends(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as waiting:
        port = str(waiting.getsockname()[1])
        told = {"PYTHON_WORKER_FACTORY_PORT": port, "PYTHON_WORKER_FACTORY_SECRET": SECRET.decode()}
        with start(here, told) as worker:
            connection, _ = waiting.accept()
            with connection:
                exactly(connection, 4 + len(SECRET))
                connection.sendall(b"\0\0\0\3err")
                _, said = worker.communicate()
    assert worker.returncode != 0
    assert b"spark does not take this worker" in said


def test_any_other_program_of_python_runs_as_it_is() -> None:
    done = subprocess.run([quick_python(), "-c", "print(6 * 7)"], capture_output=True, check=True)
    assert done.stdout == b"42\n"

"""An S3 server for tests: ministack, in its own virtual environment, since its dependencies are pinned."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from pyarrow import fs

from tests.support.processes import end, free_port, spawn, wait_until

_PACKAGE: Final = "ministack==1.5.33"
"""ministack handles a conditional PUT atomically: one of many writers wins. moto checks first and then writes."""
_SECONDS: Final = 120.0


def install(directory: Path) -> Path:
    """The program, installed into *directory*; if that fails, the test is skipped."""
    program = directory / "bin/ministack"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        words = ["install", "--quiet", "--disable-pip-version-check", _PACKAGE]
        done = subprocess.run([directory / "bin/pip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"an S3 server: {_PACKAGE} cannot be installed ({done.stderr.strip()[-200:]})")
    return program


@contextmanager
def server(directory: Path) -> Iterator[dict[str, str]]:
    """Run a server; yields the environment variables for Arrow and deltalake. The server stores nothing on disk.

    Args:
        directory: the directory of the program and its output.
    """
    program = install(directory / "ministack")
    port = free_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "testtest",
        "AWS_REGION": "us-east-1",
    }
    with (directory / "ministack.log").open("wb") as output:
        process = spawn([str(program)], output=output.fileno(), env=os.environ | {"GATEWAY_PORT": str(port)})
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, seconds=_SECONDS, what="an S3 server")
        assert process.poll() is None, (directory / "ministack.log").read_text()[-2000:]
        yield variables
    finally:
        end(process)


def _answers(port: int) -> bool:
    system = fs.S3FileSystem(
        access_key="test", secret_key="testtest", endpoint_override=f"http://127.0.0.1:{port}",
        region="us-east-1", allow_bucket_creation=True, connect_timeout=1, request_timeout=5,
    )  # fmt: skip
    try:
        system.create_dir("bucket")
    except OSError:
        return False
    return True

"""A private MariaDB for tests, if its programs are installed."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import end, short_directory, spawn, wait_until

SERVER = shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def mariadb() -> Iterator[str]:
    """A server in its own directory; yields the URL of its user root, who needs no password."""
    assert SERVER is not None
    with short_directory("mariadb") as directory:
        data, path = directory / "data", directory / "socket"
        install = shutil.which("mariadb-install-db") or "mariadb-install-db"
        common = ["--no-defaults", f"--datadir={data}"]
        made = subprocess.run(
            [install, *common, "--auth-root-authentication-method=normal", "--skip-test-db", "--user=root"],
            capture_output=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        with (directory / "log").open("wb") as log:
            server = spawn(
                [
                    SERVER,
                    *common,
                    f"--socket={path}",
                    "--skip-networking",
                    "--user=root",
                    "--innodb-buffer-pool-size=16M",
                ],
                output=log.fileno(),
            )
        try:
            wait_until(lambda: _answers(path), seconds=90, what="MariaDB's start")
            yield f"mariadb://root@localhost/?unix_socket={path}"
        finally:
            end(server)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:  # PyMySQL does not close a refused socket
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True

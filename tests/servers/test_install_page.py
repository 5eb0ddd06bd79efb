"""docs/operations/install.md from its first command to its last, with wheels in an environment of its own."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import end, free_port, short_directory, spawn, wait_until
from tests.support.wheels import CLIENT, SERVER, build_wheel

PAGE = SERVER / "docs/operations/install.md"
SERVE = "/opt/dtx/bin/dtx serve --config /etc/dtx/dtx.toml"


class Reader:
    """Follows the page in a directory of its own.

    Args:
        place: a directory for what the page has in /etc and /var.
    """

    def __init__(self, place: Path) -> None:
        wheel, client = (build_wheel(project, place / project.name) for project in (SERVER, CLIENT))
        self._places = {
            "'dtx[embedded]'": f"'{wheel}[embedded]' '{client}'",
            "/opt/dtx": str(place / "opt"),
            "/etc/dtx": str(place / "etc"),
            "/var/lib/dtx": str(place / "data"),
            "15673": str(free_port()),
            "5673": str(free_port()),
        }
        self._place = place
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DTX_"))
        }
        self._log = place / "log"
        text = PAGE.read_text(encoding="utf-8")
        self.blocks = {
            title: re.findall(r"^```(\w+)\n(.*?)^```", rest, re.DOTALL | re.MULTILINE)
            for title, _, rest in (
                part.partition("\n") for part in re.split(r"^## \d\. ", text, flags=re.MULTILINE)[1:]
            )
        }

    def here(self, text: str) -> str:
        """*text* with the places of this reader."""
        return re.sub("|".join(map(re.escape, self._places)), lambda found: self._places[found[0]], text)

    def run(self, commands: str) -> str:
        """Run commands in one shell; return their output."""
        environment = self._environment | {"DTX_CONFIG": self.here("/etc/dtx/dtx.toml")}
        environment["PATH"] = f"{self.here('/opt/dtx/bin')}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-euc", self.here(commands)], cwd=self._place, env=environment, text=True, check=False,
            capture_output=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self) -> "subprocess.Popen[bytes]":
        """Start dtx as the page says, and wait for READY."""
        with self._log.open("wb") as log:
            process = spawn(self.here(SERVE).split(), output=log.fileno(), env=self._environment, cwd=self._place)
        wait_until(lambda: b"READY" in self._log.read_bytes(), what="READY")
        return process


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A reader in a directory that PostgreSQL's account can enter."""
    with short_directory("install") as place:
        yield Reader(place)


@pytest.mark.timeout(600)  # pip installs dtx, and is slow where much else runs
def test_the_page_leads_from_installation_to_restore(reader: Reader) -> None:
    blocks = {title: [text for _, text in found] for title, found in reader.blocks.items()}
    reader.run(blocks["Install the package"][0])
    certificates, settings = blocks["TLS"]
    reader.run(certificates)
    reader.run(f"cat > /etc/dtx/dtx.toml <<'END'\n{settings}END")
    start, doctor = blocks["Start"]
    assert start.strip() == SERVE
    process = reader.serve()
    try:
        reader.run(doctor)
        users, client = blocks["Two users"]
        assert re.findall(r"^(\w+) ", reader.run(users), re.MULTILINE)[-2:] == ["alice", "bob"]
        reader.run(f"/opt/dtx/bin/python - <<'END'\n{client}END")
        assert "1 in doubt: 1 prepared" in reader.run("dtx branches")
        assert re.search(r"^dtx_lease_held.* 1\.0$", reader.run(blocks["A dashboard"][0]), re.MULTILINE)
        assert "wrote dtx.dump" in reader.run(blocks["A backup"][0])
    finally:
        end(process)
    restore, look = blocks["A restore"]
    assert ", 1 branch is open" in reader.run(restore)
    reader.run(blocks["An upgrade"][0])
    process = reader.serve()
    try:
        found = reader.run(look)
        assert "1 in doubt: 1 prepared" in found
        assert {"alice", "bob"} <= set(found.split())
    finally:
        end(process)

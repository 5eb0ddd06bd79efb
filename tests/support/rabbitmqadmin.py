"""RabbitMQ's own command line client for its management API, against dtx."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.operator import Operator
from tests.support.rabbitmq import RabbitNode


@cache
def _program(url: str) -> bytes:
    """The client that a node offers."""
    with urllib.request.urlopen(f"{url}/cli/rabbitmqadmin") as answer:
        program: bytes = answer.read()
    return program


class Admin:
    """``rabbitmqadmin`` of the version of *node*, for a dtx.

    Args:
        node: offers the program.
        operator: the address and user of dtx.
    """

    def __init__(self, node: RabbitNode, operator: Operator) -> None:
        self._program = _program(node.management_url)
        self._operator = operator

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run it with *words*."""
        place = urlsplit(self._operator.url)
        with tempfile.TemporaryDirectory() as directory:
            program = Path(directory, "rabbitmqadmin")
            program.write_bytes(self._program)
            given = {"host": place.hostname, "port": place.port}
            given |= {"username": self._operator.user, "password": self._operator.password}
            options = [f"--{name}={value}" for name, value in given.items()]
            command = [sys.executable, "-W", "ignore", str(program), *options, *words]
            return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)

    def do(self, *words: str, stdin: str = "") -> str:
        """Run it with *words*, successfully; returns what it printed."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, done
        return done.stdout

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """The rows that it shows, with the columns of its table."""
        raw = json.loads(self.do("--format=raw_json", *words))
        text = self.do("--format=tsv", *words).splitlines() if raw else [""]
        names = text[0].split("\t")
        return [{name: _value(value) for name, value in zip(names, line.split("\t"), strict=True)} for line in text[1:]]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

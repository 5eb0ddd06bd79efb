"""The runbooks of README: a test runs their commands as they stand there, all of them, in the order that they have."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dtx.client import Xid
from tests.support.service import DtxService

README = Path(__file__).parents[2] / "README.md"
_SECTION = re.compile(r"^## Runbooks\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_BLOCK = r"^ *```{}\n(.*?)^ *```$"


def runbooks(kind: str = "sh") -> dict[str, list[str]]:
    """By title, the lines of each: commands, or what else the blocks of *kind* have."""
    block = re.compile(_BLOCK.format(kind), re.MULTILINE | re.DOTALL)
    section = _SECTION.search(README.read_text(encoding="utf-8"))
    assert section is not None
    _, *parts = re.split(r"^### ", section[1], flags=re.MULTILINE)
    found = {}
    for part in parts:
        title, _, rest = part.partition("\n")
        lines = [line.strip() for text in block.findall(rest) for line in text.splitlines()]
        found[title] = [line for line in lines if line]
    return found


class Runbook:
    """One of them.

    Args:
        title: of it.
        service: beside which, or for which, the commands run.
        words: what each command must be told besides, by the first word that needs it; ``""`` for all.
    """

    def __init__(self, title: str, service: DtxService, words: Mapping[str, tuple[str, ...]]) -> None:
        self._left = runbooks()[title]
        self._service = service
        self._words = words

    def next(self, begins: str, xid: Xid | None = None, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the next command, which begins so."""
        command = self.skip(begins)
        _, *words = shlex.split(command.replace("XID", str(xid)))
        more = [*self._words.get("", ()), *self._words.get(words[0], ())]
        if "--reason" in words:
            more.append("--yes")  # nobody can be asked
        return self._service.run(*words, *more, check=check)

    def skip(self, begins: str) -> str:
        """The next command, which the test carries out itself."""
        command = self._left.pop(0)
        assert command.startswith(f"dtx {begins}"), command
        return command

    def finish(self) -> None:
        """Nothing is left."""
        assert self._left == []

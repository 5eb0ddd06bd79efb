"""The runbooks in docs/operations/runbooks.md: a test runs all their commands, in their order."""

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dtx.client import Xid
from tests.support.service import DtxService

PAGE = Path(__file__).parents[2] / "docs/operations/runbooks.md"
_BLOCK = r"^ *```{}\n(.*?)^ *```$"


def runbooks(kind: str = "sh") -> dict[str, list[str]]:
    """The lines of the blocks of *kind* of each runbook, by title; blocks ``sh`` have commands."""
    block = re.compile(_BLOCK.format(kind), re.MULTILINE | re.DOTALL)
    _, *parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for part in parts:
        title, _, rest = part.partition("\n")
        lines = [line.strip() for text in block.findall(rest) for line in text.splitlines()]
        found[title] = [line for line in lines if line]
    return found


class Runbook:
    """Runs the commands of one runbook.

    Args:
        title: the title of the runbook.
        service: the service on whose data the commands run.
        words: further arguments, by the first word of the command; ``""``: for all commands.
    """

    def __init__(self, title: str, service: DtxService, words: Mapping[str, tuple[str, ...]]) -> None:
        self._left = runbooks()[title]
        self._service = service
        self._words = words

    def next(self, begins: str, xid: Xid | None = None, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the next command, which must begin with *begins*."""
        command = self.skip(begins)
        _, *words = shlex.split(command.replace("XID", str(xid)))
        more = [*self._words.get("", ()), *self._words.get(words[0], ())]
        if "--reason" in words:
            more.append("--yes")  # no terminal for a confirmation
        return self._service.run(*words, *more, check=check)

    def skip(self, begins: str) -> str:
        """Return the next command, which the test runs itself."""
        command = self._left.pop(0)
        assert command.startswith(f"dtx {begins}"), command
        return command

    def finish(self) -> None:
        """Check that no command is left."""
        assert self._left == []

"""``dtx serve`` with a failpoint armed, and what it reached."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtx.failpoint import Point
from tests.support.service import DtxService


class ArmedService(DtxService):
    """As long as *arming* has words for ``python -m dtx.failpoint``, they are used; the next start may have others.

    Args:
        arming: these words.
        options: see :class:`DtxService`.
    """

    def __init__(self, *arming: str, **options: Any) -> None:
        super().__init__(**options)
        self.arming: Sequence[str] = arming

    def command(self) -> list[str]:
        """The command line."""
        words = super().command()
        if not self.arming:
            return words
        return [sys.executable, "-m", "dtx.failpoint", *self.arming, "--", *words[words.index("serve") :]]


def traced(file: Path) -> list[Point]:
    """What a ``--trace`` has."""
    return [Point.named(line) for line in file.read_text().splitlines()]

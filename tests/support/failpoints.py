"""``dtx serve`` with an armed failpoint, and the points that it reached."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtx.failpoint import Point
from tests.support.service import DtxService


class ArmedService(DtxService):
    """A service that starts with the arguments in ``arming``, which may change between starts.

    Args:
        arming: arguments of ``python -m dtx.failpoint``; empty: no failpoint.
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
    """The points in a ``--trace`` file."""
    return [Point.named(line) for line in file.read_text().splitlines()]

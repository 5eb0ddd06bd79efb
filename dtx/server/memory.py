"""When garbage is collected: a log of many branches is loaded into objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_YOUNG: Final = 20_000
"""Objects made before the youngest are looked at: a busy service makes 700, Python's default, every few branches."""
_MIDDLE: Final = 5
"""Looks at the youngest before one at what has survived them: a hundred thousand objects are 25 ms that all wait."""
_OLD: Final = 200
"""Of those before one at everything, if that has grown by a fourth."""


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in the block, since what is made there stays; afterwards only among what is made later."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
        gc.enable()

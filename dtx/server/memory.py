"""When garbage is collected: a log of many branches is loaded into objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_YOUNG: Final = 20_000
"""Objects made before the youngest are looked at: a busy service makes 700, Python's default, every few branches."""


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage in the block, since what is made there stays; afterwards only among what is made later."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, 20, 50)
        gc.enable()

"""Marks of names: a few octets in a branch's row by which a look for one name passes over branches without it.

The names themselves stand beside the messages, and a look into those of a hundred thousand branches takes seconds. A
mark that is found is looked at closely; one that is not found proves that the name is not there.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from typing import Final

MARK_OCTETS: Final = 4
"""Of four billion names two have the same mark, and finding one of them costs a close look."""


@lru_cache(maxsize=4096)
def mark(name: bytes) -> bytes:
    """The mark of a name; it is stored, so it never changes."""
    return sha256(name).digest()[:MARK_OCTETS]


def marks(names: Iterable[bytes]) -> bytes:
    """The marks of all *names*, each once."""
    return b"".join(map(mark, dict.fromkeys(names)))

"""Serial numbers of 32 bits: delivery counts, delivery ids, transfer ids (RFC 1982)."""

from typing import Final

MASK: Final = 0xFFFF_FFFF
_HALF: Final = 0x8000_0000


def add(number: int, increment: int) -> int:
    """*number* + *increment*, round the corner."""
    return (number + increment) & MASK


def distance(start: int, end: int) -> int:
    """How far *end* is ahead of *start*; negative where it is behind."""
    return ((end - start + _HALF) & MASK) - _HALF

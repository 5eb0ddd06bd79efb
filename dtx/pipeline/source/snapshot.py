"""Sets of ended transactions, and the lines between two of them. Pure.

PostgreSQL writes a snapshot as ``xmin:xmax:xip,…``. Every transaction below *xmin* has ended. None from *xmax* on had
ended. Of those between, the ones in *xip* were active. The journal is append-only and each of its lines names its
transaction (``xid8``), so the set of lines that a snapshot shows never changes. Lines between two snapshots are those
that the later one shows and the earlier one does not. Those of a long transaction come when it has committed.
``max(id)`` would lose them, and ``pg_snapshot_xmin`` alone would delay all later lines until then.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

_MOST: int = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SourceSnapshot:
    """A set of transactions that have ended: all below *xmax* but those of *under_way*."""

    xmax: int
    under_way: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.xmax <= _MOST or any(not 0 < xid < self.xmax for xid in self.under_way):
            raise ValueError(f"not a snapshot of PostgreSQL: {self}")

    @property
    def xmin(self) -> int:
        """Every transaction below this number has ended."""
        return min(self.under_way, default=self.xmax)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse PostgreSQL's text form, or raise :class:`ValueError`."""
        try:
            xmin, xmax, listed = text.split(":")
            found = cls(_number(xmax), frozenset(map(_number, listed.split(","))) if listed else frozenset())
            if _number(xmin) > found.xmin:
                raise ValueError
        except ValueError:
            raise ValueError(f"not a snapshot of PostgreSQL: {text[:200]!r}") from None
        return found  # xmin may be lower than the first listed number: transactions between have ended

    def __str__(self) -> str:
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.under_way)))}"

    def contains(self, other: "SourceSnapshot") -> bool:
        """Return whether all transactions of *other* are in this set."""
        if other.xmax > self.xmax and any(xid not in other.under_way for xid in range(self.xmax, other.xmax)):
            return False
        return all(xid in other.under_way or xid >= other.xmax for xid in self.under_way)

    def cut(self, start: "SourceSnapshot", at: int) -> "SourceSnapshot":
        """Return *start*, a subset of this set, and of its further transactions only those below *at*."""
        xmax = max(start.xmax, min(at, self.xmax))
        late = {xid for xid in start.under_way if xid >= at}
        return SourceSnapshot(xmax, frozenset({xid for xid in self.under_way if xid < xmax} | late))


NOTHING = SourceSnapshot(1)
"""The empty set: before the first transaction of any database."""


def shown(snapshot: SourceSnapshot) -> str:
    """Return the SQL condition for lines of the journal in *snapshot*."""
    if not snapshot.under_way:
        return f"xid8 < '{snapshot.xmax}'::xid8"
    return (
        f"(xid8 < '{snapshot.xmin}'::xid8 OR "
        f"(xid8 < '{snapshot.xmax}'::xid8 AND xid8 <> ALL ({_listed(snapshot.under_way)})))"
    )


def between(start: SourceSnapshot, end: SourceSnapshot) -> str:
    """Return the SQL condition for lines in *end* and not in *start*; an index on ``xid8`` can serve it."""
    if start == NOTHING:
        return shown(end)
    late = start.under_way - end.under_way
    fresh = f"xid8 >= '{start.xmax}'::xid8 AND {shown(end)}"
    return f"(({fresh}) OR xid8 = ANY ({_listed(late)}))" if late else f"({fresh})"


def _listed(xids: Iterable[int]) -> str:
    return "'{" + ",".join(map(str, sorted(xids))) + "}'::xid8[]"


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(_MOST)):
        raise ValueError(text)
    return int(text)

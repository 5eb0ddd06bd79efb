"""How far a stream has read the journal of one database. Pure.

A database has no index by transaction unless somebody makes one, and a look at years of journal every second is too
much. So a stream looks at recent days all the time (``at >= since``), and at the days before now and then: a clock that
is wrong, or a transaction that was open for days, writes there. What has come of recent days is what *snapshot* shows,
what has come of older ones is what *swept* shows; both are the same whenever *since* moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dtx.pipeline.source.errors import SourceError
from dtx.pipeline.source.server import Identity
from dtx.pipeline.source.snapshot import NOTHING, Snapshot, between


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far one database has been read.

    Args:
        identity: of the history that the numbers belong to.
        snapshot: what has been read of lines at or after *since*.
        swept: what has been read of lines before it.
        since: a point in time, as PostgreSQL writes it; ``None``: all lines are recent.
    """

    identity: Identity
    snapshot: Snapshot = NOTHING
    swept: Snapshot = NOTHING
    since: str | None = None

    @classmethod
    def read(cls, name: str, given: Any) -> Self:
        """From an offset of Spark.

        Raises:
            SourceError: somebody else wrote it.
        """
        try:
            since = given["since"]
            return cls(
                identity=Identity(system=str(given["system"]), timeline=int(given["timeline"])),
                snapshot=Snapshot.parse(given["snapshot"]),
                swept=Snapshot.parse(given["swept"]),
                since=None if since is None else _time(str(since)),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise SourceError(f"{name}: the checkpoint holds no place that this dtx understands") from None

    def written(self) -> dict[str, Any]:
        """As an offset of Spark."""
        return {
            "system": self.identity.system,
            "timeline": self.identity.timeline,
            "snapshot": str(self.snapshot),
            "swept": str(self.swept),
            "since": self.since,
        }

    def follow(self, name: str, now: Identity, latest: Snapshot | None, *, any_timeline: bool) -> Self:
        """The same place in the database as it is *now*.

        Args:
            name: of the source.
            now: which database that is.
            latest: what has ended there; ``None`` where that may lag behind (a standby).
            any_timeline: whether a fail-over is fine.

        Raises:
            SourceError: it is not the same history any more: what the numbers say would be wrong.
        """
        if now.system != self.identity.system:
            raise SourceError(
                f"{name}: this is not the database that the stream has read until now (a restored dump, or another "
                "server): begin a new checkpoint, or give the source a new name"
            )
        if now.timeline != self.identity.timeline and not any_timeline:
            raise SourceError(
                f"{name}: the database has changed its timeline from {self.identity.timeline} to {now.timeline} (a "
                "fail-over, or a recovery to a point in time): where no commit was lost, option timeline=any goes on; "
                "else begin a new checkpoint"
            )
        if latest is not None and latest.xmax < self.snapshot.xmax:
            raise SourceError(
                f"{name}: the database is older than what the stream has read of it: begin a new checkpoint"
            )
        return type(self)(identity=now, snapshot=self.snapshot, swept=self.swept, since=self.since)

    def advanced(self, end: Snapshot) -> Self:
        """When recent days have been read as far as *end*."""
        swept = end if self.since is None else self.swept
        return type(self)(identity=self.identity, snapshot=end, swept=swept, since=self.since)

    def complete(self, end: Snapshot, since: str) -> Self:
        """When everything has been read as far as *end*; from now on days from *since* on are the recent ones."""
        return type(self)(identity=self.identity, snapshot=end, swept=end, since=since)


def recent(start: Place, end: Place) -> tuple[str, ...] | None:
    """Conditions of the recent lines that *end* has and *start* has not; ``None`` where there can be none."""
    if start.snapshot == end.snapshot:
        return None
    of_days = () if start.since is None else (f"at >= '{start.since}'::timestamptz",)
    return (*of_days, between(start.snapshot, end.snapshot))


def older(start: Place, end: Place) -> tuple[str, ...] | None:
    """Conditions of the lines of days before, which *end* has and *start* has not."""
    if start.since is None or start.swept == end.swept:
        return None
    return (f"at < '{start.since}'::timestamptz", between(start.swept, end.swept))


def places(offset: Mapping[str, Any]) -> dict[str, Place]:
    """All places of an offset of Spark."""
    return {name: Place.read(name, given) for name, given in offset.items()}


def _time(text: str) -> str:
    """*text*, which becomes part of SQL."""
    if not text or any(letter not in "0123456789-+:. " for letter in text):
        raise ValueError(text)
    return text

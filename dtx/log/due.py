"""Branches that have been prepared for long, by the clock of the database."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Select, func, select

from dtx.log.reading import LogReader
from dtx.log.records import LogState
from dtx.log.tables import branch
from dtx.xa.xid import Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A prepared branch.

    Args:
        age: seconds since the vote, by the database's clock now.
    """

    id: UUID
    vhost: str
    xid: Xid
    owner: str
    version: int
    age: float


_AGE: Final = func.extract("epoch", func.clock_timestamp() - branch.c.prepared_at)


def clock(log: LogReader) -> float:
    """The time of the database, seconds since the epoch."""
    ((now,),) = log.rows(select(func.extract("epoch", func.clock_timestamp())))
    return float(now)


def of_ids(log: LogReader, rm: str, ids: Sequence[UUID]) -> list[Due]:
    """Those of *ids* that are prepared, the oldest vote first."""
    return _read(log, _prepared(rm).where(branch.c.id.in_(ids)))


def older_than(log: LogReader, rm: str, seconds: float, *, limit: int) -> tuple[int, list[Due]]:
    """How many votes are older than *seconds*, and the oldest *limit* of them."""
    old = branch.c.prepared_at <= func.clock_timestamp() - func.make_interval(0, 0, 0, 0, 0, 0, seconds)
    ((count,),) = log.rows(select(func.count()).where(branch.c.rm == rm, branch.c.state == str(LogState.PREPARED), old))
    return int(count), _read(log, _prepared(rm).where(old).limit(limit)) if count else []


def _prepared(rm: str) -> Select[Any]:
    columns = (branch.c.id, branch.c.vhost, branch.c.format_id, branch.c.gtrid, branch.c.bqual)
    return (
        select(*columns, branch.c.owner, branch.c.version, _AGE)
        .where(branch.c.rm == rm, branch.c.state == str(LogState.PREPARED), branch.c.prepared_at.is_not(None))
        .order_by(branch.c.prepared_at, branch.c.id)
    )


def _read(log: LogReader, statement: Select[Any]) -> list[Due]:
    return [
        Due(
            id=id_,
            vhost=vhost,
            xid=Xid(format_id, bytes(gtrid), bytes(bqual)),
            owner=owner,
            version=version,
            age=float(age),
        )
        for id_, vhost, format_id, gtrid, bqual, owner, version, age in log.rows(statement)
    ]

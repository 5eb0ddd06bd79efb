"""Writes branches into a log while no service runs; a service that starts later finds them."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any, Final

from dtx.db import migrate
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import Advance, BranchRecord, Insert, JournalEvent, LogState, WorkRow
from dtx.xa.codes import Heuristic
from dtx.xa.xid import Xid
from tests.support.branches import a_branch, a_line, a_publish, an_insert

_LOCAL: Final[dict[str, Any]] = {"published": (), "consumed": ()}


def seed(url: str, branches: Iterable[BranchRecord], queue: str = "nowhere", rm: str = "dtx") -> None:
    """Write *branches* as prepared, each with a publish to *queue* unless its messages are in the same database; those
    with an outcome then become heuristic.

    Args:
        url: the URL of a database that no service uses.
        branches: made by :func:`in_doubt` and :func:`heuristic`.
        queue: the routing key of the publish.
        rm: the name of the resource manager.
    """
    migrate.upgrade(url)
    asyncio.run(
        _seed(url, rm, tuple(branches), a_publish(exchange=b"", routing_key=queue.encode(), properties=b"\0\0"))
    )


async def _seed(url: str, rm: str, branches: Iterable[BranchRecord], work: WorkRow) -> None:
    log = PostgresTransactionLog(url, rm)
    await log.open()
    try:
        await asyncio.gather(*(_write(log, branch, work) for branch in branches))
    finally:
        await log.close()


async def _write(log: PostgresTransactionLog, branch: BranchRecord, work: WorkRow) -> None:
    prepared = branch._replace(state=LogState.PREPARED, outcome=None)
    if branch.published is None:
        await log.write(an_insert(prepared, work))
    else:
        await log.write(Insert(branch=prepared, journal=a_line(prepared)))
    if branch.outcome is not None:
        line = a_line(
            prepared, JournalEvent.HEURISTIC, outcome=branch.outcome, actor="an operator", reason="the TM died"
        )
        await log.write(
            Advance(
                id=branch.id,
                expect=LogState.PREPARED,
                version=1,
                to=LogState.HEURISTIC,
                decided_at=time.time(),
                outcome=branch.outcome,
                journal=line,
            )
        )


def in_doubt(xid: Xid, vhost: str = "/", owner: str = "guest", *, local: bool = False) -> BranchRecord:
    """A prepared branch; *local*: a branch of standalone mode, without messages."""
    return a_branch(xid=xid, vhost=vhost, owner=owner, **_LOCAL if local else {})


def heuristic(xid: Xid, outcome: Heuristic, vhost: str = "/", *, local: bool = False) -> BranchRecord:
    """A branch that an operator completed; *local* as in :func:`in_doubt`."""
    return a_branch(xid=xid, vhost=vhost, state=LogState.HEURISTIC, outcome=outcome, **_LOCAL if local else {})

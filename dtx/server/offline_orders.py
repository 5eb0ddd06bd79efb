"""Operator orders without a running service: the command takes the lease, if no dtx holds it.

The command loads the branches, runs the orders as the service would, and gives the lease back. It accepts no clients. A
service that starts meanwhile stands by until then. If the broker does not answer, the decision still becomes durable.
The service does the rest at the broker later.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from dtx.config import Settings
from dtx.config.values import DAY
from dtx.log.lease import Keep
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.reader import LogReader
from dtx.manager import BranchManager, Limits
from dtx.server.alongside.mode import BrokerAway, broker_of, open_alongside, require_broker, vhost_of
from dtx.server.standalone.mode import open_standalone
from dtx.telemetry import Metrics

_BROKER_AWAY_SECONDS: Final = 1.0
"""Seconds that an order waits for a broker that did not answer at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveDtx:
    """The active dtx of one command.

    Args:
        manager: the transaction manager.
        log: the open log, which holds the lease.
        away: why the broker does not answer; ``None`` if it does, or in standalone mode.
    """

    manager: BranchManager
    log: PostgresTransactionLog
    away: str | None


def _last_retention(settings: Settings, url: str) -> Keep:
    """The retention of the last service: the lease holder drops older data, and commands have no options for it."""
    with LogReader(url) as log:
        return log.retention(settings.rm) or Keep(journal=max(1, round(settings.journal_retention / DAY)))


@asynccontextmanager
async def active_offline(settings: Settings, url: str) -> AsyncIterator[ActiveDtx]:
    """Be the active dtx in the block.

    Args:
        settings: of the service, with the broker if it is alongside one.
        url: of the database.

    Raises:
        LeaseHeld: another dtx holds the lease.
        BrokerUnusable: the broker answers, but refuses dtx.
        LogError: the log cannot be used, or has branches whose messages are in a broker and *settings* have none.
    """
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        broker = None if settings.broker is None else broker_of(settings)
        away = None
        if broker is not None:
            try:
                await require_broker(broker, vhost_of(settings))
            except BrokerAway as error:
                away = str(error)
        holder = f"{socket.gethostname()}:{os.getpid()} (operator command)"
        log = PostgresTransactionLog(
            url,
            settings.rm,
            holder=holder,
            lease_ttl=settings.lease_ttl,
            keep=await asyncio.to_thread(_last_retention, settings, url),
            unsafe=settings.unsafe,
        )
        await log.open(wait=False)
        stack.push_async_callback(log.close)
        limits = Limits(patience=settings.unit_deadline if away is None else _BROKER_AWAY_SECONDS)
        if broker is not None:
            manager, _, _ = await open_alongside(settings, broker, log, limits, metrics, stack)
        else:
            manager, _, _ = await open_standalone(settings, url, log, limits, metrics, stack)
        yield ActiveDtx(manager=manager, log=log, away=away)
        await manager.drain(settings.drain_timeout if away is None else 0.0)

"""Orders without a service: the command line takes the lease for a moment, where nobody else has it.

The branches are loaded, orders are carried out as the service would, and the lease is given back. No client comes. A
service that is started meanwhile stands by until then. Where the broker does not answer, a decision is made durable all
the same, and what it has to do there is left for the service.
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
from dtx.log.postgres import TransactionLog
from dtx.log.reader import LogReader
from dtx.manager import Limits, TransactionManager
from dtx.server.alongside.mode import BrokerAway, broker_of, open_alongside, require_broker, vhost_of
from dtx.server.standalone.mode import open_standalone
from dtx.telemetry import Metrics

_BROKER_AWAY_SECONDS: Final = 1.0
"""How long an order waits for a broker that has just not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The only dtx, for a moment.

    Args:
        manager: of the branches.
        log: under whose lease it works.
        away: why the broker cannot be used; ``None`` where it can, or there is none.
    """

    manager: TransactionManager
    log: TransactionLog
    away: str | None


def _kept(settings: Settings, url: str) -> Keep:
    """What the service keeps, which a command need not be told: whoever has the lease drops what is older."""
    with LogReader(url) as log:
        return log.retention(settings.rm) or Keep(journal=max(1, round(settings.journal_retention / DAY)))


@asynccontextmanager
async def alone(settings: Settings, url: str) -> AsyncIterator[Alone]:
    """Be the active dtx, if nobody else is.

    Args:
        settings: with the broker where the messages are in one.
        url: of the database.

    Raises:
        LeaseHeld: another dtx has the lease.
        BrokerUnusable: the broker is there, and does not let dtx in.
        LogError: the log cannot be used, or has branches whose messages are in a broker that is not named.
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
        holder = f"{socket.gethostname()}:{os.getpid()} (an order at the command line)"
        log = TransactionLog(
            url,
            settings.rm,
            holder=holder,
            lease_ttl=settings.lease_ttl,
            keep=await asyncio.to_thread(_kept, settings, url),
            unsafe=settings.unsafe,
        )
        await log.open(wait=False)
        stack.push_async_callback(log.close)
        limits = Limits(patience=settings.unit_deadline if away is None else _BROKER_AWAY_SECONDS)
        if broker is not None:
            manager, _, _ = await open_alongside(settings, broker, log, limits, metrics, stack)
        else:
            manager, _ = await open_standalone(settings, url, log, limits, metrics, stack)
        yield Alone(manager=manager, log=log, away=away)
        await manager.drain(settings.drain_timeout if away is None else 0.0)

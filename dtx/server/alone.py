"""One order without a service: the command line takes the lease for a moment, where nobody else has it.

The branches are loaded, the order is carried out as the service would, and the lease is given back. No client comes.
"""

from contextlib import AsyncExitStack

from dtx.config import Settings
from dtx.log.postgres import PostgresLog
from dtx.manager import Limits
from dtx.manager.operators import Done, Forecast, Operators, Order
from dtx.server.alongside.mode import broker_of, open_alongside, require_broker
from dtx.server.standalone.mode import open_standalone
from dtx.telemetry import Metrics


async def carry_out(settings: Settings, url: str, order: Order, *, dry_run: bool) -> Done | Forecast:
    """Do what *order* says, or forecast it.

    Args:
        settings: with the broker where the messages are in one.
        url: of the database.
        order: what.
        dry_run: whether to forecast it.

    Raises:
        XaError: as :class:`dtx.manager.operators.Operators` says.
        BrokerUnusable, LogError: dtx cannot work; each says why in one sentence.
    """
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        broker = None if settings.broker is None else broker_of(settings)
        if broker is not None:
            await require_broker(broker)
        log = PostgresLog(url, settings.rm, lease_ttl=settings.lease_ttl, unsafe=settings.unsafe)
        await log.open()
        stack.push_async_callback(log.close)
        limits = Limits(patience=settings.unit_deadline)
        if broker is not None:
            manager, _, _ = await open_alongside(settings, broker, log, limits, metrics, stack)
        else:
            manager, _ = await open_standalone(settings, url, log, limits, metrics, stack)
        operators = Operators(manager)
        if dry_run:
            return await operators.forecast(order)
        done = await operators.carry_out(order)
        await manager.drain(settings.drain_timeout)
        return done

"""The samples from which rates are computed."""

import asyncio
import time
from collections.abc import Iterator

from dtx.admin.api_context import Active, ApiContext
from dtx.store.slices import finish
from dtx.telemetry.rates import RATE_SECONDS


async def sample_rates(context: ApiContext) -> None:
    """Take a sample of all counters of queues and connections every :data:`RATE_SECONDS`, until this is cancelled."""
    at = time.monotonic()
    while True:
        await asyncio.sleep(RATE_SECONDS)
        before, at = at, time.monotonic()
        if context.active is not None:
            await finish(_take(context.active, at - before))


def _take(active: Active, passed: float) -> Iterator[None]:
    for arrived in list(active.connections().values()):
        arrived.sample.take(arrived.traffic(), passed)
        yield
    if active.own_broker is not None:
        yield from active.own_broker.counts.take_sample(passed)

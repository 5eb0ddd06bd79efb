"""Numbers that take a look at everything: they are counted when somebody asks, and cost branches nothing."""

import time

from dtx.admin.desk import Desk
from dtx.manager.census import Census, count


async def refresh(desk: Desk) -> None:
    """Bring the gauges of ``desk.metrics`` up to date; those of a standby, or of a dtx without a lease, are 0."""
    metrics, active = desk.metrics, desk.active
    if active is not None and not active.lease_valid():
        active = None
    census = Census() if active is None else await count(active.manager.entries())
    states = census.states
    for gauge in metrics.branches.values():
        gauge.set(0)
    for state, number in states.items():
        metrics.branches[state].set(number)
    metrics.stuck_branches.set(census.stuck)
    metrics.in_doubt_bytes.set(census.in_doubt_bytes)
    oldest = census.oldest_prepared
    metrics.oldest_in_doubt.set(0 if oldest is None else max(0.0, time.time() - oldest))
    metrics.lease_held.set(active is not None)
    metrics.lease_epoch.set(0 if active is None else active.epoch())
    metrics.log_queue.set(0 if active is None else active.log_queue())
    metrics.held_bytes.set(0 if active is None else active.manager.budget.used)
    metrics.held_bytes_limit.set(0 if active is None else active.manager.budget.limit)
    metrics.usage_numbers([] if active is None else active.manager.quotas)
    disk = None if active is None else active.manager.disk
    metrics.disk_alarm.set(disk is not None and disk.raised)
    metrics.disk_free.set(0 if disk is None else disk.free or 0)
    metrics.disk_free_limit.set(0 if disk is None else disk.limit)
    metrics.lane_numbers([] if active is None else active.lanes().values())

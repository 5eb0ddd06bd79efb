"""What machines ask: whether dtx lives, whether it serves, and its numbers."""

import time

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dtx.admin.desk import Desk
from dtx.admin.document import OPEN
from dtx.admin.looking import Asker, TheDesk
from dtx.log.operator_tables import Role
from dtx.manager.branches import BranchStats, branch_stats

router = APIRouter(tags=["service"])


@router.get("/healthz", response_class=PlainTextResponse, openapi_extra=OPEN)
async def is_alive() -> str:
    """The process answers. Open to everybody, and says nothing else."""
    return "ok\n"


@router.get("/readyz", response_class=PlainTextResponse, openapi_extra=OPEN)
async def is_ready(desk: TheDesk) -> Response:
    """200 where clients are served; 503 on a standby, without the lease, and low on disk. Open to everybody."""
    if desk.active is None or not desk.active.lease_valid():
        return PlainTextResponse("not the active dtx\n", 503)
    if desk.active.manager.draining:
        return PlainTextResponse("shutting down\n", 503)
    if desk.active.manager.disk.raised:
        return PlainTextResponse("low on disk\n", 503)
    return PlainTextResponse("ok\n")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def show_metrics(who: Asker, desk: TheDesk) -> Response:
    """All numbers, for Prometheus (give it a viewer's token)."""
    who.require(Role.VIEWER)
    await _count(desk)
    return Response(desk.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _count(desk: Desk) -> None:
    """Bring the gauges of ``desk.metrics`` up to date; those of a standby, or of a dtx without a lease, are 0."""
    metrics, active = desk.metrics, desk.active
    if active is not None and not active.lease_valid():
        active = None
    stats = BranchStats() if active is None else await branch_stats(active.manager.entries())
    states = stats.states
    for gauge in metrics.branches.values():
        gauge.set(0)
    for state, number in states.items():
        metrics.branches[state].set(number)
    metrics.stuck_branches.set(stats.stuck)
    metrics.in_doubt_bytes.set(stats.in_doubt_bytes)
    oldest = stats.oldest_prepared
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

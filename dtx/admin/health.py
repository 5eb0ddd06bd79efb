"""What machines ask: whether dtx lives, whether it serves, and its numbers."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dtx.admin import numbers
from dtx.admin.document import OPEN
from dtx.admin.looking import Asker, TheDesk
from dtx.log.operator_tables import Role

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
    await numbers.refresh(desk)
    return Response(desk.metrics.render(), media_type=CONTENT_TYPE_LATEST)

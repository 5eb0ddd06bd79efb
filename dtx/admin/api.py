"""The API as one ASGI application, used by the server and by commands in their own process.

The OpenAPI document is made from the routes; the schemes of authentication and the format of errors are added here.
The routes for monitoring are here, too: liveness, readiness and metrics.
"""

import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Query
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import Field

import dtx
from dtx.admin import (
    problems,
    rabbitmq_definitions,
    rabbitmq_metrics,
    routes_accounts,
    routes_orders,
    routes_rabbitmq,
    routes_rabbitmq_changes,
    routes_read,
)
from dtx.admin.api_context import ApiContext, Asker, Context
from dtx.admin.forms import Form
from dtx.admin.identity import Identity
from dtx.admin.rabbitmq_rows import View
from dtx.auth.roles import OperatorRole
from dtx.manager.branches import BranchStats, branch_stats


class ProblemForm(Form):
    """The reason for an error (RFC 9457)."""

    type: str = Field(description="Always about:blank.")
    title: str = Field(description="Name of the status.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="The reason, for people.")


_PROBLEM: Final = f"#/components/schemas/{ProblemForm.__name__}"
_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {"description": "A problem.", "content": {problems.MEDIA_TYPE: {"schema": {"$ref": _PROBLEM}}}}
}
"""Responses of every route, as well as its own ones."""
_OPEN: Final[dict[str, Any]] = {"security": []}
"""For routes without authentication."""
_FAMILIES: Final = f"Metrics to show: {', '.join(rabbitmq_metrics.DETAILS)}; others are ignored."
_SCHEMES: Final = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token made by dtx token or /dtx/v1/tokens."},
    "user": {"type": "http", "scheme": "basic", "description": "A user, made by dtx user, with a tag for the API."},
}


router = APIRouter(tags=["service"])


@router.get("/healthz", response_class=PlainTextResponse, openapi_extra=_OPEN)
async def is_alive() -> str:
    """Show that the process answers. Needs no authentication."""
    return "ok\n"


@router.get(
    "/readyz",
    response_class=PlainTextResponse,
    openapi_extra=_OPEN,
    responses={503: {"description": "not the active dtx, shutting down, or low on disk (the text of the answer)."}},
)
async def is_ready(context: Context) -> Response:
    """200 if clients are served; 503 on a standby, without the lease, or low on disk. Needs no authentication."""
    if context.active is None or not context.active.lease_valid():
        return PlainTextResponse("not the active dtx\n", 503)
    if context.active.manager.draining:
        return PlainTextResponse("shutting down\n", 503)
    if context.active.manager.disk.raised:
        return PlainTextResponse("low on disk\n", 503)
    return PlainTextResponse("ok\n")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def show_metrics(who: Asker, context: Context) -> Response:
    """All metrics but those of each queue, for Prometheus. Needs the role viewer."""
    who.require(OperatorRole.VIEWER)
    await _count(context)
    view = _view(who, context)
    shown = context.metrics.render()
    if view is not None:
        shown += rabbitmq_metrics.page(await view.totals())
    return Response(shown, media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/metrics/detailed",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def show_detailed_metrics(
    who: Asker,
    context: Context,
    family: Annotated[list[str], Query(max_length=100, description=_FAMILIES)] = [],  # noqa: B006 - FastAPI copies it
    vhost: Annotated[list[str], Query(max_length=100, description="Only these virtual hosts.")] = [],  # noqa: B006
) -> Response:
    """Metrics of each queue, in standalone mode. Needs the role viewer."""
    who.require(OperatorRole.VIEWER)
    view = _view(who, context)
    hosts = [] if view is None else [host for host in view.vhosts() if not vhost or host.name in vhost]
    queues = [queue for host in hosts for queue in host.queues.values()]
    wanted = [] if view is None else family
    return StreamingResponse(rabbitmq_metrics.detailed(queues, wanted), media_type=CONTENT_TYPE_LATEST)


def _view(who: Identity, context: ApiContext) -> View | None:
    """The view of the broker of standalone mode; ``None`` alongside a broker, and on a standby."""
    active = context.active
    if active is None or active.own_broker is None or not active.lease_valid():
        return None
    broker = active.own_broker
    return View(who=who, context=context, active=active, broker=broker, users=broker.accounts.users)


async def _count(context: ApiContext) -> None:
    """Update the gauges of ``context.metrics``. On a standby, or without the lease, they are 0."""
    metrics, active = context.metrics, context.active
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
    metrics.commit_connection_numbers([] if active is None else active.commit_connections.values())


def api(context: ApiContext) -> FastAPI:
    """The application with all routes, for *context*."""
    app = FastAPI(
        title="dtx",
        version=dtx.__version__,
        summary="Branches in doubt: states, causes, messages, and orders about them.",
        docs_url=None,  # FastAPI's page would fetch scripts from another site
        redoc_url=None,
        openapi_url="/openapi.json",
        responses=_RESPONSES,
    )
    app.state.context = context
    for routes in (
        routes_read.router,
        routes_orders.router,
        routes_accounts.router,
        router,
        routes_rabbitmq_changes.router,
        rabbitmq_definitions.router,
        routes_rabbitmq.router,
    ):
        app.include_router(routes)
    problems.install(app)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    """Add authentication and errors to the OpenAPI document of *app*."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            found["components"]["securitySchemes"] = _SCHEMES
            found["components"]["schemas"][ProblemForm.__name__] = ProblemForm.model_json_schema()
            found["security"] = [{name: []} for name in _SCHEMES]
            app.openapi_schema = found
        return app.openapi_schema

    # This is how FastAPI's documentation changes the document.
    app.openapi = document  # type: ignore[method-assign]

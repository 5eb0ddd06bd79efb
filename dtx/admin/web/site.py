"""The web pages as one application within that of the API, and the pages that do not show a branch.

- The overview: branches in doubt and their ages, throughput, the lease.
- Connections: clients, branches that have not voted, open recovery scans.
- Reconciliation: the verdicts of the pipeline about global transactions.
- Outcomes, archive and audit log.
"""

import asyncio
import time
from base64 import b64decode
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dtx.admin import routes_orders, routes_read
from dtx.admin.api_context import ApiContext, page_of
from dtx.admin.forms import AuditQuery, ConnectionForm, DisconnectForm, OutcomeQuery, XidQuery
from dtx.admin.message_properties import flat
from dtx.admin.problems import Problem
from dtx.admin.rabbitmq_lists import Listed, Row
from dtx.admin.rabbitmq_rows import Client, connection_row
from dtx.admin.routes_rabbitmq import view_of
from dtx.admin.web import account_pages, branch_pages, broker_pages, login, topology_pages
from dtx.admin.web.branch_pages import attachment, contents_page
from dtx.admin.web.broker_pages import NamedQuery, list_page
from dtx.admin.web.history import HEIGHT, WIDTH, WINDOW_TEXTS, ago, draw
from dtx.admin.web.live_updates import LiveUpdates, rates
from dtx.admin.web.page_request import (
    Sessions,
    SignInNeeded,
    Visitor,
    build,
    read_form,
    reads,
    require_known_keys,
    show_error,
    to_sign_in,
    total,
)
from dtx.admin.web.rendering import address, load_templates, redirect_to
from dtx.auth.roles import OperatorRole
from dtx.log import pages
from dtx.log.api import LogError
from dtx.log.pages import OUTCOMES, VERDICT_CURSORS, Cursor, VerdictFilter
from dtx.log.records import WITH_OUTCOME
from dtx.xa.codes import XaError
from dtx.xa.model import State
from dtx.xa.table import IN_DOUBT

router = APIRouter()
_PAGE = 50
_OTHERS = 20
"""Branches and scans on the page of connections at most; the API lists all."""


@router.get("/")
async def show_overview(visit: Visitor, window: Literal["10m", "1h", "8h"] = "10m") -> Response:
    """The overview."""
    visit.who.require(OperatorRole.VIEWER)
    status = (await visit.pulse.snapshot()).status
    samples, shown = visit.pulse.samples, visit.pulse.history.windows[window]
    order = [str(state) for state in State if status.branches.get(str(state))]
    in_doubt = {str(state) for state in IN_DOUBT}
    return visit.show(
        "overview.html",
        status=status,
        states=order,
        in_doubt=in_doubt,
        total=sum(count for state, count in status.branches.items() if state in in_doubt),
        rates=rates(samples),
        charts=draw(shown, time.monotonic(), standalone=visit.context.standalone),
        ago=ago(shown),
        window=window,
        windows=WINDOW_TEXTS,
        width=WIDTH,
        height=HEIGHT,
        lease=next((lease for lease in status.leases if lease.rm == status.rm), None),
        live="always",
    )


def _given(request: Request, *names: str) -> dict[str, str]:
    """The values of those fields of a search that are not empty."""
    return {name: request.query_params[name].strip() for name in names if request.query_params.get(name, "").strip()}


def _listed(page: str, given: dict[str, str], cursor: object, following: object) -> dict[str, Any]:
    """The values that the templates of lists share: the search, and the addresses of the first and the next page."""
    return {
        "given": given,
        "first": address(page, **given) if cursor else None,
        "more": address(page, **given, cursor=following) if following else None,
    }


class ConnectionsQuery(NamedQuery):
    """The query of connections."""

    user: str = Field(default="", max_length=255)


@router.get("/connections")
async def show_connections(visit: Visitor, query: Annotated[ConnectionsQuery, Query()]) -> Response:
    """Connections, branches that have not voted, and open recovery scans."""
    who, context = visit.who, visit.context
    user, vhost = query.user or None, query.vhost or None
    working = await routes_read.list_associations(who, context, owner=user, vhost=vhost, limit=_OTHERS)
    scans = await routes_read.list_scans(who, context, user=user, vhost=vhost, cursor="0-0", limit=_OTHERS)
    active, _ = context.require_active()
    clients = {client.id: (client, at) for client, at in routes_read.clients_of(active, user, vhost)}
    listed = Listed(clients.values(), lambda pair: {"id": pair[0].id} | connection_row(pair), ("id",))
    found = await list_page("connections", listed, query)
    shown = await ConnectionForm.of_clients(clients[row["id"]] for row in found.rows)
    return visit.show(
        "connections.html",
        found=found,
        connections=list(zip(found.rows, shown, strict=True)),
        branches=working.associations,
        more_branches=working.cursor is not None,
        missing=working.missing,
        scans=scans.scans,
        more_scans=scans.cursor is not None,
        live="always",
    )


@router.get("/connection")
async def show_connection(visit: Visitor, number: int) -> Response:
    """One connection with its channels."""
    found = await routes_read.show_connection(visit.who, visit.context, number)
    client = cast("Client", routes_read.client_of(visit.context, number))
    row = connection_row(client)
    details: dict[int, Row] = {}
    if visit.context.standalone:
        view = await view_of(visit.who, visit.context)
        details = {each[1]: view.channel_row(each) for each in view.channels([client])}
    return visit.show(
        "connection.html",
        connection=found.connection,
        row=row,
        properties=flat(row["client_properties"]),
        channels=[(channel, details.get(channel.number)) for channel in found.channels],
        live="always",
    )


@router.get("/connection/close")
async def ask_to_close(visit: Visitor, number: int) -> Response:
    """The form that closes a connection."""
    visit.who.require(OperatorRole.OPERATOR)
    found = await routes_read.show_connection(visit.who, visit.context, number)
    return visit.show("close.html", connection=found.connection)


@router.post("/connection/close")
async def close_connection(request: Request, visit: Visitor) -> Response:
    """Close a client's connection."""
    form = await read_form(request, visit)
    order = build(DisconnectForm, {"reason": form.one("reason")})
    typed = form.one("number")
    number = int(typed) if typed.isdecimal() and len(typed) < 19 else 0
    was = await routes_orders.close_connection(visit.who, visit.context, number, order)
    visit.session.notice = f"Connection {was.id} of {was.user} from {was.address} is closed."
    return redirect_to(address("connections"))


@router.get("/reconciliation")
@reads("verdict", "gtrid", "rm", "owner", "cursor")
async def show_reconciliation(request: Request, visit: Visitor) -> Response:
    """The totals, and the transactions that need attention."""
    visit.who.require(OperatorRole.VIEWER)
    given = _given(request, "verdict", "gtrid", "rm", "owner")
    cursor = request.query_params.get("cursor", "")
    gtrid = _gtrid(given["gtrid"]) if "gtrid" in given else None
    after = _cursor(cursor) if cursor else None
    run = await visit.context.read(pages.last_reconciliation)
    asked = VerdictFilter(word=given.get("verdict"), gtrid=gtrid, rm=given.get("rm"), owner=given.get("owner"))
    found = await visit.context.read(lambda log: pages.verdict_page(log, asked, after=after, limit=_PAGE + 1))
    shown, last = page_of(found, _PAGE)
    return visit.show(
        "reconciliation.html",
        run=run,
        found=shown,
        total=await total(visit, shown, cursor, last, lambda log: pages.verdict_count(log, asked)),
        **_listed("reconciliation", given, cursor, None if last is None else str(last.cursor)),
    )


def _gtrid(words: str) -> bytes:
    """The gtrid that was typed: hexadecimal, else text."""
    try:
        return bytes.fromhex(words)
    except ValueError:
        return words.encode()


def _cursor(text: str) -> Cursor:
    try:
        return VERDICT_CURSORS.parse(text)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, str(error)) from None


@router.get("/outcomes")
@reads("xid", "owner", "vhost", "event", "cursor")
async def show_outcomes(request: Request, visit: Visitor) -> Response:
    """Outcomes of branches, and heuristic outcomes that are not forgotten yet."""
    given = _given(request, "xid", "owner", "vhost", "event")
    query = build(
        OutcomeQuery,
        {
            **{name: value for name, value in given.items() if name != "event"},
            "event": [given["event"]] if "event" in given else [],
            "cursor": request.query_params.get("cursor") or None,
            "limit": _PAGE,
        },
    )
    ended = await routes_read.list_outcomes(visit.who, visit.context, query)
    asked = routes_read.journal_filter(visit.context.rm, query, tuple(query.event) or OUTCOMES)
    wanted = routes_read.BranchQuery(state=sorted(str(state) for state in WITH_OUTCOME), limit=_PAGE)
    kept = await routes_read.list_branches(visit.who, visit.context, wanted)
    all_kept = wanted.wanted(visit.context.rm)
    return visit.show(
        "outcomes.html",
        events=OUTCOMES,
        kept=kept.branches,
        all_kept=address("branches", state=wanted.state) if kept.cursor else None,
        lines=ended.lines,
        total=await total(visit, ended.lines, query.cursor, ended.cursor, lambda log: pages.journal_count(log, asked)),
        total_kept=await total(visit, kept.branches, None, kept.cursor, lambda log: pages.branch_count(log, all_kept)),
        **_listed("outcomes", given, query.cursor, ended.cursor),
        live="branches",
    )


@router.get("/archive")
@reads("xid", "owner", "vhost", "cursor")
async def show_archive(request: Request, visit: Visitor) -> Response:
    """Undelivered messages of forgotten branches."""
    given = _given(request, "xid", "owner", "vhost")
    cursor = request.query_params.get("cursor") or None
    query = build(XidQuery, {**given, "cursor": cursor, "limit": _PAGE})
    found = await routes_read.list_archive(visit.who, visit.context, query)
    asked = routes_read.journal_filter(visit.context.rm, query)
    return visit.show(
        "archive.html",
        messages=found.messages,
        total=await total(visit, found.messages, cursor, found.cursor, lambda log: pages.archive_count(log, asked)),
        **_listed("archive", given, cursor, found.cursor),
    )


@router.get("/archive/message")
async def show_archived(visit: Visitor, branch: UUID, position: int) -> Response:
    """One archived message with its contents. Viewing it is recorded in the audit log."""
    found = await routes_read.view_archived(visit.who, visit.context, branch, position)
    return contents_page(
        visit,
        found,
        xid=routes_read.xid_of(found.xid),
        vhost=found.vhost,
        archived=found.archived_at,
        back=address("archive", xid=found.xid),
        body=address("archive/body", branch=branch, position=position),
    )


@router.get("/archive/body")
async def download_archived(visit: Visitor, branch: UUID, position: int) -> Response:
    """The body of an archived message, as a download."""
    found = await routes_read.archived_contents(visit.who, visit.context, branch, position, action="export")
    return attachment(b64decode(found.body), f"message-{position}.bin")


@router.get("/audit")
@reads("actor", "action", "subject")
async def show_audit(request: Request, visit: Visitor, cursor: Annotated[str, Query(max_length=20)] = "") -> Response:
    """The audit log."""
    given = _given(request, "actor", "action", "subject")
    query = build(AuditQuery, {**given, "cursor": cursor or None, "limit": _PAGE})
    found = await routes_read.show_audit(visit.who, visit.context, query)
    count = len(found.lines)
    if cursor or found.cursor:
        asked = (pages.MOST_COUNTED + 1, query.actor, query.action, query.subject)
        count = await asyncio.to_thread(visit.context.operator_log.audit_count, *asked)
    return visit.show(
        "audit.html",
        lines=found.lines,
        total=count,
        **_listed("audit", given, cursor, found.cursor),
        live="audit",
    )


def website(context: ApiContext, pulse: LiveUpdates) -> FastAPI:
    """The application with all pages.

    Args:
        context: the context of the API.
        pulse: the source of live updates.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.context = context
    app.state.pulse = pulse
    app.state.sessions = Sessions()
    parts = (login, branch_pages, broker_pages, topology_pages, account_pages)
    for routes in (*(part.router for part in parts), router):
        depends = [Depends(load_templates), Depends(require_known_keys)]
        app.include_router(routes, include_in_schema=False, dependencies=depends)

    async def redirect_to_sign_in(request: Request, _: Exception) -> Response:
        return to_sign_in(request)

    app.add_exception_handler(SignInNeeded, redirect_to_sign_in)
    for kind in (Problem, XaError, LogError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, show_error)
    return app

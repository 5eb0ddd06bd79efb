"""Clients: their connections, branches that have not voted, recovery scans that are open."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dtx.admin import clients
from dtx.admin.client_forms import DisconnectForm
from dtx.admin.web.rendering import address, go_to
from dtx.admin.web.visits import Visitor, build, read_form
from dtx.log.operator_tables import Role

router = APIRouter()
_PAGE = 50
_OTHERS = 20
"""Branches and scans on the page of connections: the API has them all."""


@router.get("/connections")
async def show_connections(request: Request, visit: Visitor, cursor: int = 0) -> Response:
    """Who is connected, and what their channels work for."""
    names = ("user", "vhost")
    given: dict[str, Any] = {
        name: request.query_params[name].strip() for name in names if request.query_params.get(name, "").strip()
    }
    who, desk = visit.who, visit.desk
    found = await clients.list_connections(who, desk, **given, cursor=cursor, limit=_PAGE)
    vhost = given.get("vhost")
    working = await clients.list_associations(who, desk, owner=given.get("user"), vhost=vhost, limit=_OTHERS)
    scans = await clients.list_scans(who, desk, user=given.get("user"), vhost=vhost, cursor="0-0", limit=_OTHERS)
    return visit.show(
        "connections.html",
        given=given,
        connections=found.connections,
        branches=working.associations,
        more_branches=working.cursor is not None,
        scans=scans.scans,
        more_scans=scans.cursor is not None,
        first=address("connections", **given) if cursor else None,
        more=address("connections", **given, cursor=found.cursor) if found.cursor else None,
        live="always",
    )


@router.get("/connection")
async def show_connection(visit: Visitor, number: int) -> Response:
    """One connection with its channels."""
    found = await clients.show_connection(visit.who, visit.desk, number)
    return visit.show("connection.html", connection=found.connection, channels=found.channels, live="always")


@router.get("/connection/close")
async def ask_to_close(visit: Visitor, number: int) -> Response:
    """The form of that order."""
    visit.who.require(Role.OPERATOR)
    found = await clients.show_connection(visit.who, visit.desk, number)
    return visit.show("close.html", connection=found.connection)


@router.post("/connection/close")
async def close_connection(request: Request, visit: Visitor) -> Response:
    """End a client's connection."""
    form = await read_form(request, visit)
    order = build(DisconnectForm, {"reason": form.one("reason")})
    typed = form.one("number")
    number = int(typed) if typed.isdecimal() and len(typed) < 19 else 0
    was = await clients.close_connection(visit.who, visit.desk, number, order)
    visit.session.notice = f"Connection {was.id} of {was.user} from {was.address} is closed."
    return go_to(address("connections"))

"""Forms of standalone mode's broker that declare, delete, purge, bind and unbind.

Each change is a function of :mod:`dtx.admin.routes_rabbitmq_changes`, which checks role and permissions before any
effect, and writes the audit log. The address of a form names its object: browsers change line ends in fields.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from dtx.admin import routes_rabbitmq_changes as changes
from dtx.admin.problems import Problem, as_problem
from dtx.admin.rabbitmq_rows import View, binding_row
from dtx.admin.web.broker_pages import REFUSALS, Seen, typed_object
from dtx.admin.web.page_request import Visit, Visitor, build, read_form
from dtx.admin.web.rendering import address, redirect_to
from dtx.log.changes import DestinationKind
from dtx.store.postgres.matchers import ExchangeType

router = APIRouter()
Given = Mapping[str, str]
"""The fields of a form and of its address; empty if they are not given."""
_OBJECT: Final = ("vhost", "name", "source", "destination", "kind", "key")
"""The fields of an address that name an object."""
_TYPES: Final = {"queue": ("classic", "quorum"), "exchange": tuple(map(str, ExchangeType))}


class TopologyQuery(BaseModel):
    """The change of a form and its object. Fields of the object that are not here are typed."""

    action: str = Field(max_length=30)
    vhost: str = Field(default="", max_length=255)
    name: str = Field(default="", max_length=255)
    source: str = Field(default="", max_length=255)
    destination: str = Field(default="", max_length=255)
    kind: DestinationKind | None = None
    key: str = Field(default="", max_length=1000, description="properties_key of a binding")
    end: Literal["source", "destination"] = Field(default="destination", description="the page after a binding")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyChange:
    """A change.

    Args:
        headline: its name, also on the button.
        thing: ``queue``, ``exchange`` or ``binding``.
        run: calls the function of the API.
        fields: of the form, unless the address has them.
        done: the notice afterwards.
        there: the notice if the object was there before.
        removes: whether something is removed.
        gone: whether the object has no page afterwards.
    """

    headline: str
    thing: str
    run: Callable[[View, Given], Awaitable[Response]]
    fields: tuple[str, ...]
    done: str
    there: str = ""
    removes: bool = False
    gone: bool = False


def _ticked(given: Given, *names: str) -> dict[str, bool]:
    return {name: given[name] == "yes" for name in names}


def _arguments(given: Given) -> dict[str, Any]:
    return typed_object("arguments", given["arguments"])


async def _declare_queue(view: View, given: Given) -> Response:
    kind = {} if given["type"] == "classic" else {"x-queue-type": given["type"]}
    values = _ticked(given, "durable", "auto_delete") | {"arguments": kind | _arguments(given)}
    return await changes.declare_queue(view, given["vhost"], given["name"], build(changes.QueueBody, values))


async def _purge_queue(view: View, given: Given) -> Response:
    return await changes.purge_queue(view, given["vhost"], given["name"])


async def _delete_queue(view: View, given: Given) -> Response:
    only = _ticked(given, "if_unused", "if_empty")
    return await changes.delete_queue(view, given["vhost"], given["name"], **only)


async def _declare_exchange(view: View, given: Given) -> Response:
    ticked = _ticked(given, "durable", "auto_delete", "internal")
    body = build(changes.ExchangeBody, {**ticked, "type": given["type"], "arguments": _arguments(given)})
    return await changes.declare_exchange(view, given["vhost"], given["name"], body)


async def _delete_exchange(view: View, given: Given) -> Response:
    return await changes.delete_exchange(view, given["vhost"], given["name"], **_ticked(given, "if_unused"))


async def _bind(view: View, given: Given) -> Response:
    bind = changes.bind_exchange if given["kind"] == DestinationKind.EXCHANGE else changes.bind_queue
    body = build(changes.BindingBody, {"routing_key": given["routing_key"], "arguments": _arguments(given)})
    return await bind(view, given["vhost"], given["source"], given["destination"], body)


async def _unbind(view: View, given: Given) -> Response:
    unbind = changes.unbind_exchange if given["kind"] == DestinationKind.EXCHANGE else changes.unbind_queue
    return await unbind(view, given["vhost"], given["source"], given["destination"], given["key"])


TOPOLOGY_CHANGES: Final = {
    "declare-queue": TopologyChange(
        headline="Declare queue",
        thing="queue",
        run=_declare_queue,
        fields=("vhost", "name", "type", "durable", "auto_delete", "arguments"),
        done="Queue {name} is declared.",
        there="Queue {name} was there already, with the same properties.",
    ),
    "purge-queue": TopologyChange(
        headline="Purge queue",
        thing="queue",
        run=_purge_queue,
        fields=(),
        done="The ready messages of queue {name} are removed.",
        removes=True,
    ),
    "delete-queue": TopologyChange(
        headline="Delete queue",
        thing="queue",
        run=_delete_queue,
        fields=("if_empty", "if_unused"),
        done="Queue {name} is deleted.",
        removes=True,
        gone=True,
    ),
    "declare-exchange": TopologyChange(
        headline="Declare exchange",
        thing="exchange",
        run=_declare_exchange,
        fields=("vhost", "name", "type", "durable", "auto_delete", "internal", "arguments"),
        done="Exchange {name} is declared.",
        there="Exchange {name} was there already, with the same properties.",
    ),
    "delete-exchange": TopologyChange(
        headline="Delete exchange",
        thing="exchange",
        run=_delete_exchange,
        fields=("if_unused",),
        done="Exchange {name} is deleted.",
        removes=True,
        gone=True,
    ),
    "bind": TopologyChange(
        headline="Add binding",
        thing="binding",
        run=_bind,
        fields=("vhost", "source", "kind", "destination", "routing_key", "arguments"),
        done="Exchange {source} is bound to {kind} {destination}.",
    ),
    "unbind": TopologyChange(
        headline="Remove binding",
        thing="binding",
        run=_unbind,
        fields=(),
        done="The binding from exchange {source} to {kind} {destination} is removed.",
        removes=True,
    ),
}


@router.get("/topology")
async def ask_to_change_topology(visit: Visitor, view: Seen, query: Annotated[TopologyQuery, Query()]) -> Response:
    """The form of a change."""
    return _form(visit, view, query, {"durable": "yes"})


@router.post("/topology")
async def change_topology(
    request: Request, visit: Visitor, view: Seen, query: Annotated[TopologyQuery, Query()]
) -> Response:
    """Make a change. A refusal is shown in the form."""
    form = await read_form(request, visit)
    wanted = _wanted(query)
    typed = {name: form.exactly(name) for name in wanted.fields}
    given = dict.fromkeys(_OBJECT, "") | typed | _place(query)
    try:
        answer = await wanted.run(view, given)
    except REFUSALS as error:
        return _form(visit, view, query, typed, as_problem(error))
    was_there = answer.status_code == HTTPStatus.NO_CONTENT and wanted.there
    visit.session.notice = (was_there or wanted.done).format_map(given)
    return redirect_to(address(f"{wanted.thing}s") if wanted.gone else _page_of(wanted, given, query.end))


def _wanted(query: TopologyQuery) -> TopologyChange:
    wanted = TOPOLOGY_CHANGES.get(query.action)
    if wanted is None:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"there is no change {query.action!r}")
    return wanted


def _place(query: TopologyQuery) -> dict[str, str]:
    """The fields of the object that the address has."""
    given = query.model_dump(include=set(_OBJECT))
    return {name: str(given[name]) for name in _OBJECT if given[name]}


def _page_of(wanted: TopologyChange, given: Given, end: str) -> str:
    """The page of the object, or of one end of the binding; the list if it has no name yet."""
    thing, name = wanted.thing, given.get("name")
    if thing == "binding":
        thing = "exchange" if end == "source" else given.get("kind", "queue")
        name = given.get(end)
    return address(thing, vhost=given.get("vhost"), name=name) if name else address(f"{thing}s")


def _effect(view: View, action: str, place: Given) -> dict[str, Any]:
    """The facts about the object that a change removes. Raises Problem 404."""
    vhost, name = place.get("vhost", ""), place.get("name", "")
    match action:
        case "purge-queue" | "delete-queue":
            queue = view.queue(vhost, name)
            return {"queue": view.queue_row(queue), "bindings": len(queue.into)}
        case "delete-exchange":
            exchange = view.exchange(vhost, name)
            return {"bindings": len(exchange.bindings) + len(exchange.into)}
        case "unbind":
            ends = place.get("source", ""), DestinationKind(place.get("kind", "queue")), place.get("destination", "")
            return {"binding": binding_row(view.binding(vhost, *ends, place.get("key", "")))}
        case _:
            return {}


def _form(visit: Visit, view: View, query: TopologyQuery, values: Given, problem: Problem | None = None) -> Response:
    visit.who.require(changes.role_for_change(visit.who))
    wanted, place = _wanted(query), _place(query)
    return visit.show(
        "topology.html",
        HTTPStatus.OK if problem is None else problem.status,
        change=wanted,
        target=address("topology", **query.model_dump(exclude_defaults=True)),
        place=place,
        fields=[name for name in wanted.fields if name not in place],
        values=values,
        problem=problem,
        vhosts=sorted(view.users.vhosts),
        types=_TYPES.get(wanted.thing, ()),
        kinds=list(DestinationKind),
        back=_page_of(wanted, place, query.end),
        **({"queue": None, "binding": None, "bindings": 0} | _effect(view, query.action, place)),
    )

"""Pages of standalone mode's broker: queues, exchanges, bindings and consumers.

They show the rows of RabbitMQ's management API and change objects with its functions, which check roles and permissions
and write the audit log.
"""

import asyncio
import json
from base64 import b64decode
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from dtx.admin import routes_rabbitmq as reading
from dtx.admin import routes_rabbitmq_changes as changes
from dtx.admin.message_properties import flat
from dtx.admin.problems import Problem, as_problem
from dtx.admin.rabbitmq_lists import Listed, ListQuery, Row, find, rows
from dtx.admin.rabbitmq_rows import View, exchange_row
from dtx.admin.safe_text import preview
from dtx.admin.web.page_request import Visit, Visitor, build, read_form
from dtx.admin.web.rendering import address, redirect_to
from dtx.auth.roles import OperatorRole
from dtx.log.api import LogError
from dtx.log.changes import DestinationKind
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import XaError

router = APIRouter()
PAGE: Final = 50
_FEW: Final = 20
"""Bindings and consumers on the page of a queue or exchange; their own page has all."""
_DEFAULT: Final = "amq.default"
"""The name of the default exchange in paths of the API."""
MOST_SHOWN: Final = 50
"""Messages on one page."""
_PREVIEW: Final = 4_000
"""Characters of a body in its preview."""
_MOST_PROPERTIES: Final = 50
"""Properties of each of these messages."""
_PROPERTY: Final = 200
"""Characters of such a property."""
REFUSALS: Final = (Problem, XaError, WireError, LogError)
"""Errors that a form shows. If its object is not there, or not for this user, there is no form to show."""


class BrokerQuery(BaseModel):
    """The query of a list."""

    vhost: str = Field(default="", max_length=255)
    page: int = Field(default=1, ge=1)
    sort: str = Field(default="", max_length=100)
    sort_reverse: bool = False


class NamedQuery(BrokerQuery):
    """The query of queues or exchanges."""

    name: str = Field(default="", max_length=255)


class BindingsQuery(BrokerQuery):
    """The query of bindings."""

    source: str = Field(default="", max_length=255)
    destination: str = Field(default="", max_length=255)
    kind: DestinationKind = DestinationKind.QUEUE


class ConsumersQuery(BrokerQuery):
    """The query of consumers."""

    queue: str = Field(default="", max_length=255)


class ObjectQuery(BaseModel):
    """The query of one object."""

    vhost: str = Field(default="/", max_length=255)
    name: str = Field(max_length=255)


class PublishQuery(BaseModel):
    """The query of the form to publish."""

    vhost: str = Field(default="/", max_length=255)
    exchange: str = Field(default=_DEFAULT, max_length=255)
    routing_key: str = Field(default="", max_length=255)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """One page of a list.

    Args:
        where: the page of the console.
        rows: its rows.
        count: the number of rows that the search finds.
        total: the number of all rows.
        page: its number.
        pages: the number of pages.
        given: the fields of the search that are not empty.
        sort: the field to sort by; empty for the order of names.
        reverse: whether the order is reversed.
    """

    where: str
    rows: list[Row]
    count: int
    total: int
    page: int
    pages: int
    given: dict[str, str]
    sort: str
    reverse: bool

    def at(self, page: int) -> str:
        """The address of another page of the list."""
        return self._address(self.sort, self.reverse, page)

    def by(self, field: str, *, descending: bool) -> str:
        """The address of the list in the order of a field; a second time, in the reverse order.

        Args:
            field: of the rows.
            descending: whether the greatest value comes first at the first time.
        """
        return self._address(field, not self.reverse if field == self.sort else descending, 1)

    def _address(self, sort: str, reverse: bool, page: int) -> str:
        order = {"sort": sort, "sort_reverse": "yes" if reverse else None, "page": page if page > 1 else None}
        return address(self.where, **self.given, **order)


async def list_page(where: str, listed: Listed, query: BrokerQuery, size: int = PAGE) -> ListPage:
    """A page of a list; the last one if the list has become shorter.

    Raises:
        Problem: 422, the rows have no such field.
    """
    name = query.name if isinstance(query, NamedQuery) else ""
    order = ListQuery(page=1, name=name, sort=query.sort or None, sort_reverse=query.sort_reverse)
    found = await find(listed, order)
    pages = found.pages(size)
    page = min(query.page, pages)
    shown = [row async for row in rows(listed, found.things, (page - 1) * size, page * size)]
    if query.sort and shown and query.sort.partition(".")[0] not in shown[0]:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"sort: the rows have no field {query.sort[:100]!r}")
    given = query.model_dump(exclude={"page", "sort", "sort_reverse"}, exclude_defaults=True)
    return ListPage(
        where=where,
        rows=shown,
        count=found.count,
        total=found.total,
        page=page,
        pages=pages,
        given={key: str(value) for key, value in given.items() if value},
        sort=query.sort,
        reverse=query.sort_reverse,
    )


async def _see(visit: Visitor) -> View:
    """What the visitor sees. Raises as :func:`~dtx.admin.routes_rabbitmq.view_of`; Problem 403 without a role."""
    visit.who.require(OperatorRole.VIEWER)
    return await reading.view_of(visit.who, visit.context)


Seen = Annotated[View, Depends(_see)]


def _may_change(visit: Visit) -> bool:
    return visit.who.role.includes(changes.role_for_change(visit.who))


# -- queues


@router.get("/queues")
async def show_queues(visit: Visitor, view: Seen, query: Annotated[NamedQuery, Query()]) -> Response:
    """The list of queues."""
    found = await list_page("queues", reading.queue_list(view, query.vhost or None), query)
    return visit.show("queues.html", found=found, may_change=_may_change(visit), live="always")


@router.get("/queue")
async def show_queue(visit: Visitor, view: Seen, query: Annotated[ObjectQuery, Query()]) -> Response:
    """One queue with its bindings and consumers."""
    queue = view.queue(query.vhost, query.name)
    row = view.queue_row(queue)
    place = {"vhost": query.vhost}
    bindings = reading.binding_list(view.bindings_to(query.vhost, DestinationKind.QUEUE, query.name))
    consumers = reading.consumer_list(view, query.vhost, queue)
    return visit.show(
        "queue.html",
        queue=row,
        arguments=flat(row["arguments"]),
        bindings=await list_page("bindings", bindings, BindingsQuery(**place, destination=query.name), _FEW),
        consumers=await list_page("consumers", consumers, ConsumersQuery(**place, queue=query.name), _FEW),
        may_change=_may_change(visit),
        live="always",
    )


@router.get("/consumers")
async def show_consumers(visit: Visitor, view: Seen, query: Annotated[ConsumersQuery, Query()]) -> Response:
    """The list of consumers."""
    queue = view.queue(query.vhost or "/", query.queue) if query.queue else None
    found = await list_page("consumers", reading.consumer_list(view, query.vhost or None, queue), query)
    return visit.show("consumers.html", found=found, live="always")


# -- exchanges and bindings


@router.get("/exchanges")
async def show_exchanges(visit: Visitor, view: Seen, query: Annotated[NamedQuery, Query()]) -> Response:
    """The list of exchanges."""
    found = await list_page("exchanges", reading.exchange_list(view, query.vhost or None), query)
    return visit.show("exchanges.html", found=found, may_change=_may_change(visit), live="always")


@router.get("/exchange")
async def show_exchange(visit: Visitor, view: Seen, query: Annotated[ObjectQuery, Query()]) -> Response:
    """One exchange with its bindings."""
    vhost, name = query.vhost, query.name
    row = exchange_row(view.exchange(vhost, name))
    begin = reading.binding_list(view.bindings_from(vhost, name))
    end = reading.binding_list(view.bindings_to(vhost, DestinationKind.EXCHANGE, name))
    to = BindingsQuery(vhost=vhost, destination=name, kind=DestinationKind.EXCHANGE)
    return visit.show(
        "exchange.html",
        exchange=row,
        arguments=flat(row["arguments"]),
        begin=await list_page("bindings", begin, BindingsQuery(vhost=vhost, source=name), _FEW),
        end=await list_page("bindings", end, to, _FEW),
        may_change=_may_change(visit),
        live="always",
    )


@router.get("/bindings")
async def show_bindings(visit: Visitor, view: Seen, query: Annotated[BindingsQuery, Query()]) -> Response:
    """The list of bindings: all, or those of a source, a destination, or both."""
    source, destination, kind = query.source, query.destination, query.kind
    vhost = query.vhost or ("/" if source or destination else None)
    if vhost is None or not (source or destination):
        found = reading.binding_list(view.bindings(vhost))
    elif not destination:
        found = reading.binding_list(view.bindings_from(vhost, source))
    elif not source:
        found = reading.binding_list(view.bindings_to(vhost, kind, destination))
    else:
        found = reading.binding_list(view.bindings_between(vhost, source, kind, destination))
    shown = await list_page("bindings", found, query)
    return visit.show(
        "bindings.html",
        found=shown,
        kind=kind,
        kinds=list(DestinationKind),
        may_change=_may_change(visit),
        live="always",
    )


# -- messages


@router.get("/queue/messages")
async def ask_to_peek(visit: Visitor, view: Seen, query: Annotated[ObjectQuery, Query()]) -> Response:
    """The form that shows messages of a queue."""
    return _messages_page(visit, view, query.vhost, query.name, "1")


@router.post("/queue/messages")
async def peek(request: Request, visit: Visitor, view: Seen, query: Annotated[ObjectQuery, Query()]) -> Response:
    """Show the first messages of a queue, which keeps them. Viewing them is recorded in the audit log."""
    form = await read_form(request, visit)
    vhost, name, count = query.vhost, query.name, form.one("count")
    try:
        if not count.isdecimal() or not 1 <= int(count[:4]) <= MOST_SHOWN:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"count: from 1 to {MOST_SHOWN}")
        wanted = {"count": count, "ackmode": "ack_requeue_true", "encoding": "base64", "truncate": _PREVIEW}
        body = build(changes.GetBody, wanted)
        found = await changes.take_messages(view, vhost, name, body, request.is_disconnected)
    except REFUSALS as error:
        return _messages_page(visit, view, vhost, name, count, as_problem(error))
    row = view.queue_row(view.queue(vhost, name))
    # In a thread, because many properties take long.
    return await asyncio.to_thread(lambda: _with_messages(visit, row, count, [_shown(each) for each in found]))


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """A message of the API, with its properties and the beginning of its body for people."""
    body = b64decode(message["payload"])
    return message | {
        "properties": flat(dict(message["properties"]), _MOST_PROPERTIES, _PROPERTY),
        "preview": preview(body, _PREVIEW, message["payload_bytes"]),
    }


def _messages_page(
    visit: Visit,
    view: View,
    vhost: str,
    name: str,
    count: str,
    problem: Problem | None = None,
) -> Response:
    visit.who.require(changes.role_for_change(visit.who))
    return _with_messages(visit, view.queue_row(view.queue(vhost, name)), count, None, problem)


def _with_messages(
    visit: Visit, queue: Row, count: str, messages: list[dict[str, Any]] | None, problem: Problem | None = None
) -> Response:
    return visit.show(
        "queue-messages.html",
        HTTPStatus.OK if problem is None else problem.status,
        queue=queue,
        count=count,
        most=MOST_SHOWN,
        messages=messages,
        problem=problem,
    )


@router.get("/publish")
async def ask_to_publish(visit: Visitor, view: Seen, query: Annotated[PublishQuery, Query()]) -> Response:
    """The form that publishes a message."""
    if not {"\r", "\n"}.isdisjoint(query.routing_key):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "a form cannot send a routing key with line ends: use the API")
    return _publish_page(visit, view, query.vhost, query.exchange, {"routing_key": query.routing_key})


@router.post("/publish")
async def publish(request: Request, visit: Visitor, view: Seen, query: Annotated[PublishQuery, Query()]) -> Response:
    """Publish a message."""
    form = await read_form(request, visit)
    vhost, exchange = query.vhost, query.exchange
    given = {name: form.exactly(name) for name in ("routing_key", "payload", "properties", "persistent")}
    try:
        properties = typed_object("properties", given["properties"])
        if given["persistent"] == "yes":
            properties = {"delivery_mode": 2} | properties
        body = build(
            changes.PublishBody,
            {
                "routing_key": given["routing_key"],
                "payload": given["payload"].replace("\r\n", "\n"),  # browsers send CRLF for each line end
                "payload_encoding": "string",
                "properties": properties,
            },
        )
        answer = await changes.publish(view, vhost, exchange, body)
    except REFUSALS as error:
        return _publish_page(visit, view, vhost, exchange, given, as_problem(error))
    if not answer.routed:
        return _publish_page(visit, view, vhost, exchange, given, unrouted=True)
    visit.session.notice = "The message is published: a queue has taken it."
    return redirect_to(_place(vhost, exchange, given["routing_key"]))


def typed_object(name: str, text: str) -> dict[str, Any]:
    """The properties or arguments that were typed as JSON.

    Raises:
        Problem: 422, they are no object of JSON.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: no object of JSON")
    return found


def _place(vhost: str, exchange: str, routing_key: str) -> str:
    """The page from which a message is published: that of the queue, or that of the exchange."""
    if exchange == _DEFAULT and routing_key:
        return address("queue", vhost=vhost, name=routing_key)
    return address("exchange", vhost=vhost, name=exchange)


def _publish_page(
    visit: Visit,
    view: View,
    vhost: str,
    exchange: str,
    given: dict[str, str],
    problem: Problem | None = None,
    *,
    unrouted: bool = False,
) -> Response:
    visit.who.require(changes.role_for_change(visit.who))
    view.exchange(vhost, exchange)
    return visit.show(
        "publish.html",
        HTTPStatus.OK if problem is None else problem.status,
        vhost=vhost,
        exchange=exchange,
        given=given,
        back=_place(vhost, exchange, given["routing_key"]),
        problem=problem,
        unrouted=unrouted,
    )

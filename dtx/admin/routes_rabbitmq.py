"""The reading part of RabbitMQ's management API, in standalone mode: its paths, with the rows of
:mod:`dtx.admin.rabbitmq_rows`.

One table has all lists and objects. Names in these paths are percent-encoded, as the virtual host ``%2F``; the server
passes the paths on as they are (:data:`PREFIX`).
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Final
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator

from dtx.admin import rabbitmq_rows as rows
from dtx.admin.api_context import Asker, Context
from dtx.admin.problems import ELSEWHERE, NOT_ACTIVE, Problem, refusals
from dtx.admin.rabbitmq_lists import Listed, ListQuery, Row, answer, only
from dtx.admin.rabbitmq_rows import View
from dtx.auth.roles import TAGS, OperatorRole
from dtx.log import reader
from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres.exchanges import Queue

PREFIX: Final = "/api"
TAG: Final = "rabbitmq"
router = APIRouter(prefix=PREFIX, tags=[TAG])
READ: Final = refusals(
    {
        HTTPStatus.BAD_REQUEST: "The page or the pattern is not possible.",
        HTTPStatus.NOT_FOUND: "There is no such object, or dtx runs alongside a broker.",
        HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE,
    }
)


async def view_of(who: Asker, context: Context) -> View:
    """What a request sees.

    Raises:
        Problem: 404, dtx runs alongside a broker; 503, this dtx is not the active one.
        LogUnavailable: the database cannot be used.
    """
    if not context.standalone:
        raise Problem(HTTPStatus.NOT_FOUND, ELSEWHERE)
    active, _ = context.require_active()
    broker = active.own_broker
    assert broker is not None, "standalone mode has it"
    await broker.accounts.refresh()
    return View(who=who, context=context, active=active, broker=broker, users=broker.accounts.users)


Seen = Annotated[View, Depends(view_of)]


def _place(text: str) -> Any:
    return Path(description=f"{text} Percent-encoded.")


_DECODED: Final = AfterValidator(lambda text: unquote(text, errors="strict"))
VhostPlace = Annotated[str, _place("Virtual host."), _DECODED]
NamePlace = Annotated[str, _place("Name of the object."), _DECODED]
SourcePlace = Annotated[str, _place("Name of the source exchange."), _DECODED]
DestinationPlace = Annotated[str, _place("Name of the destination."), _DECODED]
PropsPlace = Annotated[str, _place("*properties_key* of the binding."), _DECODED]
UserPlace = Annotated[str, _place("Name of the user."), _DECODED]
_PLACES: Final[dict[str, Any]] = {
    "vhost": VhostPlace,
    "name": NamePlace,
    "source": SourcePlace,
    "destination": DestinationPlace,
    "props": PropsPlace,
    "user": UserPlace,
}


@dataclass(frozen=True, slots=True)
class _Resource:
    """A path that can be read.

    Args:
        path: after the prefix.
        about: a sentence.
        read: returns the list or the object, from the view and the path parameters.
        role: that it needs.
    """

    path: str
    about: str
    read: Callable[..., Listed | Row | Awaitable[Listed | Row]]
    role: OperatorRole = OperatorRole.VIEWER


def queue_list(view: View, vhost: str | None = None) -> Listed:
    """The queues of a virtual host, or all."""
    return Listed(view.queues(vhost), view.queue_row, ("vhost", "name"))


def exchange_list(view: View, vhost: str | None = None) -> Listed:
    """The exchanges of a virtual host, or all."""
    return Listed(view.exchanges(vhost), rows.exchange_row, ("vhost", "name"))


def binding_list(found: Iterable[BindingRow | None]) -> Listed:
    """The bindings of a reading of the view."""
    return Listed(found, rows.binding_row, ("vhost", "source", "destination_type", "destination", "routing_key"))


def _connections(view: View, vhost: str | None = None) -> Listed:
    if vhost is not None:
        view.vhost(vhost)
    return Listed(view.clients(vhost), view.connection_row, ("vhost", "name"))


def _channels(view: View, clients: list[rows.Client]) -> Listed:
    return Listed(view.channels(clients), view.channel_row, ("vhost", "name"))


def consumer_list(view: View, vhost: str | None = None, queue: Queue | None = None) -> Listed:
    """The consumers of a queue, of a virtual host, or all."""
    queues = view.queues(vhost) if queue is None else [queue]
    return Listed(view.consumers(queues, vhost), view.consumer_row, ("queue.vhost", "queue.name"))


async def _vhosts(view: View) -> Listed:
    found = [await view.one_vhost(host.name) for host in view.vhosts()]
    return Listed(found, dict, ("name",))


def _granted(found: Any) -> Listed:
    return Listed(found, dict, ("vhost", "user", "exchange"))


def _in_vhost(found: Any, view: View, vhost: str) -> Listed:
    view.vhost(vhost)
    return _granted(row for row in found if row["vhost"] == vhost)


def _permission(view: View, vhost: str, user: str) -> Row:
    found = next((row for row in rows.permissions_of(view.user(user)) if row["vhost"] == vhost), None)
    if found is None:
        raise rows.not_found("permission", user)
    return found


def _topic_permission(view: View, vhost: str, user: str) -> Listed:
    found = [row for row in rows.topic_permissions_of(view.user(user)) if row["vhost"] == vhost]
    if not found:
        raise rows.not_found("topic permission", user)
    return _granted(found)


def _users(view: View, *, without_permissions: bool = False) -> Listed:
    found = (user for user in view.users.users.values() if not (without_permissions and user.grants))
    return Listed(found, rows.user_row, ("name",))


def _nothing(view: View, vhost: str | None = None, **_: str) -> Listed:
    if vhost is not None:
        view.vhost(vhost)
    return Listed((), dict, ())


def _node(view: View, name: str) -> Row:
    if name != view.node:
        raise rows.not_found("node", name)
    return view.node_row(name)


def _health(view: View, name: str | None = None) -> Row:
    if name is not None:
        _node(view, name)
    alarms = view.alarms()
    return {"status": "failed", "reason": f"resource alarms in effect: {', '.join(alarms)}"} if alarms else _OK


_OK: Final[Row] = {"status": "ok"}
_QUEUE, _EXCHANGE = DestinationKind
_COORDINATOR: Final = OperatorRole.COORDINATOR
_PAIR: Final = "/bindings/{vhost}/e/{source}/"
_RESOURCES: Final = (
    _Resource("/overview", "Numbers of all objects and messages.", View.overview),
    _Resource("/cluster-name", "The name of the resource manager.", lambda view: {"name": view.context.rm}),
    _Resource("/nodes", "This dtx as a node.", lambda view: Listed([view.node], view.node_row, ("name",))),
    _Resource("/nodes/{name}", "This dtx as a node.", _node),
    _Resource("/healthchecks/node", "Deprecated: the check of alarms, whose failure has status 200.", _health),
    _Resource("/healthchecks/node/{name}", "Deprecated: the same for this dtx as a node.", _health),
    _Resource("/vhosts", "Virtual hosts.", _vhosts),
    _Resource("/vhosts/{name}", "A virtual host.", View.one_vhost),
    _Resource("/vhosts/{vhost}/connections", "Connections to a virtual host.", _connections),
    _Resource(
        "/vhosts/{vhost}/channels",
        "Channels in a virtual host.",
        lambda view, vhost: _channels(view, view.clients(view.vhost(vhost).name)),
    ),
    _Resource(
        "/vhosts/{vhost}/permissions",
        "Permissions in a virtual host.",
        lambda view, vhost: _in_vhost(view.permissions(), view, vhost),
        _COORDINATOR,
    ),
    _Resource(
        "/vhosts/{vhost}/topic-permissions",
        "Topic permissions in a virtual host.",
        lambda view, vhost: _in_vhost(view.topic_permissions(), view, vhost),
        _COORDINATOR,
    ),
    _Resource("/connections", "Connections of clients.", _connections),
    _Resource("/connections/{name}", "A connection.", lambda view, name: view.connection_row(view.client(name))),
    _Resource(
        "/connections/{name}/channels",
        "Channels of a connection.",
        lambda view, name: _channels(view, [view.client(name)]),
    ),
    _Resource("/channels", "Channels of clients.", lambda view: _channels(view, view.clients())),
    _Resource("/channels/{name}", "A channel.", lambda view, name: view.channel_row(view.channel(name))),
    _Resource("/consumers", "Consumers.", consumer_list),
    _Resource("/consumers/{vhost}", "Consumers in a virtual host.", consumer_list),
    _Resource("/exchanges", "Exchanges.", exchange_list),
    _Resource("/exchanges/{vhost}", "Exchanges in a virtual host.", exchange_list),
    _Resource(
        "/exchanges/{vhost}/{name}",
        "An exchange; the default exchange has the name amq.default.",
        lambda view, vhost, name: rows.exchange_row(view.exchange(vhost, name)),
    ),
    _Resource(
        "/exchanges/{vhost}/{name}/bindings/source",
        "Bindings whose source is an exchange.",
        lambda view, vhost, name: binding_list(view.bindings_from(vhost, name)),
    ),
    _Resource(
        "/exchanges/{vhost}/{name}/bindings/destination",
        "Bindings whose destination is an exchange.",
        lambda view, vhost, name: binding_list(view.bindings_to(vhost, _EXCHANGE, name)),
    ),
    _Resource("/queues", "Queues.", queue_list),
    _Resource("/queues/{vhost}", "Queues in a virtual host.", queue_list),
    _Resource(
        "/queues/{vhost}/{name}",
        "A queue with its consumers.",
        lambda view, vhost, name: view.one_queue(view.queue(vhost, name)),
    ),
    _Resource(
        "/queues/{vhost}/{name}/bindings",
        "Bindings whose destination is a queue.",
        lambda view, vhost, name: binding_list(view.bindings_to(vhost, _QUEUE, name)),
    ),
    _Resource("/bindings", "Bindings.", lambda view: binding_list(view.bindings())),
    _Resource(
        "/bindings/{vhost}", "Bindings in a virtual host.", lambda view, vhost: binding_list(view.bindings(vhost))
    ),
    *(
        _Resource(
            f"{_PAIR}{kind[0]}/{{destination}}",
            f"Bindings from an exchange to {'a queue' if kind is _QUEUE else 'another one'}.",
            lambda view, vhost, source, destination, kind=kind: binding_list(
                view.bindings_between(vhost, source, kind, destination)
            ),
        )
        for kind in DestinationKind
    ),
    *(
        _Resource(
            f"{_PAIR}{kind[0]}/{{destination}}/{{props}}",
            f"A binding from an exchange to {'a queue' if kind is _QUEUE else 'another one'}.",
            lambda view, vhost, source, destination, props, kind=kind: rows.binding_row(
                view.binding(vhost, source, kind, destination, props)
            ),
        )
        for kind in DestinationKind
    ),
    _Resource("/users", "Users, without the hashes of their passwords.", _users, _COORDINATOR),
    _Resource(
        "/users/without-permissions",
        "Users that may enter no virtual host.",
        lambda view: _users(view, without_permissions=True),
        _COORDINATOR,
    ),
    _Resource("/users/{user}", "A user.", lambda view, user: rows.user_row(view.user(user)), _COORDINATOR),
    _Resource(
        "/users/{user}/permissions",
        "Permissions of a user.",
        lambda view, user: _granted(rows.permissions_of(view.user(user))),
        _COORDINATOR,
    ),
    _Resource(
        "/users/{user}/topic-permissions",
        "Topic permissions of a user.",
        lambda view, user: _granted(rows.topic_permissions_of(view.user(user))),
        _COORDINATOR,
    ),
    _Resource("/permissions", "Permissions of all users.", lambda view: _granted(view.permissions()), _COORDINATOR),
    _Resource("/permissions/{vhost}/{user}", "Permissions of a user in a virtual host.", _permission, _COORDINATOR),
    _Resource(
        "/topic-permissions",
        "Topic permissions of all users.",
        lambda view: _granted(view.topic_permissions()),
        _COORDINATOR,
    ),
    _Resource(
        "/topic-permissions/{vhost}/{user}",
        "Topic permissions of a user in a virtual host.",
        _topic_permission,
        _COORDINATOR,
    ),
    *(
        _Resource(f"/{path}", "An empty list: dtx has none.", _nothing)
        for path in (
            "extensions",
            "feature-flags",
            "global-parameters",
            "operator-policies",
            "operator-policies/{vhost}",
            "parameters",
            "parameters/{name}",
            "parameters/{name}/{vhost}",
            "policies",
            "policies/{vhost}",
            "user-limits",
            "user-limits/{user}",
            "vhost-limits",
            "vhost-limits/{vhost}",
        )
    ),
)


def _serve(resource: _Resource) -> None:
    """Make the route of *resource*."""
    names = re.findall(r"{(\w+)}", resource.path)

    async def show(view: View, query: ListQuery, **names: str) -> Response:
        view.who.require(resource.role)
        found = resource.read(view, **names)
        if inspect.isawaitable(found):
            found = await found
        if isinstance(found, Listed):
            return await answer(found, query)
        return JSONResponse(only(found, query.columns))

    keyword = inspect.Parameter.KEYWORD_ONLY
    given = {"view": Seen, "query": Annotated[ListQuery, Query()], **{name: _PLACES[name] for name in names}}
    show.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, annotation=each) for name, each in given.items()]
    )
    word = re.sub(r"\W+", "_", resource.path).strip("_")
    router.add_api_route(
        resource.path,
        show,
        name=f"show_{word}",
        description=resource.about,
        responses=READ,
        response_class=JSONResponse,
    )


for _resource in _RESOURCES:
    _serve(_resource)


@router.get("/whoami", responses=READ)
async def show_identity(who: Asker, context: Context) -> JSONResponse:
    """The user or token of the request, and its tags."""
    view = await view_of(who, context)
    user = None if who.is_token else view.users.users.get(who.name)
    tags = [tag for tag, (role, _) in TAGS.items() if role is who.role] if user is None else sorted(user.tags)
    return JSONResponse({"name": who.name, "tags": tags})


# -- health checks

_FAILED: Final = READ | refusals({HTTPStatus.SERVICE_UNAVAILABLE: "The check has failed."})
_DAYS: Final = {"days": 1.0, "weeks": 7.0, "months": 365 / 12, "years": 365.0}
"""RabbitMQ's units of time."""


def _checked(failure: str | None, **facts: object) -> JSONResponse:
    if failure is None:
        return JSONResponse(_OK | facts)
    return JSONResponse({"status": "failed", "reason": failure} | facts, HTTPStatus.SERVICE_UNAVAILABLE)


@router.get("/aliveness-test/{vhost}", responses=_FAILED)
async def check_vhost(view: Seen, vhost: VhostPlace) -> JSONResponse:
    """Check that a virtual host can be used: the database answers."""
    view.who.require(OperatorRole.VIEWER)
    view.vhost(vhost)
    await view.context.read(reader.database_time)
    return _checked("dtx is shutting down" if view.active.manager.draining else None)


@router.get("/health/checks/virtual-hosts", responses=_FAILED)
async def check_vhosts(view: Seen) -> JSONResponse:
    """Check that all virtual hosts can be used: the database answers."""
    view.who.require(OperatorRole.VIEWER)
    await view.context.read(reader.database_time)
    return _checked(None)


async def _alarms(view: Seen) -> JSONResponse:
    """Check that no alarm is raised: there is room on the disk, and in the memory for messages."""
    view.who.require(OperatorRole.VIEWER)
    alarms = [{"node": view.node, "resource": resource} for resource in view.alarms()]
    return _checked("There are alarms in effect in the cluster", alarms=alarms) if alarms else _checked(None)


async def _critical(view: Seen) -> JSONResponse:
    """Always ok: PostgreSQL has the messages."""
    view.who.require(OperatorRole.VIEWER)
    return _checked(None, reason="single node cluster")


_CRITICAL: Final = ("node-is-quorum-critical", "node-is-mirror-sync-critical")
for _check, _words in ((_alarms, ("alarms", "local-alarms")), (_critical, _CRITICAL)):
    for _word in _words:
        router.add_api_route(f"/health/checks/{_word}", _check, name=f"check {_word}", responses=_FAILED)


@router.get("/health/checks/certificate-expiration/{within}/{unit}", responses=_FAILED)
async def check_certificates(
    view: Seen,
    within: Annotated[int, Path(ge=0, description="Number of units.")],
    unit: Annotated[str, Path(description="days, weeks, months or years.")],
) -> JSONResponse:
    """Check that no certificate of a listener, nor one in --tls-ca, expires within a time."""
    view.who.require(OperatorRole.VIEWER)
    try:
        until = datetime.now(UTC) + timedelta(within * _DAYS[unit.lower()])
    except KeyError:
        raise Problem(HTTPStatus.BAD_REQUEST, "the units are days, weeks, months and years") from None
    except OverflowError:
        until = datetime.max.replace(tzinfo=UTC)
    expired = list(view.expiring(until))
    return _checked("Certificates expiring", expired=expired) if expired else _checked(None)


@router.get("/health/checks/port-listener/{port}", responses=_FAILED)
async def check_port(view: Seen, port: Annotated[str, Path(description="Number of the port.")]) -> JSONResponse:
    """Check that dtx listens on a port."""
    view.who.require(OperatorRole.VIEWER)
    ports = [str(number) for _, number, _ in view.active.addresses]
    if port in ports:
        return _checked(None, port=int(port))
    return _checked("No active listener", missing=port, ports=ports)


@router.get("/health/checks/protocol-listener/{protocol}", responses=_FAILED)
async def check_protocol(
    view: Seen, protocol: Annotated[str, Path(description="amqp091 or amqp10, for example.")]
) -> JSONResponse:
    """Check that dtx listens for a protocol."""
    view.who.require(OperatorRole.VIEWER)
    served = sorted({name for _, _, name in view.active.addresses})
    name = {"amqp091": "amqp", "amqp10": "amqp", "amqps": "amqp/ssl"}.get(protocol, protocol)
    if name in served:
        return _checked(None, protocol=name)
    return _checked("No active listener", missing=name, protocols=served)

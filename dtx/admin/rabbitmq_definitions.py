"""Definitions of RabbitMQ: users, permissions, virtual hosts, exchanges, queues and bindings as one document.

An export has the durable objects. An import makes those that are not there yet, in the order of their dependencies.
Each takes the way of its own request. It changes users, tags and permissions that are there. It deletes nothing. If an
object cannot be made, the import ends with the reason, and earlier objects stay.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from http import HTTPStatus
from itertools import islice
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field, ValidationError

import dtx
from dtx.admin import rabbitmq_rows as rows
from dtx.admin.message_properties import table_from_json
from dtx.admin.problems import Problem
from dtx.admin.rabbitmq_lists import Row
from dtx.admin.rabbitmq_rows import COMPATIBLE, View
from dtx.admin.routes_rabbitmq import PREFIX, TAG, Seen, VhostPlace
from dtx.admin.routes_rabbitmq_changes import (
    CHANGE,
    HASHING,
    ExchangeBody,
    PermissionBody,
    QueueBody,
    RabbitForm,
    TopicPermissionBody,
    change,
    stored_hash,
)
from dtx.auth.roles import OperatorRole, split_tags
from dtx.auth.users import AccountEditor
from dtx.store.slices import advance, finish
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import XaError

router = APIRouter(prefix=PREFIX, tags=[TAG])
_LONGEST: Final = (4096, 256 * 1024)
"""Characters of one object to import: at first a few, because each object is copied."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()
_AT_ONCE: Final = 50
"""Objects that are declared together, at most."""
_Request = tuple[str, str, Method]
_PIECE: Final = 500
"""Objects that are written to an export in one turn of the event loop."""


class _InVhost(RabbitForm):
    vhost: str = ""


class _User(RabbitForm):
    name: str
    password_hash: str = ""
    hashing_algorithm: str = HASHING
    tags: str | list[str]


class _Vhost(RabbitForm):
    name: str


class _Permission(PermissionBody):
    user: str
    vhost: str


class _TopicPermission(TopicPermissionBody):
    user: str
    vhost: str


class _Exchange(ExchangeBody, _InVhost):
    name: str


class _Queue(QueueBody, _InVhost):
    name: str


class _Binding(_InVhost):
    source: str
    destination: str
    destination_type: str
    routing_key: str
    arguments: dict[str, Any]


class _Definitions(RabbitForm):
    users: list[_User] = Field(default_factory=list)
    vhosts: list[_Vhost] = Field(default_factory=list)
    permissions: list[_Permission] = Field(default_factory=list)
    topic_permissions: list[_TopicPermission] = Field(default_factory=list)
    exchanges: list[_Exchange] = Field(default_factory=list)
    queues: list[_Queue] = Field(default_factory=list)
    bindings: list[_Binding] = Field(default_factory=list)


KINDS: Final[dict[str, type[RabbitForm]]] = {
    "users": _User,
    "vhosts": _Vhost,
    "permissions": _Permission,
    "topic_permissions": _TopicPermission,
    "exchanges": _Exchange,
    "queues": _Queue,
    "bindings": _Binding,
}
"""The lists that are imported."""


# -- export


def _objects(view: View, vhost: str | None) -> dict[str, Iterable[Row]]:
    """The durable objects."""
    queues = (view.queue_row(queue) for queue in view.queues(vhost) if queue.durable)
    exchanges = (
        rows.exchange_row(exchange)
        for exchange in view.exchanges(vhost)
        if exchange.durable and not exchange.name.startswith(b"amq.") and exchange.name
    )
    bindings = (
        rows.binding_row(binding)
        for exchange in view.exchanges(vhost)
        for binding, destination in list(exchange.bindings.items())
        if exchange.durable and destination.durable
    )
    place = () if vhost is not None else ("vhost",)
    return {
        "queues": _fields(queues, "name", *place, "durable", "auto_delete", "arguments"),
        "exchanges": _fields(exchanges, "name", *place, "type", "durable", "auto_delete", "internal", "arguments"),
        "bindings": _fields(bindings, "source", *place, "destination", "destination_type", "routing_key", "arguments"),
    }


def _fields(found: Iterable[Row], *names: str) -> Iterator[Row]:
    return ({name: row[name] for name in names} for row in found)


def _users(view: View) -> Iterator[Row]:
    for user in view.users.users.values():
        yield {
            "name": user.name,
            "password_hash": user.password_hash,
            "hashing_algorithm": "argon2id",
            "tags": sorted(user.tags),
            "limits": {},
        }


def _export(view: View, vhost: str | None) -> Response:
    head: Row = {"rabbit_version": COMPATIBLE, "rabbitmq_version": COMPATIBLE, "product_name": "dtx"}
    head["product_version"] = dtx.__version__
    lists: dict[str, Iterable[Row]] = {"parameters": (), "policies": ()}
    if vhost is None:
        lists |= {
            "users": _users(view),
            "vhosts": ({"name": name} for name in sorted(view.users.vhosts)),
            "permissions": view.permissions(),
            "topic_permissions": view.topic_permissions(),
            "global_parameters": (),
        }
    lists |= _objects(view, vhost)

    async def pieces() -> AsyncIterator[str]:
        yield json.dumps(head)[:-1]
        for kind, found in lists.items():
            piece, comma = f', "{kind}": [', ""
            for number, row in enumerate(found, 1):
                piece += comma + json.dumps(row)
                comma = ","
                if number % _PIECE == 0:
                    yield piece
                    piece = ""
                    await asyncio.sleep(0)
            yield piece + "]"
        yield "}"

    return StreamingResponse(pieces(), media_type="application/json")


async def _exported(view: View, vhost: str | None) -> Response:
    async def work() -> tuple[str, Response]:
        return "exported", _export(view, vhost if vhost is None else view.vhost(vhost).name)

    answer: Response = await change(view, OperatorRole.COORDINATOR, "export-definitions", vhost or "all", {}, work)
    return answer


@router.get("/definitions", responses=CHANGE)
async def export_definitions(view: Seen) -> Response:
    """Export all durable objects, with users and the hashes of their passwords; recorded in the audit log."""
    return await _exported(view, None)


@router.get("/definitions/{vhost}", responses=CHANGE)
async def export_vhost(view: Seen, vhost: VhostPlace) -> Response:
    """Export the durable objects of a virtual host; recorded in the audit log."""
    return await _exported(view, vhost)


# -- import


def _malformed(reason: str) -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, f"the definitions are malformed: {reason}")


def _after(text: str, at: int, *expected: str) -> int:
    """The place after one of the *expected* characters, if there are any, and after white space."""
    space = _SPACE.match(text, at)
    assert space is not None, "no space is a match, too"
    start = space.end()
    if not expected:
        return start
    if text[start : start + 1] not in expected:
        raise _malformed(f"character {start} is none of {' '.join(expected)}")
    return _after(text, start + 1)


def _value(text: str, at: int) -> tuple[Any, int]:
    """A value, and the place after it."""
    for most in _LONGEST:
        try:
            value, length = _DECODER.raw_decode(text[at : at + most])
        except (ValueError, RecursionError):
            continue
        return value, _after(text, at + length)
    raise _malformed(f"no JSON of at most {_LONGEST[-1]} characters at character {at}")


def _elements(text: str) -> Iterator[tuple[str, Any]]:
    """The elements of all lists of a JSON object, each with the name of its list."""
    at = _after(text, 0, "{")
    while text[at : at + 1] != "}":
        name, at = _value(text, at)
        at = _after(text, at, ":")
        if text[at : at + 1] == "[":
            at = _after(text, at + 1)
            while text[at : at + 1] != "]":
                value, at = _value(text, at)
                yield name, value
                if text[at : at + 1] != "]":
                    at = _after(text, at, ",")
            at = _after(text, at + 1)
        elif name in KINDS:
            raise _malformed(f"{name} is no list")
        else:
            _, at = _value(text, at)
        if text[at : at + 1] != "}":
            at = _after(text, at, ",")


async def _parsed(request: Request) -> _Definitions:
    """The definitions in the body. They are parsed in slices: 4 MiB take a third of a second."""
    try:
        text = (await request.body()).decode()
    except UnicodeDecodeError:
        raise _malformed("they are not UTF-8") from None
    found: dict[str, list[Any]] = {name: [] for name in KINDS}

    def parse() -> Iterator[None]:
        for name, value in _elements(text):
            if name in KINDS:
                try:
                    found[name].append(KINDS[name].model_validate(value))
                except ValidationError as error:
                    first = error.errors()[0]
                    place = ".".join(map(str, (name, len(found[name]), *first["loc"])))
                    raise _malformed(f"{place}: {first['msg']}") from None
            yield

    await finish(parse())
    return _Definitions.model_construct(None, **found)


def _methods(found: _Definitions, vhost: str | None) -> Iterator[_Request]:
    """Virtual host, description and request of each object."""
    for exchange in found.exchanges:
        if exchange.name and not exchange.name.startswith("amq."):
            yield (
                vhost or exchange.vhost,
                f"exchange '{exchange.name}'",
                methods.ExchangeDeclare(
                    exchange.name.encode(),
                    exchange.type.encode(),
                    durable=exchange.durable,
                    auto_delete=exchange.auto_delete,
                    internal=exchange.internal,
                    arguments=table_from_json(exchange.arguments),
                ),
            )
    for queue in found.queues:
        arguments = table_from_json(queue.arguments)
        yield (
            vhost or queue.vhost,
            f"queue '{queue.name}'",
            methods.QueueDeclare(
                queue.name.encode(), durable=queue.durable, auto_delete=queue.auto_delete, arguments=arguments
            ),
        )
    for binding in found.bindings:
        make = methods.QueueBind if binding.destination_type == "queue" else methods.ExchangeBind
        yield (
            vhost or binding.vhost,
            f"binding of '{binding.destination}' to '{binding.source}'",
            make(
                binding.destination.encode(),
                binding.source.encode(),
                binding.routing_key.encode(),
                arguments=table_from_json(binding.arguments),
            ),
        )


def _edit(editor: AccountEditor, found: _Definitions) -> None:
    """Make virtual hosts, users and permissions. Blocks: the hash of a password takes 20 ms."""
    there = editor.read().vhosts
    for vhost in found.vhosts:
        if vhost.name not in there:
            editor.add_vhost(vhost.name)
    for user in found.users:
        stored = stored_hash(user.name, user.password_hash, user.hashing_algorithm)
        editor.put_user(user.name, stored, split_tags(user.tags)[0])
    for given in found.permissions:
        editor.grant(given.user, given.vhost, configure=given.configure, write=given.write, read=given.read)
    for topic in found.topic_permissions:
        editor.grant_topic(topic.user, topic.vhost, topic.exchange, write=topic.write, read=topic.read)


def _next(requests: Iterator[_Request]) -> list[_Request]:
    """The next requests, as many as can be made in one slice."""
    found: list[_Request] = []
    advance(map(found.append, islice(requests, _AT_ONCE)))
    return found


async def _make(view: View, where: str, what: str, method: Method) -> bool:
    """Make an object; false if it is there. The role of the operator decides, as in RabbitMQ."""
    if where not in view.broker.accounts.users.vhosts:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{what}: no virtual host '{where}'")
    host = view.broker.virtual_host(where)
    match method:
        case methods.QueueDeclare() if method.queue in host.queues:
            return False
        case methods.ExchangeDeclare() if method.exchange in host.exchanges:
            return False
    try:
        await view.broker.user(view.who.name, where, by_role=True).request(method)
    except (XaError, WireError) as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"{what} in vhost '{where}': {error.reason}") from None
    return True


async def _import(view: View, request: Request, vhost: str | None) -> Response:
    async def work() -> tuple[str, None]:
        found = await _parsed(request)
        if vhost is None:
            await asyncio.to_thread(_edit, AccountEditor(view.context.url, view.context.rm), found)
            await view.broker.accounts.refresh()
        made = 0
        requests = _methods(found, vhost)
        while some := _next(requests):
            answers = await asyncio.gather(*(_make(view, *each) for each in some), return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                made += answer
        return f"{made} exchanges, queues and bindings are declared", None

    await change(view, OperatorRole.COORDINATOR, "import-definitions", vhost or "all", {}, work)
    return Response(status_code=HTTPStatus.NO_CONTENT)


_IMPORTED: Final[dict[str, Any]] = {"status_code": HTTPStatus.NO_CONTENT, "responses": CHANGE}


@router.post("/definitions", **_IMPORTED)
async def import_definitions(view: Seen, request: Request) -> Response:
    """Import users, permissions, virtual hosts, exchanges, queues and bindings."""
    return await _import(view, request, None)


@router.post("/definitions/{vhost}", **_IMPORTED)
async def import_vhost(view: Seen, vhost: VhostPlace, request: Request) -> Response:
    """Import exchanges, queues and bindings into a virtual host."""
    return await _import(view, request, view.vhost(vhost).name)

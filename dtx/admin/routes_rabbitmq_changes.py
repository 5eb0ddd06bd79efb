"""The changing part of RabbitMQ's management API, in standalone mode.

Changes of exchanges, queues, bindings and messages take the way of a client's AMQP methods, with the permissions of the
user. They need the role operator as well. Changes of users and virtual hosts need the role coordinator, as all changes
by a token. The audit log has each change, and each view of messages.
"""

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from dtx.admin import rabbitmq_rows as rows
from dtx.admin.api_context import BrokerUser, GotMessage, LoginFirstRoute
from dtx.admin.identity import Identity
from dtx.admin.message_properties import properties_from_json, properties_to_json, table_from_json
from dtx.admin.problems import NOT_ACTIVE, Problem, refusals
from dtx.admin.rabbitmq_rows import View, exchange_key
from dtx.admin.routes_rabbitmq import (
    PREFIX,
    TAG,
    DestinationPlace,
    NamePlace,
    PropsPlace,
    Seen,
    SourcePlace,
    UserPlace,
    VhostPlace,
)
from dtx.admin.safe_text import exact_name
from dtx.auth.passwords import imported_hash
from dtx.auth.roles import OperatorRole, split_tags
from dtx.auth.users import AccountEditor
from dtx.log.changes import BindingRow, DestinationKind
from dtx.store.postgres.arguments import in_order
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.xa.codes import ReplyCode, XaError

router = APIRouter(prefix=PREFIX, tags=[TAG], route_class=LoginFirstRoute)
HASHING: Final = "rabbit_password_hashing_sha256"
"""RabbitMQ's algorithm for hashes of passwords."""
MOST_GOT: Final = 4 << 20
"""Bytes of the bodies in one answer."""
MOST_MESSAGES: Final = 1000
"""Messages in one answer."""
CHANGE: Final = refusals(
    {
        HTTPStatus.BAD_REQUEST: "The request is not possible; the reason names the AMQP error.",
        HTTPStatus.NOT_FOUND: "There is no such object, or dtx runs alongside a broker.",
        HTTPStatus.SERVICE_UNAVAILABLE: NOT_ACTIVE,
    }
)
_MADE: Final[dict[int | str, dict[str, Any]]] = {
    **CHANGE,
    201: {"description": "It is new."},
    204: {"description": "It is there already."},
}
_NO_CONTENT: Final[dict[str, Any]] = {"status_code": HTTPStatus.NO_CONTENT, "responses": CHANGE}


class RabbitForm(BaseModel):
    """A body. Unknown fields are ignored, as in RabbitMQ: its tools repeat the names of the path."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    @field_validator("*")
    @classmethod
    def _is_utf8(cls, value: Any) -> Any:
        if isinstance(value, str):
            value.encode()  # a ValueError for half of a surrogate pair
        return value


class QueueBody(RabbitForm):
    """A queue to declare."""

    durable: bool = Field(default=False, description="Whether it survives a restart.")
    auto_delete: bool = Field(default=False, description="Whether it is deleted with its last consumer.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")


class ExchangeBody(QueueBody):
    """An exchange to declare."""

    type: str = Field(default="direct", description="Its type.")
    internal: bool = Field(default=False, description="Whether clients may not publish to it.")


class BindingBody(RabbitForm):
    """A binding to make."""

    routing_key: str = Field(default="", description="Its routing key.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Its arguments.")


class PublishBody(RabbitForm):
    """A message to publish."""

    routing_key: str = Field(description="Its routing key.")
    payload: str = Field(description="Its body.")
    payload_encoding: Literal["string", "base64"] = Field(description="The encoding of *payload*.")
    properties: dict[str, Any] | list[Any] = Field(description="Its properties, by name.")


class GetBody(RabbitForm):
    """Messages to take from a queue."""

    count: int = Field(ge=1, le=MOST_MESSAGES, description="Number of messages at most.")
    ackmode: Literal["ack_requeue_true", "ack_requeue_false", "reject_requeue_true", "reject_requeue_false"] = Field(
        description="The settlement of the messages: with requeue true, they stay in the queue."
    )
    encoding: Literal["auto", "base64"] = Field(description="auto: bodies that are UTF-8 are text.")
    truncate: int | None = Field(default=None, ge=0, description="Bytes of each body that are shown.")


class UserBody(RabbitForm):
    """A user to create or to change."""

    password: str | None = Field(default=None, max_length=2048, repr=False, description="Its password.")
    password_hash: str | None = Field(
        default=None,
        max_length=2048,
        repr=False,
        description="Without *password*: the hash of its password, as in definitions; empty for none.",
    )
    hashing_algorithm: str = Field(default=HASHING, description="The algorithm of *password_hash*.")
    tags: str | list[str] = Field(description="Its tags, with commas between them.")


class PermissionBody(RabbitForm):
    """Permissions, as regular expressions."""

    configure: str = Field(description="Names that the user may declare and delete.")
    write: str = Field(description="Names that the user may publish to, or bind.")
    read: str = Field(description="Names that the user may consume from, or bind to.")


class TopicPermissionBody(RabbitForm):
    """Topic permissions, as regular expressions."""

    exchange: str = Field(description="Name of the topic exchange.")
    write: str = Field(description="Routing keys to publish with.")
    read: str = Field(description="Routing keys to bind with.")


class RoutedAnswer(BaseModel):
    """The answer to a published message."""

    routed: bool = Field(description="Whether a queue has taken it.")


def role_for_change(who: Identity, role: OperatorRole = OperatorRole.OPERATOR) -> OperatorRole:
    """The role that a change needs: *role* for a user.

    A token has no permissions that limit it to some objects, so it needs the role coordinator for each change.
    """
    return OperatorRole.COORDINATOR if who.is_token else role


async def change(
    view: View,
    role: OperatorRole,
    action: str,
    subject: str,
    detail: dict[str, Any],
    work: Callable[[], Awaitable[tuple[str, Any]]],
) -> Any:
    """Check the role, do *work*, and record both in the audit log."""

    async def checked() -> tuple[str, Any]:
        view.who.require(role_for_change(view.who, role))
        return await work()

    return await view.context.audited(view.who, action, subject, "", detail, checked)


def user_of(view: View, vhost: str) -> BrokerUser:
    """The requests of the operator in a virtual host. Raises Problem 404, XaError 403."""
    view.vhost(vhost)
    return view.broker.user(view.who.name, vhost, by_role=view.who.is_token)


async def _request(
    view: View, action: str, vhost: str, name: str, find: Callable[[], Method], made: Callable[[], bool] | None = None
) -> Response:
    """Do what a method requests.

    Args:
        view: of the request.
        action: for the audit log.
        vhost: the virtual host.
        name: of the object, for the audit log.
        find: returns the method; may raise Problem 404.
        made: returns whether the object is not there yet.
    """

    async def work() -> tuple[str, bool]:
        user = user_of(view, vhost)
        method, new = find(), made is not None and made()
        await user.request(method)
        return "done", new

    return _made(await change(view, OperatorRole.OPERATOR, action, f"{vhost} {name}", {}, work))


def _made(new: bool) -> Response:
    return Response(status_code=HTTPStatus.CREATED if new else HTTPStatus.NO_CONTENT)


# -- exchanges, queues and bindings


@router.put("/exchanges/{vhost}/{name}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def declare_exchange(view: Seen, vhost: VhostPlace, name: NamePlace, body: ExchangeBody) -> Response:
    """Declare an exchange."""

    def make() -> Method:
        return methods.ExchangeDeclare(
            exchange_key(name),
            body.type.encode(),
            durable=body.durable,
            auto_delete=body.auto_delete,
            internal=body.internal,
            arguments=table_from_json(body.arguments),
        )

    made = lambda: exchange_key(name) not in view.vhost(vhost).exchanges  # noqa: E731
    return await _request(view, "declare-exchange", vhost, name, make, made)


@router.delete("/exchanges/{vhost}/{name}", **_NO_CONTENT)
async def delete_exchange(
    view: Seen,
    vhost: VhostPlace,
    name: NamePlace,
    if_unused: Annotated[bool, Query(alias="if-unused", description="Only if it has no bindings.")] = False,
) -> Response:
    """Delete an exchange."""

    def find() -> Method:
        return methods.ExchangeDelete(view.exchange(vhost, name).name, if_unused=if_unused)

    return await _request(view, "delete-exchange", vhost, name, find)


@router.put("/queues/{vhost}/{name}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def declare_queue(view: Seen, vhost: VhostPlace, name: NamePlace, body: QueueBody) -> Response:
    """Declare a queue."""

    def make() -> Method:
        arguments = table_from_json(body.arguments)
        return methods.QueueDeclare(
            name.encode(), durable=body.durable, auto_delete=body.auto_delete, arguments=arguments
        )

    made = lambda: name.encode() not in view.vhost(vhost).queues  # noqa: E731
    return await _request(view, "declare-queue", vhost, name, make, made)


@router.delete("/queues/{vhost}/{name}", **_NO_CONTENT)
async def delete_queue(
    view: Seen,
    vhost: VhostPlace,
    name: NamePlace,
    if_unused: Annotated[bool, Query(alias="if-unused", description="Only if it has no consumers.")] = False,
    if_empty: Annotated[bool, Query(alias="if-empty", description="Only if it has no ready messages.")] = False,
) -> Response:
    """Delete a queue with its messages."""

    def find() -> Method:
        return methods.QueueDelete(view.queue(vhost, name).name, if_unused=if_unused, if_empty=if_empty)

    return await _request(view, "delete-queue", vhost, name, find)


@router.delete("/queues/{vhost}/{name}/contents", **_NO_CONTENT)
async def purge_queue(view: Seen, vhost: VhostPlace, name: NamePlace) -> Response:
    """Remove all ready messages of a queue."""
    return await _request(view, "purge-queue", vhost, name, lambda: methods.QueuePurge(view.queue(vhost, name).name))


async def _bind(
    view: View, vhost: str, source: str, kind: DestinationKind, destination: str, body: BindingBody
) -> Response:
    make = methods.QueueBind if kind is DestinationKind.QUEUE else methods.ExchangeBind
    key, arguments = body.routing_key.encode(), b""

    def find() -> Method:
        nonlocal arguments
        arguments = table_from_json(body.arguments)
        return make(destination.encode(), exchange_key(source), key, arguments=arguments)

    answer = await _request(view, "bind", vhost, f"{source} {destination}", find, lambda: True)
    found = BindingRow(vhost, b"", kind, b"", key, in_order(arguments))
    answer.headers["location"] = f"{quote(destination, safe='')}/{quote(rows.properties_key(found), safe='~')}"
    return answer


async def _unbind(view: View, vhost: str, source: str, kind: DestinationKind, destination: str, props: str) -> Response:
    make = methods.QueueUnbind if kind is DestinationKind.QUEUE else methods.ExchangeUnbind

    def find() -> Method:
        found = view.binding(vhost, source, kind, destination, props)
        return make(found.destination, found.source, found.routing_key, arguments=found.arguments)

    return await _request(view, "unbind", vhost, f"{source} {destination}", find)


_BOUND: Final[dict[str, Any]] = {"status_code": HTTPStatus.CREATED, "responses": CHANGE}


@router.post("/bindings/{vhost}/e/{source}/q/{destination}", **_BOUND)
async def bind_queue(
    view: Seen, vhost: VhostPlace, source: SourcePlace, destination: DestinationPlace, body: BindingBody
) -> Response:
    """Bind a queue to an exchange."""
    return await _bind(view, vhost, source, DestinationKind.QUEUE, destination, body)


@router.post("/bindings/{vhost}/e/{source}/e/{destination}", **_BOUND)
async def bind_exchange(
    view: Seen, vhost: VhostPlace, source: SourcePlace, destination: DestinationPlace, body: BindingBody
) -> Response:
    """Bind an exchange to another one, the source."""
    return await _bind(view, vhost, source, DestinationKind.EXCHANGE, destination, body)


@router.delete("/bindings/{vhost}/e/{source}/q/{destination}/{props}", **_NO_CONTENT)
async def unbind_queue(
    view: Seen, vhost: VhostPlace, source: SourcePlace, destination: DestinationPlace, props: PropsPlace
) -> Response:
    """Remove a binding of a queue."""
    return await _unbind(view, vhost, source, DestinationKind.QUEUE, destination, props)


@router.delete("/bindings/{vhost}/e/{source}/e/{destination}/{props}", **_NO_CONTENT)
async def unbind_exchange(
    view: Seen, vhost: VhostPlace, source: SourcePlace, destination: DestinationPlace, props: PropsPlace
) -> Response:
    """Remove a binding of an exchange."""
    return await _unbind(view, vhost, source, DestinationKind.EXCHANGE, destination, props)


# -- messages


@router.post("/exchanges/{vhost}/{name}/publish", responses=CHANGE)
async def publish(view: Seen, vhost: VhostPlace, name: NamePlace, body: PublishBody) -> RoutedAnswer:
    """Publish a message, and wait until it is durable."""
    method = methods.BasicPublish(exchange_key(name), body.routing_key.encode())

    async def work() -> tuple[str, bool]:
        user = user_of(view, vhost)
        payload = body.payload.encode()
        if body.payload_encoding == "base64":
            try:
                payload = b64decode(payload, validate=True)
            except ValueError:
                raise Problem(HTTPStatus.BAD_REQUEST, "the payload is not base64") from None
        properties = properties_from_json(body.properties if isinstance(body.properties, dict) else {})
        try:
            routed = await user.publish(method, properties, payload)
        except XaError as error:
            if error.code is ReplyCode.NOT_FOUND:  # RabbitMQ has 404 for the virtual host only
                raise Problem(HTTPStatus.BAD_REQUEST, f"404 NOT_FOUND - {error.reason}") from None
            raise
        return f"{len(payload)} bytes, {'routed' if routed else 'not routed'}", routed

    detail = {"routing_key": body.routing_key[:255]}
    return RoutedAnswer(routed=await change(view, OperatorRole.OPERATOR, "publish", f"{vhost} {name}", detail, work))


@router.post("/queues/{vhost}/{name}/get", responses=CHANGE)
async def get_messages(view: Seen, vhost: VhostPlace, name: NamePlace, body: GetBody, request: Request) -> JSONResponse:
    """Take messages from a queue and settle them. Their bodies have at most 4 MiB together."""
    return JSONResponse(await take_messages(view, vhost, name, body, request.is_disconnected))


async def take_messages(
    view: View, vhost: str, name: str, body: GetBody, has_gone: Callable[[], Awaitable[bool]]
) -> list[dict[str, Any]]:
    """Take messages from a queue and settle them.

    Args:
        view: of the request.
        vhost: the virtual host.
        name: of the queue.
        body: of the request.
        has_gone: returns whether the client has gone; then the messages stay in the queue.
    """
    kind, _, requeue = body.ackmode.partition("_requeue_")
    how = "requeue" if requeue == "true" else kind
    keep = MOST_GOT + 1 if body.truncate is None else body.truncate

    async def show(found: Sequence[GotMessage]) -> list[dict[str, Any]]:
        answers = []
        for got in found:
            answers.append(_got(got, body))
            await asyncio.sleep(0)
        if await has_gone():
            raise Problem(HTTPStatus.BAD_REQUEST, "the client has gone: the messages stay in the queue")
        return answers

    async def work() -> tuple[str, list[dict[str, Any]]]:
        answers = await user_of(view, vhost).get(name.encode(), body.count, how, MOST_GOT, keep, show)
        return f"{len(answers)} messages", answers

    detail = {"count": body.count, "ackmode": body.ackmode}
    found: list[dict[str, Any]] = await change(view, OperatorRole.OPERATOR, "get", f"{vhost} {name}", detail, work)
    return found


def _got(got: GotMessage, body: GetBody) -> dict[str, Any]:
    message = got.message
    payload = message.body if body.truncate is None else message.body[: body.truncate]
    encoding = "string"
    try:
        text = payload.decode() if body.encoding == "auto" else None
    except UnicodeDecodeError:
        text = None
    if text is None:
        text, encoding = b64encode(payload).decode(), "base64"
    return {
        "payload_bytes": got.size,
        "redelivered": got.redelivered,
        "exchange": exact_name(message.exchange),
        "routing_key": exact_name(message.routing_key),
        "message_count": got.remaining,
        "properties": properties_to_json(message.properties) or [],
        "payload": text,
        "payload_encoding": encoding,
    }


# -- connections


@router.delete("/connections/{name}", **_NO_CONTENT)
async def close_connection(view: Seen, name: NamePlace) -> Response:
    """Close a client's connection (320)."""

    async def work() -> tuple[str, None]:
        client, _ = view.client(name)
        view.active.disconnect(client, "HTTP API")
        return f"closed, it was {client.who.user}", None

    await change(view, OperatorRole.OPERATOR, "disconnect", f"connection {name}", {}, work)
    return _made(False)


# -- users and virtual hosts


async def _edit(
    view: View,
    action: str,
    subject: str,
    detail: dict[str, Any],
    edit: Callable[[AccountEditor], object],
    made: Callable[[], bool],
) -> Response:
    """Change users or virtual hosts, with immediate effect.

    Args:
        view: of the request.
        action: for the audit log.
        subject: name of the user or virtual host.
        detail: for the audit log.
        edit: makes the change.
        made: returns whether the object is new; may raise Problem.
    """

    async def work() -> tuple[str, bool]:
        new = made()
        await asyncio.to_thread(edit, AccountEditor(view.context.url, view.context.rm))
        await view.broker.accounts.refresh()
        return "done", new

    return _made(await change(view, OperatorRole.COORDINATOR, action, subject, detail, work))


def _there(found: Iterable[object], kind: str, name: str) -> bool:
    """False: the object is not new. Raises Problem 404 if *found* is empty."""
    if not any(True for _ in found):
        raise rows.not_found(kind, name)
    return False


@router.put("/vhosts/{name}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def make_vhost(view: Seen, name: NamePlace) -> Response:
    """Create a virtual host, with all permissions for the user who creates it."""
    there = name in view.users.vhosts

    def edit(editor: AccountEditor) -> None:
        if not there:
            editor.add_vhost(name)
            if not view.who.is_token:
                editor.grant(view.who.name, name, configure=".*", write=".*", read=".*")

    return await _edit(view, "make-vhost", name, {}, edit, lambda: not there)


@router.delete("/vhosts/{name}", **_NO_CONTENT)
async def remove_vhost(view: Seen, name: NamePlace) -> Response:
    """Remove a virtual host that has no branch in doubt, no durable queue and no durable exchange."""
    return await _edit(
        view,
        "remove-vhost",
        name,
        {},
        lambda editor: editor.remove_vhost(name),
        lambda: _there([view.vhost(name)], "virtual host", name),
    )


def stored_hash(user: str, given: str, algorithm: str) -> str:
    """See :func:`~dtx.auth.passwords.imported_hash`. Raises Problem 400."""
    try:
        return imported_hash(given, algorithm)
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"user '{user}': {error}") from None


@router.put("/users/{user}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def put_user(view: Seen, user: UserPlace, body: UserBody) -> Response:
    """Create a user, or change its password and tags. Tags that dtx does not have are left out."""
    (tags, _), password = split_tags(body.tags), (body.password or "").encode()
    there = user in view.users.users

    def edit(editor: AccountEditor) -> None:
        if body.password_hash is not None and not password:
            editor.put_user(user, stored_hash(user, body.password_hash, body.hashing_algorithm), tags)
        elif there:
            if password:
                editor.set_password(user, password)
            editor.set_tags(user, tags)
        else:
            editor.add_user(user, password, tags)

    return await _edit(view, "change-user" if there else "make-user", user, {"tags": tags}, edit, lambda: not there)


@router.delete("/users/{user}", **_NO_CONTENT)
async def remove_user(view: Seen, user: UserPlace) -> Response:
    """Remove a user with all its permissions, and close its connections."""
    return await _edit(
        view,
        "remove-user",
        user,
        {},
        lambda editor: editor.remove_user(user),
        lambda: _there([view.user(user)], "user", user),
    )


@router.put("/permissions/{vhost}/{user}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def grant(view: Seen, vhost: VhostPlace, user: UserPlace, body: PermissionBody) -> Response:
    """Set the permissions of a user in a virtual host."""
    given = body.model_dump()
    return await _edit(
        view,
        "grant",
        user,
        {"vhost": vhost, **given},
        lambda editor: editor.grant(user, vhost, **given),
        lambda: user in view.users.users and vhost not in view.user(user).grants,
    )


@router.delete("/permissions/{vhost}/{user}", **_NO_CONTENT)
async def revoke(view: Seen, vhost: VhostPlace, user: UserPlace) -> Response:
    """Revoke the permissions of a user in a virtual host."""
    return await _edit(
        view,
        "revoke",
        user,
        {"vhost": vhost},
        lambda editor: editor.revoke(user, vhost),
        lambda: _there((where for where in view.user(user).grants if where == vhost), "permission", user),
    )


@router.put("/topic-permissions/{vhost}/{user}", responses=_MADE, status_code=HTTPStatus.CREATED)
async def grant_topic(view: Seen, vhost: VhostPlace, user: UserPlace, body: TopicPermissionBody) -> Response:
    """Set the topic permissions of a user at a topic exchange."""
    return await _edit(
        view,
        "grant-topic",
        user,
        {"vhost": vhost, **body.model_dump()},
        lambda editor: editor.grant_topic(user, vhost, body.exchange, write=body.write, read=body.read),
        lambda: user in view.users.users and not any(where == vhost for where, _ in view.user(user).topics),
    )


@router.delete("/topic-permissions/{vhost}/{user}", **_NO_CONTENT)
async def revoke_topic(view: Seen, vhost: VhostPlace, user: UserPlace) -> Response:
    """Remove the topic permissions of a user in a virtual host."""
    return await _edit(
        view,
        "revoke-topic",
        user,
        {"vhost": vhost},
        lambda editor: editor.revoke_topic(user, vhost),
        lambda: _there((where for where, _ in view.user(user).topics if where == vhost), "topic permission", user),
    )

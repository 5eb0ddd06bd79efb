"""``dtx queue``, ``exchange``, ``connection`` and ``definitions``: the objects of a dtx without a broker.

They use the API that rabbitmqadmin and the web pages use, RabbitMQ's management API under ``/api/``.
"""

import json
import os
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

import click
from rich.text import Text

from dtx.admin.safe_text import human_duration, human_size, preview, safe
from dtx.auth.roles import split_tags
from dtx.cli.access import ApiAccess, reach, with_access
from dtx.cli.api_client import Api, Remote, RequestRefused
from dtx.cli.database import database_url
from dtx.cli.errors import CommandError, Exit
from dtx.cli.files import written
from dtx.cli.options import ADMIN_SETTINGS, DATABASE_SETTINGS, SettingsCommand, Subcommands, with_options, with_settings
from dtx.cli.output import (
    Column,
    Listing,
    Row,
    field_of,
    name_columns,
    table_lines,
    with_form,
    with_listing,
    with_output,
    with_sort,
)
from dtx.config import Settings
from dtx.wire.amqp09.properties import Property
from dtx.xa.codes import RefusalCause

_DEFAULT: Final = "amq.default"
"""The name of the default exchange in paths."""
_PREVIEW: Final = 120
_PRODUCT: Final = 100
"""Most characters of a client's product or version."""
_IMPORT_SECONDS: Final = 3600.0
"""Most seconds of an import: dtx makes some hundred queues in a second."""
_JSON_PROPERTIES: Final = frozenset({"headers", "delivery_mode", "priority", "timestamp"})
_WHERE: Final = """\b
The commands ask the active dtx at --admin-listen, or the API of --api; 'dtx branches --help' explains tokens. Alongside
a broker, use the broker's own tools: rabbitmqctl and rabbitmqadmin.
"""


@click.group(cls=Subcommands, epilog=_WHERE)
def queue() -> None:
    """Queues of a dtx without a broker, and their messages."""


@click.group(cls=Subcommands, epilog=_WHERE)
def exchange() -> None:
    """Exchanges and bindings of a dtx without a broker."""


@click.group(cls=Subcommands, epilog=_WHERE)
def connection() -> None:
    """Connections of clients to a dtx without a broker."""


@click.group(cls=Subcommands, epilog=_WHERE)
def definitions() -> None:
    """Virtual hosts, users, permissions, queues, exchanges and bindings as one JSON document, in RabbitMQ's format."""


# -- columns


def _age(row: Row) -> str:
    age = row.get("oldest_ready_age")
    return "" if age is None else human_duration(age)


def _rate(name: str, field: str) -> Column:
    return Column(name, field, lambda row: "" if (rate := field_of(row, field)) is None else f"{rate:.1f}", number=True)


def _traffic(row: Row, counter: str) -> str:
    return human_size(round(row[f"{counter}_details"]["rate"]))


def _product(row: Row) -> str:
    found = row["client_properties"]
    return safe(" ".join(str(found[name])[:_PRODUCT] for name in ("product", "version") if name in found))


def _body(row: Row) -> str:
    payload: str = row["payload"]
    raw = b64decode(payload) if row["payload_encoding"] == "base64" else payload.encode()
    return preview(raw, _PREVIEW, row["payload_bytes"])


_COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "queues": (
        Column("queue", "name", cut=True),
        Column("vhost", cut=True),
        Column("type"),
        Column("ready", "messages_ready", number=True),
        Column("unacked", "messages_unacknowledged", number=True),
        Column("total", "messages", number=True),
        Column("consumers", number=True),
        Column("oldest", "oldest_ready_age", _age, number=True),
        _rate("in/s", "message_stats.publish_details.rate"),
        _rate("out/s", "message_stats.deliver_get_details.rate"),
        *(Column(name, wide=True) for name in ("durable", "auto delete", "exclusive", "arguments")),
    ),
    "exchanges": (
        Column("exchange", "name", lambda row: safe(row["name"]) or "(default)", cut=True),
        Column("vhost", cut=True),
        *map(Column, ("type", "durable", "internal")),
        *(Column(name, wide=True) for name in ("auto delete", "arguments")),
    ),
    "connections": (
        Column("connection", "name"),
        *name_columns("user", "vhost"),
        Column("state"),
        Column("channels", number=True),
        Column("from/s", "recv_oct_details.rate", lambda row: _traffic(row, "recv_oct"), number=True),
        Column("to/s", "send_oct_details.rate", lambda row: _traffic(row, "send_oct"), number=True),
        Column("TLS", "ssl"),
        Column("age", "connected_at", lambda row: human_duration(max(0, time.time() - row["connected_at"] / 1000))),
        Column("client", "client_properties.product", _product),
        Column("name", "client_properties.connection_name", cut=True),
        Column("protocol", wide=True),
        Column("login", "auth_mechanism", wide=True),
        Column("heartbeat", "timeout", number=True, wide=True),
    ),
    "bindings": (
        Column("from", "source", lambda row: safe(row["source"]) or "(default)", cut=True),
        Column("to", "destination", lambda row: f"{row['destination_type']} {safe(row['destination'])}", cut=True),
        Column("routing key", cut=True),
        Column("arguments"),
    ),
    "consumers": (
        Column("consumer", "consumer_tag", cut=True),
        Column("channel", "channel_details.name"),
        Column("user", "channel_details.user", cut=True),
        Column("prefetch", "prefetch_count", number=True),
        *map(Column, ("ack required", "active")),
    ),
    "channels": (
        Column("channel", "number", number=True),
        Column("prefetch", "prefetch_count", number=True),
        Column("consumers", "consumer_count", number=True),
        Column("unacked", "messages_unacknowledged", number=True),
        *map(Column, ("confirm", "transactional")),
    ),
    "messages": (
        *name_columns("exchange", "routing key"),
        Column("bytes", "payload_bytes", lambda row: human_size(row["payload_bytes"]), number=True),
        *map(Column, ("redelivered", "properties")),
        Column("body", "payload", _body),
    ),
}


# -- machinery


@contextmanager
def _broker(settings: Settings, access: ApiAccess) -> Iterator[Api]:
    """The API of a dtx that runs: queues are there only while it does."""
    if access.api is None:
        from dtx.embedded.postgres import EmbeddedPostgresError

        try:
            database_url(settings)
        except EmbeddedPostgresError as error:
            raise CommandError(Exit.DATABASE, f"{error}; or name its API with --api") from None
    with reach(settings, access, orders=True) as api:
        if not isinstance(api, Remote):
            raise CommandError(Exit.FAILED, "no dtx is active: start 'dtx serve', or name its API with --api")
        yield api


def _command(
    group: click.Group, name: str, *options: Callable[[Any], Any], examples: Sequence[str]
) -> Callable[[Callable[..., str | None]], click.Command]:
    """Make a command of *group*. It is called with the API, and prints the sentence that it returns."""

    def decorate(function: Callable[..., str | None]) -> click.Command:
        @wraps(function)
        def run(settings: Settings, access: ApiAccess, **given: Any) -> int:
            with _broker(settings, access) as api:
                done = function(api, **given)
            if done is not None:
                click.echo(done)
            return Exit.OK

        epilog = "\b\nExamples:\n" + "".join(f"  dtx {group.name} {name} {each}".rstrip() + "\n" for each in examples)
        api_options = (with_settings(*DATABASE_SETTINGS, *ADMIN_SETTINGS), with_access)
        return group.command(name, cls=SettingsCommand, epilog=epilog)(with_options(*api_options, *options)(run))

    return decorate


def _path(*words: str) -> str:
    """A path of the API. Dots are encoded too: a name can be ``..``."""
    if not all(words):
        raise click.UsageError("a name is empty")
    return "/api/" + "/".join(map(_word, words))


def _word(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")


def _lists(group: click.Group, plural: str, place: Callable[[str], str], *examples: str) -> None:
    """Make the command ``list`` of *group*; *place* returns the path of the list in one virtual host."""

    def show(api: Api, vhost: str | None, listing: Listing) -> None:
        path = _path(plural) if vhost is None else place(vhost)
        listing.show(lambda: api.get(path), _COLUMNS[plural], f"there are no {plural}")

    show.__doc__ = f"List {plural}."
    vhost = click.option("--vhost", metavar="VHOST", help="Only in this virtual host.")
    _command(group, "list", vhost, with_listing, examples=("", *examples))(show)


def _show(listing: Listing, plural: str, read: Callable[[], Row], **parts: str) -> None:
    """Show an object: its facts, then the lists in it, each as a table with the columns of *parts*."""

    def lines(row: Row) -> Iterator[str]:
        facts = ((Text(column.name, style="bold"), column.text(row)) for column in _COLUMNS[plural])
        yield from table_lines(("", ""), (fact for fact in facts if fact[1]), head=False)
        for name, columns in parts.items():
            if row[name]:
                yield ""
                yield f"{name.replace('_', ' ')}:"
                yield from listing.table(_COLUMNS[columns], row[name])

    listing.show_one(read, lines)


def _pairs(_: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, Any]:
    """Options NAME=VALUE as a dictionary. A value is JSON, else text; most properties are text in any case."""
    found: dict[str, Any] = {}
    properties = {each.name.lower() for each in Property} if param.name == "properties" else None
    for each in given:
        name, equals, text = each.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{safe(each)} must be NAME=VALUE")
        if properties is not None and name not in properties:
            raise click.BadParameter(f"there is no property {safe(name)}: {', '.join(sorted(properties))}")
        try:
            found[name] = text if properties is not None and name not in _JSON_PROPERTIES else json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _confirm(question: str, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(Exit.USAGE, f"{question}: stdin is no terminal, so dtx cannot ask: use --yes")
    click.confirm(f"{question}?", abort=True, err=True)


def _flag(name: str, about: str) -> Callable[[Any], Any]:
    return click.option(name, is_flag=True, help=about)


_name = click.argument("name")
_vhost = click.option("--vhost", default="/", show_default=True, metavar="VHOST", help="In this virtual host.")
_yes = _flag("--yes", "Do not ask.")
_transient = _flag("--transient", "Not durable: it ends with dtx.")
_auto_delete = _flag("--auto-delete", "Remove it with its last consumer or binding.")
_if_unused = _flag("--if-unused", "Only if it has no consumers or bindings.")
_type = click.option("--type", "kind", type=click.Choice(["classic", "quorum"]), default="classic", help="Its type.")
_arguments = click.option(
    "--argument", "arguments", multiple=True, callback=_pairs, metavar="NAME=VALUE",
    help="An argument, its value as JSON or text. Can be repeated.",
)  # fmt: skip
_properties = click.option(
    "--property", "properties", multiple=True, callback=_pairs, metavar="NAME=VALUE",
    help="A property; headers as JSON. Can be repeated.",
)  # fmt: skip
_count = click.option(
    "--count", type=click.IntRange(1, 1000), default=10, metavar="NUMBER", help="At most; default 10."
)
_bytes = click.option(
    "--bytes", "truncate", type=click.IntRange(min=0), default=4096, metavar="NUMBER",
    help="Bytes of each body at most; default 4096.",
)  # fmt: skip


def _declare(api: Api, path: str, *, transient: bool, **body: Any) -> None:
    api.put(path, {"durable": not transient, **body})


def _query(flags: dict[str, bool]) -> dict[str, str]:
    return {name.replace("_", "-"): "true" for name, given in flags.items() if given}


# -- queues

_lists(queue, "queues", lambda vhost: _path("queues", vhost), "--sort -ready --watch 5", "--vhost shop --output wide")


@_command(queue, "show", _name, _vhost, with_output, examples=("orders", "orders --output yaml"))
def show_queue(api: Api, name: str, vhost: str, listing: Listing) -> None:
    """Show a queue, its bindings and its consumers."""
    path = _path("queues", vhost, name)
    read = lambda: {**api.get(path), "bindings": api.get(f"{path}/bindings")}  # noqa: E731
    _show(listing, "queues", read, bindings="bindings", consumer_details="consumers")


@_command(
    queue, "declare", _name, _vhost, _type, _transient, _auto_delete, _arguments,
    examples=("orders", "orders --type quorum --argument x-delivery-limit=5", "news --argument x-max-length=1000"),
)  # fmt: skip
def declare_queue(api: Api, name: str, vhost: str, kind: str, arguments: dict[str, Any], **given: bool) -> str:
    """Declare a queue. It is durable unless --transient."""
    types = {} if kind == "classic" else {"x-queue-type": kind}
    _declare(api, _path("queues", vhost, name), arguments=types | arguments, **given)
    return f"queue {safe(name)} is declared"


@_command(queue, "purge", _name, _vhost, _yes, examples=("orders", "orders --yes"))
def purge_queue(api: Api, name: str, vhost: str, yes: bool) -> str:
    """Remove all ready messages of a queue. Those that consumers have not acknowledged stay."""
    path = _path("queues", vhost, name)
    _confirm(f"remove {api.get(path)['messages_ready']} messages of queue {safe(name)}", yes=yes)
    api.delete(f"{path}/contents")
    return f"the ready messages of queue {safe(name)} are removed"


@_command(
    queue, "remove", _name, _vhost, _if_unused, _flag("--if-empty", "Only if it has no ready messages."), _yes,
    examples=("orders", "orders --if-empty --if-unused"),
)  # fmt: skip
def remove_queue(api: Api, name: str, vhost: str, yes: bool, **given: bool) -> str:
    """Remove a queue with its messages. It asks if there are any."""
    path = _path("queues", vhost, name)
    found = api.get(path)
    unasked = not found["messages_unacknowledged"] and (given["if_empty"] or not found["messages_ready"])
    _confirm(f"remove queue {safe(name)} with {found['messages']} messages", yes=yes or unasked)
    only_empty = given["if_empty"] or (unasked and not yes)  # messages may arrive meanwhile
    try:
        api.delete(path, **_query(given | {"if_empty": only_empty}))
    except RequestRefused as error:
        if only_empty and not given["if_empty"] and error.cause == RefusalCause.NOT_EMPTY:
            why = f"queue {safe(name)} is not empty any more: to remove it with its messages, use --yes"
            raise CommandError(Exit.FAILED, why) from error
        raise
    return f"queue {safe(name)} is removed"


@_command(
    queue, "peek", _name, _vhost, _count, _bytes, with_sort, with_form,
    examples=("orders", "orders --count 1 --bytes 1000000 --json | jq -r .payload"),
)  # fmt: skip
def peek(api: Api, name: str, vhost: str, count: int, truncate: int, listing: Listing) -> None:
    """Show the first ready messages of a queue. They stay there.

    Consumers get them as redelivered messages. A look does not count towards x-delivery-limit.
    """
    body = {"count": count, "truncate": truncate, "ackmode": "ack_requeue_true", "encoding": "auto"}
    path = _path("queues", vhost, name, "get")
    listing.show(lambda: api.post(path, body), _COLUMNS["messages"], f"queue {safe(name)} has no ready messages")


@_command(
    queue, "publish", _name, click.argument("body", required=False), _vhost,
    click.option("--file", type=click.File("rb"), metavar="FILE", help="Read the body from a file; - is stdin."),
    _properties,
    examples=(
        "orders 'a test'",
        "orders --file order.json --property content_type=application/json",
        "orders x --property 'headers={\"attempt\": 1}' --property message_id=4711",
    ),
)  # fmt: skip
def publish(
    api: Api, name: str, body: str | None, vhost: str, file: BinaryIO | None, properties: dict[str, Any]
) -> str:
    """Publish a persistent message to a queue, through the default exchange. It is durable when the command ends."""
    if (body is None) == (file is None):
        raise click.UsageError("name the message: BODY, or --file")
    raw = file.read() if file is not None else os.fsencode(body or "")
    message = {
        "routing_key": name,
        "payload": b64encode(raw).decode(),
        "payload_encoding": "base64",
        "properties": {"delivery_mode": 2, **properties},
    }
    if not api.post(_path("exchanges", vhost, _DEFAULT, "publish"), message)["routed"]:
        raise CommandError(Exit.FAILED, f"no queue has taken the message: there is no queue {safe(name)}")
    return f"{len(raw)} bytes are in queue {safe(name)}"


# -- exchanges and bindings

_lists(exchange, "exchanges", lambda vhost: _path("exchanges", vhost), "--vhost shop --output wide")


@_command(exchange, "show", _name, _vhost, with_output, examples=("events", "amq.default --json"))
def show_exchange(api: Api, name: str, vhost: str, listing: Listing) -> None:
    """Show an exchange, and its bindings."""
    path = _path("exchanges", vhost, name or _DEFAULT)
    lists = {"bindings_from_it": "source", "bindings_to_it": "destination"}
    read = lambda: api.get(path) | {name: api.get(f"{path}/bindings/{end}") for name, end in lists.items()}  # noqa: E731
    _show(listing, "exchanges", read, **dict.fromkeys(lists, "bindings"))


@_command(
    exchange, "declare", _name, _vhost,
    click.option("--type", default="direct", show_default=True, metavar="TYPE", help="Or fanout, topic, headers."),
    _transient, _auto_delete, _flag("--internal", "Clients cannot publish to it."), _arguments,
    examples=("events --type topic", "orders --argument alternate-exchange=lost"),
)  # fmt: skip
def declare_exchange(api: Api, name: str, vhost: str, **given: Any) -> str:
    """Declare an exchange. It is durable unless --transient."""
    _declare(api, _path("exchanges", vhost, name), **given)
    return f"exchange {safe(name)} is declared"


@_command(exchange, "remove", _name, _vhost, _if_unused, examples=("events", "events --if-unused"))
def remove_exchange(api: Api, name: str, vhost: str, **given: bool) -> str:
    """Remove an exchange with its bindings."""
    api.delete(_path("exchanges", vhost, name), **_query(given))
    return f"exchange {safe(name)} is removed"


_BINDING: Final = (
    click.argument("source"),
    click.argument("destination"),
    _vhost,
    click.option("--key", default="", metavar="KEY", help="Routing key, or pattern of a topic exchange."),
    _flag("--to-exchange", "DESTINATION is an exchange, not a queue."),
    _arguments,
)


def _between(source: str, destination: str, vhost: str, *, to_exchange: bool) -> str:
    return _path("bindings", vhost, "e", source, "e" if to_exchange else "q", destination)


@_command(
    exchange, "bind", *_BINDING,
    examples=("events orders --key 'order.#'", "events archive --to-exchange --key '#'"),
)  # fmt: skip
def bind(api: Api, source: str, destination: str, key: str, arguments: dict[str, Any], **given: Any) -> str:
    """Bind a queue, or an exchange, to the exchange SOURCE."""
    api.post(_between(source, destination, **given), {"routing_key": key, "arguments": arguments})
    return f"{safe(destination)} is bound to exchange {safe(source)}"


@_command(exchange, "unbind", *_BINDING, examples=("events orders --key 'order.#'",))
def unbind(api: Api, source: str, destination: str, key: str, arguments: dict[str, Any], **given: Any) -> str:
    """Remove the binding that has the same key and arguments."""
    path = _between(source, destination, **given)
    for each in api.get(path):
        if (each["routing_key"], each["arguments"]) == (key, arguments):
            api.delete(f"{path}/{_word(each['properties_key'])}")
            return f"{safe(destination)} is no longer bound to exchange {safe(source)}"
    raise CommandError(Exit.FAILED, "there is no such binding; 'dtx exchange show' lists those of an exchange")


# -- connections

_lists(
    connection, "connections", lambda vhost: _path("vhosts", vhost, "connections"),
    "--sort -channels", "--watch --output wide",
)  # fmt: skip


def _found(api: Api, name: str) -> str:
    """The path of the connection that has this name, or comes from this address."""
    for each in api.get(_path("connections"), columns="name"):
        if name in (each["name"], each["name"].partition(" -> ")[0]):
            return _path("connections", each["name"])
    raise CommandError(Exit.FAILED, f"there is no connection {safe(name)}")


@_command(connection, "show", _name, with_output, examples=("127.0.0.1:40522", "'127.0.0.1:40522 -> 127.0.0.1:5672'"))
def show_connection(api: Api, name: str, listing: Listing) -> None:
    """Show a connection and its channels. NAME can be the address of the client alone."""
    path = _found(api, name)
    read = lambda: {**api.get(path), "channel_details": api.get(f"{path}/channels")}  # noqa: E731
    _show(listing, "connections", read, channel_details="channels")


@_command(connection, "close", _name, examples=("127.0.0.1:40522",))
def close_connection(api: Api, name: str) -> str:
    """Close a connection (320). NAME can be the address of the client alone. A client may connect again."""
    api.delete(_found(api, name))
    return f"connection {safe(name)} is closed"


# -- definitions

_only = click.option("--vhost", metavar="VHOST", help="Only this virtual host, without users.")


def _document(vhost: str | None) -> str:
    return _path("definitions") if vhost is None else _path("definitions", vhost)


@_command(
    definitions, "export", click.argument("file", type=click.Path(path_type=Path), default="-"), _only,
    examples=("backup.json", "--vhost shop > shop.json"),
)  # fmt: skip
def export_definitions(api: Api, file: Path, vhost: str | None) -> None:
    """Write the definitions of all durable objects to FILE, or to stdout.

    They have the hashes of passwords, so only this user can read the file. It replaces a file when it is complete.
    """
    text = json.dumps(api.get(_document(vhost)), indent=2)
    try:
        with written(file) as target:
            if target is None:
                click.echo(text)
            else:
                target.write_text(text + "\n", encoding="utf-8")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(Exit.FAILED, f"{file} cannot be written: {error.strerror}") from None


@_command(
    definitions, "import", click.argument("file", type=click.File("rb")), _only,
    examples=("backup.json", "- --vhost shop < shop.json"),
)  # fmt: skip
def import_definitions(api: Api, file: BinaryIO, vhost: str | None) -> str:
    """Make the objects of FILE that are missing, and set users, tags and permissions. It removes nothing.

    FILE is the export of a dtx or of a RabbitMQ. What dtx does not have, such as policies, is left out and named.
    """
    try:
        document = json.load(file)
    except ValueError as error:
        raise CommandError(Exit.USAGE, f"{file.name} is no JSON: {error}") from None
    api.patience = _IMPORT_SECONDS
    api.post(_document(vhost), document)
    done = f"the definitions of {safe(file.name)} are imported"
    left_out = _left_out(document)
    return f"{done}, without what dtx does not have: {', '.join(left_out)}" if left_out else done


def _left_out(document: dict[str, Any]) -> list[str]:
    """What the import ignores, for people."""
    from dtx.admin.rabbitmq_definitions import KINDS

    found = [
        f"{len(rows)} {kind.replace('_', ' ')}"
        for kind, rows in document.items()
        if isinstance(rows, list) and rows and kind not in KINDS
    ]
    for user in document.get("users", ()):
        _, unknown = split_tags(user.get("tags", ()))
        if unknown:
            found.append(f"tags {', '.join(map(safe, unknown))} of user {safe(user['name'])}")
        if user.get("limits"):
            found.append(f"limits of user {safe(user['name'])}")
    return found

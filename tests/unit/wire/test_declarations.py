"""What a client asks of a server: read as pika writes it, as bytes, and to the last octet."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import declarations, keys
from dtx.wire.amqp09.errors import WireError
from tests.support.preview import Binding, Exchange, Execution

TABLE = b"\x01aV"


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(1, method).marshal()
    return marshalled[7:-1]


READ: list[tuple[Callable[[bytes], Any], amqp_object.Method, object]] = [
    (
        declarations.access_request,
        spec.Access.Request(realm="/data", exclusive=True, passive=False, active=True, write=False, read=True),
        (b"/data", True, False, True, False, True),
    ),
    (
        declarations.access_request,
        spec.Access.Request(realm="", exclusive=False, passive=True, active=False, write=True, read=False),
        (b"", False, True, False, True, False),
    ),
    (declarations.flag, spec.Channel.Flow(True), True),
    (declarations.flag, spec.Confirm.Select(nowait=False), False),
    (declarations.no_arguments, spec.Tx.Commit(), None),
    (declarations.execution_complete, Execution.Complete(7), 7),
    (
        declarations.exchange_declare,
        spec.Exchange.Declare(exchange="e", type="topic", durable=True, internal=True, arguments={"a": None}),
        (b"e", b"topic", False, True, False, True, False, TABLE),
    ),
    (
        declarations.exchange_declare,
        spec.Exchange.Declare(exchange="", type="", passive=True, auto_delete=True, nowait=True),
        (b"", b"", True, False, True, False, True, b""),
    ),
    (declarations.exchange_delete, spec.Exchange.Delete(exchange="e", if_unused=True), (b"e", True, False)),
    (declarations.exchange_delete, spec.Exchange.Delete(exchange="e", nowait=True), (b"e", False, True)),
    (
        declarations.bind,
        spec.Exchange.Bind(destination="d", source="s", routing_key="k", nowait=True, arguments={"a": None}),
        (b"d", b"s", b"k", True, TABLE),
    ),
    (
        declarations.bind,
        spec.Exchange.Unbind(destination="d", source="s", routing_key="k"),
        (b"d", b"s", b"k", False, b""),
    ),
    (
        declarations.bind,
        spec.Queue.Bind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
        (b"q", b"e", b"k", False, TABLE),
    ),
    (
        declarations.queue_unbind,
        spec.Queue.Unbind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
        (b"q", b"e", b"k", False, TABLE),
    ),
    (
        declarations.queue_declare,
        spec.Queue.Declare(queue="q", durable=True, auto_delete=True, arguments={"a": None}),
        (b"q", False, True, False, True, False, TABLE),
    ),
    (
        declarations.queue_declare,
        spec.Queue.Declare(queue="", passive=True, exclusive=True, nowait=True),
        (b"", True, False, True, False, True, b""),
    ),
    (declarations.queue_purge, spec.Queue.Purge(queue="q", nowait=True), (b"q", True)),
    (declarations.queue_delete, spec.Queue.Delete(queue="q", if_unused=True), (b"q", True, False, False)),
    (declarations.queue_delete, spec.Queue.Delete(queue="q", if_empty=True, nowait=True), (b"q", False, True, True)),
    (declarations.exchange_query, Exchange.Query(b"e", 7), b"e"),
    (declarations.binding_query, Binding.Query(b"e", b"q", b"k", TABLE), (b"e", b"q", b"k", TABLE)),
    (declarations.binding_query, Binding.Query(), (b"", b"", b"", b"")),
]


def name_of(value: object) -> str:
    """The same in every process: a function by its name."""
    return value.__name__ if isinstance(value, FunctionType) else repr(value)[:60]


each_read = pytest.mark.parametrize(("read", "method", "expected"), READ, ids=name_of)


@each_read
def test_a_method_is_read_as_bytes(read: Callable[[bytes], Any], method: amqp_object.Method, expected: object) -> None:
    assert read(payload(method)) == expected


@each_read
def test_a_truncated_method_is_a_syntax_error(
    read: Callable[[bytes], Any], method: amqp_object.Method, expected: object
) -> None:
    octets = payload(method)
    for length in range(4, len(octets)):
        with pytest.raises(WireError) as caught:
            read(octets[:length])
        assert caught.value.code == 502


@each_read
def test_a_method_with_something_after_it_is_a_syntax_error(
    read: Callable[[bytes], Any], method: amqp_object.Method, expected: object
) -> None:
    with pytest.raises(WireError, match="too long") as caught:
        read(payload(method) + b"\x00")
    assert caught.value.code == 502


def test_the_ticket_comes_first() -> None:
    """The XML: field name = "ticket" domain = "access-ticket", a short."""
    assert declarations.ticket(payload(spec.Basic.Publish(ticket=258))) == 258
    with pytest.raises(WireError, match="access ticket"):
        declarations.ticket(b"\x00\x3c\x00\x28\x01")


TICKETED: Final = frozenset(
    (
        keys.EXCHANGE_DECLARE,
        keys.EXCHANGE_DELETE,
        keys.EXCHANGE_BIND,  # and exchange.query
        keys.EXCHANGE_UNBIND,
        keys.QUEUE_DECLARE,
        keys.QUEUE_BIND,
        keys.QUEUE_UNBIND,
        keys.QUEUE_PURGE,
        keys.QUEUE_DELETE,
        keys.BASIC_CONSUME,
        keys.BASIC_PUBLISH,
        keys.BASIC_GET,
        keys.BINDING_QUERY,
    )
)
"""The methods that begin with an access ticket; those of dtx have theirs as well."""


def test_every_ticketed_method_has_its_ticket_where_it_is_looked_for() -> None:
    for key in TICKETED - {Binding.Query.INDEX}:
        method = spec.methods[key](ticket=258)
        vars(method).update({name: "" for name, value in vars(method).items() if value is None})
        assert declarations.ticket(payload(method)) == 258


def test_a_query_and_a_bind_of_the_same_number_are_told_apart() -> None:
    """40.30 is exchange.query in the preview, exchange.bind in RabbitMQ."""
    for name in (b"", b"e", b"\x00" * 40, b"\xff" * 255):
        assert declarations.is_query(payload(Exchange.Query(name)))
    for names in (("", "", ""), ("d", "s", "k"), ("d" * 255, "", "")):
        assert not declarations.is_query(payload(spec.Exchange.Bind(0, *names)))
    assert not declarations.is_query(b"\x00\x28\x00\x1e\x00\x00")

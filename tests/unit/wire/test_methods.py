"""What a client asks of a server: read and written as pika does, as bytes, and to the last byte."""

from typing import Final

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError
from tests.support.preview import Binding, Exchange, Execution

TABLE = b"\x01aV"


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(1, method).marshal()
    return marshalled[7:-1]


READ: list[tuple[Method, amqp_object.Method]] = [
    (
        methods.AccessRequest(b"/data", exclusive=True, passive=False, active=True, write=False, read=True),
        spec.Access.Request(realm="/data", exclusive=True, passive=False, active=True, write=False, read=True),
    ),
    (
        methods.AccessRequest(b"", exclusive=False, passive=True, active=False, write=True, read=False),
        spec.Access.Request(realm="", exclusive=False, passive=True, active=False, write=True, read=False),
    ),
    (methods.ChannelFlow(active=True), spec.Channel.Flow(True)),
    (methods.ConfirmSelect(), spec.Confirm.Select(nowait=False)),
    (methods.ConfirmSelect(no_wait=True), spec.Confirm.Select(nowait=True)),
    (methods.TxSelect(), spec.Tx.Select()),
    (methods.TxCommit(), spec.Tx.Commit()),
    (methods.TxRollback(), spec.Tx.Rollback()),
    (methods.ExecutionFlush(), Execution.Flush()),
    (methods.ExecutionComplete(7), Execution.Complete(7)),
    (
        methods.ExchangeDeclare(b"e", b"topic", durable=True, internal=True, arguments=TABLE),
        spec.Exchange.Declare(exchange="e", type="topic", durable=True, internal=True, arguments={"a": None}),
    ),
    (
        methods.ExchangeDeclare(b"", b"", passive=True, auto_delete=True, no_wait=True),
        spec.Exchange.Declare(exchange="", type="", passive=True, auto_delete=True, nowait=True),
    ),
    (methods.ExchangeDelete(b"e", if_unused=True), spec.Exchange.Delete(exchange="e", if_unused=True)),
    (methods.ExchangeDelete(b"e", no_wait=True), spec.Exchange.Delete(exchange="e", nowait=True)),
    (
        methods.ExchangeBind(b"d", b"s", b"k", no_wait=True, arguments=TABLE),
        spec.Exchange.Bind(destination="d", source="s", routing_key="k", nowait=True, arguments={"a": None}),
    ),
    (
        methods.ExchangeUnbind(b"d", b"s", b"k"),
        spec.Exchange.Unbind(destination="d", source="s", routing_key="k"),
    ),
    (
        methods.QueueBind(b"q", b"e", b"k", arguments=TABLE),
        spec.Queue.Bind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
    ),
    (
        methods.QueueUnbind(b"q", b"e", b"k", arguments=TABLE),
        spec.Queue.Unbind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
    ),
    (
        methods.QueueDeclare(b"q", durable=True, auto_delete=True, arguments=TABLE),
        spec.Queue.Declare(queue="q", durable=True, auto_delete=True, arguments={"a": None}),
    ),
    (
        methods.QueueDeclare(b"", passive=True, exclusive=True, no_wait=True),
        spec.Queue.Declare(queue="", passive=True, exclusive=True, nowait=True),
    ),
    (methods.QueuePurge(b"q", no_wait=True), spec.Queue.Purge(queue="q", nowait=True)),
    (methods.QueueDelete(b"q", if_unused=True), spec.Queue.Delete(queue="q", if_unused=True)),
    (
        methods.QueueDelete(b"q", if_empty=True, no_wait=True),
        spec.Queue.Delete(queue="q", if_empty=True, nowait=True),
    ),
    (methods.ExchangeQuery(b"e"), Exchange.Query(b"e", 0)),
    (methods.BindingQuery(b"e", b"q", b"k", TABLE), Binding.Query(b"e", b"q", b"k", TABLE)),
    (methods.BindingQuery(b"", b"", b"", b""), Binding.Query()),
]


each_method = pytest.mark.parametrize(("method", "of_pika"), READ, ids=lambda value: repr(value)[:60])


@each_method
def test_a_method_is_read_as_bytes(method: Method, of_pika: amqp_object.Method) -> None:
    assert type(method).decode(payload(of_pika)) == method
    assert method.KEY == of_pika.INDEX


@each_method
def test_a_method_is_written_as_pika_writes_it(method: Method, of_pika: amqp_object.Method) -> None:
    assert method.encode() == payload(of_pika)


@each_method
def test_a_ticket_is_no_field(method: Method, of_pika: amqp_object.Method) -> None:
    """0-9-1 calls it reserved."""
    if hasattr(of_pika, "ticket"):
        of_pika.ticket = 258
        assert type(method).decode(payload(of_pika)) == method


@each_method
def test_a_truncated_method_is_a_syntax_error(method: Method, of_pika: amqp_object.Method) -> None:
    octets = payload(of_pika)
    for length in range(4, len(octets)):
        with pytest.raises(WireError, match=f"{method.NAME} is truncated") as caught:
            method.decode(octets[:length])
        assert caught.value.code == 502


@each_method
def test_a_method_with_something_after_it_is_a_syntax_error(method: Method, of_pika: amqp_object.Method) -> None:
    with pytest.raises(WireError, match="too long") as caught:
        method.decode(payload(of_pika) + b"\x00")
    assert caught.value.code == 502


def test_a_name_that_is_too_long_cannot_be_written() -> None:
    with pytest.raises(WireError, match="256 octets"):
        methods.QueuePurge(b"q" * 256).encode()


def test_the_ticket_comes_first() -> None:
    """The XML: field name = "ticket" domain = "access-ticket", a short."""
    assert methods.ticket(payload(spec.Basic.Publish(ticket=258))) == 258
    with pytest.raises(WireError, match="access ticket"):
        methods.ticket(b"\x00\x3c\x00\x28\x01")


TICKETED: Final = frozenset(
    (
        methods.ExchangeDeclare.KEY,
        methods.ExchangeDelete.KEY,
        methods.ExchangeBind.KEY,  # and exchange.query
        methods.ExchangeUnbind.KEY,
        methods.QueueDeclare.KEY,
        methods.QueueBind.KEY,
        methods.QueueUnbind.KEY,
        methods.QueuePurge.KEY,
        methods.QueueDelete.KEY,
        methods.BasicConsume.KEY,
        methods.BasicPublish.KEY,
        methods.BasicGet.KEY,
        methods.BindingQuery.KEY,
    )
)
"""The methods that begin with an access ticket; those of dtx have theirs as well."""


def test_every_ticketed_method_has_its_ticket_where_it_is_looked_for() -> None:
    for key in TICKETED - {Binding.Query.INDEX}:
        method = spec.methods[key](ticket=258)
        vars(method).update({name: "" for name, value in vars(method).items() if value is None})
        assert methods.ticket(payload(method)) == 258


def test_a_query_and_a_bind_of_the_same_number_are_told_apart() -> None:
    """40.30 is exchange.query in the preview, exchange.bind in RabbitMQ."""
    for name in (b"", b"e", b"\x00" * 40, b"\xff" * 255):
        assert methods.is_query(payload(Exchange.Query(name)))
    for names in (("", "", ""), ("d", "s", "k"), ("d" * 255, "", "")):
        assert not methods.is_query(payload(spec.Exchange.Bind(0, *names)))
    assert not methods.is_query(b"\x00\x28\x00\x1e\x00\x00")


def test_every_row_is_the_method_that_pika_calls_so() -> None:
    for key in methods.METHODS.keys() & spec.methods.keys():
        assert methods.METHODS[key].NAME.replace("-", "") == spec.methods[key].NAME.lower()
    assert spec.methods.keys() <= methods.METHODS.keys()


def test_the_rows_know_the_methods_with_content() -> None:
    assert all(spec.has_content(key) == (key in methods.CONTENT) for key in methods.METHODS)

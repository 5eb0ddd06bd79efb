"""binding.query, exchange.query and execution, byte by byte as in the AMQP 0-9 preview."""

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09.errors import WireError
from tests.support import preview
from tests.support.preview import METHODS, Binding, Exchange, Execution

EXAMPLES: list[tuple[amqp_object.Method, str]] = [
    (Binding.Query(b"e", b"q", b"k", b"\x01aV", ticket=258), "0082 000a 0102 0165 0171 016b 00000003 016156"),
    (Binding.Query(), "0082 000a 0000 00 00 00 00000000"),
    (Binding.QueryOk(), "0082 000b 00"),
    (Binding.QueryOk(exchange_not_found=True), "0082 000b 01"),
    (Binding.QueryOk(queue_not_found=True), "0082 000b 02"),
    (Binding.QueryOk(queue_not_matched=True), "0082 000b 04"),
    (Binding.QueryOk(key_not_matched=True), "0082 000b 08"),
    (Binding.QueryOk(args_not_matched=True), "0082 000b 10"),
    (Exchange.Query(b"e", ticket=258), "0028 001e 0102 0165"),
    (Exchange.QueryOk(b"topic", durable=True, arguments=b"\x01aV"), "0028 001f 05746f706963 01 00000003 016156"),
    (Exchange.QueryOk(not_found=True), "0028 001f 00 02 00000000"),
    (Execution.Flush(), "008c 000a"),
    (Execution.Complete(258), "008c 0014 00000102"),
]
each_example = pytest.mark.parametrize(("method", "octets"), EXAMPLES, ids=lambda value: repr(value)[:60])


def test_the_examples_show_every_method() -> None:
    assert {method.INDEX for method, _ in EXAMPLES} == set(METHODS)


@each_example
def test_a_method_is_written_byte_for_byte(method: amqp_object.Method, octets: str) -> None:
    payload = bytes.fromhex(octets)
    framed = bytes.fromhex("01 0007") + len(payload).to_bytes(4, "big") + payload + b"\xce"
    assert frame.Method(7, method).marshal() == framed


@each_example
def test_a_method_is_read_as_it_was_written(method: amqp_object.Method, octets: str) -> None:
    assert type(method)().decode(bytes.fromhex(octets), 4) == method


@each_example
def test_a_truncated_method_is_a_syntax_error(method: amqp_object.Method, octets: str) -> None:
    payload = bytes.fromhex(octets)
    for length in range(4, len(payload)):
        with pytest.raises(WireError) as caught:
            type(method)().decode(payload[:length], 4)
        assert caught.value.code == 502


@each_example
def test_a_method_with_something_after_it_is_a_syntax_error(method: amqp_object.Method, octets: str) -> None:
    with pytest.raises(WireError, match="followed by 1 octet") as caught:
        type(method)().decode(bytes.fromhex(octets) + b"\x00", 4)
    assert caught.value.code == 502


@pytest.mark.parametrize(
    "method", [Binding.QueryOk(args_not_matched=True), Exchange.QueryOk(b"x"), Execution.Complete(7)]
)
def test_pika_reads_methods_of_a_server(method: amqp_object.Method) -> None:
    read = frame.decode_frame(frame.Method(1, method).marshal())[1].method
    assert type(read) is type(method)
    assert read == method


def test_the_bind_of_the_same_number_is_still_read() -> None:
    """40.31 without arguments is RabbitMQ's exchange.bind-ok, and 40.30 its exchange.bind."""
    answer = frame.decode_frame(frame.Method(1, spec.Exchange.BindOk()).marshal())[1].method
    assert type(answer) is spec.Exchange.BindOk
    assert answer == spec.Exchange.BindOk()
    assert spec.methods[Exchange.Query.INDEX] is spec.Exchange.Bind


def test_a_question_waits_for_its_answer() -> None:
    assert {method.NAME for method in METHODS.values() if method.synchronous} == {
        "Binding.Query",
        "Exchange.Query",
        "Execution.Flush",
    }


def test_registering_again_changes_nothing() -> None:
    before = dict(spec.methods)
    preview.register()
    assert spec.methods == before

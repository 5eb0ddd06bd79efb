"""Every row is read and written as by pika, as bytes, and to the last byte."""

import struct
from copy import copy
from dataclasses import fields

import pytest
from pika import amqp_object, frame, spec

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.codec import Fact, Method, Sender, packer
from dtx.wire.amqp09.errors import WireError
from tests.support.preview import Binding, Exchange, Execution

TABLE = b"\x01aV"


def payload(method: amqp_object.Method) -> bytes:
    marshalled: bytes = frame.Method(1, method).marshal()
    return marshalled[7:-1]


METHODS: list[tuple[Method, amqp_object.Method]] = [
    (
        methods.ConnectionStart(0, 9, TABLE, b"PLAIN AMQPLAIN", b"en_US"),
        spec.Connection.Start(0, 9, {"a": None}, "PLAIN AMQPLAIN", "en_US"),
    ),
    (
        methods.ConnectionStartOk(TABLE, b"PLAIN", b"\x00guest\x00guest", b"en_US"),
        spec.Connection.StartOk({"a": None}, "PLAIN", "\x00guest\x00guest", "en_US"),
    ),
    (methods.ConnectionSecure(b"who?"), spec.Connection.Secure("who?")),
    (methods.ConnectionSecureOk(b"me"), spec.Connection.SecureOk("me")),
    (methods.ConnectionTune(2047, 131_072, 60), spec.Connection.Tune(2047, 131_072, 60)),
    (methods.ConnectionTuneOk(0, 4096, 0), spec.Connection.TuneOk(0, 4096, 0)),
    (methods.ConnectionOpen(b"/"), spec.Connection.Open("/")),
    (methods.ConnectionOpen(b"v", b"c", insist=True), spec.Connection.Open("v", "c", insist=True)),
    (methods.ConnectionOpenOk(), spec.Connection.OpenOk()),
    (methods.ConnectionClose(200, b"bye"), spec.Connection.Close(200, "bye", 0, 0)),
    (methods.ConnectionCloseOk(), spec.Connection.CloseOk()),
    (methods.ConnectionBlocked(b"low on disk"), spec.Connection.Blocked("low on disk")),
    (methods.ConnectionUnblocked(), spec.Connection.Unblocked()),
    (methods.ConnectionUpdateSecret(b"new", b"why"), spec.Connection.UpdateSecret("new", "why")),
    (methods.ConnectionUpdateSecretOk(), spec.Connection.UpdateSecretOk()),
    (methods.ChannelOpen(), spec.Channel.Open()),
    (methods.ChannelOpenOk(), spec.Channel.OpenOk(b"")),
    (methods.ChannelFlow(active=True), spec.Channel.Flow(True)),
    (methods.ChannelFlowOk(active=True), spec.Channel.FlowOk(True)),
    (methods.ChannelFlowOk(active=False), spec.Channel.FlowOk(False)),
    (methods.ChannelClose(406, b"why", methods.BasicAck.KEY), spec.Channel.Close(406, "why", 60, 80)),
    (methods.ChannelCloseOk(), spec.Channel.CloseOk()),
    (
        methods.AccessRequest(b"/data", exclusive=True, passive=False, active=True, write=False, read=True),
        spec.Access.Request(realm="/data", exclusive=True, passive=False, active=True, write=False, read=True),
    ),
    (
        methods.AccessRequest(b"", exclusive=False, passive=True, active=False, write=True, read=False),
        spec.Access.Request(realm="", exclusive=False, passive=True, active=False, write=True, read=False),
    ),
    (methods.AccessRequestOk(258), spec.Access.RequestOk(258)),
    (
        methods.ExchangeDeclare(b"e", b"topic", durable=True, internal=True, arguments=TABLE),
        spec.Exchange.Declare(exchange="e", type="topic", durable=True, internal=True, arguments={"a": None}),
    ),
    (
        methods.ExchangeDeclare(b"", b"", passive=True, auto_delete=True, no_wait=True),
        spec.Exchange.Declare(exchange="", type="", passive=True, auto_delete=True, nowait=True),
    ),
    (
        methods.ExchangeDeclare(b"ex", b"fanout", passive=True, durable=True),
        spec.Exchange.Declare(exchange="ex", type="fanout", passive=True, durable=True),
    ),
    (methods.ExchangeDeclareOk(), spec.Exchange.DeclareOk()),
    (methods.ExchangeDelete(b"e", if_unused=True), spec.Exchange.Delete(exchange="e", if_unused=True)),
    (methods.ExchangeDelete(b"e", no_wait=True), spec.Exchange.Delete(exchange="e", nowait=True)),
    (methods.ExchangeDeleteOk(), spec.Exchange.DeleteOk()),
    (
        methods.ExchangeBind(b"d", b"s", b"k", no_wait=True, arguments=TABLE),
        spec.Exchange.Bind(destination="d", source="s", routing_key="k", nowait=True, arguments={"a": None}),
    ),
    (methods.ExchangeBindOk(), spec.Exchange.BindOk()),
    (
        methods.ExchangeUnbind(b"d", b"s", b"k"),
        spec.Exchange.Unbind(destination="d", source="s", routing_key="k"),
    ),
    (methods.ExchangeUnbindOk(), spec.Exchange.UnbindOk()),
    (methods.ExchangeQuery(b"e"), Exchange.Query(b"e", 0)),
    (
        methods.ExchangeQueryOk(b"topic", durable=True, not_found=False, arguments=TABLE),
        Exchange.QueryOk(b"topic", durable=True, arguments=TABLE),
    ),
    (methods.ExchangeQueryOk(b"", durable=False, not_found=True, arguments=b""), Exchange.QueryOk(not_found=True)),
    (
        methods.QueueDeclare(b"q", durable=True, auto_delete=True, arguments=TABLE),
        spec.Queue.Declare(queue="q", durable=True, auto_delete=True, arguments={"a": None}),
    ),
    (
        methods.QueueDeclare(b"", passive=True, exclusive=True, no_wait=True),
        spec.Queue.Declare(queue="", passive=True, exclusive=True, nowait=True),
    ),
    (methods.QueueDeclareOk(b"q", 5, 6), spec.Queue.DeclareOk("q", 5, 6)),
    (
        methods.QueueBind(b"q", b"e", b"k", arguments=TABLE),
        spec.Queue.Bind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
    ),
    (methods.QueueBindOk(), spec.Queue.BindOk()),
    (
        methods.QueueUnbind(b"q", b"e", b"k", arguments=TABLE),
        spec.Queue.Unbind(queue="q", exchange="e", routing_key="k", arguments={"a": None}),
    ),
    (methods.QueueUnbindOk(), spec.Queue.UnbindOk()),
    (methods.QueuePurge(b"q", no_wait=True), spec.Queue.Purge(queue="q", nowait=True)),
    (methods.QueuePurgeOk(7), spec.Queue.PurgeOk(7)),
    (methods.QueueDelete(b"q", if_unused=True), spec.Queue.Delete(queue="q", if_unused=True)),
    (
        methods.QueueDelete(b"q", if_empty=True, no_wait=True),
        spec.Queue.Delete(queue="q", if_empty=True, nowait=True),
    ),
    (methods.QueueDeleteOk(0), spec.Queue.DeleteOk(0)),
    (methods.BasicQos(1, 2, global_qos=True), spec.Basic.Qos(prefetch_size=1, prefetch_count=2, global_qos=True)),
    (methods.BasicQos(0, 10), spec.Basic.Qos(prefetch_count=10)),
    (methods.BasicQosOk(), spec.Basic.QosOk()),
    (
        methods.BasicConsume(b"q", b"t", no_local=True, exclusive=True, arguments=TABLE),
        spec.Basic.Consume(queue="q", consumer_tag="t", no_local=True, exclusive=True, arguments={"a": None}),
    ),
    (
        methods.BasicConsume(b"", b"", no_ack=True, no_wait=True),
        spec.Basic.Consume(no_ack=True, nowait=True),
    ),
    (methods.BasicConsumeOk(b"t"), spec.Basic.ConsumeOk("t")),
    (methods.BasicCancel(b"t"), spec.Basic.Cancel("t", nowait=False)),
    (methods.BasicCancel(b"t", no_wait=True), spec.Basic.Cancel("t", nowait=True)),
    (methods.BasicCancelOk(b"t"), spec.Basic.CancelOk("t")),
    (methods.BasicPublish(b"ex", b"key"), spec.Basic.Publish(exchange="ex", routing_key="key")),
    (methods.BasicPublish(b"", b"q", methods.MANDATORY), spec.Basic.Publish(routing_key="q", mandatory=True)),
    (methods.BasicPublish(b"", b"", methods.IMMEDIATE), spec.Basic.Publish(immediate=True)),
    (
        methods.BasicReturn(312, b"NO_ROUTE", b"ex", b"key"),
        spec.Basic.Return(312, "NO_ROUTE", "ex", "key"),
    ),
    (
        methods.BasicDeliver(b"tag", 2**40, True, b"ex", b"key"),
        spec.Basic.Deliver("tag", 2**40, True, "ex", "key"),
    ),
    (methods.BasicDeliver(b"", 1, False, b"", b""), spec.Basic.Deliver("", 1, False, "", "")),
    (methods.BasicGet(b"q", no_ack=True), spec.Basic.Get(queue="q", no_ack=True)),
    (methods.BasicGetOk(7, True, b"ex", b"key", 12), spec.Basic.GetOk(7, True, "ex", "key", 12)),
    (methods.BasicGetOk(7, False, b"", b"", 0), spec.Basic.GetOk(7, False, "", "", 0)),
    (methods.BasicGetEmpty(), spec.Basic.GetEmpty()),
    (methods.BasicAck(2**63), spec.Basic.Ack(2**63)),
    (methods.BasicAck(3, multiple=True), spec.Basic.Ack(3, multiple=True)),
    (methods.BasicReject(3), spec.Basic.Reject(3)),
    (methods.BasicReject(3, requeue=False), spec.Basic.Reject(3, requeue=False)),
    (methods.BasicRecoverAsync(requeue=False), spec.Basic.RecoverAsync(requeue=False)),
    (methods.BasicRecover(requeue=True), spec.Basic.Recover(requeue=True)),
    (methods.BasicRecoverOk(), spec.Basic.RecoverOk()),
    (methods.BasicNack(3), spec.Basic.Nack(3)),
    (methods.BasicNack(3, multiple=True, requeue=False), spec.Basic.Nack(3, multiple=True, requeue=False)),
    (methods.BasicNack(3, multiple=False, requeue=True), spec.Basic.Nack(3, multiple=False, requeue=True)),
    (methods.ConfirmSelect(), spec.Confirm.Select(nowait=False)),
    (methods.ConfirmSelect(no_wait=True), spec.Confirm.Select(nowait=True)),
    (methods.ConfirmSelectOk(), spec.Confirm.SelectOk()),
    (methods.TxSelect(), spec.Tx.Select()),
    (methods.TxSelectOk(), spec.Tx.SelectOk()),
    (methods.TxCommit(), spec.Tx.Commit()),
    (methods.TxCommitOk(), spec.Tx.CommitOk()),
    (methods.TxRollback(), spec.Tx.Rollback()),
    (methods.TxRollbackOk(), spec.Tx.RollbackOk()),
    (methods.BindingQuery(b"e", b"q", b"k", TABLE), Binding.Query(b"e", b"q", b"k", TABLE)),
    (methods.BindingQuery(b"", b"", b"", b""), Binding.Query()),
    (
        methods.BindingQueryOk(False, True, False, True, False),
        Binding.QueryOk(queue_not_found=True, key_not_matched=True),
    ),
    (
        methods.BindingQueryOk(True, False, True, False, True),
        Binding.QueryOk(exchange_not_found=True, queue_not_matched=True, args_not_matched=True),
    ),
    (methods.ExecutionFlush(), Execution.Flush()),
    (methods.ExecutionComplete(7), Execution.Complete(7)),
]
"""Each with its method in pika. The dtx methods are in tests/unit/client/test_pika_methods.py."""


each_method = pytest.mark.parametrize(("method", "of_pika"), METHODS, ids=lambda value: repr(value)[:60])


@each_method
def test_a_method_is_read_as_bytes(method: Method, of_pika: amqp_object.Method) -> None:
    assert type(method).decode(payload(of_pika)) == method
    assert method.KEY == of_pika.INDEX


@each_method
def test_a_method_is_written_as_pika_writes_it(method: Method, of_pika: amqp_object.Method) -> None:
    assert method.encode() == payload(of_pika)
    assert method.frame(513) == frame.Method(513, of_pika).marshal()


@each_method
def test_a_frame_is_made_without_an_object_too(method: Method, of_pika: amqp_object.Method) -> None:
    values = [getattr(method, field.name) for field in fields(method)]  # type: ignore[arg-type]  # it is a dataclass
    assert packer(type(method))(513, *values) == frame.Method(513, of_pika).marshal()


@each_method
def test_pika_reads_written_methods(method: Method, of_pika: amqp_object.Method) -> None:
    if method.SENT_BY & Sender.SERVER and method.KEY in spec.methods:
        octets = method.frame(513)
        consumed, read = frame.decode_frame(octets)
        assert consumed == len(octets)
        assert type(read.method) is type(of_pika)
        assert read.marshal() == octets


def test_the_methods_above_are_those_of_the_table() -> None:
    shown = {type(method) for method, _ in METHODS}
    assert shown - {methods.ExchangeQuery, methods.ExchangeQueryOk} == {
        row for row in methods.METHODS.values() if not row.FACTS & Fact.SOFT
    }


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
    for method in (
        methods.QueuePurge(b"q" * 256),
        methods.BasicGet(bytes(256)),
        methods.QueueDeclareOk(bytes(256), 0, 0),
    ):
        with pytest.raises(WireError, match="short string of 256 bytes"):
            method.encode()


def test_a_number_too_large_beside_a_name_is_refused() -> None:
    with pytest.raises(struct.error):
        methods.QueueDeclareOk(b"q", 1 << 32, 0).encode()


def test_a_name_that_is_no_text_is_unchanged() -> None:
    octets = bytes.fromhex("003c0028 0000 02 ff00 03 c328fe 01")
    assert methods.BasicPublish.decode(octets) == methods.BasicPublish(b"\xff\x00", b"\xc3\x28\xfe", methods.MANDATORY)
    assert methods.BasicPublish(b"\xff\x00", b"\xc3\x28\xfe", methods.MANDATORY).encode() == octets


def test_the_flags_of_a_publish_are_forwarded_unchanged() -> None:
    assert methods.BasicPublish.decode(bytes.fromhex("003c0028 0000 00 00 ff")).flags == 0xFF


def test_bits_without_a_meaning_are_ignored() -> None:
    assert methods.BasicAck.decode(bytes.fromhex("003c0050 0000000000000007 fe")) == methods.BasicAck(7)


def test_a_secret_is_never_shown() -> None:
    for method in (
        methods.ConnectionStartOk(b"", b"PLAIN", b"\x00guest\x00secret", b""),
        methods.ConnectionSecure(b"secret"),
        methods.ConnectionSecureOk(b"secret"),
        methods.ConnectionUpdateSecret(b"secret", b"it is time"),
    ):
        assert "secret" not in repr(method).lower().replace("updatesecret", "")


def test_the_execution_mark_goes_round() -> None:
    """The XML: cumulative-execution-mark, domain long."""
    assert methods.ExecutionComplete.of(2**32 + 5) == methods.ExecutionComplete(5)


def test_a_settlement_is_a_frame_of_one_size() -> None:
    for method in (methods.BasicAck(1), methods.BasicNack(2**63), methods.BasicReject(3)):
        assert len(method.frame(7)) == methods.SETTLE_FRAME


@each_method
def test_the_ticket_comes_first(method: Method, of_pika: amqp_object.Method) -> None:
    """The XML: field name = "ticket" domain = "access-ticket", a short. 0-9-1 calls it reserved: it is no field."""
    has_ticket = hasattr(of_pika, "ticket") and type(method) is not methods.AccessRequestOk
    assert bool(method.FACTS & Fact.TICKET) == has_ticket
    if has_ticket:
        of_pika = copy(of_pika)
        of_pika.ticket = 258
        assert methods.ticket(payload(of_pika)) == 258
        assert type(method).decode(payload(of_pika)) == method


def test_a_truncated_ticket_is_a_syntax_error() -> None:
    with pytest.raises(WireError, match="access ticket"):
        methods.ticket(b"\x00\x3c\x00\x28\x01")


def test_a_query_and_a_bind_with_one_number_are_distinct() -> None:
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

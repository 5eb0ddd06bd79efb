"""Channels of standalone mode and RabbitMQ: the same frames get the same answers."""

import secrets
import struct
from collections.abc import Iterator

import pytest

from dtx.wire.amqp09 import content, methods, properties
from dtx.wire.amqp09.frames import HEADER, METHOD, header_frame
from dtx.wire.amqp09.properties import Property
from dtx.wire.amqp09.tables import entry, put_long, put_short
from tests.support.raw import ConnectionEnded, RawClient, message, session
from tests.support.raw_calls import (
    ask,
    bodies,
    code_after,
    code_of_end,
    confirmed,
    consume,
    declare,
    fill,
    get,
    next_delivery,
    publish,
    returned,
)

PERSISTENT = properties.build({Property.DELIVERY_MODE: b"\x02"})
MANDATORY, IMMEDIATE = 1, 2


@pytest.fixture
def client(either_url: str) -> Iterator[RawClient]:
    with session(either_url) as connected:
        connected.open(1)
        yield connected


@pytest.fixture
def queue(client: RawClient) -> bytes:
    """An exclusive queue with a unique name."""
    name = f"dialogue-{secrets.token_hex(6)}".encode()
    ask(client, 1, methods.QueueDeclare(name, exclusive=True).encode(), methods.QueueDeclareOk.KEY)
    return name


# -- publish and get ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4088, 4089, 300_000])
def test_a_message_comes_out_as_it_went_in(client: RawClient, queue: bytes, size: int) -> None:
    body = secrets.token_bytes(size)
    raw = properties.build({Property.MESSAGE_ID: b"m", Property.TYPE: b"t\xff"}, {b"key": b"\x00value"})
    publish(client, queue, body, properties=raw)
    client.say(1, methods.BasicGet(queue).encode())
    method = methods.BasicGetOk.decode(client.read_method(1, methods.BasicGetOk.KEY))
    kind, _, header = client.read()
    assert (kind, content.header(header)) == (HEADER, (60, size, raw))
    assert (method.exchange, method.routing_key, method.redelivered, method.message_count) == (b"", queue, False, 0)
    found = b""
    while len(found) < size:
        found += client.read().payload
    assert found == body


def test_get_reports_the_number_of_remaining_messages(client: RawClient, queue: bytes) -> None:
    fill(client, queue, b"1", b"2", b"3")
    got = get(client, queue)
    assert got is not None
    assert (got[0].message_count, got[1]) == (2, b"1")
    assert declare(client, queue, passive=True).message_count == 2


def test_an_empty_queue_gives_nothing(client: RawClient, queue: bytes) -> None:
    assert get(client, queue) is None


def test_a_publish_to_a_missing_exchange_closes_the_channel(client: RawClient) -> None:
    client.send_raw(message(1, b"key", exchange=b"not-there"))
    refusal = client.refused(1)
    assert (refusal.code, refusal.class_id, refusal.method_id) == (404, 60, 40)


def test_frames_after_an_exception_are_discarded_until_close_ok(client: RawClient, queue: bytes) -> None:
    """AMQP 0-9-1, 1.5.2.5: "after sending this method, any received methods except … MUST be discarded"."""
    client.send_raw(message(1, b"key", exchange=b"not-there"))
    publish(client, queue, b"late")
    client.say(1, methods.QueueDeclare(b"", exclusive=True).encode())
    assert client.refused(1).code == 404
    assert declare(client, queue, passive=True).message_count == 0


def test_immediate_is_not_implemented(client: RawClient, queue: bytes) -> None:
    assert code_after(client, message(1, queue, flags=IMMEDIATE)) == 540


@pytest.mark.parametrize("value", [b"-1", b"a", b"1.5", b"", b" 1"])
def test_an_expiration_that_is_no_number_is_refused(client: RawClient, queue: bytes, value: bytes) -> None:
    publish(client, queue, b"x", properties=properties.build({Property.EXPIRATION: value}))
    assert client.refused(1).code == 406


def test_a_publish_to_an_internal_exchange_is_refused(client: RawClient) -> None:
    name = f"internal-{secrets.token_hex(4)}".encode()
    # auto-delete and internal: bits 2 and 3
    payload = methods.ExchangeDeclare.HEAD + b"\x00\x00" + put_short(name) + put_short(b"fanout")
    ask(client, 1, payload + b"\x0c" + put_long(b""), methods.ExchangeDeclareOk.KEY)
    client.send_raw(message(1, b"key", exchange=name))
    assert client.refused(1).code == 403
    ask(client, 1, _exchange_delete(name), methods.ExchangeDeleteOk.KEY)


def _exchange_delete(name: bytes) -> bytes:
    return methods.ExchangeDelete.HEAD + b"\x00\x00" + put_short(name) + b"\x00"


def test_each_key_of_cc_and_bcc_gets_a_copy(client: RawClient, queue: bytes) -> None:
    """RabbitMQ, Sender-selected Distribution."""
    second, third = (declare(client, exclusive=True).queue for _ in range(2))

    def keys_in(*names: bytes) -> bytes:
        return b"".join(b"S" + put_long(name) for name in names)

    table = entry(b"CC", b"A", keys_in(second)) + entry(b"BCC", b"A", keys_in(third))
    publish(client, queue, b"copied", properties=properties.put(properties.EMPTY, Property.HEADERS, table))
    for name in (queue, second, third):
        client.say(1, methods.BasicGet(name, no_ack=True).encode())
        client.read_method(1, methods.BasicGetOk.KEY)
        raw = content.header(client.read().payload).properties
        assert properties.has_header(raw, b"CC")
        assert not properties.has_header(raw, b"BCC")
        assert client.read().payload == b"copied"


# -- unexpected frames -------------------------------------------------------------------------------------------------


def test_a_method_in_the_midst_of_content_ends_the_connection(client: RawClient, queue: bytes) -> None:
    assert code_of_end(client, methods.BasicPublish(b"", queue).encode(), methods.BasicGet(queue).encode()) == 505


def test_a_close_in_the_midst_of_content_ends_the_connection(client: RawClient, queue: bytes) -> None:
    close = methods.ChannelClose(200, b"bye").encode()
    assert code_of_end(client, methods.BasicPublish(b"", queue).encode(), close) == 505


def test_a_content_of_another_class_ends_the_connection(client: RawClient, queue: bytes) -> None:
    frames = methods.BasicPublish(b"", queue).frame(1) + header_frame(1, 70, 1, b"\x00\x00")
    assert code_after(client, frames) == 505


def test_content_without_a_publish_ends_the_connection(client: RawClient) -> None:
    assert code_after(client, header_frame(1, 60, 1, b"\x00\x00")) == 505


def test_a_method_on_a_closed_channel_ends_the_connection(client: RawClient) -> None:
    assert code_of_end(client, methods.BasicGet(b"q").encode(), channel=7) == 504


def test_one_channel_too_many_ends_the_connection(either_url: str) -> None:
    with RawClient(either_url) as peer:
        peer.log_in(channel_max=2)
        peer.open(1, 2)
        peer.say(3, methods.ChannelOpen().encode())
        end = peer.end()
        assert end is not None
        assert end.reply_code == 530


def test_a_channel_that_is_open_cannot_be_opened(client: RawClient) -> None:
    assert code_of_end(client, methods.ChannelOpen().encode()) == 504


def test_a_truncated_method_ends_the_connection(client: RawClient) -> None:
    assert code_of_end(client, methods.BasicGet(b"queue").encode()[:-3]) in (501, 502)


# -- acknowledgements --------------------------------------------------------------------------------------------------


def test_a_requeued_message_is_redelivered_first_and_marked(client: RawClient, queue: bytes) -> None:
    publish(client, queue, b"1", b"2")
    got = get(client, queue)
    assert got is not None
    client.say(1, methods.BasicNack(got[0].delivery_tag, requeue=True).encode())
    again = get(client, queue)
    assert again is not None
    assert (again[1], again[0].redelivered, again[0].delivery_tag) == (b"1", True, 2)


def test_unacknowledged_messages_return_with_the_channel(client: RawClient, queue: bytes) -> None:
    publish(client, queue, b"1", b"2", b"3", b"4")
    for _ in range(4):
        get(client, queue)
    client.say(1, methods.BasicAck(2, multiple=True).encode())
    client.say(1, methods.BasicReject(4, requeue=False).encode())
    client.close_channel(1)
    client.open(1)
    returned(client, queue, 1)
    got = get(client, queue)
    assert got is not None
    assert (got[1], got[0].redelivered) == (b"3", True)
    assert get(client, queue) is None


@pytest.mark.parametrize("multiple", [False, True])
def test_an_unknown_delivery_tag_closes_the_channel(client: RawClient, multiple: bool) -> None:
    refusal = client.refusal_of(1, methods.BasicAck(1, multiple).encode())
    assert (refusal.code, refusal.text) == (406, "PRECONDITION_FAILED - unknown delivery tag 1")


def test_recover_gives_everything_back(client: RawClient, queue: bytes) -> None:
    publish(client, queue, b"1", b"2")
    get(client, queue)
    get(client, queue)
    ask(client, 1, methods.BasicRecover.HEAD + b"\x01", methods.BasicRecoverOk.KEY)
    assert bodies(client, queue) == [b"1", b"2"]


def test_recover_to_the_same_consumer_is_not_implemented(client: RawClient) -> None:
    assert code_of_end(client, methods.BasicRecover.HEAD + b"\x00") == 540


# -- consumers ---------------------------------------------------------------------------------------------------------


def test_deliveries_come_in_order_with_growing_tags(client: RawClient, queue: bytes) -> None:
    consume(client, queue)
    publish(client, queue, *(b"%d" % number for number in range(20)))
    found = [next_delivery(client) for _ in range(20)]
    assert [body for _, body in found] == [b"%d" % number for number in range(20)]
    assert [method.delivery_tag for method, _ in found] == list(range(1, 21))
    assert {(method.consumer_tag, method.redelivered) for method, _ in found} == {(b"tag", False)}


def test_a_prefetch_holds_further_messages_back(client: RawClient, queue: bytes) -> None:
    """basic.qos: "The client can request that messages be sent in advance", up to a number of unacknowledged ones."""
    ask(client, 1, methods.BasicQos(0, 2).encode(), methods.BasicQosOk.KEY)
    fill(client, queue, b"1", b"2", b"3", b"4")
    consume(client, queue)
    assert [next_delivery(client)[1] for _ in range(2)] == [b"1", b"2"]
    assert declare(client, queue, passive=True).message_count == 2
    client.say(1, methods.BasicAck(1).encode())
    assert next_delivery(client)[1] == b"3"


def test_the_consumers_of_a_channel_share_a_global_prefetch(client: RawClient, queue: bytes) -> None:
    """RabbitMQ, Consumer Prefetch: global true is "shared across all consumers on the channel"."""
    second = declare(client, exclusive=True).queue
    ask(client, 1, methods.BasicQos(0, 1, global_qos=True).encode(), methods.BasicQosOk.KEY)
    consume(client, queue, b"a")
    consume(client, second, b"b")
    publish(client, queue, b"1")
    assert next_delivery(client)[0].consumer_tag == b"a"
    fill(client, second, b"2")
    assert declare(client, second, passive=True).message_count == 1
    client.say(1, methods.BasicAck(1).encode())
    assert next_delivery(client)[0].consumer_tag == b"b"


def test_a_cancelled_consumer_gets_messages_published_before(client: RawClient, queue: bytes) -> None:
    consume(client, queue, b"high", arguments=entry(b"x-priority", b"I", b"\x00\x00\x00\x0a"))
    consume(client, queue, b"low")
    publish(client, queue, *(b"%d" % number for number in range(100)))
    client.say(1, methods.BasicCancel(b"high").encode())
    assert {next_delivery(client)[0].consumer_tag for _ in range(100)} == {b"high"}
    client.read_method(1, methods.BasicCancelOk.KEY)


def test_a_consumer_that_comes_gets_nothing_published_before(client: RawClient, queue: bytes) -> None:
    """A waiting consumer gets the message, even if a later consumer has a higher priority."""
    consume(client, queue, b"low")
    publish(client, queue, b"1")
    high = entry(b"x-priority", b"I", b"\x00\x00\x00\x0a")
    client.say(1, methods.BasicConsume(queue, b"high", no_wait=True, arguments=high).encode())
    assert next_delivery(client)[0].consumer_tag == b"low"
    publish(client, queue, b"2")
    assert next_delivery(client)[0].consumer_tag == b"high"


def test_a_consumer_that_is_not_local_gets_its_connections_messages(client: RawClient, queue: bytes) -> None:
    """RabbitMQ ignores no-local."""
    no_local = bytearray(methods.BasicConsume(queue, b"tag").encode())
    no_local[-5] |= 1  # the bits, in front of an empty table
    ask(client, 1, bytes(no_local), methods.BasicConsumeOk.KEY)
    publish(client, queue, b"mine")
    assert next_delivery(client)[1] == b"mine"


def test_a_consumer_without_acknowledgements_gets_all(client: RawClient, queue: bytes) -> None:
    ask(client, 1, methods.BasicQos(0, 1).encode(), methods.BasicQosOk.KEY)
    consume(client, queue, no_ack=True)
    publish(client, queue, b"1", b"2", b"3")
    assert [next_delivery(client)[1] for _ in range(3)] == [b"1", b"2", b"3"]
    assert client.refusal_of(1, methods.BasicAck(1).encode()).code == 406


def test_the_server_names_consumers_that_have_no_name(client: RawClient, queue: bytes) -> None:
    answer = ask(client, 1, methods.BasicConsume(queue, b"").encode(), methods.BasicConsumeOk.KEY)
    assert methods.BasicConsumeOk.decode(answer).consumer_tag.startswith(b"amq.ctag-")


def test_a_consumer_tag_is_used_once(client: RawClient, queue: bytes) -> None:
    consume(client, queue)
    assert code_of_end(client, methods.BasicConsume(queue, b"tag").encode()) == 530


def test_a_cancelled_consumer_gets_nothing_and_its_tag_is_free(client: RawClient, queue: bytes) -> None:
    consume(client, queue)
    answer = ask(client, 1, methods.BasicCancel(b"tag").encode(), methods.BasicCancelOk.KEY)
    assert methods.BasicCancelOk.decode(answer).consumer_tag == b"tag"
    fill(client, queue, b"1")
    assert declare(client, queue, passive=True) == methods.QueueDeclareOk(queue, 1, 0)
    consume(client, queue)
    assert next_delivery(client)[1] == b"1"


def test_cancelling_a_consumer_that_is_not_there_is_no_error(client: RawClient) -> None:
    answer = ask(client, 1, methods.BasicCancel(b"nobody").encode(), methods.BasicCancelOk.KEY)
    assert methods.BasicCancelOk.decode(answer).consumer_tag == b"nobody"


def test_an_exclusive_consumer_is_alone(client: RawClient, queue: bytes) -> None:
    client.open(2)
    consume(client, queue, exclusive=True)
    assert client.refusal_of(2, methods.BasicConsume(queue, b"other").encode()).code == 403


def test_a_consumer_of_a_missing_queue_closes_the_channel(client: RawClient) -> None:
    refusal = client.refusal_of(1, methods.BasicConsume(b"not-there", b"t").encode())
    assert (refusal.code, refusal.class_id, refusal.method_id) == (404, 60, 20)


def test_a_queue_with_auto_delete_goes_with_its_last_consumer(client: RawClient) -> None:
    name = declare(client, auto_delete=True).queue
    consume(client, name, b"a")
    consume(client, name, b"b")
    ask(client, 1, methods.BasicCancel(b"a").encode(), methods.BasicCancelOk.KEY)
    assert declare(client, name, passive=True).consumer_count == 1
    ask(client, 1, methods.BasicCancel(b"b").encode(), methods.BasicCancelOk.KEY)
    assert client.refusal_of(1, methods.QueueDeclare(name, passive=True).encode()).code == 404


def test_a_prefetch_in_bytes_is_not_implemented(client: RawClient) -> None:
    assert code_of_end(client, struct.pack(">IIHB", methods.BasicQos.KEY, 1, 0, 0)) == 540


def test_a_channel_reports_that_flow_is_active(client: RawClient) -> None:
    assert ask(client, 1, methods.ChannelFlow.HEAD + b"\x01", methods.ChannelFlowOk.KEY)[4:] == b"\x01"


# -- queues ------------------------------------------------------------------------------------------------------------


def test_the_server_names_queues_that_have_no_name(client: RawClient) -> None:
    name = declare(client, exclusive=True).queue
    assert name.startswith(b"amq.gen-")
    assert declare(client, name, passive=True).queue == name


def test_an_empty_name_is_the_queue_that_was_declared_last(client: RawClient, queue: bytes) -> None:
    publish(client, queue, b"1")
    got = get(client, b"")
    assert got is not None
    assert got[1] == b"1"


def test_without_one_an_empty_name_is_not_found(client: RawClient) -> None:
    client.open(2)
    assert client.refusal_of(2, methods.BasicGet(b"").encode()).code == 404


def test_an_exclusive_queue_is_locked_and_deleted_with_its_connection(
    client: RawClient, either_url: str, queue: bytes
) -> None:
    with session(either_url) as other:
        other.open(1)
        assert other.refusal_of(1, methods.BasicGet(queue).encode()).code == 405
        client.close()
        assert other.refusal_of(1, methods.BasicGet(queue).encode()).code == 404


def test_purge_removes_ready_messages(client: RawClient, queue: bytes) -> None:
    publish(client, queue, b"1", b"2", b"3")
    get(client, queue)
    answer = ask(client, 1, methods.QueuePurge(queue).encode(), methods.QueuePurgeOk.KEY)
    assert answer[4:] == b"\x00\x00\x00\x02"
    client.say(1, methods.BasicNack(1).encode())
    assert bodies(client, queue) == [b"1"]


def test_delete_returns_the_number_of_deleted_messages(client: RawClient, queue: bytes) -> None:
    """queue.delete-ok: "Reports the number of messages deleted"; RabbitMQ means those that were ready."""
    fill(client, queue, b"1", b"2", b"3")
    assert get(client, queue) is not None
    answer = ask(client, 1, methods.QueueDelete(queue).encode(), methods.QueueDeleteOk.KEY)
    assert answer[4:] == b"\x00\x00\x00\x02"


def test_a_delete_of_a_missing_queue_is_no_error(client: RawClient) -> None:
    """RabbitMQ, "queue.delete": "idempotent"."""
    answer = ask(client, 1, methods.QueueDelete(b"not-there").encode(), methods.QueueDeleteOk.KEY)
    assert answer[4:] == b"\x00\x00\x00\x00"


def test_a_conditional_delete_spares_queues_in_use_or_not_empty(client: RawClient, queue: bytes) -> None:
    """if-empty, if-unused: "If the queue has … consumers the server does not delete it but raises a channel exception
    instead".
    """
    fill(client, queue, b"1")
    assert client.refusal_of(1, methods.QueueDelete(queue, if_empty=True).encode()).code == 406
    client.open(2)
    consume(client, queue, no_ack=True, channel=2)
    assert client.refusal_of(1, methods.QueueDelete(queue, if_unused=True).encode()).code == 406
    assert declare(client, queue, passive=True).consumer_count == 1


def test_a_binding_routes_and_an_unbinding_does_not(client: RawClient, queue: bytes) -> None:
    ask(client, 1, methods.QueueBind(queue, b"amq.direct", queue).encode(), methods.QueueBindOk.KEY)
    client.send_raw(message(1, queue, b"bound", exchange=b"amq.direct"))
    assert bodies(client, queue) == [b"bound"]
    unbind = methods.QueueUnbind.HEAD + b"\x00\x00"
    unbind += put_short(queue) + put_short(b"amq.direct") + put_short(queue) + put_long(b"")
    ask(client, 1, unbind, methods.QueueUnbindOk.KEY)
    client.send_raw(message(1, queue, b"unbound", exchange=b"amq.direct"))
    assert bodies(client, queue) == []


def test_methods_without_answers_are_done_in_order(client: RawClient) -> None:
    name = f"silent-{secrets.token_hex(4)}".encode()
    client.say(
        1,
        methods.QueueDeclare(name, exclusive=True, no_wait=True).encode(),
        methods.BasicConsume(name, b"t", no_wait=True).encode(),
    )
    publish(client, name, b"1")
    assert next_delivery(client)[1] == b"1"


# -- confirms and returns ----------------------------------------------------------------------------------------------


def test_publishes_are_confirmed(client: RawClient, queue: bytes) -> None:
    ask(client, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    publish(client, queue, *(b"%d" % number for number in range(100)), properties=PERSISTENT)
    assert confirmed(client, 100) <= 100
    assert declare(client, queue, passive=True).message_count == 100


def test_an_unroutable_message_is_returned_and_then_confirmed(client: RawClient) -> None:
    """RabbitMQ, Confirms: "the basic.return is sent to the client before basic.ack"."""
    ask(client, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    client.send_raw(message(1, b"nowhere", b"body", flags=MANDATORY))
    back = methods.BasicReturn.decode(client.read_method(1))
    assert back == methods.BasicReturn(312, b"NO_ROUTE", b"", b"nowhere")
    assert client.read_content(1) == b"body"
    assert methods.BasicAck.decode(client.read_method(1, methods.BasicAck.KEY)).delivery_tag == 1


def test_an_unroutable_message_without_mandatory_is_confirmed(client: RawClient) -> None:
    ask(client, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    client.send_raw(message(1, b"nowhere", b"body"))
    assert methods.BasicAck.decode(client.read_method(1, methods.BasicAck.KEY)).delivery_tag == 1


def test_a_full_queue_that_rejects_publishes_nacks(client: RawClient) -> None:
    """RabbitMQ, Queue Length Limit: reject-publish "informs the publisher of the reject via a basic.nack"."""
    limits = entry(b"x-max-length", b"I", b"\x00\x00\x00\x02") + entry(b"x-overflow", b"S", b"reject-publish")
    payload = methods.QueueDeclare(b"", exclusive=True, arguments=limits).encode()
    name = methods.QueueDeclareOk.decode(ask(client, 1, payload, methods.QueueDeclareOk.KEY)).queue
    ask(client, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    fates = []
    for number in range(4):
        publish(client, name, b"%d" % number)
        fates.append(client.read_method(1, methods.BasicAck.KEY, methods.BasicNack.KEY)[3])
    assert fates[:2] == [methods.BasicAck.KEY & 0xFF] * 2
    assert fates[-1] == methods.BasicNack.KEY & 0xFF
    assert bodies(client, name)[:2] == [b"0", b"1"]


# -- transactions ------------------------------------------------------------------------------------------------------


def test_a_transaction_is_seen_when_it_is_committed(client: RawClient, queue: bytes) -> None:
    client.open(2)
    ask(client, 2, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    publish(client, queue, b"1", b"2", channel=2)
    assert get(client, queue) is None
    ask(client, 2, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    assert bodies(client, queue) == [b"1", b"2"]


def test_a_transaction_that_is_rolled_back_has_published_nothing(client: RawClient, queue: bytes) -> None:
    ask(client, 1, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    publish(client, queue, b"1")
    ask(client, 1, methods.TxRollback().encode(), methods.TxRollbackOk.KEY)
    ask(client, 1, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    assert bodies(client, queue) == []


def test_acknowledgements_count_when_they_are_committed(client: RawClient, queue: bytes) -> None:
    """tx.rollback: unacknowledged messages "MUST NOT be automatically redelivered by rollback"."""
    fill(client, queue, b"1", b"2")
    client.open(2)
    ask(client, 2, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    assert get(client, queue, 2) is not None
    assert get(client, queue, 2) is not None
    client.say(2, methods.BasicAck(1).encode())
    ask(client, 2, methods.TxRollback().encode(), methods.TxRollbackOk.KEY)
    assert get(client, queue) is None
    client.say(2, methods.BasicAck(1).encode())
    ask(client, 2, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    client.close_channel(2)
    assert bodies(client, queue) == [b"2"]


def test_a_rejection_in_a_transaction_waits_for_its_commit(client: RawClient, queue: bytes) -> None:
    fill(client, queue, b"1")
    client.open(2)
    ask(client, 2, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    get(client, queue, 2)
    client.say(2, methods.BasicReject(1, requeue=True).encode())
    assert get(client, queue) is None
    ask(client, 2, methods.TxCommit().encode(), methods.TxCommitOk.KEY)
    assert bodies(client, queue) == [b"1"]


def test_a_transaction_dies_with_its_channel(client: RawClient, queue: bytes) -> None:
    fill(client, queue, b"1")
    client.open(2)
    ask(client, 2, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    publish(client, queue, b"2", channel=2)
    get(client, queue, 2)
    client.say(2, methods.BasicAck(1).encode())
    client.close_channel(2)
    returned(client, queue, 1)
    assert bodies(client, queue) == [b"1"]


def test_an_unroutable_message_is_returned_at_the_commit(client: RawClient) -> None:
    ask(client, 1, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    client.send_raw(message(1, b"nowhere", b"body", flags=MANDATORY))
    client.say(1, methods.TxCommit().encode())
    assert methods.BasicReturn.decode(client.read_method(1)).reply_code == 312
    assert client.read_content(1) == b"body"
    client.read_method(1, methods.TxCommitOk.KEY)


@pytest.mark.parametrize("method", [methods.TxCommit().encode(), methods.TxRollback().encode()])
def test_without_tx_select_there_is_nothing_to_commit(client: RawClient, method: bytes) -> None:
    assert client.refusal_of(1, method).code == 406


def test_confirms_and_transactions_exclude_each_other(client: RawClient) -> None:
    ask(client, 1, methods.ConfirmSelect().encode(), methods.ConfirmSelectOk.KEY)
    assert client.refusal_of(1, methods.TxSelect().encode()).code == 406


def test_transactions_and_confirms_exclude_each_other(client: RawClient) -> None:
    ask(client, 1, methods.TxSelect().encode(), methods.TxSelectOk.KEY)
    assert client.refusal_of(1, methods.ConfirmSelect().encode()).code == 406


# -- the connection ----------------------------------------------------------------------------------------------------


def test_a_new_secret_is_taken(client: RawClient, queue: bytes) -> None:
    """RabbitMQ passes the secret to its authentication backend, which does not check the password again."""
    client.say(0, methods.ConnectionUpdateSecret.HEAD + put_long(b"new") + put_short(b"renewed"))
    assert client.read_method(0, methods.ConnectionUpdateSecretOk.KEY)[4:] == b""
    assert declare(client, queue, passive=True).queue == queue


@pytest.mark.parametrize("payload", [b"", put_long(b"new"), put_long(b"new") + put_short(b"") + b"x"])
def test_a_malformed_secret_ends_the_connection(client: RawClient, payload: bytes) -> None:
    secret = methods.ConnectionUpdateSecret.HEAD + payload
    assert code_of_end(client, secret, channel=0) in (501, 502, 541)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_frames_before_a_close_are_handled(client: RawClient, either_url: str) -> None:
    name = f"closing-{secrets.token_hex(4)}".encode()
    declare(client, name)
    publish(client, name, *(b"%d" % number for number in range(50)))
    client.close()
    with session(either_url) as other:
        other.open(1)
        answer = ask(other, 1, methods.QueueDelete(name).encode(), methods.QueueDeleteOk.KEY)
        assert answer[4:] == b"\x00\x00\x00\x32"


def test_both_sides_may_close_a_channel_at_once(client: RawClient) -> None:
    """AMQP 0-9-1, 1.5.2.5: each side answers the close of the other."""
    close = methods.ChannelClose(200, b"done").encode()
    client.say(1, methods.BasicGet(b"not-there").encode(), close)
    client.read_method(1, methods.ChannelClose.KEY)
    client.read_method(1, methods.ChannelCloseOk.KEY)
    client.say(1, methods.ChannelCloseOk().encode())  # RabbitMQ may drop its own close after it has read the client's
    client.open(1)


def test_a_wrong_password_is_refused(either_url: str) -> None:
    with pytest.raises(ConnectionEnded):
        RawClient(either_url.replace("guest:guest", "guest:wrong")).log_in()


def test_a_vhost_that_is_not_there_is_not_allowed(either_url: str) -> None:
    with pytest.raises(ConnectionEnded, match="530"):
        RawClient(either_url[: either_url.rindex("/")] + "/not-there").log_in()


def test_frames_of_an_unknown_type_end_the_connection(client: RawClient) -> None:
    assert code_after(client, b"\x09" + methods.TxSelect().frame(1)[1:]) == 501
    assert METHOD == 1

"""The table of methods: AMQP 0-9-1, RabbitMQ's extensions, and the AMQP 0-9 preview.

Each class is a row: name, numbers, sender, further properties, and the wire fields in order. An answer is defined
before the methods that it answers. The codec of a row serves both ends (:mod:`~dtx.wire.amqp09.codec`). An empty queue
name means the queue that the channel declared last.
"""

from dataclasses import field
from typing import ClassVar, Final, get_args

from dtx.wire.amqp09.codec import (
    Bit,
    ChannelMode,
    Fact,
    Long,
    LongLong,
    LongString,
    Method,
    Octet,
    Sender,
    Short,
    ShortString,
    Table,
    XidField,
    method,
)
from dtx.wire.amqp09.errors import syntax_error
from dtx.xa.codes import ReplyCode, XaError

_CLIENT: Final = Sender.CLIENT
_SERVER: Final = Sender.SERVER
_BOTH: Final = Sender.BOTH
_CONTENT: Final = Fact.CONTENT
_LOCAL: Final = Fact.LOCAL
_WATCHED: Final = Fact.WATCHED
_TICKET: Final = Fact.TICKET
_UNCOUNTED: Final = Fact.UNCOUNTED
_DTX: Final = Fact.SOFT | Fact.LOCAL
_IN_TX: Final = frozenset((ChannelMode.TX,))
_IN_DTX: Final = frozenset((ChannelMode.DTX,))


# -- connection


@method("connection.start-ok", 10, 11, _CLIENT)
class ConnectionStartOk(Method):
    """``response`` contains the password."""

    client_properties: Table
    mechanism: ShortString
    response: LongString = field(repr=False)
    locale: ShortString


@method("connection.start", 10, 10, _SERVER, answer=ConnectionStartOk)
class ConnectionStart(Method):
    """Mechanisms and locales are names separated by spaces."""

    version_major: Octet
    version_minor: Octet
    server_properties: Table
    mechanisms: LongString
    locales: LongString


@method("connection.secure-ok", 10, 21, _CLIENT)
class ConnectionSecureOk(Method):
    response: LongString = field(repr=False)


@method("connection.secure", 10, 20, _SERVER, answer=ConnectionSecureOk)
class ConnectionSecure(Method):
    challenge: LongString = field(repr=False)


@method("connection.tune-ok", 10, 31, _CLIENT)
class ConnectionTuneOk(Method):
    """As :class:`ConnectionTune`."""

    channel_max: Short
    frame_max: Long
    heartbeat: Short


@method("connection.tune", 10, 30, _SERVER, answer=ConnectionTuneOk)
class ConnectionTune(Method):
    """The highest channel number; the largest frame in bytes; the heartbeat in seconds. 0 means no limit or none."""

    channel_max: Short
    frame_max: Long
    heartbeat: Short


@method("connection.open-ok", 10, 41, _SERVER)
class ConnectionOpenOk(Method):
    known_hosts: ShortString = b""


@method("connection.open", 10, 40, _CLIENT, answer=ConnectionOpenOk)
class ConnectionOpen(Method):
    virtual_host: ShortString
    capabilities: ShortString = b""
    insist: Bit = False


@method("connection.close-ok", 10, 51, _BOTH)
class ConnectionCloseOk(Method): ...


@method("connection.close", 10, 50, _BOTH, answer=ConnectionCloseOk)
class ConnectionClose(Method):
    """``failed``: class << 16 | method of the method that failed; 0 where none did."""

    reply_code: Short
    reply_text: ShortString
    failed: Long = 0


@method("connection.blocked", 10, 60, _BOTH)
class ConnectionBlocked(Method):
    reason: ShortString


@method("connection.unblocked", 10, 61, _BOTH)
class ConnectionUnblocked(Method): ...


@method("connection.update-secret-ok", 10, 71, _SERVER)
class ConnectionUpdateSecretOk(Method): ...


@method("connection.update-secret", 10, 70, _CLIENT, answer=ConnectionUpdateSecretOk)
class ConnectionUpdateSecret(Method):
    new_secret: LongString = field(repr=False)
    reason: ShortString


# -- channel


@method("channel.open-ok", 20, 11, _SERVER, _UNCOUNTED)
class ChannelOpenOk(Method):
    channel_id: LongString = b""


@method("channel.open", 20, 10, _CLIENT, _WATCHED | _UNCOUNTED, answer=ChannelOpenOk)
class ChannelOpen(Method):
    out_of_band: ShortString = b""


@method("channel.flow-ok", 20, 21, _BOTH, _WATCHED | _UNCOUNTED)
class ChannelFlowOk(Method):
    active: Bit


@method("channel.flow", 20, 20, _BOTH, _WATCHED | _UNCOUNTED, answer=ChannelFlowOk)
class ChannelFlow(Method):
    active: Bit


@method("channel.close-ok", 20, 41, _BOTH, _WATCHED | _UNCOUNTED)
class ChannelCloseOk(Method): ...


@method("channel.close", 20, 40, _BOTH, _WATCHED | _UNCOUNTED, answer=ChannelCloseOk)
class ChannelClose(Method):
    """As :class:`ConnectionClose`."""

    reply_code: Short
    reply_text: ShortString
    failed: Long = 0


# -- access


@method("access.request-ok", 30, 11, _SERVER, _WATCHED)
class AccessRequestOk(Method):
    ticket: Short


@method("access.request", 30, 10, _CLIENT, answer=AccessRequestOk)
class AccessRequest(Method):
    realm: ShortString
    exclusive: Bit
    passive: Bit
    active: Bit
    write: Bit
    read: Bit


# -- exchange


@method("exchange.declare-ok", 40, 11, _SERVER)
class ExchangeDeclareOk(Method): ...


@method("exchange.declare", 40, 10, _CLIENT, _TICKET, answer=ExchangeDeclareOk)
class ExchangeDeclare(Method):
    exchange: ShortString
    kind: ShortString
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    no_wait: Bit = False
    arguments: Table = b""


@method("exchange.delete-ok", 40, 21, _SERVER)
class ExchangeDeleteOk(Method): ...


@method("exchange.delete", 40, 20, _CLIENT, _TICKET, answer=ExchangeDeleteOk)
class ExchangeDelete(Method):
    exchange: ShortString
    if_unused: Bit = False
    no_wait: Bit = False


@method("exchange.query-ok", 40, 31, _SERVER, _LOCAL)
class ExchangeQueryOk(Method):
    """A method of the preview. RabbitMQ gave its number to exchange.bind-ok, which has no arguments."""

    kind: ShortString
    durable: Bit
    not_found: Bit
    arguments: Table


@method("exchange.query", 40, 30, _CLIENT, _LOCAL | _TICKET, answer=ExchangeQueryOk)
class ExchangeQuery(Method):
    """A method of the preview. RabbitMQ gave its number to exchange.bind: see :func:`is_query`."""

    exchange: ShortString


@method("exchange.bind-ok", 40, 31, _SERVER)
class ExchangeBindOk(Method): ...


@method("exchange.bind", 40, 30, _CLIENT, _WATCHED | _TICKET, answer=ExchangeBindOk)
class ExchangeBind(Method):
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


@method("exchange.unbind-ok", 40, 51, _SERVER)
class ExchangeUnbindOk(Method): ...


@method("exchange.unbind", 40, 40, _CLIENT, _TICKET, answer=ExchangeUnbindOk)
class ExchangeUnbind(Method):
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


# -- queue


@method("queue.declare-ok", 50, 11, _SERVER, _WATCHED)
class QueueDeclareOk(Method):
    """``message_count``: messages that are ready."""

    queue: ShortString
    message_count: Long
    consumer_count: Long


@method("queue.declare", 50, 10, _CLIENT, _WATCHED | _TICKET, answer=QueueDeclareOk)
class QueueDeclare(Method):
    """With an empty name, the server chooses the name."""

    queue: ShortString
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    no_wait: Bit = False
    arguments: Table = b""


@method("queue.bind-ok", 50, 21, _SERVER)
class QueueBindOk(Method): ...


@method("queue.bind", 50, 20, _CLIENT, _TICKET, answer=QueueBindOk)
class QueueBind(Method):
    """The destination is the queue."""

    destination: ShortString
    source: ShortString
    routing_key: ShortString
    no_wait: Bit = False
    arguments: Table = b""


@method("queue.purge-ok", 50, 31, _SERVER)
class QueuePurgeOk(Method):
    message_count: Long


@method("queue.purge", 50, 30, _CLIENT, _TICKET, answer=QueuePurgeOk)
class QueuePurge(Method):
    queue: ShortString
    no_wait: Bit = False


@method("queue.delete-ok", 50, 41, _SERVER)
class QueueDeleteOk(Method):
    message_count: Long


@method("queue.delete", 50, 40, _CLIENT, _WATCHED | _TICKET, answer=QueueDeleteOk)
class QueueDelete(Method):
    queue: ShortString
    if_unused: Bit = False
    if_empty: Bit = False
    no_wait: Bit = False


@method("queue.unbind-ok", 50, 51, _SERVER)
class QueueUnbindOk(Method): ...


@method("queue.unbind", 50, 50, _CLIENT, _TICKET, answer=QueueUnbindOk)
class QueueUnbind(Method):
    no_wait: ClassVar[bool] = False
    destination: ShortString
    source: ShortString
    routing_key: ShortString
    arguments: Table = b""


# -- basic


@method("basic.qos-ok", 60, 11, _SERVER)
class BasicQosOk(Method): ...


@method("basic.qos", 60, 10, _CLIENT, answer=BasicQosOk)
class BasicQos(Method):
    prefetch_size: Long
    prefetch_count: Short
    global_qos: Bit = False


@method("basic.consume-ok", 60, 21, _SERVER, _WATCHED)
class BasicConsumeOk(Method):
    consumer_tag: ShortString


@method("basic.consume", 60, 20, _CLIENT, _WATCHED | _TICKET, answer=BasicConsumeOk)
class BasicConsume(Method):
    queue: ShortString
    consumer_tag: ShortString
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    no_wait: Bit = False
    arguments: Table = b""


@method("basic.cancel-ok", 60, 31, _BOTH, _WATCHED)
class BasicCancelOk(Method):
    consumer_tag: ShortString


@method("basic.cancel", 60, 30, _BOTH, _WATCHED, answer=BasicCancelOk)
class BasicCancel(Method):
    """From a server, it means that the consumer no longer exists."""

    consumer_tag: ShortString
    no_wait: Bit = False


@method("basic.publish", 60, 40, _CLIENT, _CONTENT | _TICKET)
class BasicPublish(Method):
    """``flags``: :data:`MANDATORY` and :data:`IMMEDIATE`, passed on as they came."""

    exchange: ShortString
    routing_key: ShortString
    flags: Octet = 0


MANDATORY: Final = 1
IMMEDIATE: Final = 2


@method("basic.return", 60, 50, _SERVER, _CONTENT)
class BasicReturn(Method):
    reply_code: Short
    reply_text: ShortString
    exchange: ShortString
    routing_key: ShortString


@method("basic.deliver", 60, 60, _SERVER, _CONTENT)
class BasicDeliver(Method):
    consumer_tag: ShortString
    delivery_tag: LongLong
    redelivered: Bit
    exchange: ShortString
    routing_key: ShortString


@method("basic.get-empty", 60, 72, _SERVER, _WATCHED)
class BasicGetEmpty(Method):
    cluster_id: ShortString = b""


@method("basic.get-ok", 60, 71, _SERVER, _CONTENT | _WATCHED)
class BasicGetOk(Method):
    delivery_tag: LongLong
    redelivered: Bit
    exchange: ShortString
    routing_key: ShortString
    message_count: Long


@method("basic.get", 60, 70, _CLIENT, _WATCHED | _TICKET, answer=BasicGetOk)
class BasicGet(Method):
    queue: ShortString
    no_ack: Bit = False


@method("basic.ack", 60, 80, _BOTH)
class BasicAck(Method):
    delivery_tag: LongLong
    multiple: Bit = False


@method("basic.reject", 60, 90, _CLIENT)
class BasicReject(Method):
    multiple: ClassVar[bool] = False
    delivery_tag: LongLong
    requeue: Bit = True


@method("basic.recover-async", 60, 100, _CLIENT)
class BasicRecoverAsync(Method):
    requeue: Bit


@method("basic.recover-ok", 60, 111, _SERVER, _WATCHED)
class BasicRecoverOk(Method): ...


@method("basic.recover", 60, 110, _CLIENT, answer=BasicRecoverOk)
class BasicRecover(Method):
    requeue: Bit


@method("basic.nack", 60, 120, _BOTH)
class BasicNack(Method):
    delivery_tag: LongLong
    multiple: Bit = False
    requeue: Bit = True


Settle = BasicAck | BasicNack | BasicReject
SETTLE_FRAME: Final = len(BasicAck(0).frame(0))
"""Bytes of a frame of basic.ack, nack or reject."""


# -- confirm and tx


@method("confirm.select-ok", 85, 11, _SERVER)
class ConfirmSelectOk(Method): ...


@method(
    "confirm.select",
    85,
    10,
    _CLIENT,
    _WATCHED,
    modes=frozenset((ChannelMode.PLAIN, ChannelMode.CONFIRM)),
    answer=ConfirmSelectOk,
)
class ConfirmSelect(Method):
    no_wait: Bit = False


@method("tx.select-ok", 90, 11, _SERVER)
class TxSelectOk(Method): ...


@method("tx.select", 90, 10, _CLIENT, _WATCHED, modes=frozenset((ChannelMode.PLAIN, ChannelMode.TX)), answer=TxSelectOk)
class TxSelect(Method): ...


@method("tx.commit-ok", 90, 21, _SERVER, _WATCHED)
class TxCommitOk(Method): ...


@method("tx.commit", 90, 20, _CLIENT, modes=_IN_TX, answer=TxCommitOk)
class TxCommit(Method): ...


@method("tx.rollback-ok", 90, 31, _SERVER, _WATCHED)
class TxRollbackOk(Method): ...


@method("tx.rollback", 90, 30, _CLIENT, modes=_IN_TX, answer=TxRollbackOk)
class TxRollback(Method): ...


# -- dtx-demarcation


@method("dtx-demarcation.select-ok", 101, 11, _SERVER, _DTX)
class DtxSelectOk(Method): ...


@method(
    "dtx-demarcation.select",
    101,
    10,
    _CLIENT,
    _DTX,
    modes=frozenset((ChannelMode.PLAIN, ChannelMode.DTX)),
    answer=DtxSelectOk,
)
class DtxSelect(Method):
    """Use distributed transactions on this channel."""


@method("dtx-demarcation.start-ok", 101, 21, _SERVER, _DTX)
class DtxStartOk(Method):
    """The branch is started, or is rollback-only."""

    flags: Short


@method("dtx-demarcation.start", 101, 20, _CLIENT, _DTX | _TICKET, modes=_IN_DTX, answer=DtxStartOk)
class DtxStart(Method):
    """The work on the channel from here on belongs to ``xid``."""

    xid: XidField
    join: Bit = False
    resume: Bit = False


@method("dtx-demarcation.end-ok", 101, 31, _SERVER, _DTX)
class DtxEndOk(Method):
    """The channel is no longer associated with the branch."""

    flags: Short


@method("dtx-demarcation.end", 101, 30, _CLIENT, _DTX | _TICKET, modes=_IN_DTX, answer=DtxEndOk)
class DtxEnd(Method):
    """The work on behalf of ``xid`` is finished, has failed or is suspended."""

    xid: XidField
    fail: Bit = False
    suspend: Bit = False


# -- dtx-coordination


@method("dtx-coordination.commit-ok", 105, 11, _SERVER, _DTX)
class DtxCommitOk(Method):
    """The branch is committed, or ended as ``flags`` states."""

    flags: Short


@method("dtx-coordination.commit", 105, 10, _CLIENT, _DTX | _TICKET, answer=DtxCommitOk)
class DtxCommit(Method):
    """Make produced messages available and discard consumed ones."""

    xid: XidField
    one_phase: Bit = False


@method("dtx-coordination.forget-ok", 105, 21, _SERVER, _DTX)
class DtxForgetOk(Method): ...


@method("dtx-coordination.forget", 105, 20, _CLIENT, _DTX | _TICKET, answer=DtxForgetOk)
class DtxForget(Method):
    """Discard the knowledge of a heuristically completed branch."""

    xid: XidField


@method("dtx-coordination.get-timeout-ok", 105, 31, _SERVER, _DTX)
class DtxGetTimeoutOk(Method):
    """The timeout in seconds."""

    timeout: Long


@method("dtx-coordination.get-timeout", 105, 30, _CLIENT, _DTX, answer=DtxGetTimeoutOk)
class DtxGetTimeout(Method):
    """Ask for the timeout of a branch. No other client method on a branch lacks a ticket."""

    xid: XidField


@method("dtx-coordination.prepare-ok", 105, 41, _SERVER, _DTX)
class DtxPrepareOk(Method):
    """The vote."""

    flags: Short


@method("dtx-coordination.prepare", 105, 40, _CLIENT, _DTX | _TICKET, answer=DtxPrepareOk)
class DtxPrepare(Method):
    """Prepare for commitment all messages that were produced or consumed on behalf of ``xid``."""

    xid: XidField


@method("dtx-coordination.recover-ok", 105, 51, _SERVER, _DTX)
class DtxRecoverOk(Method):
    """A batch of a recovery scan; an empty batch ends it. ``xids`` is a table with one entry, also named ``xids``."""

    xids: Table


@method("dtx-coordination.recover", 105, 50, _CLIENT, _DTX | _TICKET, answer=DtxRecoverOk)
class DtxRecover(Method):
    """Ask for branches that are prepared or heuristically completed.

    The XML defines ``endscan`` as a long, so only a long is accepted. Any value but 0 is true.
    """

    startscan: Bit
    endscan: Long


@method("dtx-coordination.rollback-ok", 105, 61, _SERVER, _DTX)
class DtxRollbackOk(Method):
    """The branch is rolled back, or ended as ``flags`` states."""

    flags: Short


@method("dtx-coordination.rollback", 105, 60, _CLIENT, _DTX | _TICKET, answer=DtxRollbackOk)
class DtxRollback(Method):
    """Discard produced messages and requeue consumed ones."""

    xid: XidField


@method("dtx-coordination.set-timeout-ok", 105, 71, _SERVER, _DTX)
class DtxSetTimeoutOk(Method): ...


@method("dtx-coordination.set-timeout", 105, 70, _CLIENT, _DTX | _TICKET, answer=DtxSetTimeoutOk)
class DtxSetTimeout(Method):
    """Set the timeout of a branch in seconds; 0 restores the default."""

    xid: XidField
    timeout: Long


# -- other classes of the preview


@method("binding.query-ok", 130, 11, _SERVER, _LOCAL)
class BindingQueryOk(Method):
    exchange_not_found: Bit
    queue_not_found: Bit
    queue_not_matched: Bit
    key_not_matched: Bit
    args_not_matched: Bit


@method("binding.query", 130, 10, _CLIENT, _LOCAL | _TICKET, answer=BindingQueryOk)
class BindingQuery(Method):
    """An empty field matches any value."""

    exchange: ShortString
    queue: ShortString
    routing_key: ShortString
    arguments: Table


@method("execution.complete", 140, 20, _BOTH, _LOCAL | _UNCOUNTED)
class ExecutionComplete(Method):
    """``mark`` counts the commands that have been executed, modulo 2**32."""

    mark: Long

    @classmethod
    def of(cls, commands: int) -> "ExecutionComplete":
        """Make the method from the number of executed *commands*."""
        return cls(commands & 0xFFFFFFFF)


@method("execution.flush", 140, 10, _BOTH, _LOCAL | _UNCOUNTED, answer=ExecutionComplete)
class ExecutionFlush(Method): ...


METHODS: Final[dict[int, type[Method]]] = {
    row.KEY: row
    for row in globals().copy().values()
    if isinstance(row, type) and issubclass(row, Method) and row not in (Method, ExchangeQuery, ExchangeQueryOk)
}
"""The rows by class << 16 | method. 40.30 is exchange.bind here, and 40.31 is its answer: see :func:`is_query`."""

CONTENT: Final = frozenset(key for key, row in METHODS.items() if row.FACTS & Fact.CONTENT)
"""The keys of the methods with a content."""


def watched(sender: Sender) -> frozenset[int]:
    """Return the keys of the methods of *sender* that a proxy reads."""
    return frozenset(key for key, row in METHODS.items() if row.FACTS & Fact.WATCHED and row.SENT_BY & sender)


def unwatched(sender: Sender) -> frozenset[int]:
    """Return the keys of the methods of *sender* that brokers know and no proxy reads."""
    write_separately = Fact.WATCHED | Fact.LOCAL
    return frozenset(key for key, row in METHODS.items() if not row.FACTS & write_separately and row.SENT_BY & sender)


DTX_CLASSES: Final = frozenset((DtxSelect.KEY >> 16, DtxCommit.KEY >> 16))
CoordinationCall = DtxCommit | DtxForget | DtxGetTimeout | DtxPrepare | DtxRecover | DtxRollback | DtxSetTimeout
"""A method of dtx-coordination."""
DtxCall = DtxSelect | DtxStart | DtxEnd | CoordinationCall
_CALLS: Final[dict[int, type[DtxCall]]] = {row.KEY: row for row in get_args(DtxCall)}


def decode_call(payload: bytes) -> DtxCall:
    """Read a method of the dtx classes that a client sent.

    Args:
        payload: the payload of the method frame. It starts with class and method: at least four bytes.

    Raises:
        XaError: 502 if the arguments or the xid are malformed. 503 for a method that only a server sends. 540 for a
            method that the XML does not have.
    """
    key = int.from_bytes(payload[:4], "big")
    row = _CALLS.get(key)
    if row is not None:
        return row.decode(payload)
    if key >> 16 in DTX_CLASSES and key in METHODS:
        raise XaError(ReplyCode.COMMAND_INVALID, f"{METHODS[key].NAME} is sent by servers only")
    raise XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")


def ticket(payload: bytes) -> int:
    """Return the access ticket, which 0-9-1 calls reserved: the first argument of a method that has a ticket.

    Raises:
        WireError: 502 if it is truncated.
    """
    if len(payload) < 6:
        raise syntax_error("access ticket is truncated")
    return int.from_bytes(payload[4:6], "big")


def is_query(payload: bytes) -> bool:
    """Return whether a method 40.30 is the preview's exchange.query: its only argument after the ticket is one name."""
    return len(payload) > 6 and len(payload) == 7 + payload[6]

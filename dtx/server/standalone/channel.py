"""A client's channel: its life, its modes, and the order of what its client asks for.

Frames are handled as they come. A method that waits for something (the log, a message's body, what was published
before it) occupies the channel; frames behind it wait, so that answers and effects keep their order.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from dtx.log.api import LogError
from dtx.log.records import Work
from dtx.manager.entry import Entry
from dtx.manager.scan import Scan
from dtx.server.backlog import MAX_BACKLOG, Backlog
from dtx.server.standalone.confirms import Confirms
from dtx.server.standalone.consuming import Consuming
from dtx.server.standalone.contexts import Context, Immediate, Local
from dtx.server.standalone.declaring import Declaring
from dtx.server.standalone.publishing import Publishing
from dtx.server.standalone.transactions import Transactions
from dtx.store.slices import SLICE_SECONDS
from dtx.store.work import HeldPublish
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import closes, content, methods
from dtx.wire.amqp09.codec import ChannelMode, Method
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import BODY, HEADER
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association

if TYPE_CHECKING:
    from dtx.server.standalone.connection import Connection

_log = get_logger(part="channel")

_NO_ROUTE: Final = 312
_NOT_COMMANDS: Final = frozenset((methods.ChannelOpen.KEY >> 16, methods.ExecutionFlush.KEY >> 16))
"""Classes whose methods execution.complete does not count: they are about the channel itself."""


class Phase(Enum):
    """Where a channel is in its life."""

    OPEN = "open"
    CLOSING = "closing"
    """The client has closed it; it hears close-ok when all that it sent before is durable."""
    REFUSED = "refused"
    """dtx closed it; the client has not confirmed, and all it sends before that is discarded."""
    GONE = "gone"


class Channel:
    """One channel of a client.

    Args:
        connection: whose it is.
        number: of the channel.
    """

    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection = connection
        self.number = number
        self.phase = Phase.OPEN
        self.mode = ChannelMode.PLAIN
        self.is_busy = False
        self.confirms: Confirms | None = None
        self.publishing = Publishing(self)
        self.consuming = Consuming(self)
        self.declaring = Declaring(self)
        self.context: Context = Immediate(self)
        self.transactions = Transactions(self)
        self._commands = 0
        """Commands so far, for execution.complete."""
        self._backlog = Backlog()
        self._going_on = False

    # -- frames

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame from the client."""
        if self.phase is not Phase.OPEN:
            self._late(key)
        elif self.is_busy:
            self._wait(key, buffer, start, end)
        else:
            payload = buffer[start + 7 : end - 1]
            try:
                if key == BODY:
                    self.publishing.body(payload)
                elif key == HEADER:
                    self.publishing.header(payload)
                elif key == methods.BasicPublish.KEY:
                    self.publishing.method(payload)
                    self._commands += 1
                else:
                    self._method(key, payload)
            except XaError as error:
                self.refuse(error, key if key > BODY else methods.BasicPublish.KEY)
            except WireError as error:
                self.connection.refuse(error, key if key > BODY else methods.BasicPublish.KEY)

    def _late(self, key: int) -> None:
        """A frame on a channel that is not open any more."""
        if self.phase is Phase.REFUSED:
            if key == methods.ChannelCloseOk.KEY:
                self.phase = Phase.GONE
                self.connection.forget(self)
            elif key == methods.ChannelClose.KEY:
                # Both sides closed at once: each confirms the other's close (AMQP 0-9-1, 1.5.2.5).
                self.send(methods.ChannelCloseOk().frame(self.number))

    def _wait(self, key: int, buffer: bytes, start: int, end: int) -> None:
        self._backlog.add(key, buffer[start:end])
        if self._backlog.size > MAX_BACKLOG:
            self.connection.hold(self)

    def _method(self, key: int, payload: bytes) -> None:
        if self.publishing.under_way:
            raise WireError(HardCode.UNEXPECTED_FRAME, f"method frame in the midst of content on channel {self.number}")
        if key >> 16 not in _NOT_COMMANDS:
            self._commands += 1
        if key >> 16 in methods.DTX_CLASSES:
            self.transactions.call(key, payload)
            return
        handler = _METHODS.get(key)
        if handler is None:
            raise WireError(
                HardCode.COMMAND_INVALID, f"class {key >> 16} method {key & 0xFFFF} has no place on a channel"
            )
        handler(self, payload)

    def distribute(self, context: Context) -> None:
        """dtx-demarcation.select: *context* is the channel's from now on.

        Raises:
            XaError: 406, the channel is selected for something else.
        """
        if self.mode is not ChannelMode.PLAIN:
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"select on a channel in {self.mode.value} mode")
        self.mode = ChannelMode.DTX
        self.context = context
        self.connection.metrics.selected_channels.inc()

    # -- what operators see

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of connection and channel."""
        return self.connection.id, self.number

    @property
    def ties(self) -> Iterable[tuple[Entry, Association]]:
        """Branches that it is associated or suspended with."""
        return self.transactions.ties

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open on it."""
        return self.transactions.scan

    # -- the order of things

    def occupy(self) -> None:
        """What the client sends from now on waits until :meth:`finish`."""
        self.is_busy = True

    def finish(self, answer: bytes | XaError = b"", key: int = 0) -> None:
        """What occupied the channel is through: answer it, and go on with what waited behind it.

        Args:
            answer: the frame, or the reason of the channel's end.
            key: the method that is answered.
        """
        self.is_busy = False
        if isinstance(answer, XaError):
            self.refuse(answer, key)
        elif answer and self.phase is Phase.OPEN:
            self.send(answer)
        if not self._going_on:
            self._go_on()

    def _go_on(self) -> None:
        """Handle the frames that waited, until one occupies the channel again."""
        backlog = self._backlog
        until = time.monotonic() + SLICE_SECONDS
        self._going_on = True
        try:
            while backlog and not self.is_busy and not self.connection.is_over:
                if time.monotonic() >= until:
                    self.occupy()
                    asyncio.get_running_loop().call_soon(self.finish)
                    break
                key, frame = backlog.next()
                self.frame(key, frame, 0, len(frame))
        except Exception as error:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("connection failed", connection=self.connection.id)
            self.connection.refuse(error)
        finally:
            self._going_on = False
        if backlog.size <= MAX_BACKLOG // 2:
            self.connection.release(self)
        self.connection.flush()

    def after_writes(self, act: Callable[[], None], key: int) -> None:
        """Do *act* when all that was sent before is durable.

        Args:
            act: may occupy the channel, or refuse by an XaError.
            key: the method in whose name it acts.
        """
        writes = self.connection.writes
        if writes.idle:
            act()
            return
        self.occupy()

        def go_on() -> None:
            self.is_busy = False
            error: XaError | None = None
            if self.phase is Phase.OPEN and not self.connection.is_over:
                try:
                    act()
                except XaError as refusal:
                    error = refusal
                except Exception as fault:  # noqa: BLE001 - as where a method is handled at once
                    self.connection.refuse(fault, key)
            if not self.is_busy:
                self.finish(error or b"", key)

        writes.then(go_on)

    def may_go_on(self) -> bool:
        """Whether the channel is open still."""
        return self.phase is Phase.OPEN

    @property
    def waits(self) -> bool:
        """Whether frames of the client wait behind a method."""
        return bool(self._backlog)

    def run(self, work: Coroutine[Any, Any, bytes], key: int) -> None:
        """Run *work*, which returns the answering frame; it goes on when the channel is gone."""
        self.occupy()
        self.connection.manager.spawn(self._finish_after(work, key))

    async def _finish_after(self, work: Coroutine[Any, Any, bytes], key: int) -> None:
        try:
            answer: bytes | XaError = await work
        except XaError as error:
            answer = error
        except LogError as error:
            _log.error("not durable", channel=self.number, connection=self.connection.id, reason=str(error))
            answer = XaError(ReplyCode.INTERNAL_ERROR, "the database failed, the outcome is not known")
        except Exception:  # noqa: BLE001 - logged; the client is told no more than that
            _log.exception("method failed", channel=self.number, connection=self.connection.id)
            answer = XaError(ReplyCode.INTERNAL_ERROR, "internal error")
        self.finish(answer, key)

    # -- answers

    def send(self, frame: bytes) -> None:
        """Send whole frames to the client; none are."""
        if frame:
            self.connection.outbox.send(frame)

    def answer(self, method: Method) -> None:
        """Send a method to the client."""
        self.connection.outbox.send(method.frame(self.number))

    def queue_name(self, name: bytes) -> bytes:
        """See :meth:`Declaring.queue_name`."""
        return self.declaring.queue_name(name)

    def unrouted(self, message: HeldPublish) -> None:
        """No queue takes the message: it may be a direct reply; a mandatory one comes back even so, as RabbitMQ's."""
        self.connection.direct.deliver(self.connection.who.vhost, message)
        if message.mandatory:
            self._return(
                message.exchange, message.routing_key, message.properties, message.body, _NO_ROUTE, b"NO_ROUTE"
            )

    def returned(self, work: Work, code: int, text: bytes) -> None:
        """A mandatory message could not be routed when its branch was committed."""
        self._return(work.exchange, work.routing_key, work.properties, work.body, code, text)

    def _return(
        self, exchange: bytes, routing_key: bytes, properties: bytes, body: bytes, code: int, text: bytes
    ) -> None:
        if self.phase is Phase.OPEN:
            method = methods.BasicReturn(code, text, exchange, routing_key).frame(self.number)
            self.send(content.message(method, self.number, properties, body, self.connection.frame_max))

    # -- what becomes of publishes

    def written(self, number: int, error: LogError | None) -> None:
        """The publish *number* is durable, or may not be; 0 where nobody confirms."""
        if self.confirms is not None and number:
            self.confirms.settle(number, safe=error is None)
        elif error is not None:
            self.refuse(
                XaError(ReplyCode.INTERNAL_ERROR, "the database failed, messages may be lost"), methods.BasicPublish.KEY
            )

    def refused(self, number: int) -> None:
        """A full queue does not take the publish *number*: only confirms can tell."""
        if self.confirms is not None and number:
            self.confirms.settle(number, safe=False)

    def say_confirms(self) -> None:
        """Send the confirms that are due."""
        if self.confirms is not None and self.phase is Phase.OPEN:
            self.send(self.confirms.take())

    # -- modes

    def _may_become(self, wanted: ChannelMode) -> None:
        """Refuse (406) to change from one mode to another."""
        if self.mode is ChannelMode.DTX:
            raise XaError(
                ReplyCode.PRECONDITION_FAILED,
                "this channel is selected for distributed transactions; open another one for tx or confirm",
            )
        if self.mode not in (ChannelMode.PLAIN, wanted):
            raise XaError(ReplyCode.PRECONDITION_FAILED, f"cannot switch from {self.mode.value} to {wanted.value} mode")

    def confirm_select(self, payload: bytes) -> None:
        """confirm.select."""
        no_wait = methods.ConfirmSelect.decode(payload).no_wait
        self._may_become(ChannelMode.CONFIRM)
        if self.confirms is None:
            self.mode = ChannelMode.CONFIRM
            self.confirms = Confirms(self.number)
        if not no_wait:
            self.answer(methods.ConfirmSelectOk())

    def tx_select(self, payload: bytes) -> None:
        """tx.select."""
        methods.TxSelect.decode(payload)
        self._may_become(ChannelMode.TX)
        if self.mode is ChannelMode.PLAIN:
            self.mode = ChannelMode.TX
            self.context = Local(self)
        self.answer(methods.TxSelectOk())

    def tx_commit(self, payload: bytes) -> None:
        """tx.commit."""
        methods.TxCommit.decode(payload)
        context = self._local()
        self.occupy()

        def done(error: XaError | None) -> None:
            self.finish(error or methods.TxCommitOk().frame(self.number), methods.TxCommit.KEY)

        context.commit(done)

    def tx_rollback(self, payload: bytes) -> None:
        """tx.rollback."""
        methods.TxRollback.decode(payload)
        self._local().rollback()
        self.answer(methods.TxRollbackOk())

    def _local(self) -> Local:
        if not isinstance(self.context, Local):
            self._may_become(ChannelMode.TX)
            raise XaError(ReplyCode.PRECONDITION_FAILED, "channel is not transactional")
        return self.context

    def execution_flush(self, payload: bytes) -> None:
        """execution.flush of the preview: execution.complete when all commands so far have been executed."""
        methods.ExecutionFlush.decode(payload)
        frame = methods.ExecutionComplete.of(self._commands).frame(self.number)
        self.after_writes(lambda: self.send(frame), methods.ExecutionFlush.KEY)

    def execution_complete(self, payload: bytes) -> None:
        """execution.complete of the preview, which a server MUST implement: dtx waits for no command of its own."""
        methods.ExecutionComplete.decode(payload)

    # -- the end

    def open(self, payload: bytes) -> None:  # noqa: ARG002 - there is nothing in it
        """channel.open, again."""
        raise WireError(HardCode.CHANNEL_ERROR, "second 'channel.open' seen")

    def close(self, payload: bytes) -> None:  # noqa: ARG002 - why it closes is the client's business
        """channel.close: confirmed when all that was sent before is durable."""
        self.connection.flush()
        self.let_go()
        self.phase = Phase.CLOSING
        self.connection.slices.then(lambda: self.connection.writes.then(self._closed))

    def _closed(self) -> None:
        if self.phase is Phase.CLOSING:
            self.phase = Phase.GONE
            self.connection.forget(self)
            self.send(methods.ChannelCloseOk().frame(self.number))

    def close_ok(self, payload: bytes) -> None:
        """channel.close-ok where nothing was closed: no harm."""

    def refuse(self, error: XaError, key: int = 0) -> None:
        """Close the channel with an exception; the connection lives on."""
        if self.phase is Phase.OPEN:
            _log.info("channel refused", connection=self.connection.id, channel=self.number, reason=str(error))
            self.let_go()
            self.phase = Phase.REFUSED
            self.send(closes.close_frame(error, self.number, key))

    def let_go(self) -> None:
        """The channel ends: nothing is delivered to it any more, and what is not settled goes back. Idempotent."""
        if self.phase is Phase.OPEN:
            self.phase = Phase.GONE
            self.publishing.let_go()
            self.consuming.let_go()
            self.context.let_go()
            self.transactions.let_go()
            if self.mode is ChannelMode.DTX:
                self.connection.metrics.selected_channels.dec()
        self.connection.release(self)


_METHODS: Final[dict[int, Callable[[Channel, bytes], None]]] = {
    methods.ChannelOpen.KEY: Channel.open,
    methods.ChannelFlow.KEY: lambda channel, payload: channel.consuming.flow(
        methods.ChannelFlow.decode(payload).active
    ),
    methods.ChannelClose.KEY: Channel.close,
    methods.ChannelCloseOk.KEY: Channel.close_ok,
    methods.AccessRequest.KEY: lambda channel, payload: channel.declaring.access_request(payload),
    methods.ExchangeDeclare.KEY: lambda channel, payload: channel.declaring.exchange_declare(payload),
    methods.ExchangeDelete.KEY: lambda channel, payload: channel.declaring.exchange_delete(payload),
    methods.ExchangeBind.KEY: lambda channel, payload: channel.declaring.exchange_bind_or_query(payload),
    methods.ExchangeUnbind.KEY: lambda channel, payload: channel.declaring.exchange_unbind(payload),
    methods.QueueDeclare.KEY: lambda channel, payload: channel.declaring.queue_declare(payload),
    methods.QueueBind.KEY: lambda channel, payload: channel.declaring.queue_bind(payload),
    methods.QueueUnbind.KEY: lambda channel, payload: channel.declaring.queue_unbind(payload),
    methods.QueuePurge.KEY: lambda channel, payload: channel.declaring.queue_purge(payload),
    methods.QueueDelete.KEY: lambda channel, payload: channel.declaring.queue_delete(payload),
    methods.BasicQos.KEY: lambda channel, payload: channel.consuming.qos(payload),
    methods.BasicConsume.KEY: lambda channel, payload: channel.consuming.consume(payload),
    methods.BasicCancel.KEY: lambda channel, payload: channel.consuming.cancel(payload),
    methods.BasicGet.KEY: lambda channel, payload: channel.consuming.get(payload),
    methods.BasicAck.KEY: lambda channel, payload: channel.consuming.ack(payload),
    methods.BasicNack.KEY: lambda channel, payload: channel.consuming.nack(payload),
    methods.BasicReject.KEY: lambda channel, payload: channel.consuming.reject(payload),
    methods.BasicRecover.KEY: lambda channel, payload: channel.consuming.recover(payload, answered=True),
    methods.BasicRecoverAsync.KEY: lambda channel, payload: channel.consuming.recover(payload, answered=False),
    methods.ConfirmSelect.KEY: Channel.confirm_select,
    methods.TxSelect.KEY: Channel.tx_select,
    methods.TxCommit.KEY: Channel.tx_commit,
    methods.TxRollback.KEY: Channel.tx_rollback,
    methods.BindingQuery.KEY: lambda channel, payload: channel.declaring.binding_query(payload),
    methods.ExecutionFlush.KEY: Channel.execution_flush,
    methods.ExecutionComplete.KEY: Channel.execution_complete,
}

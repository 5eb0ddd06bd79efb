"""A client's channel: its modes, and the dispatch of methods to its parts."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, cast, get_args

from dtx.manager.branch_runtime import BranchRuntime
from dtx.manager.scan import Scan
from dtx.server.coordination import CoordinationHandler
from dtx.server.failpoints import around_reply
from dtx.server.standalone.answer_order import ChannelOrder
from dtx.server.standalone.channel_consumers import ChannelConsumers
from dtx.server.standalone.client import Client
from dtx.server.standalone.contexts import Context, ImmediateContext, LocalContext, PublisherChannel
from dtx.server.standalone.declarations import Declarations
from dtx.server.standalone.distributed_context import DistributedContext
from dtx.server.standalone.message_routing import MessageRouting
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.channel import ChannelEngine
from dtx.wire.amqp09.codec import ChannelMode, Fact, Method
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.events import ContentReceived, MethodReceived
from dtx.xa.codes import XaError
from dtx.xa.model import Association


class StandaloneChannel:
    """One channel of a client.

    Args:
        client: the owner of the channel.
        engine: the protocol engine of the channel.
    """

    def __init__(self, client: Client, engine: ChannelEngine) -> None:
        self.number = engine.number
        self.engine = engine
        self.order = ChannelOrder(client, engine, self.shut_down)
        self.consuming = ChannelConsumers(client, self.order)
        self._client = client
        self._publisher = PublisherChannel(client, self.order)
        self._publishing = MessageRouting(client, self.consuming, self._publisher)
        self._declaring = Declarations(client, self.order)
        self._context: Context = ImmediateContext(client, self.order, self._publisher)
        self._coordination = CoordinationHandler(client.manager, client.parts.metrics, self.number, client.connection)
        self._wants_tickets = client.parts.limits.require_tickets
        self._is_shut_down = False

    # -- for operators

    @property
    def mode(self) -> ChannelMode:
        """The mode that the client selected."""
        return self.engine.mode

    @property
    def place(self) -> tuple[int, int]:
        """Numbers of the connection and the channel."""
        return self.order.place

    @property
    def associations(self) -> Iterable[tuple[BranchRuntime, Association]]:
        """The branches with which the channel has an association, active or suspended."""
        return self._context.associations if isinstance(self._context, DistributedContext) else ()

    @property
    def scan(self) -> Scan | None:
        """The open recovery scan of the channel."""
        return self._coordination.scan

    @property
    def consumers(self) -> int:
        """The number of its consumers."""
        return len(self.consuming.consumers)

    @property
    def unacked(self) -> int:
        """The number of deliveries that the client has not settled."""
        return len(self.consuming.unsettled)

    @property
    def prefetch(self) -> tuple[int, int]:
        """The limits of basic.qos for each later consumer, and for the channel; 0 for none."""
        return self.consuming.prefetch

    # -- methods of the client

    def receive(self, event: MethodReceived | ContentReceived) -> None:
        """Handle a method and its content, if it has one.

        Raises:
            XaError: the channel must be closed.
            WireError: the connection must be closed.
        """
        if isinstance(event, ContentReceived):
            publish: Any = event.method
            self._publishing.publish(publish, event.properties, event.body, event.number, self._context)
            return
        method = event.method
        kind = type(method)
        handle = _HANDLERS.get(kind)
        if handle is None:
            key = method.KEY
            raise WireError(
                HardCode.COMMAND_INVALID, f"class {key >> 16} method {key & 0xFFFF} is illegal on a channel"
            )
        if (event.ticket or self._wants_tickets) and kind in _TICKETED:
            self._declaring.check_ticket(method.NAME, event.ticket)
        handle(self, event)

    def _settle(self, event: MethodReceived) -> None:
        method: Any = event.method
        self.consuming.settle(method, self._context)

    def _flush(self, event: MethodReceived) -> None:
        """execution.flush of the preview: send execution.complete when all earlier commands have been executed."""
        frame = methods.ExecutionComplete(event.mark & 0xFFFFFFFF).frame(self.number)
        self.order.after_writes(lambda: self.order.send(frame), methods.ExecutionFlush.KEY)

    def _nothing(self, event: MethodReceived) -> None:
        """execution.complete of the preview. A server MUST implement it, but dtx sends no command to wait for."""

    # -- modes: the engine has checked that the mode may change

    def _confirm_select(self, event: MethodReceived) -> None:
        self.engine.become(ChannelMode.CONFIRM)
        if not cast("methods.ConfirmSelect", event.method).no_wait:
            self.order.send(methods.ConfirmSelectOk().frame(self.number))

    def _tx_select(self, event: MethodReceived) -> None:  # noqa: ARG002 - no arguments
        if not isinstance(self._context, LocalContext):
            self.engine.become(ChannelMode.TX)
            self._context = LocalContext(self._client, self.order, self._publisher, self.consuming.unsettled.restore)
        self.order.send(methods.TxSelectOk().frame(self.number))

    def _tx_commit(self, event: MethodReceived) -> None:
        self.order.occupy()

        def done(error: XaError | None) -> None:
            self.order.finish(error or methods.TxCommitOk().frame(self.number), event.method.KEY)

        cast("LocalContext", self._context).commit(done)

    def _tx_rollback(self, event: MethodReceived) -> None:  # noqa: ARG002 - no arguments
        cast("LocalContext", self._context).rollback()
        self.order.send(methods.TxRollbackOk().frame(self.number))

    def _dtx_select(self, event: MethodReceived) -> None:  # noqa: ARG002 - no arguments
        if not isinstance(self._context, DistributedContext):
            self.engine.become(ChannelMode.DTX)
            self._context = DistributedContext(self._client, self.order, self._publisher)
            self._client.parts.metrics.selected_channels.inc()
        self.order.send(around_reply(methods.DtxSelectOk().frame(self.number)))

    def _demarcate(self, event: MethodReceived) -> None:
        method: Any = event.method
        assert isinstance(self._context, DistributedContext), "the engine lets a channel say so in that mode alone"
        self._context.demarcate(method, method.KEY)

    def _coordinate(self, event: MethodReceived) -> None:
        method: Any = event.method
        order, client = self.order, self._client
        order.occupy()
        self._coordination.run(method, client.who, client.frame_max, partial(order.finish, key=method.KEY))

    # -- the end

    def shut_down(self) -> None:
        """End the channel: stop its deliveries, and return its unsettled messages. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.consuming.shut_down()
            self._context.shut_down()
            self._coordination.shut_down()
            if self.mode is ChannelMode.DTX:
                self._client.parts.metrics.selected_channels.dec()


_Handler = Callable[[StandaloneChannel, MethodReceived], None]


def _of_queue(act: Callable[[ChannelConsumers, Any, bytes], None]) -> _Handler:
    def handle(channel: StandaloneChannel, event: MethodReceived) -> None:
        method: Any = event.method
        act(channel.consuming, method, channel._declaring.queue_name(method.queue))  # noqa: SLF001 - same module

    return handle


def _consuming(act: Callable[[ChannelConsumers, Any], None]) -> _Handler:
    return lambda channel, event: act(channel.consuming, event.method)


def _declaring(act: Callable[[Declarations, Any], None]) -> _Handler:
    return lambda channel, event: act(channel._declaring, event.method)  # noqa: SLF001 - same module


_HANDLERS: Final[dict[type[Method], _Handler]] = {
    methods.BasicAck: StandaloneChannel._settle,  # noqa: SLF001 - as for all below
    methods.BasicNack: StandaloneChannel._settle,  # noqa: SLF001
    methods.BasicReject: StandaloneChannel._settle,  # noqa: SLF001
    methods.BasicQos: _consuming(ChannelConsumers.qos),
    methods.BasicConsume: _of_queue(ChannelConsumers.consume),
    methods.BasicCancel: _consuming(ChannelConsumers.cancel),
    methods.BasicGet: _of_queue(ChannelConsumers.get),
    methods.BasicRecover: _consuming(ChannelConsumers.recover),
    methods.BasicRecoverAsync: _consuming(ChannelConsumers.recover),
    methods.ChannelFlow: _consuming(lambda consuming, method: consuming.flow(method.active)),
    methods.AccessRequest: _declaring(Declarations.access_request),
    methods.ExchangeDeclare: _declaring(Declarations.exchange_declare),
    methods.ExchangeDelete: _declaring(Declarations.exchange_delete),
    methods.ExchangeQuery: _declaring(Declarations.exchange_query),
    methods.ExchangeBind: _declaring(Declarations.bind),
    methods.ExchangeUnbind: _declaring(Declarations.bind),
    methods.QueueDeclare: _declaring(Declarations.queue_declare),
    methods.QueueBind: _declaring(Declarations.bind),
    methods.QueueUnbind: _declaring(Declarations.bind),
    methods.QueuePurge: _declaring(Declarations.queue_purge),
    methods.QueueDelete: _declaring(Declarations.queue_delete),
    methods.BindingQuery: _declaring(Declarations.binding_query),
    methods.ConfirmSelect: StandaloneChannel._confirm_select,  # noqa: SLF001
    methods.TxSelect: StandaloneChannel._tx_select,  # noqa: SLF001
    methods.TxCommit: StandaloneChannel._tx_commit,  # noqa: SLF001
    methods.TxRollback: StandaloneChannel._tx_rollback,  # noqa: SLF001
    methods.DtxSelect: StandaloneChannel._dtx_select,  # noqa: SLF001
    methods.DtxStart: StandaloneChannel._demarcate,  # noqa: SLF001
    methods.DtxEnd: StandaloneChannel._demarcate,  # noqa: SLF001
    **dict.fromkeys(get_args(methods.CoordinationCall), StandaloneChannel._coordinate),  # noqa: SLF001
    methods.ExecutionFlush: StandaloneChannel._flush,  # noqa: SLF001
    methods.ExecutionComplete: StandaloneChannel._nothing,  # noqa: SLF001
}
_TICKETED: Final = frozenset(row for row in _HANDLERS if Fact.TICKET | Fact.LOCAL in row.FACTS)
"""Methods of the preview whose tickets are checked."""

"""The methods of dtx-demarcation and dtx-coordination on a channel."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, assert_never

from dtx.manager.entry import Entry
from dtx.manager.scan import Scan
from dtx.server.coordination import Coordination
from dtx.server.failpoints import replying
from dtx.server.standalone.distributed import Distributed
from dtx.wire.amqp09 import methods
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association

if TYPE_CHECKING:
    from dtx.server.standalone.channel import Channel

_WITHOUT_TICKET: Final = frozenset((methods.DtxSelect.KEY, methods.DtxGetTimeout.KEY))


class Transactions:
    """What a channel's client asks of the transaction manager.

    Args:
        channel: whose it is.
    """

    __slots__ = ("_channel", "_context", "_coordination")

    def __init__(self, channel: "Channel") -> None:
        connection = channel.connection
        self._channel = channel
        self._coordination = Coordination(connection.manager, connection.metrics, channel.number, connection.id)
        self._context: Distributed | None = None

    @property
    def ties(self) -> Iterable[tuple[Entry, Association]]:
        """Branches that the channel is associated or suspended with."""
        return () if self._context is None else self._context.ties

    @property
    def scan(self) -> Scan | None:
        """The recovery scan that is open."""
        return self._coordination.scan

    def call(self, key: int, payload: bytes) -> None:
        """Run a method of the classes 101 and 105.

        Raises:
            XaError: it is refused.
        """
        channel = self._channel
        if key not in _WITHOUT_TICKET:
            row = methods.METHODS.get(key)
            channel.declaring.check_ticket("method" if row is None else row.NAME, payload)
        call = methods.decode_call(payload)
        match call:
            case methods.DtxStart() | methods.DtxEnd():
                if self._context is None:
                    # "The client must use this method at least once on a channel before …"
                    raise XaError(
                        ReplyCode.COMMAND_INVALID,
                        f"{call.NAME} on a channel without dtx-demarcation.select (xid {call.xid})",
                    )
                self._context.demarcate(call, key)
            case (
                methods.DtxPrepare()
                | methods.DtxCommit()
                | methods.DtxRollback()
                | methods.DtxForget()
                | methods.DtxGetTimeout()
                | methods.DtxSetTimeout()
                | methods.DtxRecover()
            ):
                channel.occupy()
                connection = channel.connection
                self._coordination.run(
                    call, connection.who, connection.frame_max, lambda answer: channel.finish(answer, key)
                )
            case methods.DtxSelect():
                self._select()
            case _:
                assert_never(call)

    def let_go(self) -> None:
        """The channel is closed."""
        self._coordination.let_go()

    def _select(self) -> None:
        channel = self._channel
        if self._context is None:
            self._context = Distributed(channel)
            channel.distribute(self._context)
        channel.send(replying(methods.DtxSelectOk().frame(channel.number)))

"""The methods of dtx-demarcation and dtx-coordination on a channel."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, assert_never

from dtx.manager.entry import Entry
from dtx.manager.scan import Scan
from dtx.server.coordination import Coordination
from dtx.server.failpoints import replying
from dtx.server.standalone.distributed import Distributed
from dtx.wire.amqp09 import answers, calls
from dtx.wire.amqp09.calls import DtxMethod
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import Association

if TYPE_CHECKING:
    from dtx.server.standalone.channel import Channel

_NAMES: Final = {method.value: method.wire_name for method in DtxMethod}
_WITHOUT_TICKET: Final = frozenset((DtxMethod.SELECT.value, DtxMethod.GET_TIMEOUT.value))


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
            channel.declaring.check_ticket(_NAMES.get(key, "method"), payload)
        call = calls.decode_call(payload)
        match call:
            case calls.Start() | calls.End():
                if self._context is None:
                    # "The client must use this method at least once on a channel before …"
                    raise XaError(
                        ReplyCode.COMMAND_INVALID,
                        f"{_NAMES[key]} on a channel without dtx-demarcation.select (xid {call.xid})",
                    )
                self._context.demarcate(call, key)
            case (
                calls.Prepare()
                | calls.Commit()
                | calls.Rollback()
                | calls.Forget()
                | calls.GetTimeout()
                | calls.SetTimeout()
                | calls.Recover()
            ):
                channel.occupy()
                connection = channel.connection
                self._coordination.run(
                    call, connection.who, connection.frame_max, lambda answer: channel.finish(answer, key)
                )
            case calls.Select():
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
        channel.send(replying(answers.empty_ok(channel.number, DtxMethod.SELECT_OK)))

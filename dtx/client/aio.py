"""XA on aio-pika and aiormq. The import of this module registers the dtx classes with their codec, pamqp.

:class:`AioXAResource` and :class:`AioCoordinator` have the methods, results and errors of those in :mod:`dtx.client`.
All methods are awaited. The module needs the extra ``dtx[aio]``::

    connection = await aio_pika.connect("amqp://guest:guest@127.0.0.1:5673/")
    channel = await connection.channel(publisher_confirms=False)
    xa, xid = AioXAResource(channel), Xid(1, os.urandom(16), b"queue")
    await xa.start(xid)
    await channel.default_exchange.publish(aio_pika.Message(b"30 to Bob"), "payments")
    await xa.end(xid)
    await xa.prepare(xid)
    await xa.commit(xid)

aiormq has no public function that returns the method for which the server closed a channel. It also cannot decode
user-defined methods. This module therefore uses private parts of aiormq and pamqp. No other module does.
"""
# ruff: noqa: SLF001 - see above

import asyncio
from contextlib import suppress
from typing import Any, ClassVar, Final

import aio_pika.abc
import aiormq
import pamqp.commands
from aiormq.exceptions import AMQPError
from pamqp.base import Frame
from pamqp.exceptions import PAMQPException

from dtx.client.calls import DTX_CLASSES, Call, T, require_capability
from dtx.client.coordination import AsyncCoordination, AsyncReplacing, AsyncWork
from dtx.client.errors import (
    XAER_INVAL,
    XAER_OUTSIDE,
    XAER_RMFAIL,
    XAException,
    raised_by_reply_code,
)
from dtx.client.pika_methods import METHODS, DtxMethod
from dtx.wire.amqp09.errors import WireError

AnyChannel = aio_pika.abc.AbstractChannel | aiormq.abc.AbstractChannel
AnyConnection = aio_pika.abc.AbstractConnection | aiormq.abc.AbstractConnection

_ATTRIBUTE: Final = "_dtx_underlying"
"""The attribute of an aiormq channel that holds its :class:`Underlying`."""
_LOST: Final = (AMQPError, ConnectionError, PAMQPException, RuntimeError)
"""The exceptions of aiormq and aio-pika for a channel or connection that is closed, or closes during a call."""


class DtxFrame(Frame):
    """A method of the dtx classes in the form of pamqp. It contains the method in the form of :mod:`dtx.wire`."""

    method_class: ClassVar[type[DtxMethod]]

    def __init__(self, method: DtxMethod | None = None) -> None:
        self.method = self.method_class() if method is None else method

    def marshal(self) -> bytes:
        """Return the encoded arguments."""
        return b"".join(self.method.encode())

    def unmarshal(self, data: bytes) -> None:
        """Read the arguments.

        Raises:
            ValueError: the arguments are malformed. pamqp names the method.
        """
        try:
            self.method.decode(data)
        except WireError as error:
            raise ValueError(str(error)) from error


def _frame_class(method: type[DtxMethod]) -> type[DtxFrame]:
    waits = bool(method.synchronous)
    kind: type[DtxFrame] = type(
        method.__name__,
        (DtxFrame,),
        {
            "method_class": method,
            "index": method.INDEX,
            "frame_id": method.INDEX & 0xFFFF,
            "name": method.NAME,
            "synchronous": waits,
            "valid_responses": [f"{method.NAME}Ok"] if waits else [],
        },
    )
    return kind


_FRAMES: Final[dict[type[DtxMethod], type[DtxFrame]]] = {method: _frame_class(method) for method in METHODS.values()}


def register() -> None:
    """Register the dtx methods with pamqp. The import of this module does it. A second call changes nothing."""
    pamqp.commands.INDEX_MAPPING.update({frame.index: frame for frame in _FRAMES.values()})


register()


class Underlying:
    """One channel of aiormq, with the channel.close that the server sent for it.

    Args:
        channel: a channel of aiormq.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.selected = False
        """Whether dtx-demarcation.select was answered on this channel."""
        self.close: Any = None
        """The server's channel.close; ``None`` until it arrives."""
        on_close = channel._on_close_frame

        async def closed(frame: Any) -> None:
            self.close = frame
            await on_close(frame)

        # aiormq's exceptions contain the text of a close, but not the method that it names
        channel._on_close_frame = closed

    @property
    def is_open(self) -> bool:
        """Whether the channel accepts calls."""
        return not self.channel.is_closed

    async def call(self, call: Call[T], timeout: float | None) -> T:
        """Send *call* and return its result.

        If the task is cancelled, the call continues and the channel stays usable. aiormq alone would close the channel.

        Args:
            call: one of the calls of :mod:`dtx.client.calls`.
            timeout: seconds to wait for the answer; ``None`` sets no limit.

        Raises:
            XAException: the answer to *call* is an error, or there is no answer.
        """
        frame = _FRAMES[type(call.request)](call.request)
        try:
            answer: Any = await asyncio.shield(self.channel.rpc(frame, timeout=timeout))
            if not isinstance(answer, DtxFrame) or not isinstance(answer.method, call.reply):
                raise XAER_RMFAIL(f"the answer is {answer!r}")
            return call.read(answer.method)
        except XAException as error:
            error.call = str(call)
            raise
        except TimeoutError as error:
            raise _named(call, XAER_RMFAIL(f"no answer within {timeout:g} s, the outcome is not known")) from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise _named(call, self._refusal(call, "the channel is closed")) from None
        except _LOST as error:
            raise _named(call, self._refusal(call, str(error) or type(error).__name__)) from error

    def _refusal(self, call: Call[Any], words: str) -> XAException:
        """Return the error for *call* after the channel is closed."""
        close = self.close
        if close is None:
            return XAER_RMFAIL(words)
        # A close that names no dtx method (for example a late acknowledgement) is not an answer to the call.
        if close.class_id in DTX_CLASSES and not self._close_reported:
            self._close_reported = True
            return raised_by_reply_code(call.operation, close.reply_code)(close.reply_text, close.reply_code)
        return XAER_RMFAIL(f"the server closed the channel: {close.reply_code} {close.reply_text}", close.reply_code)

    _close_reported = False
    """Whether a call got the close as its answer. The server has not received, or not read, any further call."""


def _underlying(channel: Any) -> Underlying:
    # kept in the channel, not in a table: it references the channel, so a table would keep the channel for ever
    known: Underlying | None = getattr(channel, _ATTRIBUTE, None)
    if known is None:
        known = Underlying(channel)
        setattr(channel, _ATTRIBUTE, known)
    return known


def _named(call: Call[Any], error: XAException) -> XAException:
    error.call = str(call)
    return error


def require_dtx(connection: Any) -> None:
    """Check that the server is dtx. Another broker would close the connection after a dtx frame.

    Args:
        connection: an open connection of aiormq.

    Raises:
        PeerIsNotDtx: the server does not announce the capability.
        XAER_RMFAIL: the connection is not open.
    """
    if connection.is_closed or not getattr(connection, "server_properties", None):
        raise XAER_RMFAIL("the connection is not open")
    properties = connection.server_properties
    require_capability(properties.get("capabilities") or {}, properties)


class _OnAiormq(AsyncCoordination):
    """Sends calls on channels of aiormq."""

    async def _send(self, channel: Any, call: Call[T]) -> T:
        return await channel.call(call, self._timeout)  # type: ignore[no-any-return]


class AioXAResource(_OnAiormq, AsyncWork):
    """One channel as an XA resource; :class:`dtx.client.XAResource` describes the results and errors.

    A channel that is closed within a branch must stay closed. On a new channel, publishes and acknowledgements take
    effect at once. aio-pika opens robust channels again by itself, so this class refuses them. A program can open a
    channel that is not robust on a robust connection::

        channel = aio_pika.Channel(connection, publisher_confirms=False)
        await channel.initialize()

    Args:
        channel: an open channel of aio-pika or aiormq, not robust, without publisher confirms. Do not ``reopen`` it
            in a branch.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open. A call that times
            out closes the channel and raises XAER_RMFAIL.

    Raises:
        XAER_INVAL: the channel is robust.
        XAER_OUTSIDE: the channel has publisher confirms. A channel cannot have both confirms and distributed
            transactions.
    """

    def __init__(self, channel: AnyChannel, *, timeout: float | None = None) -> None:
        super().__init__(timeout)
        if isinstance(channel, aio_pika.abc.AbstractRobustChannel):
            raise XAER_INVAL(
                "the channel is robust: after a reconnect its work is outside the branch;"
                " open it with aio_pika.Channel(connection, publisher_confirms=False)"
            )
        if channel.publisher_confirms:  # type: ignore[union-attr]  # both have it; the abstract classes do not say so
            raise XAER_OUTSIDE("the channel has publisher confirms: open it with publisher_confirms=False")
        self._channel = channel

    @property
    def channel(self) -> AnyChannel:
        """The channel that this object was made with."""
        return self._channel

    async def _channel_for_calls(self) -> Any:
        try:
            channel: Any = self._channel
            if isinstance(channel, aio_pika.abc.AbstractChannel):
                channel = await channel.get_underlay_channel()
        except _LOST as error:
            raise XAER_RMFAIL(str(error) or type(error).__name__) from error
        require_dtx(channel.connection)
        return _underlying(channel)

    async def _watched(self) -> Any:
        return await self._channel_for_calls()


class AioCoordinator(_OnAiormq, AsyncReplacing):
    """Completes branches on a channel of its own.

    The object opens the channel when a call needs it, and opens a new one after a refused call.

    Args:
        connection: an open connection of aio-pika or aiormq.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.
    """

    def __init__(self, connection: AnyConnection, *, timeout: float | None = None) -> None:
        super().__init__(connection, timeout)

    async def _open(self) -> Underlying:
        try:
            connection: Any = self._connection
            if isinstance(connection, aio_pika.abc.AbstractConnection):
                if connection.transport is None:
                    raise XAER_RMFAIL("the connection is not open")
                connection = connection.transport.connection
            require_dtx(connection)
            async with asyncio.timeout(self._timeout):
                return _underlying(await connection.channel(publisher_confirms=False))
        except TimeoutError:
            raise XAER_RMFAIL(f"no channel within {self._timeout:g} s") from None
        except _LOST as error:
            raise XAER_RMFAIL(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the channel, not the connection. A second ``close`` does nothing. A later call opens a new channel."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            with suppress(*_LOST):  # after any of these errors the channel is closed, too
                await channel.channel.close()


XAResource = AioXAResource  # deprecated: the former names, kept for one version
Coordinator = AioCoordinator

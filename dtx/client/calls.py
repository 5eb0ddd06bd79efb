"""The ten XA operations as data, and how pika sends them: the only module that knows pika from the inside.

Which answers are results and which are raised: an answer that says that what was asked for has happened is a result,
every other one is raised. So ``xa-ok`` and ``xa-rdonly`` are results everywhere; ``xa-rbrollback`` and ``xa-rbtimeout``
are results of ``rollback`` and of ``end(fail=True)``, and are raised by ``start``, ``end``, ``prepare`` and ``commit``;
``xa-heur*`` are always raised, because the record stays until ``forget``. Every front (blocking, asyncio, callbacks)
sends the same calls.

pika has no public way to send a method of its user's own and wait for the answer, so this module uses what pika's own
methods use: ``Channel._rpc``, which keeps the order of requests on a channel, and the I/O loop of the connection.
Deliveries, returns and confirms that arrive while a call waits are queued by pika as ever; none is lost.

One :class:`ChannelWatch` per channel knows which calls wait for an answer. Every way in which a channel can end
settles them, so nobody waits for an answer that cannot come any more.
"""
# ruff: noqa: SLF001 - see above: this is where pika's inside is touched, so that nothing else needs to

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from select import POLLIN, poll
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from pika import spec
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.channel import Channel
from pika.exceptions import AMQPConnectionError, AMQPError, ChannelClosed, ChannelClosedByBroker, ConnectionClosed

from dtx.client.errors import (
    XAER_RMERR,
    XAER_RMFAIL,
    PeerIsNotDtx,
    XAError,
    XAException,
    XARollback,
    raised_by_flag,
    raised_by_reply_code,
)
from dtx.client.pika_methods import DtxCoordination, DtxDemarcation
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid

T = TypeVar("T")
DTX_CLASSES: Final = frozenset({DtxDemarcation.INDEX, DtxCoordination.INDEX})
"""A channel exception that names one of these classes is the answer to a call."""
CAPABILITY: Final = "dtx"
"""What a server announces in its properties, under ``capabilities``."""
ABANDONED: Final = 320
"""connection-forced: the reply code of a channel or connection that is given up because no answer comes."""
# AttributeError: pika's own, where the end of a connection comes in at an unusual moment
FAILURES: Final = (AMQPError, OSError, AttributeError)
"""What pika raises for whatever happens to a connection."""
_LOGIN_REFUSED: Final = frozenset({"AuthenticationError", "ProbableAuthenticationError"})
"""Classes of pika, and of aiormq, which need not be installed."""
_MOST_TURNS: Final = 100
"""Of pika's loop; what has come in still is heard by the next call itself."""


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    Args:
        operation: its name, for messages.
        xid: the branch concerned, if there is one.
        request: the method to send.
        reply: the class of the method that answers it.
        read: turns the answer into the result, or raises an XAException.
    """

    operation: str
    xid: Xid | None
    request: Any
    reply: type[Any]
    read: Callable[[Any], T]

    def __str__(self) -> str:
        return self.operation if self.xid is None else f"{self.operation} of {self.xid}"


def select() -> Call[None]:
    """Use distributed transactions on the channel."""
    return Call("select", None, DtxDemarcation.Select(), DtxDemarcation.SelectOk, _nothing)


def start(xid: Xid, *, join: bool, resume: bool) -> Call[XaFlag]:
    """Associate the channel with a branch."""
    request = DtxDemarcation.Start(xid=xid.to_wire(), join=join, resume=resume)
    return Call("start", xid, request, DtxDemarcation.StartOk, _read_flag)


def end(xid: Xid, *, fail: bool, suspend: bool) -> Call[XaFlag]:
    """Dissociate the channel from a branch."""
    request = DtxDemarcation.End(xid=xid.to_wire(), fail=fail, suspend=suspend)
    return Call("end", xid, request, DtxDemarcation.EndOk, _read_rollback_flag if fail else _read_flag)


def prepare(xid: Xid) -> Call[XaFlag]:
    """Ask for the vote."""
    return Call("prepare", xid, DtxCoordination.Prepare(xid=xid.to_wire()), DtxCoordination.PrepareOk, _read_flag)


def commit(xid: Xid, *, one_phase: bool) -> Call[XaFlag]:
    """Commit a branch."""
    request = DtxCoordination.Commit(xid=xid.to_wire(), one_phase=one_phase)
    return Call("one-phase commit" if one_phase else "commit", xid, request, DtxCoordination.CommitOk, _read_flag)


def rollback(xid: Xid) -> Call[XaFlag]:
    """Roll a branch back."""
    request = DtxCoordination.Rollback(xid=xid.to_wire())
    return Call("rollback", xid, request, DtxCoordination.RollbackOk, _read_rollback_flag)


def forget(xid: Xid) -> Call[None]:
    """Discard a heuristic outcome."""
    return Call("forget", xid, DtxCoordination.Forget(xid=xid.to_wire()), DtxCoordination.ForgetOk, _nothing)


def recover(*, startscan: bool, endscan: bool) -> Call[list[Xid]]:
    """One batch of a recovery scan."""
    request = DtxCoordination.Recover(startscan=startscan, endscan=endscan)
    return Call("recover", None, request, DtxCoordination.RecoverOk, _read_xids)


def get_timeout(xid: Xid) -> Call[int]:
    """The timeout of a branch, in seconds."""
    request = DtxCoordination.GetTimeout(xid=xid.to_wire())
    return Call("get-timeout", xid, request, DtxCoordination.GetTimeoutOk, _read_timeout)


def set_timeout(xid: Xid, seconds: int) -> Call[None]:
    """Set the timeout of a branch, in seconds."""
    if not 0 <= seconds <= 0xFFFFFFFF:
        raise ValueError(f"timeout of {seconds} s is not an unsigned 32 bit number")
    request = DtxCoordination.SetTimeout(xid=xid.to_wire(), timeout=seconds)
    return Call("set-timeout", xid, request, DtxCoordination.SetTimeoutOk, _nothing)


def _nothing(_answer: Any) -> None:
    return None


def _read_timeout(answer: Any) -> int:
    return int(answer.timeout)


def _read_xids(answer: Any) -> list[Xid]:
    try:
        return list(answer.decoded())
    except XaError as error:
        raise XAER_RMERR(f"the server answered recover with {error.reason}") from None


def _read_flag(answer: Any) -> XaFlag:
    """xa-ok and xa-rdonly are results, everything else is raised."""
    flag = _flag(answer)
    raised = raised_by_flag(flag)
    if raised is not None:
        raise raised(f"the server answered {flag.wire_name}")
    return flag


def _read_rollback_flag(answer: Any) -> XaFlag:
    """As :func:`_read_flag`, where xa-rb* says that what was asked for has happened."""
    flag = _flag(answer)
    raised = raised_by_flag(flag)
    if raised is not None and not issubclass(raised, XARollback):
        raise raised(f"the server answered {flag.wire_name}")
    return flag


def _flag(answer: Any) -> XaFlag:
    try:
        return XaFlag(answer.flags)
    except ValueError:
        raise XAER_RMERR(f"the server answered with unknown flags {answer.flags}") from None


# -- channels of pika -------------------------------------------------------------------------------------------------


class _Pending:
    """A call that waits for its answer."""

    def __init__(self, call: Call[Any], done: Callable[[Any], None]) -> None:
        self.call = call
        self.done = done
        self.cancel_timer: Callable[[], None] | None = None


class ChannelWatch:
    """What this package knows about one callback channel, and the calls that wait on it."""

    def __init__(self, channel: Any) -> None:
        self.selected = False
        """Whether dtx-demarcation.select was answered on this channel."""
        self._pending: list[_Pending] = []
        self._cause: int | None = None
        """The class of the method that the server's channel.close names, 0 where it names none."""
        # A code and words, not the exception: that holds the frames that it went through, and so the channel, alive.
        self._end: tuple[str, int | None] = ("the channel is closed", None)
        if channel.is_closed:
            self._end = _words(channel._closing_reason)
        else:
            channel.add_callback(self._on_close_method, [spec.Channel.Close])
            channel.add_on_close_callback(self._on_closed)

    def _on_close_method(self, frame: Any) -> None:
        # pika reports that the channel is closed first and this second, and only this says what was refused.
        self._cause = frame.method.class_id
        self._end = (frame.method.reply_text, frame.method.reply_code)
        self.settle_all()

    def _on_closed(self, _channel: Any, reason: Exception) -> None:
        self._end = _words(reason)
        if self._cause is not None or not isinstance(reason, ChannelClosedByBroker):
            self.settle_all()

    def add(self, call: Call[Any], done: Callable[[Any], None]) -> _Pending:
        """Remember that *done* waits for the answer to *call*."""
        entry = _Pending(call, done)
        self._pending.append(entry)
        return entry

    def settle(self, entry: _Pending, outcome: object) -> None:
        """Give *entry* its outcome, once."""
        if entry not in self._pending:
            return
        self._pending.remove(entry)
        if entry.cancel_timer is not None:
            entry.cancel_timer()
        if isinstance(outcome, XAException):
            outcome.call = str(entry.call)
        entry.done(outcome)

    def settle_all(self) -> None:
        """The channel is gone: no answer will come to anybody."""
        for position, entry in enumerate(tuple(self._pending)):
            self.settle(entry, self.refusal(entry.call, sent=position == 0))

    def refusal(self, call: Call[Any], *, sent: bool) -> XAError:
        """What *call* gets because the channel is closed.

        Args:
            call: the call.
            sent: whether it may be what the server's channel.close answers: pika sends one request at a time.
        """
        words, code = self._end
        # A close that names no method (a delivery was not acknowledged in time) says nothing about the call.
        if sent and code is not None and self._cause in DTX_CLASSES:
            return raised_by_reply_code(call.operation, code)(words, code)
        if self._cause is not None:
            words = f"the server closed the channel: {code} {words}"
        return XAER_RMFAIL(words, code)


_WATCHES: Final[WeakKeyDictionary[Any, ChannelWatch]] = WeakKeyDictionary()


def watch(channel: Any) -> ChannelWatch:
    """What is known about *channel*, blocking or not; starts watching it when it is new."""
    if isinstance(channel, BlockingChannel):
        channel = channel._impl
    known = _WATCHES.get(channel)
    if known is None:
        known = _WATCHES[channel] = ChannelWatch(channel)
    return known


def require_dtx(connection: Any) -> None:
    """Make sure that the peer is dtx, before a frame goes out that another broker drops the connection for.

    Args:
        connection: any connection of pika, open.

    Raises:
        PeerIsNotDtx: the server does not announce the capability.
        XAER_RMFAIL: the connection is not open.
    """
    inner = connection._impl if isinstance(connection, BlockingConnection) else connection
    if not inner.is_open:
        raise XAER_RMFAIL("the connection is not open")
    require_capability(inner.server_capabilities, inner.server_properties or {})


def require_capability(capabilities: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    """Make sure that a server with these *capabilities* is dtx.

    Raises:
        PeerIsNotDtx: it does not announce the capability.
    """
    if not capabilities.get(CAPABILITY):
        product = properties.get("product", "a server without a name")
        raise PeerIsNotDtx(f"the peer is not dtx: {product} does not announce the capability {CAPABILITY!r}")


def submit(
    channel: Channel, call: Call[T], done: Callable[[T | XAException], None], timeout: float | None = None
) -> None:
    """Send *call*, and have *done* called once with its outcome, whatever becomes of the channel.

    This is the way in for channels of every callback adapter (SelectConnection, Tornado, Gevent and so on). To be
    called in the thread of the connection's I/O loop.

    Args:
        channel: a callback channel of pika, on a connection that :func:`require_dtx` has accepted.
        call: one of :mod:`dtx.client.calls`.
        done: gets the result or the XAException; may be called before this function returns.
        timeout: seconds to wait for the answer; ``None`` waits until the channel or the connection ends. When the time
            is up the outcome is XAER_RMFAIL and the channel is closed, since the answer to this call, when it comes
            after all, could be taken for the answer to the next.
    """
    state = watch(channel)
    entry = state.add(call, done)
    if not channel.is_open:
        state.settle(entry, state.refusal(call, sent=False))
        return

    def answered(frame: Any) -> None:
        outcome: object
        try:
            outcome = call.read(frame.method)
        except XAException as error:
            outcome = error
        state.settle(entry, outcome)

    try:
        channel._rpc(call.request, answered, [call.reply])
    except AMQPError as error:
        state.settle(entry, XAER_RMFAIL(*_words(error)))
        return
    if timeout is not None:
        connection = channel.connection
        timer = connection._adapter_call_later(timeout, lambda: _expire(channel, entry, timeout))
        entry.cancel_timer = lambda: connection._adapter_remove_timeout(timer)


def _expire(channel: Any, entry: _Pending, timeout: float) -> None:
    """The time of *entry* is up: give up the channel, and the connection where the peer does not even read any more."""
    entry.cancel_timer = None
    reason = f"no answer within {timeout:g} s"
    watch(channel).settle(entry, XAER_RMFAIL(f"{reason}, the outcome is not known"))
    if channel.connection._transport.get_write_buffer_size():
        channel.connection._terminate_stream(AMQPConnectionError(reason))
    elif channel.is_open:
        # pika holds every further method back until the answer comes: channel.close must not wait for it.
        channel._blocking = None
        channel._blocked.clear()
        with suppress(AMQPError):
            channel.close(ABANDONED, reason)
        watch(channel).settle_all()


def submit_and_wait(channel: BlockingChannel, call: Call[T], timeout: float | None) -> T:
    """Send *call* and run the connection's I/O until its outcome is there; other arguments as in :func:`submit`.

    Raises:
        XAException: as *call* says, or why there is no answer.
    """
    outcomes: list[T | XAException] = []
    submit(channel._impl, call, outcomes.append, timeout)
    while not outcomes:
        try:
            channel._flush_output(lambda: bool(outcomes))
        except AMQPError as error:
            # The end of the channel has settled the call before pika raises; unless pika could not even try.
            if not outcomes:
                raise XAER_RMFAIL(*_words(error)) from error
    outcome = outcomes[0]
    if isinstance(outcome, XAException):
        raise outcome
    return outcome


def open_channel(connection: BlockingConnection, timeout: float | None) -> BlockingChannel:
    """A new channel.

    Args:
        connection: open.
        timeout: seconds to wait for it; then the connection is given up, for it answers nothing.

    Raises:
        XAER_RMFAIL: there is none to be had.
    """
    if not connection.is_open:
        raise XAER_RMFAIL("the connection is not open")  # pika's timers raise ValueError then
    try:
        with limited(connection, timeout, "channel"):
            return connection.channel()
    except AMQPError as error:
        raise XAER_RMFAIL(*_words(error)) from error


def closing_reason(channel: BlockingChannel) -> Exception:
    """Why *channel* is closed."""
    return channel._impl._closing_reason or ConnectionError("the channel is closed")


def _words(error: Exception | None) -> tuple[str, int | None]:
    """The text of what pika raises, and the reply code if there is one."""
    if isinstance(error, ChannelClosed | ConnectionClosed):
        return error.reply_text, error.reply_code
    return str(error) or type(error).__name__, None


# -- connections of pika that nobody has read from for a while --------------------------------------------------------


def unreachable(where: str, error: Exception) -> XAER_RMFAIL:
    """Why there is no connection to *where*: it is out of reach, or it refused the login."""
    what = "refused the login" if type(error).__name__ in _LOGIN_REFUSED else "is out of reach"
    return XAER_RMFAIL(f"{where} {what}: {' '.join(str(error).split()) or type(error).__name__}")


def alive(connection: BlockingConnection) -> bool:
    """Whether a connection is open still; hears what the server said meanwhile.

    pika notices the end of a connection in several turns of its loop, and one turn is all that ``process_data_events``
    makes when it is not to wait: so there are as many as there is something to read. Mostly that is none.
    """
    for _ in range(_MOST_TURNS):
        if not connection.is_open or not _readable(connection):
            break
        with suppress(*FAILURES):
            connection.process_data_events(0)
    return bool(connection.is_open)


def _readable(connection: BlockingConnection) -> bool:
    """Whether the socket has anything for us, be it its end."""
    look = poll()  # select.select knows no descriptor from 1024 on, and programs in C have many
    look.register(connection._impl._transport._sock.fileno(), POLLIN)
    return bool(look.poll(0))


def drop(connection: BlockingConnection) -> None:
    """Close its socket. pika does that some turns of its loop later, and its loop with it."""
    with suppress(*FAILURES):
        connection._impl._terminate_stream(AMQPConnectionError("given up"))
        for _ in range(_MOST_TURNS):
            connection.process_data_events(0)  # until it raises that the connection is closed


@contextmanager
def limited(connection: BlockingConnection, timeout: float | None, what: str = "answer") -> Iterator[None]:
    """Within it pika's own calls wait no longer than *timeout* seconds: then the connection is given up.

    Raises:
        AMQPConnectionError: by the call within, when the time is up.
    """
    inner = connection._impl
    if timeout is None or not inner.is_open:
        yield
        return
    error = AMQPConnectionError(f"no {what} within {timeout:g} s")
    timer = inner._adapter_call_later(timeout, lambda: inner._terminate_stream(error))
    try:
        yield
    finally:
        inner._adapter_remove_timeout(timer)

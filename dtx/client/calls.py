"""The ten XA operations as data, and the code that sends them with pika.

This is the only module that uses private parts of pika. All interfaces (blocking, asyncio, callbacks) send the same
calls.

An answer is a result if it reports that the requested action has happened. Every other answer is raised:

- ``xa-ok`` and ``xa-rdonly`` are results of every call.
- ``xa-rbrollback`` and ``xa-rbtimeout`` are results of ``rollback`` and of ``end(fail=True)``. ``start``, ``end``,
  ``prepare`` and ``commit`` raise them.
- ``xa-heur*`` are always raised, because the server keeps the record until ``forget``.

pika has no public function that sends a user-defined method and waits for the answer. This module therefore uses the
parts that pika's own methods use. ``Channel._rpc`` keeps the order of requests on a channel. The connection provides
the I/O loop. pika queues deliveries, returns and confirms that arrive while a call waits, as usual; none is lost.

Each channel has one :class:`ChannelWatch`, which keeps the calls that wait for an answer. When the channel ends in any
way, the ChannelWatch settles these calls. No call waits for an answer that cannot arrive.
"""
# ruff: noqa: SLF001 - see above: only this module uses private parts of pika

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
"""The capability that a dtx server announces in its properties, under ``capabilities``."""
ABANDONED: Final = 320
"""connection-forced: the reply code with which the client closes a channel after a time-out."""
# AttributeError: pika raises it when a connection ends at an unusual moment
FAILURES: Final = (AMQPError, OSError, AttributeError)
"""The exceptions that pika raises when a connection fails."""
_LOGIN_REFUSED: Final = frozenset({"AuthenticationError", "ProbableAuthenticationError"})
"""Names of exception classes of pika and of aiormq. aiormq may be missing, so this module does not import them."""
_MOST_ITERATIONS: Final = 100
"""The maximum number of turns of pika's loop. The next call reads any data that is left."""


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    Args:
        operation: the name of the call, for messages.
        xid: the branch; ``None`` for a call that has none.
        request: the method to send.
        reply: the class of the method that answers the request.
        read: a function that returns the result for an answer, or raises an XAException.
    """

    operation: str
    xid: Xid | None
    request: Any
    reply: type[Any]
    read: Callable[[Any], T]

    def __str__(self) -> str:
        return self.operation if self.xid is None else f"{self.operation} of {self.xid}"


def select() -> Call[None]:
    """Make the call that sets the channel to use distributed transactions."""
    return Call("select", None, DtxDemarcation.Select(), DtxDemarcation.SelectOk, _nothing)


def start(xid: Xid, *, join: bool, resume: bool) -> Call[XaFlag]:
    """Make the call that associates the channel with a branch.

    Args:
        xid: the branch.
        join: the branch exists, and other channels have done work in it.
        resume: continue the branch that this channel suspended.
    """
    request = DtxDemarcation.Start(xid=xid.to_wire(), join=join, resume=resume)
    return Call("start", xid, request, DtxDemarcation.StartOk, _read_flag)


def end(xid: Xid, *, fail: bool, suspend: bool) -> Call[XaFlag]:
    """Make the call that dissociates the channel from a branch.

    Args:
        xid: the branch.
        fail: the work failed. The branch becomes rollback-only.
        suspend: the program will resume the branch on this channel.
    """
    request = DtxDemarcation.End(xid=xid.to_wire(), fail=fail, suspend=suspend)
    return Call("end", xid, request, DtxDemarcation.EndOk, _read_rollback_flag if fail else _read_flag)


def prepare(xid: Xid) -> Call[XaFlag]:
    """Make the call that prepares a branch.

    Args:
        xid: the branch.
    """
    return Call("prepare", xid, DtxCoordination.Prepare(xid=xid.to_wire()), DtxCoordination.PrepareOk, _read_flag)


def commit(xid: Xid, *, one_phase: bool) -> Call[XaFlag]:
    """Make the call that commits a branch.

    Args:
        xid: the branch.
        one_phase: commit without prepare.
    """
    request = DtxCoordination.Commit(xid=xid.to_wire(), one_phase=one_phase)
    return Call("one-phase commit" if one_phase else "commit", xid, request, DtxCoordination.CommitOk, _read_flag)


def rollback(xid: Xid) -> Call[XaFlag]:
    """Make the call that rolls a branch back.

    Args:
        xid: the branch.
    """
    request = DtxCoordination.Rollback(xid=xid.to_wire())
    return Call("rollback", xid, request, DtxCoordination.RollbackOk, _read_rollback_flag)


def forget(xid: Xid) -> Call[None]:
    """Make the call that discards the record of a heuristic outcome.

    Args:
        xid: the branch.
    """
    return Call("forget", xid, DtxCoordination.Forget(xid=xid.to_wire()), DtxCoordination.ForgetOk, _nothing)


def recover(*, startscan: bool, endscan: bool) -> Call[list[Xid]]:
    """Make the call that reads one batch of a recovery scan.

    Args:
        startscan: begin a new scan.
        endscan: end the scan.
    """
    request = DtxCoordination.Recover(startscan=startscan, endscan=endscan)
    return Call("recover", None, request, DtxCoordination.RecoverOk, _read_xids)


def get_timeout(xid: Xid) -> Call[int]:
    """Make the call that reads the timeout of a branch, in seconds.

    Args:
        xid: the branch.
    """
    request = DtxCoordination.GetTimeout(xid=xid.to_wire())
    return Call("get-timeout", xid, request, DtxCoordination.GetTimeoutOk, _read_timeout)


def set_timeout(xid: Xid, seconds: int) -> Call[None]:
    """Make the call that sets the timeout of a branch.

    Args:
        xid: the branch.
        seconds: the new timeout, an unsigned number of 32 bits.

    Raises:
        ValueError: *seconds* is not an unsigned number of 32 bits.
    """
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
    """Return xa-ok or xa-rdonly; raise the exception for any other flag."""
    flag = _flag(answer)
    raised = raised_by_flag(flag)
    if raised is not None:
        raise raised(f"the server answered {flag.wire_name}")
    return flag


def _read_rollback_flag(answer: Any) -> XaFlag:
    """Read a flag as :func:`_read_flag` does, but return xa-rb* as a result: the requested rollback has happened."""
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
    """The state of one callback channel, and the calls that wait for an answer on it."""

    def __init__(self, channel: Any) -> None:
        self.selected = False
        """Whether dtx-demarcation.select was answered on this channel."""
        self._pending: list[_Pending] = []
        self._cause: int | None = None
        """The class of the method that the server's channel.close names; 0 where it names none."""
        # A code and a text, not the exception: the exception references its stack frames, and so keeps the channel.
        self._end: tuple[str, int | None] = ("the channel is closed", None)
        if channel.is_closed:
            self._end = _words(channel._closing_reason)
        else:
            channel.add_callback(self._on_close_method, [spec.Channel.Close])
            channel.add_on_close_callback(self._on_closed)

    def _on_close_method(self, frame: Any) -> None:
        # pika reports first that the channel is closed, and then this method. Only this method names the refused call.
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
        """Give *entry* its outcome. A second call for the same entry does nothing."""
        if entry not in self._pending:
            return
        self._pending.remove(entry)
        if entry.cancel_timer is not None:
            entry.cancel_timer()
        if isinstance(outcome, XAException):
            outcome.call = str(entry.call)
        entry.done(outcome)

    def settle_all(self) -> None:
        """Refuse all calls that wait: the channel is closed, and no answer can arrive."""
        for position, entry in enumerate(tuple(self._pending)):
            self.settle(entry, self.refusal(entry.call, sent=position == 0))

    def refusal(self, call: Call[Any], *, sent: bool) -> XAError:
        """Return the error for *call* after the channel is closed.

        Args:
            call: the call.
            sent: whether the server's channel.close may be the answer to this call. pika sends one request at a time.
        """
        words, code = self._end
        # A close that names no dtx method (for example a late acknowledgement) is not an answer to the call.
        if sent and code is not None and self._cause in DTX_CLASSES:
            return raised_by_reply_code(call.operation, code)(words, code)
        if self._cause is not None:
            words = f"the server closed the channel: {code} {words}"
        return XAER_RMFAIL(words, code)


_WATCHES: Final[WeakKeyDictionary[Any, ChannelWatch]] = WeakKeyDictionary()


def watch(channel: Any) -> ChannelWatch:
    """Return the ChannelWatch of *channel*, and make one if there is none.

    Args:
        channel: a callback channel of pika, or a BlockingChannel.
    """
    if isinstance(channel, BlockingChannel):
        channel = channel._impl
    known = _WATCHES.get(channel)
    if known is None:
        known = _WATCHES[channel] = ChannelWatch(channel)
    return known


def require_dtx(connection: Any) -> None:
    """Check that the server is dtx. Another broker would close the connection after a dtx frame.

    Args:
        connection: an open connection of pika, of any kind.

    Raises:
        PeerIsNotDtx: the server does not announce the capability.
        XAER_RMFAIL: the connection is not open.
    """
    inner = connection._impl if isinstance(connection, BlockingConnection) else connection
    if not inner.is_open:
        raise XAER_RMFAIL("the connection is not open")
    require_capability(inner.server_capabilities, inner.server_properties or {})


def require_capability(capabilities: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    """Check that a server with these *capabilities* is dtx.

    Args:
        capabilities: the capabilities that the server announced.
        properties: the properties of the server. The message of the error names their ``product``.

    Raises:
        PeerIsNotDtx: the server does not announce the capability.
    """
    if not capabilities.get(CAPABILITY):
        product = properties.get("product", "a server without a name")
        raise PeerIsNotDtx(f"the peer is not dtx: {product} does not announce the capability {CAPABILITY!r}")


def submit(
    channel: Channel, call: Call[T], done: Callable[[T | XAException], None], timeout: float | None = None
) -> None:
    """Send *call* and call *done* once with its outcome.

    *done* is called even if the channel ends before the answer. This function serves channels of all callback adapters
    (SelectConnection, Tornado, Gevent and so on). Call it in the thread of the connection's I/O loop.

    Args:
        channel: a callback channel of pika, on a connection that :func:`require_dtx` has accepted.
        call: one of the calls of :mod:`dtx.client.calls`.
        done: a function that gets the result or the XAException. It may be called before this function returns.
        timeout: seconds to wait for the answer. ``None`` waits until the channel or the connection ends. After the
            timeout the outcome is XAER_RMFAIL and the channel is closed. Otherwise a late answer to this call could be
            taken for the answer to the next call.
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
    """Settle *entry* after its timeout and close the channel; close the connection if the peer no longer reads."""
    entry.cancel_timer = None
    reason = f"no answer within {timeout:g} s"
    watch(channel).settle(entry, XAER_RMFAIL(f"{reason}, the outcome is not known"))
    if channel.connection._transport.get_write_buffer_size():
        channel.connection._terminate_stream(AMQPConnectionError(reason))
    elif channel.is_open:
        # pika delays every further method until the answer arrives: channel.close must not wait for it.
        channel._blocking = None
        channel._blocked.clear()
        with suppress(AMQPError):
            channel.close(ABANDONED, reason)
        watch(channel).settle_all()


def submit_and_wait(channel: BlockingChannel, call: Call[T], timeout: float | None) -> T:
    """Send *call* and run the connection's I/O until the outcome is known.

    Args:
        channel: a BlockingChannel, on a connection that :func:`require_dtx` has accepted.
        call: one of the calls of :mod:`dtx.client.calls`.
        timeout: seconds, as in :func:`submit`.

    Returns:
        The result of the call.

    Raises:
        XAException: the answer to *call* is an error, or there is no answer.
    """
    outcomes: list[T | XAException] = []
    submit(channel._impl, call, outcomes.append, timeout)
    while not outcomes:
        try:
            channel._flush_output(lambda: bool(outcomes))
        except AMQPError as error:
            # Usually the end of the channel has settled the call before pika raises. Otherwise pika could not send it.
            if not outcomes:
                raise XAER_RMFAIL(*_words(error)) from error
    outcome = outcomes[0]
    if isinstance(outcome, XAException):
        raise outcome
    return outcome


def open_channel(connection: BlockingConnection, timeout: float | None) -> BlockingChannel:
    """Open a new channel.

    Args:
        connection: an open connection.
        timeout: seconds to wait for the channel. After the timeout the client closes the connection, because the
            server does not answer. ``None`` sets no limit.

    Returns:
        The open channel.

    Raises:
        XAER_RMFAIL: no channel could be opened.
    """
    if not connection.is_open:
        raise XAER_RMFAIL("the connection is not open")  # pika's timers raise ValueError then
    try:
        with limited(connection, timeout, "channel"):
            return connection.channel()
    except AMQPError as error:
        raise XAER_RMFAIL(*_words(error)) from error


def closing_reason(channel: BlockingChannel) -> Exception:
    """Return the reason why *channel* is closed."""
    return channel._impl._closing_reason or ConnectionError("the channel is closed")


def _words(error: Exception | None) -> tuple[str, int | None]:
    """Return the text of an exception of pika, and its reply code; ``None`` where it has no reply code."""
    if isinstance(error, ChannelClosed | ConnectionClosed):
        return error.reply_text, error.reply_code
    return str(error) or type(error).__name__, None


# -- connections of pika that the program has not read from for a while -----------------------------------------------


def unreachable(where: str, error: Exception) -> XAER_RMFAIL:
    """Return the error for a failed connection to *where*: the server is unreachable, or refused the login.

    Args:
        where: the name or address of the server, for the message.
        error: the exception that the connection attempt raised.
    """
    what = "refused the login" if type(error).__name__ in _LOGIN_REFUSED else "is out of reach"
    return XAER_RMFAIL(f"{where} {what}: {' '.join(str(error).split()) or type(error).__name__}")


def alive(connection: BlockingConnection) -> bool:
    """Return whether a connection is still open. Read the data that the server has sent first.

    pika needs several turns of its loop to notice the end of a connection. ``process_data_events`` without a wait makes
    only one turn. This function therefore repeats it while there is data to read. Usually there is none.
    """
    for _ in range(_MOST_ITERATIONS):
        if not connection.is_open or not _readable(connection):
            break
        with suppress(*FAILURES):
            connection.process_data_events(0)
    return bool(connection.is_open)


def _readable(connection: BlockingConnection) -> bool:
    """Return whether the socket has data to read, or its end."""
    poller = poll()  # select.select accepts no descriptor from 1024 on, and programs in C have many
    poller.register(connection._impl._transport._sock.fileno(), POLLIN)
    return bool(poller.poll(0))


def drop(connection: BlockingConnection) -> None:
    """Close the socket of *connection*. pika closes the socket and its loop some turns of the loop later."""
    with suppress(*FAILURES):
        connection._impl._terminate_stream(AMQPConnectionError("given up"))
        for _ in range(_MOST_ITERATIONS):
            connection.process_data_events(0)  # until it raises that the connection is closed


@contextmanager
def limited(connection: BlockingConnection, timeout: float | None, what: str = "answer") -> Iterator[None]:
    """Limit the time that pika's own calls in the ``with`` block wait. After the timeout the connection is closed.

    Args:
        connection: the connection of the calls.
        timeout: seconds; ``None`` sets no limit.
        what: the expected event, for the message of the error.

    Raises:
        AMQPConnectionError: raised by the call in the block after the timeout.
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

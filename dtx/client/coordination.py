"""XA on pika: :class:`XAResource` for work and outcomes, :class:`Coordinator` for outcomes alone.

Both are for BlockingConnection. Their twins are for AsyncioConnection, and for every callback channel whose I/O runs in
the current asyncio loop. Results and errors are explained once, at the blocking ones.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.channel import Channel
from pika.exceptions import AMQPError

from dtx.client import calls
from dtx.client.calls import Call, T, open_channel, require_dtx, submit, submit_and_wait, watch
from dtx.client.errors import XAER_PROTO, XAER_RMFAIL, XAException
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid


class Coordination(ABC):
    """The class dtx-coordination: what becomes of branches. It needs no association, and no particular channel.

    Every method raises an :class:`~dtx.client.errors.XAException`: XAER_NOTA for an xid that is not known, XAER_PROTO
    in a state that does not allow the call ("still associated with a channel" among others), XAER_RMERR when the server
    refuses, XAER_RMFAIL when the outcome is not known and the call may be repeated.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scan = 0

    @abstractmethod
    def _channel_for_calls(self) -> BlockingChannel:
        """The channel that the next call goes to."""

    def _do(self, call: Call[T]) -> T:
        return submit_and_wait(self._channel_for_calls(), call, self._timeout)

    def prepare(self, xid: Xid) -> XaFlag:
        """First phase. "Once this method successfully returns it is guaranteed that the transaction branch may be
        either committed or rolled back regardless of failures."

        Returns:
            OK, or RDONLY: there was no work, and the branch is gone already.

        Raises:
            XARollback: the branch cannot be committed (XA_RBROLLBACK, XA_RBTIMEOUT).
            XAER_RMERR: "the specified Xid may or may not have been prepared".
        """
        return self._do(calls.prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> XaFlag:
        """Second phase, or the only one.

        Args:
            xid: the branch.
            one_phase: commit without prepare.

        Returns:
            OK.

        Raises:
            XARollback: a one-phase commit that could not be; the branch is rolled back.
            XAHeuristic: the branch was completed by hand; ``forget`` it when that is dealt with.
            XAER_RMFAIL: it is decided, and not finished yet; call again.
        """
        return self._do(calls.commit(xid, one_phase=one_phase))

    def rollback(self, xid: Xid) -> XaFlag:
        """Roll back, before or after prepare. "Any produced messages are discarded and any consumed messages are
        re-enqueued."

        Returns:
            OK; RBROLLBACK or RBTIMEOUT where the branch was rolled back before it was asked to be.

        Raises:
            XAHeuristic: the branch was completed by hand; ``forget`` it when that is dealt with.
            XAER_RMFAIL: it is decided, and not finished yet; call again.
        """
        return self._do(calls.rollback(xid))

    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""
        return self._do(calls.forget(xid))

    def get_timeout(self, xid: Xid) -> int:
        """The timeout of a branch in seconds, from its start or the last `set_timeout` to its prepare; 0 is none."""
        return self._do(calls.get_timeout(xid))

    def set_timeout(self, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch in seconds. "A value of zero resets the timeout value to the default value."

        The server cuts it down to its --max-timeout without an error; :meth:`get_timeout` tells what holds.

        Raises:
            ValueError: not an unsigned 32 bit number.
        """
        return self._do(calls.set_timeout(xid, seconds))

    def recover(self) -> Iterator[Xid]:
        """Every branch that is in doubt or heuristically completed, batch by batch from the server's snapshot.

        Branches may be completed while the scan goes on, by this object too. A scan that is dropped half-way costs
        nothing. A channel has one scan: a second ``recover`` ends the first.

        Raises:
            XAER_PROTO: this scan was ended by another one.
        """
        self._scan += 1
        mine = self._scan
        seen: set[Xid] = set()
        channel: BlockingChannel | None = None
        batch: list[Xid] = []
        while batch or channel is None:
            if mine != self._scan:
                raise XAER_PROTO("another recovery scan was begun on this channel")
            current = self._channel_for_calls()
            # A scan belongs to its channel. Where that was replaced in mid-scan the new one is scanned from the start.
            batch = self._do(calls.recover(startscan=current is not channel, endscan=False))
            channel = current
            fresh = [xid for xid in batch if xid not in seen]
            seen.update(fresh)
            yield from fresh
        if channel.is_open:
            self._do(calls.recover(startscan=False, endscan=True))


class XAResource(Coordination):
    """One channel as an XA resource: work between :meth:`start` and :meth:`end` belongs to the branch.

    What is published and acked (``basic_publish``, ``basic_ack``) with the channel's own methods between the two is
    done when the branch commits. Work outside is not transactional.

    A refused call closes the channel (AMQP calls that a channel exception) and the connection lives on. An XAResource
    lives and dies with its channel; :class:`Coordinator` completes branches on channels that it replaces by itself.

    Args:
        channel: open; of a BlockingConnection to dtx.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives. A call that is given up
            closes the channel, and raises XAER_RMFAIL.

    Raises:
        PeerIsNotDtx: the server is something else. Nothing was sent to it.
    """

    def __init__(self, channel: BlockingChannel, *, timeout: float | None = None) -> None:
        super().__init__(timeout)
        if not isinstance(channel, BlockingChannel):
            raise TypeError(f"not a channel of a BlockingConnection: {channel!r}, see AsyncXAResource")
        require_dtx(channel.connection)
        self._channel = channel
        self._watch = watch(channel)

    @property
    def channel(self) -> BlockingChannel:
        """The channel."""
        return self._channel

    def _channel_for_calls(self) -> BlockingChannel:
        return self._channel

    def select(self) -> None:
        """Set the channel to use distributed transactions. :meth:`start` does it when it has not been done.

        A channel that has consumed can be selected when its consumers are cancelled and its deliveries settled.

        Raises:
            XAER_OUTSIDE: the channel consumes, has unsettled deliveries, or is in confirm or tx mode.
            XAER_RMERR: the user may not use transactions.
        """
        self._do(calls.select())
        self._watch.selected = True

    def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Associate the channel with a branch.

        Args:
            xid: the branch; a new one unless *join* or *resume*.
            join: the branch exists, and work of other channels is in it.
            resume: go on with the branch that this channel suspended.

        Returns:
            OK.

        Raises:
            XAER_DUPID: the xid exists and neither *join* nor *resume* is given.
            XA_RBROLLBACK: the branch is rollback-only; the channel is not associated with it.
        """
        if not self._watch.selected:
            self.select()
        return self._do(calls.start(xid, join=join, resume=resume))

    def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Dissociate the channel from a branch.

        Args:
            xid: the branch.
            fail: the work failed; the branch is rollback-only now.
            suspend: it is to be resumed on this channel.

        Returns:
            OK; with *fail* RBROLLBACK or RBTIMEOUT.

        Raises:
            XARollback: the branch is rollback-only; the channel is dissociated all the same.
        """
        return self._do(calls.end(xid, fail=fail, suspend=suspend))


class Coordinator(Coordination):
    """Completes branches, on a channel of its own that is opened when needed, and again after a refused call.

    Args:
        connection: open, to dtx.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.

    Raises:
        PeerIsNotDtx: the server is something else. Nothing was sent to it.
    """

    def __init__(self, connection: BlockingConnection, *, timeout: float | None = None) -> None:
        super().__init__(timeout)
        require_dtx(connection)
        self._connection = connection
        self._channel: BlockingChannel | None = None

    def _channel_for_calls(self) -> BlockingChannel:
        if self._channel is None or not self._channel.is_open:
            self._channel = open_channel(self._connection, self._timeout)
        return self._channel

    def close(self) -> None:
        """Close the channel, not the connection. Doing it again changes nothing; a later call opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            with suppress(AMQPError):  # whatever else ends it ends it too
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncCoordination(ABC):
    """The class dtx-coordination; as :class:`Coordination`, which explains results and errors.

    Several tasks may use one object: calls go out one after the other, in the order they were made. A task that is
    cancelled in a call leaves the outcome open and the channel usable: the answer is awaited and dropped.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scan = 0

    @abstractmethod
    async def _channel_for_calls(self) -> Any:
        """The channel that the next call goes to."""

    async def _do(self, call: Call[T]) -> T:
        return await self._send(await self._channel_for_calls(), call)

    async def _send(self, channel: Any, call: Call[T]) -> T:
        """Send *call* on a callback channel of pika; its result."""
        answer: asyncio.Future[T | XAException] = asyncio.get_running_loop().create_future()

        def done(outcome: T | XAException) -> None:
            if not answer.done():
                answer.set_result(outcome)

        submit(channel, call, done, self._timeout)
        outcome = await answer
        if isinstance(outcome, XAException):
            raise outcome
        return outcome

    async def prepare(self, xid: Xid) -> XaFlag:
        """First phase: OK or RDONLY, else XARollback or XAError."""
        return await self._do(calls.prepare(xid))

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> XaFlag:
        """Second phase, or with *one_phase* the only one: OK, else XARollback, XAHeuristic or XAError."""
        return await self._do(calls.commit(xid, one_phase=one_phase))

    async def rollback(self, xid: Xid) -> XaFlag:
        """Roll back, before or after prepare: OK, RBROLLBACK or RBTIMEOUT, else XAHeuristic or XAError."""
        return await self._do(calls.rollback(xid))

    async def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""
        return await self._do(calls.forget(xid))

    async def get_timeout(self, xid: Xid) -> int:
        """The timeout of a branch in seconds; 0 is none."""
        return await self._do(calls.get_timeout(xid))

    async def set_timeout(self, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch in seconds; 0 is the default, and more than --max-timeout is cut down to that."""
        return await self._do(calls.set_timeout(xid, seconds))

    async def recover(self) -> AsyncIterator[Xid]:
        """Every branch that is in doubt or heuristically completed; a scan that is dropped half-way costs nothing.

        Raises:
            XAER_PROTO: this scan was ended by another one.
        """
        self._scan += 1
        mine = self._scan
        seen: set[Xid] = set()
        channel: Any = None
        batch: list[Xid] = []
        while batch or channel is None:
            if mine != self._scan:
                raise XAER_PROTO("another recovery scan was begun on this channel")
            current = await self._channel_for_calls()
            batch = await self._do(calls.recover(startscan=current is not channel, endscan=False))
            channel = current
            for xid in batch:
                if xid not in seen:
                    seen.add(xid)
                    yield xid
        if channel.is_open:
            await self._do(calls.recover(startscan=False, endscan=True))


class AsyncWork(AsyncCoordination):
    """The class dtx-demarcation, and outcomes: what both kinds of XAResource for asyncio have in common."""

    @abstractmethod
    async def _watched(self) -> Any:
        """What is known about the channel: whether it was *selected*."""

    async def select(self) -> None:
        """Set the channel to use distributed transactions. :meth:`start` does it when it has not been done."""
        await self._do(calls.select())
        (await self._watched()).selected = True

    async def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Associate the channel with a branch: OK, else XA_RBROLLBACK or XAError."""
        if not (await self._watched()).selected:
            await self.select()
        return await self._do(calls.start(xid, join=join, resume=resume))

    async def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Dissociate the channel from a branch: OK, with *fail* RBROLLBACK or RBTIMEOUT, else XARollback or XAError."""
        return await self._do(calls.end(xid, fail=fail, suspend=suspend))


class AsyncReplacing(AsyncCoordination):
    """Outcomes on a channel that is opened when needed: what both kinds of Coordinator for asyncio have in common."""

    def __init__(self, connection: Any, timeout: float | None) -> None:
        super().__init__(timeout)
        self._connection = connection
        self._channel: Any = None
        self._opening = asyncio.Lock()

    async def _channel_for_calls(self) -> Any:
        async with self._opening:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._open()
            return self._channel

    @abstractmethod
    async def _open(self) -> Any:
        """A new channel.

        Raises:
            XAER_RMFAIL: there is none to be had.
        """


class AsyncXAResource(AsyncWork):
    """One channel as an XA resource; as :class:`XAResource`, which explains results and errors.

    Args:
        channel: open; its connection's I/O runs in the asyncio loop of the caller.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives. A call that is given up
            closes the channel, and raises XAER_RMFAIL.

    Raises:
        PeerIsNotDtx: the server is something else. Nothing was sent to it.
    """

    def __init__(self, channel: Channel, *, timeout: float | None = None) -> None:
        super().__init__(timeout)
        if not isinstance(channel, Channel):
            raise TypeError(f"not a callback channel of pika: {channel!r}, see XAResource")
        require_dtx(channel.connection)
        self._channel = channel
        self._watch = watch(channel)

    @property
    def channel(self) -> Channel:
        """The channel."""
        return self._channel

    async def _channel_for_calls(self) -> Channel:
        return self._channel

    async def _watched(self) -> Any:
        return self._watch


class AsyncCoordinator(AsyncReplacing):
    """Completes branches, on a channel of its own that is opened when needed, and again after a refused call.

    Args:
        connection: open, to dtx; its I/O runs in the asyncio loop of the caller.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.

    Raises:
        PeerIsNotDtx: the server is something else. Nothing was sent to it.
    """

    def __init__(self, connection: Any, *, timeout: float | None = None) -> None:
        require_dtx(connection)
        super().__init__(connection, timeout)

    async def _open(self) -> Channel:
        opened: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

        def on_open(channel: Channel) -> None:
            if not opened.done():
                opened.set_result(channel)

        def on_closed(_channel: Channel, reason: Exception) -> None:
            if not opened.done():
                opened.set_exception(XAER_RMFAIL(str(reason)))

        try:
            self._connection.channel(on_open_callback=on_open).add_on_close_callback(on_closed)
            async with asyncio.timeout(self._timeout):
                return await opened
        except AMQPError as error:
            raise XAER_RMFAIL(str(error) or type(error).__name__) from error
        except TimeoutError:
            raise XAER_RMFAIL(f"no channel within {self._timeout:g} s") from None

    async def close(self) -> None:
        """Close the channel, not the connection. Doing it again changes nothing; a later call opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()

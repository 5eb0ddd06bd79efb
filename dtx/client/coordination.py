"""XA on pika: :class:`XAResource` for work and outcomes, :class:`Coordinator` for outcomes alone.

Both are for BlockingConnection. :class:`AsyncXAResource` and :class:`AsyncCoordinator` are for AsyncioConnection. They
also accept every callback channel whose I/O runs in the current asyncio loop. The blocking classes describe the results
and errors of both kinds.
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
    """The class dtx-coordination: the methods that complete branches.

    They need no association, and no particular channel. Every method raises an
    :class:`~dtx.client.errors.XAException`:

    - XAER_NOTA: the server does not know the xid.
    - XAER_PROTO: the state does not allow the call, for example because the branch is "still associated with a
      channel".
    - XAER_RMERR: the server refuses the call.
    - XAER_RMFAIL: the outcome is not known, and the call may be repeated.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scan = 0

    @abstractmethod
    def _channel_for_calls(self) -> BlockingChannel:
        """Return the channel for the next call."""

    def _do(self, call: Call[T]) -> T:
        return submit_and_wait(self._channel_for_calls(), call, self._timeout)

    def prepare(self, xid: Xid) -> XaFlag:
        """Prepare the branch: the first phase.

        "Once this method successfully returns it is guaranteed that the transaction branch may be
        either committed or rolled back regardless of failures."

        Args:
            xid: the branch.

        Returns:
            OK, or RDONLY. RDONLY means that the branch had no work and that the server has removed it.

        Raises:
            XARollback: the branch cannot be committed (XA_RBROLLBACK, XA_RBTIMEOUT).
            XAER_RMERR: "the specified Xid may or may not have been prepared".
        """
        return self._do(calls.prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> XaFlag:
        """Commit the branch: the second phase, or with *one_phase* the only phase.

        Args:
            xid: the branch.
            one_phase: commit without prepare.

        Returns:
            OK.

        Raises:
            XARollback: the one-phase commit was not possible. The branch is rolled back.
            XAHeuristic: the branch was completed by hand. Call ``forget`` after the outcome is dealt with.
            XAER_RMFAIL: the commit is decided and not finished yet. Repeat the call.
        """
        return self._do(calls.commit(xid, one_phase=one_phase))

    def rollback(self, xid: Xid) -> XaFlag:
        """Roll the branch back, before or after prepare.

        "Any produced messages are discarded and any consumed messages are
        re-enqueued."

        Args:
            xid: the branch.

        Returns:
            OK; RBROLLBACK or RBTIMEOUT if the branch was rolled back before this call.

        Raises:
            XAHeuristic: the branch was completed by hand. Call ``forget`` after the outcome is dealt with.
            XAER_RMFAIL: the rollback is decided and not finished yet. Repeat the call.
        """
        return self._do(calls.rollback(xid))

    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome.

        Args:
            xid: the branch.
        """
        return self._do(calls.forget(xid))

    def get_timeout(self, xid: Xid) -> int:
        """Return the timeout of a branch.

        Args:
            xid: the branch.

        Returns:
            Seconds from the start of the branch, or from the last `set_timeout`, to its prepare; 0 means no timeout.
        """
        return self._do(calls.get_timeout(xid))

    def set_timeout(self, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch in seconds. "A value of zero resets the timeout value to the default value."

        The server reduces a larger value to its --max-timeout without an error. :meth:`get_timeout` returns the value
        in force.

        Args:
            xid: the branch.
            seconds: the new timeout, an unsigned number of 32 bits.

        Raises:
            ValueError: *seconds* is not an unsigned number of 32 bits.
        """
        return self._do(calls.set_timeout(xid, seconds))

    def recover(self) -> Iterator[Xid]:
        """List the branches that are in doubt or heuristically completed.

        The server takes a snapshot, and the client reads it batch by batch. Branches may be completed during the scan,
        also with this object. A program may stop the iteration at any time without cost. A channel has one scan: a
        second ``recover`` ends the first.

        Returns:
            An iterator over the xids; each xid appears once.

        Raises:
            XAER_PROTO: another scan has ended this one.
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
            # A scan belongs to its channel. If the channel was replaced during the scan, the new one needs a new scan.
            batch = self._do(calls.recover(startscan=current is not channel, endscan=False))
            channel = current
            fresh = [xid for xid in batch if xid not in seen]
            seen.update(fresh)
            yield from fresh
        if channel.is_open:
            self._do(calls.recover(startscan=False, endscan=True))


class XAResource(Coordination):
    """One channel as an XA resource: work between :meth:`start` and :meth:`end` belongs to the branch.

    The program publishes and acknowledges between the two with the channel's own methods (``basic_publish``,
    ``basic_ack``). This work takes effect when the branch commits. Work outside is not transactional.

    A refused call closes the channel (AMQP calls this a channel exception). The connection stays open. An XAResource
    cannot be used after its channel is closed. :class:`Coordinator` completes branches on a channel that it replaces
    by itself.

    Args:
        channel: an open channel of a BlockingConnection to dtx.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open. A call that times
            out closes the channel and raises XAER_RMFAIL.

    Raises:
        PeerIsNotDtx: the server is not dtx. The client sent nothing to it.
        TypeError: *channel* is not a channel of a BlockingConnection.
        XAER_RMFAIL: the connection is not open.
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
        """The channel that this object was made with."""
        return self._channel

    def _channel_for_calls(self) -> BlockingChannel:
        return self._channel

    def select(self) -> None:
        """Set the channel to use distributed transactions.

        :meth:`start` calls this method if the program has not called it. A channel that has had consumers can be
        selected after its consumers are cancelled and its deliveries are settled.

        Raises:
            XAER_OUTSIDE: the channel consumes, has unsettled deliveries, or is in confirm or tx mode.
            XAER_RMERR: the user may not use transactions.
        """
        self._do(calls.select())
        self._watch.selected = True

    def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Associate the channel with a branch.

        Args:
            xid: the branch. It is a new one unless *join* or *resume* is true.
            join: the branch exists, and other channels have done work in it.
            resume: continue the branch that this channel suspended.

        Returns:
            OK.

        Raises:
            XAER_DUPID: the xid exists and neither *join* nor *resume* is true.
            XA_RBROLLBACK: the branch is rollback-only. The channel is not associated with it.
        """
        if not self._watch.selected:
            self.select()
        return self._do(calls.start(xid, join=join, resume=resume))

    def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Dissociate the channel from a branch.

        Args:
            xid: the branch.
            fail: the work failed. The branch becomes rollback-only.
            suspend: the program will resume the branch on this channel.

        Returns:
            OK; with *fail* RBROLLBACK or RBTIMEOUT.

        Raises:
            XARollback: the branch is rollback-only. The channel is dissociated nevertheless.
        """
        return self._do(calls.end(xid, fail=fail, suspend=suspend))


class Coordinator(Coordination):
    """Completes branches on a channel of its own.

    The object opens the channel when a call needs it, and opens a new one after a refused call.

    Args:
        connection: an open BlockingConnection to dtx.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.

    Raises:
        PeerIsNotDtx: the server is not dtx. The client sent nothing to it.
        XAER_RMFAIL: the connection is not open.
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
        """Close the channel, not the connection. A second ``close`` does nothing. A later call opens a new channel."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            with suppress(AMQPError):  # after any error the channel is closed, too
                channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncCoordination(ABC):
    """The class dtx-coordination for asyncio; :class:`Coordination` describes the results and errors.

    Several tasks may use one object. The client sends their calls one after the other, in the order of the calls. If a
    task is cancelled during a call, the outcome of the call is open. The channel stays usable: the client waits for the
    answer and discards it.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scan = 0

    @abstractmethod
    async def _channel_for_calls(self) -> Any:
        """Return the channel for the next call."""

    async def _do(self, call: Call[T]) -> T:
        return await self._send(await self._channel_for_calls(), call)

    async def _send(self, channel: Any, call: Call[T]) -> T:
        """Send *call* on a callback channel of pika and return its result."""
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
        """Prepare the branch: the first phase.

        Args:
            xid: the branch.

        Returns:
            OK or RDONLY.

        Raises:
            XARollback: as for :meth:`Coordination.prepare`.
            XAError: as for :meth:`Coordination.prepare`.
        """
        return await self._do(calls.prepare(xid))

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> XaFlag:
        """Commit the branch: the second phase, or with *one_phase* the only phase.

        Args:
            xid: the branch.
            one_phase: commit without prepare.

        Returns:
            OK.

        Raises:
            XARollback: as for :meth:`Coordination.commit`.
            XAHeuristic: as for :meth:`Coordination.commit`.
            XAError: as for :meth:`Coordination.commit`.
        """
        return await self._do(calls.commit(xid, one_phase=one_phase))

    async def rollback(self, xid: Xid) -> XaFlag:
        """Roll the branch back, before or after prepare.

        Args:
            xid: the branch.

        Returns:
            OK, RBROLLBACK or RBTIMEOUT.

        Raises:
            XAHeuristic: as for :meth:`Coordination.rollback`.
            XAError: as for :meth:`Coordination.rollback`.
        """
        return await self._do(calls.rollback(xid))

    async def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome.

        Args:
            xid: the branch.
        """
        return await self._do(calls.forget(xid))

    async def get_timeout(self, xid: Xid) -> int:
        """Return the timeout of a branch in seconds; 0 means no timeout.

        Args:
            xid: the branch.
        """
        return await self._do(calls.get_timeout(xid))

    async def set_timeout(self, xid: Xid, seconds: int) -> None:
        """Set the timeout of a branch in seconds.

        0 restores the default. The server reduces a larger value to its --max-timeout.

        Args:
            xid: the branch.
            seconds: the new timeout.
        """
        return await self._do(calls.set_timeout(xid, seconds))

    async def recover(self) -> AsyncIterator[Xid]:
        """List the branches that are in doubt or heuristically completed.

        A program may stop the iteration at any time without cost.

        Raises:
            XAER_PROTO: another scan has ended this one.
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
    """The class dtx-demarcation, and outcomes: the base of both kinds of XAResource for asyncio."""

    @abstractmethod
    async def _watched(self) -> Any:
        """Return the state of the channel. Its attribute *selected* tells whether select was answered."""

    async def select(self) -> None:
        """Set the channel to use distributed transactions.

        :meth:`start` calls this method if the program has not called it.
        """
        await self._do(calls.select())
        (await self._watched()).selected = True

    async def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Associate the channel with a branch.

        Args:
            xid: the branch.
            join: the branch exists, and other channels have done work in it.
            resume: continue the branch that this channel suspended.

        Returns:
            OK.

        Raises:
            XA_RBROLLBACK: as for :meth:`XAResource.start`.
            XAError: as for :meth:`XAResource.start`.
        """
        if not (await self._watched()).selected:
            await self.select()
        return await self._do(calls.start(xid, join=join, resume=resume))

    async def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Dissociate the channel from a branch.

        Args:
            xid: the branch.
            fail: the work failed. The branch becomes rollback-only.
            suspend: the program will resume the branch on this channel.

        Returns:
            OK; with *fail* RBROLLBACK or RBTIMEOUT.

        Raises:
            XARollback: as for :meth:`XAResource.end`.
            XAError: as for :meth:`XAResource.end`.
        """
        return await self._do(calls.end(xid, fail=fail, suspend=suspend))


class AsyncReplacing(AsyncCoordination):
    """Outcomes on a channel that is opened when a call needs it: the base of both kinds of Coordinator for asyncio."""

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
        """Open a new channel.

        Raises:
            XAER_RMFAIL: no channel could be opened.
        """


class AsyncXAResource(AsyncWork):
    """One channel as an XA resource, for asyncio; :class:`XAResource` describes the results and errors.

    Args:
        channel: an open callback channel. The I/O of its connection runs in the asyncio loop of the caller.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open. A call that times
            out closes the channel and raises XAER_RMFAIL.

    Raises:
        PeerIsNotDtx: the server is not dtx. The client sent nothing to it.
        TypeError: *channel* is not a callback channel of pika.
        XAER_RMFAIL: the connection is not open.
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
        """The channel that this object was made with."""
        return self._channel

    async def _channel_for_calls(self) -> Channel:
        return self._channel

    async def _watched(self) -> Any:
        return self._watch


class AsyncCoordinator(AsyncReplacing):
    """Completes branches on a channel of its own, for asyncio.

    The object opens the channel when a call needs it, and opens a new one after a refused call.

    Args:
        connection: an open connection to dtx. Its I/O runs in the asyncio loop of the caller.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.

    Raises:
        PeerIsNotDtx: the server is not dtx. The client sent nothing to it.
        XAER_RMFAIL: the connection is not open.
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
        """Close the channel, not the connection. A second ``close`` does nothing. A later call opens a new channel."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open:
            channel.close()

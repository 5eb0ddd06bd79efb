"""XA on pika's AsyncioConnection, and on every callback channel whose I/O runs in the current asyncio loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from pika.channel import Channel
from pika.exceptions import AMQPError

from dtx.client import calls
from dtx.client.calls import Call, T
from dtx.client.channels import require_dtx, submit, watch
from dtx.client.errors import XAER_PROTO, XAER_RMFAIL, XAException
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid


class AsyncCoordination(ABC):
    """The class dtx-coordination; as :class:`~dtx.client.blocking.Coordination`, which explains results and errors.

    Several tasks may use one object: calls go out one after the other, in the order they were made. A task that is
    cancelled in a call leaves the outcome open and the channel usable: the answer is awaited and dropped.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._scan = 0

    @abstractmethod
    async def _channel_for_calls(self) -> Channel:
        """The channel that the next call goes to."""

    async def _do(self, call: Call[T]) -> T:
        channel = await self._channel_for_calls()
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
        channel: Channel | None = None
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


class AsyncXAResource(AsyncCoordination):
    """One channel as an XA resource; as :class:`~dtx.client.blocking.XAResource`, which explains results and errors.

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

    async def select(self) -> None:
        """Set the channel to use distributed transactions. :meth:`start` does it when it has not been done."""
        await self._do(calls.select())
        self._watch.selected = True

    async def start(self, xid: Xid, *, join: bool = False, resume: bool = False) -> XaFlag:
        """Associate the channel with a branch: OK, else XA_RBROLLBACK or XAError."""
        if not self._watch.selected:
            await self.select()
        return await self._do(calls.start(xid, join=join, resume=resume))

    async def end(self, xid: Xid, *, fail: bool = False, suspend: bool = False) -> XaFlag:
        """Dissociate the channel from a branch: OK, with *fail* RBROLLBACK or RBTIMEOUT, else XARollback or XAError."""
        return await self._do(calls.end(xid, fail=fail, suspend=suspend))


class AsyncCoordinator(AsyncCoordination):
    """Completes branches, on a channel of its own that is opened when needed, and again after a refused call.

    Args:
        connection: open, to dtx; its I/O runs in the asyncio loop of the caller.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.

    Raises:
        PeerIsNotDtx: the server is something else. Nothing was sent to it.
    """

    def __init__(self, connection: Any, *, timeout: float | None = None) -> None:
        super().__init__(timeout)
        require_dtx(connection)
        self._connection = connection
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()

    async def _channel_for_calls(self) -> Channel:
        async with self._opening:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._open()
            return self._channel

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

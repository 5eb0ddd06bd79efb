"""The transaction manager for asyncio: the same core in a shell that awaits, with sessions that are awaited."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final, ParamSpec, Self, TypeVar

from dtx.client.calls import unreachable
from dtx.client.errors import XAER_RMFAIL, XAException
from dtx.client.tm.commitment import Outcome
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.manager import BaseTransaction, BaseTransactionManager
from dtx.client.tm.recovery import RecoveryReport
from dtx.client.tm.resources import ANSWER_SECONDS, AnyDtxSession, Pep249Session, Pool, ResourceSession, words
from dtx.client.tm.steps import Work, drive_async
from dtx.xa.xid import Xid

_log: Final = logging.getLogger("dtx.client.tm")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class AsyncResource(Pool):
    """Where sessions come from; as :class:`~dtx.client.tm.Resource`, whose names and meanings these are.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    drive = staticmethod(drive_async)

    @abstractmethod
    async def open(self) -> ResourceSession[Any]:
        """A new session; its methods are awaited."""

    @abstractmethod
    def around(self, handle: Any) -> ResourceSession[Any]:
        """A session on a connection or channel of the application's own."""


class AsyncDtxResource(AsyncResource):
    """A virtual host of a dtx, with aio-pika (``dtx[aio]``). What applications work with is a channel of aio-pika.

    Args:
        name: see :class:`AsyncResource`.
        connect: a URL, or what makes a connection of aio-pika (not a robust one: a branch dies with its connection).
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.
    """

    def __init__(
        self, name: str, connect: str | Callable[[], Awaitable[Any]], *, timeout: float | None = ANSWER_SECONDS
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._timeout = timeout

    async def open(self) -> "AsyncDtxSession":
        """A new connection and a channel."""
        import aio_pika

        try:
            if isinstance(self._connect, str):
                connection: Any = await aio_pika.connect(self._connect, timeout=self._timeout)
            else:
                connection = await self._connect()
        except Exception as error:
            raise unreachable(self.name, error) from error
        try:
            channel = await connection.channel(publisher_confirms=False)
            return AsyncDtxSession(channel, connection, self._timeout, own=True)
        except XAException:
            await connection.close()
            raise
        except Exception as error:
            with suppress(Exception):
                await connection.close()
            raise XAER_RMFAIL(f"{self.name}: {words(error)}") from error

    def around(self, handle: Any) -> "AsyncDtxSession":
        """A session on a channel of the application's."""
        return AsyncDtxSession(handle, handle._connection, self._timeout, own=False)  # noqa: SLF001 - it has no other


class AsyncDtxSession(AnyDtxSession[Any]):
    """A session on a channel of aio-pika; as :class:`~dtx.client.tm.resources.DtxSession`, and awaited."""

    drive = staticmethod(drive_async)

    def __init__(self, channel: Any, connection: Any, timeout: float | None, *, own: bool) -> None:
        from dtx.client.aio import Coordinator, XAResource

        outcomes = Coordinator(connection, timeout=timeout)
        super().__init__(XAResource(channel, timeout=timeout), outcomes, own=own)
        self._connection = connection

    async def _scan(self) -> list[Xid]:
        return [xid async for xid in self._outcomes.recover()]

    async def _alive(self) -> bool:
        return not self.handle.is_closed and not self._connection.is_closed

    async def _leave(self) -> None:
        with suppress(Exception):
            await (self._connection.close() if self.own else self._outcomes.close())


class AsyncPep249Resource(AsyncResource):
    """A database whose driver has PEP 249's two-phase methods as coroutines, as psycopg's AsyncConnection.

    Args:
        name: see :class:`AsyncResource`.
        connect: makes a connection, not in autocommit mode.
    """

    def __init__(self, name: str, connect: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(name)
        self._connect = connect

    async def open(self) -> "AsyncPep249Session":
        """A new connection."""
        try:
            return AsyncPep249Session(await self._connect(), own=True)
        except Exception as error:
            raise XAER_RMFAIL(f"{self.name} is out of reach: {words(error)}") from error

    def around(self, handle: Any) -> "AsyncPep249Session":
        """A session on a connection of the application's."""
        return AsyncPep249Session(handle, own=False)


class AsyncPep249Session(Pep249Session):
    """One connection; as :class:`~dtx.client.tm.resources.Pep249Session`, and awaited."""

    drive = staticmethod(drive_async)


class AsyncTransactionManager(BaseTransactionManager["AsyncTransaction"]):
    """A transaction manager for programs with asyncio; arguments as of :class:`~dtx.client.tm.TransactionManager`.

    Of one event loop. Any task may begin transactions; each belongs to the task that began it. The log is written in
    threads, so its fsync holds nothing else up, and transactions that commit at the same time share it.
    """

    where = "task"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._recovering = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Recover, now and in the background."""
        if self._recover_every is not None and self._task is None:
            self._task = asyncio.create_task(self._watch(), name="dtx tm recovery")
        return self

    async def close(self) -> None:
        """End recovery, close free sessions and the log. Transactions must be over."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for resource in self._resources.values():
            await resource.close()
        await asyncio.to_thread(self.log.close)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def write(self, call: Callable[[DecisionLog], Any]) -> Any:
        """Call the log in a thread."""
        return await asyncio.to_thread(call, self.log)

    def begin(self, *, timeout: float | None = None) -> "AsyncTransaction":
        """A new transaction; ``async with tm.transaction()`` completes it by itself.

        Args:
            timeout: seconds, instead of the transaction manager's.
        """
        return AsyncTransaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    def transactional(self, function: Callable[_P, Awaitable[_R]]) -> Callable[_P, Awaitable[_R]]:
        """Decorator: the coroutine runs in a transaction; in the current one, where there is one."""

        @wraps(function)
        async def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return await function(*args, **kwargs)
            async with self.transaction():
                return await function(*args, **kwargs)

        return within

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """:meth:`AsyncTransaction.enlist` of the current transaction."""
        return await self.current.enlist(resource, handle)

    async def recover(self) -> RecoveryReport:
        """One round of recovery; as of :meth:`dtx.client.tm.TransactionManager.recover`."""
        async with self._recovering:
            return await drive_async(self.recovering())

    async def _watch(self) -> None:
        assert self._recover_every is not None
        while True:
            try:
                await self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed, it is tried again: %s", error)
            await asyncio.sleep(self._recover_every)


class AsyncTransaction(BaseTransaction):
    """One global transaction. Of one task; not to be used after its end.

    Args:
        manager: whose.
        gtrid: its id.
        timeout: seconds.
    """

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """Let a resource take part; as of :meth:`dtx.client.tm.Transaction.enlist`."""
        return await drive_async(self._enlisting(resource, handle))

    async def commit(self) -> Outcome:
        """Commit all of it or none; as of :meth:`dtx.client.tm.Transaction.commit`.

        A task that is cancelled meanwhile is so when the transaction has come to its end.
        """
        return await _to_its_end(self._committing())

    async def rollback(self) -> Outcome:
        """Undo all of it."""
        return await _to_its_end(self._rolling_back())

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._leave():
            return
        if kind is None:
            await self.commit()
        else:
            await self.rollback()


async def _to_its_end(work: Work[Outcome]) -> Outcome:
    """Drive *work*; a cancellation waits until it is done, and so do further ones."""
    task = asyncio.create_task(drive_async(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            _log.warning("a cancelled transaction did not commit: %s", task.exception())
        raise cancelled
    return task.result()

"""The transaction manager for asyncio. It shares its core with the one for threads. Its methods are awaited."""

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
    """A source of sessions. Its methods have the names and meanings of :class:`~dtx.client.tm.Resource`.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches. The log contains it.
    """

    drive = staticmethod(drive_async)

    @abstractmethod
    async def open(self) -> ResourceSession[Any]:
        """Open a new session. Its methods are awaited."""

    @abstractmethod
    def around(self, handle: Any) -> ResourceSession[Any]:
        """Make a session on a connection or channel of the application.

        Args:
            handle: the connection or channel, outside of any transaction.
        """


class AsyncDtxResource(AsyncResource):
    """A virtual host of a dtx, with aio-pika (``dtx[aio]``). The handle for applications is a channel of aio-pika.

    Args:
        name: see :class:`AsyncResource`.
        connect: a URL, or a function that makes a connection of aio-pika. The connection must not be robust, because a
            branch ends with its connection.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.
    """

    def __init__(
        self, name: str, connect: str | Callable[[], Awaitable[Any]], *, timeout: float | None = ANSWER_SECONDS
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._timeout = timeout

    async def open(self) -> "AsyncDtxSession":
        """Open a new connection and a channel.

        Raises:
            XAER_RMFAIL: dtx is unreachable.
        """
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
        """Make a session on a channel of the application.

        Args:
            handle: the channel, outside of any branch.
        """
        return AsyncDtxSession(handle, handle._connection, self._timeout, own=False)  # noqa: SLF001 - it has no other


class AsyncDtxSession(AnyDtxSession[Any]):
    """A session on a channel of aio-pika; as :class:`~dtx.client.tm.resources.DtxSession`, with awaited methods."""

    drive = staticmethod(drive_async)

    def __init__(self, channel: Any, connection: Any, timeout: float | None, *, own: bool) -> None:
        from dtx.client.aio import AioCoordinator, AioXAResource

        outcomes = AioCoordinator(connection, timeout=timeout)
        super().__init__(AioXAResource(channel, timeout=timeout), outcomes, own=own)
        self._connection = connection

    async def _scan(self) -> list[Xid]:
        return [xid async for xid in self._outcomes.recover()]

    async def _alive(self) -> bool:
        return not self.handle.is_closed and not self._connection.is_closed

    async def _leave(self) -> None:
        with suppress(Exception):
            await (self._connection.close() if self.own else self._outcomes.close())


class AsyncPep249Resource(AsyncResource):
    """A database whose driver has the two-phase methods of PEP 249 as coroutines, as psycopg's AsyncConnection has.

    Args:
        name: see :class:`AsyncResource`.
        connect: a function that makes a connection, not in autocommit mode.
    """

    def __init__(self, name: str, connect: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(name)
        self._connect = connect

    async def open(self) -> "AsyncPep249Session":
        """Open a new connection.

        Raises:
            XAER_RMFAIL: the database is unreachable.
        """
        try:
            return AsyncPep249Session(await self._connect(), own=True)
        except Exception as error:
            raise XAER_RMFAIL(f"{self.name} is out of reach: {words(error)}") from error

    def around(self, handle: Any) -> "AsyncPep249Session":
        """Make a session on a connection of the application.

        Args:
            handle: the connection, outside of any transaction.
        """
        return AsyncPep249Session(handle, own=False)


class AsyncPep249Session(Pep249Session):
    """One connection; as :class:`~dtx.client.tm.resources.Pep249Session`, with awaited methods."""

    drive = staticmethod(drive_async)


class AsyncTransactionManager(BaseTransactionManager["AsyncTransaction"]):
    """A transaction manager for programs with asyncio.

    The arguments are those of :class:`~dtx.client.tm.TransactionManager`. The object belongs to one event loop. Any
    task may begin transactions. A transaction belongs to the task that began it. Threads write the log, so its fsync
    does not block the event loop. Transactions that commit at the same time share one fsync.
    """

    where = "task"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._recovering = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Start recovery in the background. The first round begins at once.

        Returns:
            The transaction manager.
        """
        if self._recover_every is not None and self._task is None:
            self._task = asyncio.create_task(self._watch(), name="dtx tm recovery")
        return self

    async def close(self) -> None:
        """End recovery, and close the free sessions and the log. All transactions must be over."""
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
        """Begin a new transaction. The program completes it; ``async with tm.transaction()`` completes it by itself.

        Args:
            timeout: seconds, instead of the time-out of the transaction manager.
        """
        return AsyncTransaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    def transactional(self, function: Callable[_P, Awaitable[_R]]) -> Callable[_P, Awaitable[_R]]:
        """Decorate a coroutine function so that it runs in a transaction.

        It runs in the current transaction if there is one, and otherwise in a new one.
        """

        @wraps(function)
        async def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return await function(*args, **kwargs)
            async with self.transaction():
                return await function(*args, **kwargs)

        return within

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """Enlist a resource in the current transaction; see :meth:`AsyncTransaction.enlist`."""
        return await self.current.enlist(resource, handle)

    async def recover(self) -> RecoveryReport:
        """Make one round of recovery, as :meth:`dtx.client.tm.TransactionManager.recover` does."""
        async with self._recovering:
            return await drive_async(self.recovering())

    async def _watch(self) -> None:
        assert self._recover_every is not None
        while True:
            try:
                await self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed and is tried again later: %s", error)
            await asyncio.sleep(self._recover_every)


class AsyncTransaction(BaseTransaction):
    """One global transaction. It belongs to one task. Do not use it after its end.

    Args:
        manager: the transaction manager that began it.
        gtrid: the id of the transaction.
        timeout: seconds from begin to commit; ``None`` sets no limit.
    """

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """Enlist a resource, as :meth:`dtx.client.tm.Transaction.enlist` does."""
        return await drive_async(self._enlist_work(resource, handle))

    async def commit(self) -> Outcome:
        """Commit the whole transaction or nothing of it, as :meth:`dtx.client.tm.Transaction.commit` does.

        If the task is cancelled during the call, the cancellation takes effect after the end of the transaction.
        """
        return await _finish_uncancelled(self._commit_work())

    async def rollback(self) -> Outcome:
        """Roll the whole transaction back, as :meth:`dtx.client.tm.Transaction.rollback` does."""
        return await _finish_uncancelled(self._rollback_work())

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


async def _finish_uncancelled(work: Work[Outcome]) -> Outcome:
    """Drive *work* to its end. All cancellations take effect after that."""
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

"""The transaction manager for asyncio: the same commitment, recovery and log, with sessions that are awaited."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any, Final, ParamSpec, Self, TypeVar

from dtx.client.errors import (
    XA_RBROLLBACK,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    XAException,
    XARollback,
)
from dtx.client.tm import commitment, pep249, points
from dtx.client.tm.commitment import Branch, Outcome
from dtx.client.tm.decisions import DecisionLog
from dtx.client.tm.errors import Misuse, TimedOut, TransactionError
from dtx.client.tm.manager import BaseTransactionManager, TransactionState
from dtx.client.tm.names import Gtrid, check_resource_name
from dtx.client.tm.points import Point
from dtx.client.tm.recovery import RecoveryReport
from dtx.client.tm.resources import ANSWER_SECONDS, IDLE_SESSIONS
from dtx.client.tm.steps import Steps, run_async
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

_log: Final = logging.getLogger("dtx.client.tm")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class AsyncResource:
    """Where sessions come from; as :class:`~dtx.client.tm.Resource`, whose names and meanings these are.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    def __init__(self, name: str) -> None:
        self.name = check_resource_name(name)
        self._free: list[Any] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    async def open(self) -> Any:
        """A new session."""
        raise NotImplementedError

    def around(self, handle: Any) -> Any:
        """A session on a connection or channel of the application's own."""
        raise NotImplementedError

    async def acquire(self) -> Any:
        """A free session that is usable, or a new one."""
        while self._free:
            session = self._free.pop()
            if await session.usable():
                return session
            await session.close()
        return await self.open()

    async def started(self, xid: Xid) -> Any:
        """A session that works for the branch *xid*; as :meth:`dtx.client.tm.Resource.started`."""
        session = await self.acquire()
        try:
            await session.start(xid)
        except XAER_RMFAIL:
            await session.close()
        except BaseException:
            await session.close()
            raise
        else:
            return session
        session = await self.open()
        try:
            await session.start(xid)
        except BaseException:
            await session.close()
            raise
        return session

    async def release(self, session: Any) -> None:
        """The transaction is over."""
        if session.own and await session.usable() and len(self._free) < IDLE_SESSIONS:
            self._free.append(session)
        else:
            await session.close()

    async def close(self) -> None:
        """Close the free sessions."""
        free, self._free = self._free, []
        for session in free:
            await session.close()


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
            raise XAER_RMFAIL(f"{self.name} is out of reach: {pep249.words(error)}") from error
        try:
            channel = await connection.channel(publisher_confirms=False)
            return AsyncDtxSession(channel, connection, self._timeout, own=True)
        except XAException:
            await connection.close()
            raise
        except Exception as error:
            with suppress(Exception):
                await connection.close()
            raise XAER_RMFAIL(f"{self.name}: {pep249.words(error)}") from error

    def around(self, handle: Any) -> "AsyncDtxSession":
        """A session on a channel of the application's."""
        return AsyncDtxSession(handle, handle._connection, self._timeout, own=False)  # noqa: SLF001 - it has no other


class AsyncDtxSession:
    """A channel for work, and one beside it for outcomes; as :class:`~dtx.client.tm.resources.DtxSession`."""

    one_phase_repeatable = True

    def __init__(self, channel: Any, connection: Any, timeout: float | None, *, own: bool) -> None:
        from dtx.client.aio import Coordinator, XAResource

        self.own = own
        self._connection = connection
        self._work = XAResource(channel, timeout=timeout)
        self._outcomes = Coordinator(connection, timeout=timeout)
        self._ended = True

    @property
    def handle(self) -> Any:
        """The channel."""
        return self._work.channel

    async def start(self, xid: Xid) -> None:
        """Associate the channel."""
        await self._work.start(xid)
        self._ended = False

    async def end(self, xid: Xid) -> None:
        """Dissociate the channel."""
        self._ended = True
        await self._work.end(xid)

    async def prepare(self, xid: Xid) -> XaFlag:
        """First phase."""
        return await self._outcomes.prepare(xid)

    async def commit(self, xid: Xid) -> None:
        """Second phase."""
        await self._outcomes.commit(xid)

    async def commit_one_phase(self, xid: Xid) -> None:
        """The only phase."""
        await self._outcomes.commit(xid, one_phase=True)

    async def rollback(self, xid: Xid) -> None:
        """Roll back, ended or not."""
        if not self._ended:
            self._ended = True
            with suppress(XAException):
                await self._work.end(xid, fail=True)
        with suppress(XARollback):
            await self._outcomes.rollback(xid)

    async def forget(self, xid: Xid) -> None:
        """Discard a heuristic outcome."""
        await self._outcomes.forget(xid)

    async def recover(self) -> list[Xid]:
        """One whole scan."""
        return [xid async for xid in self._outcomes.recover()]

    async def usable(self) -> bool:
        """Whether channel and connection are open."""
        return self._ended and not self.handle.is_closed and not self._connection.is_closed

    async def close(self) -> None:
        """Close the connection, if it is the session's."""
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
            raise XAER_RMFAIL(f"{self.name} is out of reach: {pep249.words(error)}") from error

    def around(self, handle: Any) -> "AsyncPep249Session":
        """A session on a connection of the application's."""
        return AsyncPep249Session(handle, own=False)


class AsyncPep249Session:
    """One connection; as :class:`~dtx.client.tm.pep249.Pep249Session`, which says what is taken care of."""

    one_phase_repeatable = False

    def __init__(self, connection: Any, *, own: bool) -> None:
        self._connection = connection
        self.own = own
        self._current: Xid | None = None

    @property
    def handle(self) -> Any:
        """The connection."""
        return self._connection

    async def start(self, xid: Xid) -> None:
        """``tpc_begin``."""
        try:
            await self._connection.tpc_begin(pep249.xid_of(self._connection, xid))
        except Exception as error:
            raise pep249.refusal(self._connection, error, XAER_RMERR) from error
        self._current = xid

    async def end(self, xid: Xid) -> None:
        """Nothing to do."""

    async def prepare(self, xid: Xid) -> XaFlag:
        """``tpc_prepare``."""
        self._require(xid)
        try:
            await self._connection.tpc_prepare()
        except Exception as error:
            raise pep249.refusal(self._connection, error, XA_RBROLLBACK) from error
        return XaFlag.OK

    async def commit(self, xid: Xid) -> None:
        """``tpc_commit`` of a prepared transaction."""
        await self._complete("tpc_commit", xid)

    async def commit_one_phase(self, xid: Xid) -> None:
        """``tpc_commit`` without prepare."""
        self._require(xid)
        try:
            await self._connection.tpc_commit()
        except Exception as error:
            raise pep249.refusal(self._connection, error, XA_RBROLLBACK) from error
        self._current = None

    async def rollback(self, xid: Xid) -> None:
        """``tpc_rollback``, of whatever state."""
        await self._complete("tpc_rollback", xid)

    def _require(self, xid: Xid) -> None:
        if self._current != xid:
            raise XAER_PROTO(f"the connection is not in the branch {xid}")
        if not pep249.intact(self._connection):
            raise XA_RBROLLBACK("a statement failed, or the transaction was ended by hand")

    async def _complete(self, method: str, xid: Xid) -> None:
        own = self._current == xid
        if not own and self._current is not None:
            raise XAER_PROTO(f"the connection is in another branch ({self._current})")
        try:
            await getattr(self._connection, method)(*(() if own else (pep249.xid_of(self._connection, xid),)))
        except Exception as error:
            if pep249.missing(error) or (pep249.sqlstate(error) is None and await self._gone(xid)):
                raise XAER_NOTA(pep249.words(error)) from error
            raise XAER_RMFAIL(pep249.words(error)) from error
        self._current = None

    async def _gone(self, xid: Xid) -> bool:
        try:
            return xid not in await self.recover()
        except XAER_RMFAIL:
            return False

    async def forget(self, xid: Xid) -> None:
        """Nothing to do."""

    async def recover(self) -> list[Xid]:
        """``tpc_recover``, this database's alone."""
        try:
            found = await self._connection.tpc_recover()
            await self._connection.rollback()
        except Exception as error:
            raise XAER_RMFAIL(pep249.words(error)) from error
        return pep249.xids(found, pep249.database_of(self._connection))

    async def usable(self) -> bool:
        """Whether it is open and outside of a transaction."""
        closed = bool(getattr(self._connection, "closed", False))
        return self._current is None and not closed and pep249.idle(self._connection)

    async def close(self) -> None:
        """Close the connection, if it is the session's."""
        if self.own:
            with suppress(Exception):
                await self._connection.close()


class AsyncTransactionManager(BaseTransactionManager):
    """A transaction manager for programs with asyncio; arguments as of :class:`~dtx.client.tm.TransactionManager`.

    Of one event loop. Any task may begin transactions; each belongs to the task that began it. The log is written in
    threads, so its fsync holds nothing else up, and transactions that commit at the same time share it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._current: ContextVar[AsyncTransaction | None] = ContextVar("dtx_tm_async_transaction", default=None)
        self._recovering = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.log.claim(self.node, self.identity.process)

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

    def transaction(self, *, timeout: float | None = None) -> "AsyncTransaction":
        """``async with tm.transaction() as tx:`` commits at the end, and rolls back on an exception.

        Args:
            timeout: seconds, instead of the transaction manager's.
        """
        return AsyncTransaction(self, self.identity.new(), self.timeout if timeout is None else timeout)

    begin = transaction

    def transactional(self, function: Callable[_P, Awaitable[_R]]) -> Callable[_P, Awaitable[_R]]:
        """Decorator: the coroutine runs in a transaction; in the current one, where there is one."""

        @wraps(function)
        async def within(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self._current.get() is not None:
                return await function(*args, **kwargs)
            async with self.transaction():
                return await function(*args, **kwargs)

        return within

    @property
    def current(self) -> "AsyncTransaction":
        """The transaction that this task is in.

        Raises:
            Misuse: none is under way.
        """
        found = self._current.get()
        if found is None:
            raise Misuse("no transaction is under way in this task")
        return found

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """:meth:`AsyncTransaction.enlist` of the current transaction."""
        return await self.current.enlist(resource, handle)

    def enter(self, transaction: "AsyncTransaction") -> "Token[AsyncTransaction | None]":
        """*transaction* is the current one."""
        if self._current.get() is not None:
            raise Misuse("a transaction is under way in this task already; there are no nested ones")
        return self._current.set(transaction)

    def leave(self, token: "Token[AsyncTransaction | None]") -> None:
        """There is no current one any more."""
        self._current.reset(token)

    async def recover(self) -> RecoveryReport:
        """One round of recovery; as of :meth:`dtx.client.tm.TransactionManager.recover`."""
        async with self._recovering:
            work = self.round()
            try:
                report = await run_async(work.steps(), self.write)
            finally:
                for name, session in work.sessions.items():
                    if session is not None:
                        await self._resources[name].release(session)
            report.pruned = await self.write(lambda log: log.prune(self._keep))
        return self.recovered(report)

    async def _watch(self) -> None:
        assert self._recover_every is not None
        while True:
            try:
                await self.recover()
            except Exception as error:  # noqa: BLE001 - recovery goes on whatever a driver raises
                _log.warning("recovery failed, it is tried again: %s", error)
            await asyncio.sleep(self._recover_every)


class AsyncTransaction:
    """One global transaction. Of one task; not to be used after its end.

    Args:
        manager: whose.
        gtrid: its id.
        timeout: seconds.
    """

    def __init__(self, manager: AsyncTransactionManager, gtrid: bytes, timeout: float | None) -> None:
        self.gtrid: Final = gtrid
        self.state = TransactionState.ACTIVE
        self.outcome: Outcome | None = None
        """How it ended, once it has."""
        self._manager = manager
        self._timeout = timeout
        self._begun = time.monotonic()
        self._branches: dict[str, Branch] = {}
        self._token: Token[AsyncTransaction | None] | None = None
        manager.begun(gtrid)

    async def enlist(self, resource: AsyncResource | str, handle: Any = None) -> Any:
        """Let a resource take part; as of :meth:`dtx.client.tm.Transaction.enlist`."""
        self._require_active("enlist a resource")
        known = self._manager.known(resource)
        branch = self._branches.get(known.name)
        if branch is not None:
            if handle is not None and handle is not branch.session.handle:
                raise Misuse(f"{known.name} takes part in the transaction already, with another handle")
            return branch.session.handle
        xid = self._manager.identity.xid(self.gtrid, known.name)
        if handle is None:
            session = await known.started(xid)
        else:
            session = known.around(handle)
            await session.start(xid)
        self._branches[known.name] = Branch(known, session, xid)
        points.at(Point.BEGUN)
        return session.handle

    async def commit(self) -> Outcome:
        """Commit all of it or none; as of :meth:`dtx.client.tm.Transaction.commit`.

        A task that is cancelled meanwhile is so when the transaction has come to its end.
        """
        self._require_active("commit")
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        begun = Gtrid.read(self.gtrid)
        elapsed = max(time.monotonic() - self._begun, 0.0 if begun is None else time.time() - begun.begun)
        if self._timeout is not None and elapsed > self._timeout:
            await self._complete(commitment.rollback(plan))
            raise TimedOut(f"after {elapsed:.1f} s, the time-out is {self._timeout:g} s", gtrid=self.gtrid)
        return await self._complete(commitment.commit(plan))

    async def rollback(self) -> Outcome:
        """Undo all of it."""
        self._require_active("roll back")
        plan = self._manager.plan(self.gtrid, list(self._branches.values()))
        return await self._complete(commitment.rollback(plan))

    async def _complete(self, steps: Steps[Outcome]) -> Outcome:
        self.state = TransactionState.COMPLETING
        task = asyncio.create_task(self._run(steps))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                _log.warning("a cancelled transaction did not commit: %s", task.exception())
            raise

    async def _run(self, steps: Steps[Outcome]) -> Outcome:
        began = time.perf_counter()
        ended: Outcome | TransactionError | None = None
        try:
            self.outcome = ended = await run_async(steps, self._manager.write)
        except TransactionError as error:
            ended = error
            raise
        finally:
            self.state = TransactionState.OVER
            for branch in self._branches.values():
                await (branch.session.close() if ended is None else branch.resource.release(branch.session))
            self._manager.over(self.gtrid)
            if ended is not None:
                self._manager.count(self.gtrid, ended, time.perf_counter() - began)
        return ended

    def _require_active(self, what: str) -> None:
        if self.state is not TransactionState.ACTIVE:
            raise Misuse(f"cannot {what}: the transaction is {self.state.value} (gtrid {self.gtrid.decode('ascii')})")

    async def __aenter__(self) -> Self:
        self._token = self._manager.enter(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._token is not None:
            self._manager.leave(self._token)
            self._token = None
        if self.state is not TransactionState.ACTIVE:
            return
        if kind is None:
            await self.commit()
        else:
            await self.rollback()

"""Resources and their sessions, with threads and with asyncio; and the classes for dtx and for databases with threads.

A session is one connection. One transaction at a time works with it. A resource keeps its free sessions, so that a
transaction need not connect. Recovery gets its sessions in the same way. Sessions of every kind raise
:class:`~dtx.client.errors.XAException`. Each exception has its X/Open meaning.

The code of a kind of resource exists once, as work (:mod:`~dtx.client.tm.steps`). The class of a session or resource
defines how the work is driven. With threads the methods are called, and with asyncio they are awaited.

A database is any PEP 249 connection with the two-phase extension, for example psycopg's. PEP 249 leaves some cases
undefined in which data could be lost. This module defines them:

- An exception in the second phase is XAER_RMFAIL, "ask again". It is XAER_NOTA if the database does not know the
  branch. The database reports this by SQLSTATE 42704. If its errors have no SQLSTATE, it does not list the branch.
- PostgreSQL answers PREPARE TRANSACTION in a failed transaction with a silent ROLLBACK. If the driver shows the
  status of the transaction, as psycopg does, a transaction that is not intact is not prepared (XA_RBROLLBACK).
- PEP 249 has no vote "read-only", but Oracle's drivers do. Their ``tpc_prepare`` returns False if there is nothing to
  commit. A commit is an error then.
- ``pg_prepared_xacts`` lists the branches of all databases of a server. Branches of other databases are left out.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, TypeVar

import pika
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError

from dtx.client.calls import alive, unreachable
from dtx.client.coordination import Coordinator, XAResource
from dtx.client.errors import (
    XA_RBROLLBACK,
    XAER_NOTA,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    XAException,
    XARollback,
)
from dtx.client.tm.errors import Misuse
from dtx.client.tm.steps import Work, drive
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid

IDLE_SESSIONS: Final = 16
"""The number of free sessions that a resource keeps. Further ones are closed when their transaction ends."""
ANSWER_SECONDS: Final = 60.0
"""The default time in seconds that a resource waits for an answer of dtx."""
_INTRANS: Final = 2
"""libpq: the connection is in an intact transaction."""
_UNDEFINED_OBJECT: Final = "42704"
"""SQLSTATE of PostgreSQL: there is no prepared transaction of that name."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,56}")
Handle = TypeVar("Handle")
_P = ParamSpec("_P")


class Driven:
    """The base of classes with methods written as work: called with threads, and awaited with asyncio."""

    drive: ClassVar[Any] = staticmethod(drive)
    """The function that carries out the work of the methods."""


_D = TypeVar("_D", bound=Driven)


def driven_method(work: Callable[Concatenate[_D, _P], Work[Any]]) -> Callable[Concatenate[_D, _P], Any]:
    """Make a method from work. The method returns the result of the work, or with asyncio an awaitable for it."""

    @wraps(work)
    def method(self: _D, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        return self.drive(work(self, *args, **kwargs))

    return method


class ResourceSession(Driven, ABC, Generic[Handle]):
    """One connection to a resource manager, used by one thread or task at a time. With asyncio its methods are awaited.

    Args:
        own: whether the connection belongs to the resource. A connection of the application is not reused for other
            transactions, and stays open.
    """

    one_phase_repeatable: ClassVar[bool] = False
    """Whether a one-phase commit can be repeated on another session after its answer was lost."""

    def __init__(self, *, own: bool) -> None:
        self.own = own

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The channel or connection for the application."""

    @abstractmethod
    def start(self, xid: Xid) -> None:
        """Begin the work of the branch. Later work belongs to the branch.

        Args:
            xid: the branch.
        """

    @abstractmethod
    def end(self, xid: Xid) -> None:
        """End the work of the branch. Later work does not belong to the branch.

        Args:
            xid: the branch.
        """

    @abstractmethod
    def prepare(self, xid: Xid) -> XaFlag:
        """Prepare the branch.

        Args:
            xid: the branch.

        Returns:
            OK, or RDONLY. RDONLY means that there is nothing to commit and that the branch no longer exists.
        """

    @abstractmethod
    def commit(self, xid: Xid) -> None:
        """Commit a prepared branch: the second phase.

        Args:
            xid: the branch.
        """

    @abstractmethod
    def commit_one_phase(self, xid: Xid) -> None:
        """Commit the branch in one phase.

        Args:
            xid: the branch.

        Raises:
            XARollback: the branch is rolled back.
            XAException: for any other exception the outcome is not known.
        """

    @abstractmethod
    def rollback(self, xid: Xid) -> None:
        """Roll the branch back, whether or not it is prepared or ended.

        Args:
            xid: the branch.
        """

    @abstractmethod
    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome.

        Args:
            xid: the branch.
        """

    @abstractmethod
    def recover(self) -> list[Xid]:
        """Return the branches of all owners that this resource has in doubt or heuristically completed."""

    @abstractmethod
    def usable(self) -> bool:
        """Return whether another transaction can use this session."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Raise nothing."""


class Pool(Driven, ABC):
    """The base of resources with threads and with asyncio.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches. The log contains it.
    """

    def __init__(self, name: str) -> None:
        self.name = check_resource_name(name)
        self._lock = threading.Lock()
        self._free: list[Any] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def open(self) -> Any:
        """Open a new session."""

    @driven_method
    def acquire(self) -> Work[Any]:
        """Return a free session that is usable, or a new one."""
        while True:
            with self._lock:
                free = self._free.pop() if self._free else None
            if free is None:
                return (yield self.open)
            if (yield free.usable):
                return free
            yield free.close

    @driven_method
    def started(self, xid: Xid) -> Work[Any]:
        """Return a session that works for the branch *xid*.

        The connection of a free session may have been lost since its last use. No work was done in it, so a new
        session replaces it.

        Raises:
            XAException: the resource manager refuses, or is unreachable.
        """
        session = yield self.acquire
        try:
            yield from _started(session, xid)
        except XAER_RMFAIL:
            session = yield self.open
            yield from _started(session, xid)
        return session

    @driven_method
    def release(self, session: Any) -> Work[None]:
        """Take a session back after the transaction: keep it as a free one, or close it."""
        if session.own and (yield session.usable):
            with self._lock:
                kept = len(self._free) < IDLE_SESSIONS
                if kept:
                    self._free.append(session)
            if kept:
                return
        yield session.close

    @driven_method
    def close(self) -> Work[None]:
        """Close the free sessions."""
        with self._lock:
            free, self._free = self._free, []
        for session in free:
            yield session.close


def _started(session: Any, xid: Xid) -> Work[None]:
    """Start the branch. Close the session if that fails."""
    try:
        yield partial(session.start, xid)
    except BaseException:
        yield session.close
        raise


class Resource(Pool, Generic[Handle]):
    """A source of sessions. Any thread may use it.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches. The log contains it.
    """

    @abstractmethod
    def open(self) -> ResourceSession[Handle]:
        """Open a new session.

        Raises:
            XAER_RMFAIL: the resource manager is unreachable.
        """

    @abstractmethod
    def around(self, handle: Handle) -> ResourceSession[Handle]:
        """Make a session on a connection or channel of the application, which stays open afterwards.

        Args:
            handle: the connection or channel, outside of any transaction.
        """


class DtxResource(Resource[BlockingChannel]):
    """A virtual host of a dtx, with pika's BlockingConnection. The handle for applications is a channel.

    Args:
        name: see :class:`Resource`.
        connect: a URL, parameters of pika, or a function that makes a connection. Use a function for several
            addresses of a service and its standby.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.
    """

    def __init__(
        self,
        name: str,
        connect: str | pika.connection.Parameters | Callable[[], BlockingConnection],
        *,
        timeout: float | None = ANSWER_SECONDS,
    ) -> None:
        super().__init__(name)
        self._connect = connect
        self._timeout = timeout

    def open(self) -> "DtxSession":
        """Open a new connection and a channel.

        Raises:
            XAER_RMFAIL: dtx is unreachable.
        """
        connect: Any = pika.URLParameters(self._connect) if isinstance(self._connect, str) else self._connect
        try:
            connection = connect() if callable(connect) else BlockingConnection(connect)
        except (AMQPError, OSError) as error:
            raise unreachable(self.name, error) from error
        try:
            return DtxSession(connection.channel(), self._timeout, own=True)
        except BaseException as error:
            _close(connection)
            if isinstance(error, AMQPError):
                raise XAER_RMFAIL(f"{self.name}: {error or type(error).__name__}") from error
            raise

    def around(self, handle: BlockingChannel) -> "DtxSession":
        """Make a session on a channel of the application.

        Args:
            handle: the channel, outside of any branch.
        """
        return DtxSession(handle, self._timeout, own=False)


class AnyDtxSession(ResourceSession[Handle]):
    """A channel for work, and a second channel for outcomes. A refusal must not close the application's channel.

    Args:
        work: the XAResource of the channel, of either kind.
        outcomes: the Coordinator of its connection, of the same kind.
        own: whether the session closes the connection.
    """

    one_phase_repeatable = True

    def __init__(self, work: Any, outcomes: Any, *, own: bool) -> None:
        super().__init__(own=own)
        self._work, self._outcomes = work, outcomes
        self._ended = True

    @abstractmethod
    def _scan(self) -> Any:
        """Return all branches that the coordinator recovers."""

    @abstractmethod
    def _alive(self) -> Any:
        """Return whether the channel and the connection are open."""

    @abstractmethod
    def _leave(self) -> Any:
        """Close the connection if it is the session's, otherwise the channel for outcomes. Raise nothing."""

    @property
    def handle(self) -> Handle:
        """The channel."""
        return self._work.channel  # type: ignore[no-any-return]

    @driven_method
    def start(self, xid: Xid) -> Work[None]:
        """Associate the channel with the branch."""
        yield partial(self._work.start, xid)
        self._ended = False

    @driven_method
    def end(self, xid: Xid) -> Work[None]:
        """Dissociate the channel. Earlier publishes reach the server first, because the channel keeps the order."""
        self._ended = True
        yield partial(self._work.end, xid)

    @driven_method
    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """Prepare the branch: the first phase."""
        vote: XaFlag = yield partial(self._outcomes.prepare, xid)
        return vote

    @driven_method
    def commit(self, xid: Xid) -> Work[None]:
        """Commit a prepared branch: the second phase."""
        yield partial(self._outcomes.commit, xid)

    @driven_method
    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """Commit the branch in one phase."""
        yield partial(self._outcomes.commit, xid, one_phase=True)

    @driven_method
    def rollback(self, xid: Xid) -> Work[None]:
        """Roll the branch back. Before that, end the branch as failed if it is not ended.

        If the end is refused, the channel is closed.
        """
        if not self._ended:
            self._ended = True
            with suppress(XAException):
                yield partial(self._work.end, xid, fail=True)
        with suppress(XARollback):
            yield partial(self._outcomes.rollback, xid)

    @driven_method
    def forget(self, xid: Xid) -> Work[None]:
        """Discard the record of a heuristic outcome."""
        yield partial(self._outcomes.forget, xid)

    @driven_method
    def recover(self) -> Work[list[Xid]]:
        """Make one whole recovery scan."""
        found: list[Xid] = yield self._scan
        return found

    @driven_method
    def usable(self) -> Work[bool]:
        """Return whether the session is outside of a branch, and open."""
        if not self._ended:
            return False
        alive: bool = yield self._alive
        return alive

    @driven_method
    def close(self) -> Work[None]:
        """Close the connection, if it is the session's."""
        yield self._leave


class DtxSession(AnyDtxSession[BlockingChannel]):
    """A session on a channel of pika.

    Args:
        channel: an open channel.
        timeout: seconds to wait for each answer; ``None`` means: as long as the connection is open.
        own: whether the session closes the connection.
    """

    def __init__(self, channel: BlockingChannel, timeout: float | None, *, own: bool) -> None:
        outcomes = Coordinator(channel.connection, timeout=timeout)
        super().__init__(XAResource(channel, timeout=timeout), outcomes, own=own)

    def _scan(self) -> list[Xid]:
        return list(self._outcomes.recover())

    def _alive(self) -> bool:
        """Read the data that the server has sent, and return whether channel and connection are open."""
        return alive(self.handle.connection) and bool(self.handle.is_open)

    def _leave(self) -> None:
        if self.own:
            _close(self.handle.connection)
        else:
            self._outcomes.close()


def _close(connection: BlockingConnection) -> None:
    # AttributeError: pika raises it if the server's close arrives while pika closes the channels one by one
    with suppress(AMQPError, OSError, AttributeError):
        connection.close()


class Pep249Resource(Resource[Any]):
    """A database. The handle for applications is a connection.

    Within a transaction the application must not commit or roll back itself (psycopg refuses it).

    Args:
        name: see :class:`Resource`.
        connect: a function that makes a connection, not in autocommit mode. It is called again after the loss of a
            connection.
    """

    def __init__(self, name: str, connect: Callable[[], Any]) -> None:
        super().__init__(name)
        self._connect = connect

    def open(self) -> "Pep249Session":
        """Open a new connection.

        Raises:
            XAER_RMFAIL: the database is unreachable.
        """
        try:
            return Pep249Session(self._connect(), own=True)
        except Exception as error:
            raise XAER_RMFAIL(f"{self.name} is out of reach: {words(error)}") from error

    def around(self, handle: Any) -> "Pep249Session":
        """Make a session on a connection of the application.

        Args:
            handle: the connection, outside of any transaction.
        """
        return Pep249Session(handle, own=False)


class Pep249Session(ResourceSession[Any]):
    """One connection. Its two-phase methods are functions, or with asyncio coroutines.

    Args:
        connection: an open connection outside of a transaction.
        own: whether the session closes the connection.
    """

    def __init__(self, connection: Any, *, own: bool) -> None:
        super().__init__(own=own)
        self._connection = connection
        self._current: Xid | None = None
        """The branch of the connection's own transaction; ``None`` where there is none."""

    @property
    def handle(self) -> Any:
        """The connection."""
        return self._connection

    @driven_method
    def start(self, xid: Xid) -> Work[None]:
        """Call ``tpc_begin``."""
        try:
            yield partial(self._connection.tpc_begin, _xid_of(self._connection, xid))
        except Exception as error:
            raise _refusal(self._connection, error, XAER_RMERR) from error
        self._current = xid

    @driven_method
    def end(self, xid: Xid) -> Work[None]:  # noqa: ARG002 - see below
        """Do nothing: in PEP 249 the prepare ends the branch."""
        yield from ()

    @driven_method
    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """Call ``tpc_prepare``."""
        if (yield from self._first(xid, "tpc_prepare")) is False:
            self._current = None
            return XaFlag.RDONLY
        return XaFlag.OK

    @driven_method
    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """Call ``tpc_commit`` without prepare."""
        yield from self._first(xid, "tpc_commit")
        self._current = None

    def _first(self, xid: Xid, method: str) -> Work[Any]:
        """Call *method*, which the database may refuse. A refusal rolls the branch back.

        Returns:
            The result of the driver.
        """
        if self._current != xid:
            raise XAER_PROTO(f"the connection is not in the branch {xid}")
        if _info(self._connection, "transaction_status", _INTRANS) != _INTRANS:
            raise XA_RBROLLBACK("a statement failed, or the transaction was ended by hand")
        try:
            return (yield getattr(self._connection, method))
        except Exception as error:
            raise _refusal(self._connection, error, XA_RBROLLBACK) from error

    @driven_method
    def commit(self, xid: Xid) -> Work[None]:
        """Call ``tpc_commit`` for a prepared transaction, this connection's own or one found by recovery."""
        yield from self._second(xid, "tpc_commit")

    @driven_method
    def rollback(self, xid: Xid) -> Work[None]:
        """Call ``tpc_rollback``, in any state of the transaction."""
        yield from self._second(xid, "tpc_rollback")

    def _second(self, xid: Xid, method: str) -> Work[None]:
        own = self._current == xid
        if not own and self._current is not None:
            raise XAER_PROTO(f"the connection is in another branch ({self._current})")
        try:
            yield partial(getattr(self._connection, method), *(() if own else (_xid_of(self._connection, xid),)))
        except Exception as error:
            code = _sqlstate(error)
            if code == _UNDEFINED_OBJECT or (code is None and (yield from self._not_listed(xid))):
                raise XAER_NOTA(words(error)) from error
            raise XAER_RMFAIL(words(error)) from error
        self._current = None

    def _not_listed(self, xid: Xid) -> Work[bool]:
        """Return whether the database does not list the branch, for databases whose errors have no SQLSTATE."""
        try:
            return xid not in (yield self.recover)
        except XAER_RMFAIL:
            return False

    @driven_method
    def forget(self, xid: Xid) -> Work[None]:  # noqa: ARG002 - see below
        """Do nothing: PEP 249 has no heuristic outcomes."""
        yield from ()

    @driven_method
    def recover(self) -> Work[list[Xid]]:
        """Call ``tpc_recover``, and return the branches of this database only."""
        try:
            found = yield self._connection.tpc_recover
            yield self._connection.rollback  # psycopg begins a transaction for the query
        except Exception as error:
            raise XAER_RMFAIL(words(error)) from error
        return _xids(found, _info(self._connection, "dbname", None))

    @driven_method
    def usable(self) -> Work[bool]:
        """Return whether the connection is open and outside of a transaction."""
        yield from ()
        closed = bool(getattr(self._connection, "closed", False))
        return self._current is None and not closed and not _info(self._connection, "transaction_status", 0)

    @driven_method
    def close(self) -> Work[None]:
        """Close the connection, if it is the session's."""
        if self.own:
            with suppress(Exception):
                yield self._connection.close


def _xid_of(connection: Any, xid: Xid) -> Any:
    """Return *xid* in the form of the driver."""
    return connection.xid(xid.format_id, xid.gtrid.decode("ascii"), xid.bqual.decode("ascii"))


def _refusal(connection: Any, error: Exception, otherwise: type[XAException]) -> XAException:
    """Return XAER_RMFAIL if the connection is lost, because the outcome is not known then; else *otherwise*."""
    lost = bool(getattr(connection, "closed", False))
    return (XAER_RMFAIL if lost else otherwise)(words(error))


def words(error: BaseException) -> str:
    """Return the text of a driver's exception on one line, with a remedy if one is known."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "max_prepared_transactions" in text or "prepared transactions are disabled" in text:
        text += " (PostgreSQL needs max_prepared_transactions: at least one for each transaction at a time)"
    return text


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an exception of psycopg or psycopg2; ``None`` where there is none."""
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def _info(connection: Any, name: str, otherwise: Any) -> Any:
    """Return an attribute of ``connection.info``, as psycopg has it; *otherwise* if the driver has none."""
    return getattr(getattr(connection, "info", None), name, otherwise)


def _xids(found: Any, database: object) -> list[Xid]:
    """Return the branches in the result of ``tpc_recover``. Entries that are not xids belong to other programs."""
    branches = []
    for xid in found:
        if isinstance(database, str) and getattr(xid, "database", None) not in (None, database):
            continue
        format_id, gtrid, bqual = xid[0], xid[1], xid[2]
        if not (isinstance(format_id, int) and isinstance(gtrid, str) and isinstance(bqual, str)):
            continue
        with suppress(XaError, UnicodeError):
            branches.append(Xid(format_id, gtrid.encode("utf-8", "surrogateescape"), bqual.encode("utf-8")))
    return branches


def check_resource_name(name: str) -> str:
    """Return *name* if a bqual can contain it.

    Raises:
        Misuse: a bqual cannot contain it.
    """
    if not _NAME.fullmatch(name):
        raise Misuse(f"resource name {name!r} is not made of 1 to 56 letters, digits, ., - or _")
    return name

"""Resources and their sessions, with threads and with asyncio. Here are those for dtx and for databases, with threads.

A session is one connection that one transaction at a time works with. A resource keeps those that are free, so that
a transaction need not connect; recovery gets its own in the same way. Whatever the kind, a session raises
:class:`~dtx.client.errors.XAException`, and means by each what X/Open means.

What a kind of resource does is written once, as work (:mod:`~dtx.client.tm.steps`). The class of a session or resource
says how it is driven: so methods are called with threads, and awaited with asyncio.

Databases are every PEP 249 connection with the two-phase extension, psycopg's above all. What PEP 249
leaves open is where money is lost, so it is closed here:

- An exception in the second phase is XAER_RMFAIL, "ask again", unless the database says that it does not know the
  branch (XAER_NOTA): by SQLSTATE 42704, or where errors have none, by not listing it.
- PostgreSQL answers PREPARE TRANSACTION in a failed transaction with a silent ROLLBACK. So where the driver shows the
  status of the transaction, as psycopg does, one that is not intact is not prepared (XA_RBROLLBACK).
- PEP 249 has no vote "read-only", but Oracle's drivers do: ``tpc_prepare`` returns False where nothing is to be
  committed, and to commit it is an error then.
- ``pg_prepared_xacts`` lists the branches of all databases of a server; those of others are left out.
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
"""Free sessions that a resource keeps; further ones are closed when their transaction ends."""
ANSWER_SECONDS: Final = 60.0
"""How long a call of dtx is waited for, unless the resource is told otherwise."""
_INTRANS: Final = 2
"""libpq: the connection is within a transaction that is intact."""
_UNDEFINED_OBJECT: Final = "42704"
"""SQLSTATE of PostgreSQL: there is no prepared transaction of that name."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,56}")
Handle = TypeVar("Handle")
_P = ParamSpec("_P")


class Driven:
    """Has methods that are written as work: they are called with threads, and awaited with asyncio."""

    drive: ClassVar[Any] = staticmethod(drive)
    """How they are carried out."""


_D = TypeVar("_D", bound=Driven)


def driven(work: Callable[Concatenate[_D, _P], Work[Any]]) -> Callable[Concatenate[_D, _P], Any]:
    """A method that is written as work. It returns the result of the work, or what is awaited for it."""

    @wraps(work)
    def method(self: _D, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        return self.drive(work(self, *args, **kwargs))

    return method


class ResourceSession(Driven, ABC, Generic[Handle]):
    """One connection to a resource manager, used by one thread or task at a time. With asyncio its methods are awaited.

    Args:
        own: whether the connection is the resource's: one of the application's serves nobody else, and stays open.
    """

    one_phase_repeatable: ClassVar[bool] = False
    """Whether a one-phase commit whose answer was lost can be asked for again, on another session."""

    def __init__(self, *, own: bool) -> None:
        self.own = own

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """What the application works with."""

    @abstractmethod
    def start(self, xid: Xid) -> None:
        """Work that follows belongs to the branch."""

    @abstractmethod
    def end(self, xid: Xid) -> None:
        """Work that follows does not belong to the branch any more."""

    @abstractmethod
    def prepare(self, xid: Xid) -> XaFlag:
        """OK, or RDONLY: there is nothing to commit and the branch is gone."""

    @abstractmethod
    def commit(self, xid: Xid) -> None:
        """Second phase."""

    @abstractmethod
    def commit_one_phase(self, xid: Xid) -> None:
        """The only phase. XARollback: it is rolled back. Everything else: its outcome is not known."""

    @abstractmethod
    def rollback(self, xid: Xid) -> None:
        """Roll back, whether it is prepared or not, ended or not."""

    @abstractmethod
    def forget(self, xid: Xid) -> None:
        """Discard the record of a heuristic outcome."""

    @abstractmethod
    def recover(self) -> list[Xid]:
        """All branches that this resource has in doubt or heuristically completed, whoever's they are."""

    @abstractmethod
    def usable(self) -> bool:
        """Whether it is good for another transaction."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; raises nothing."""


class Pool(Driven, ABC):
    """What resources with threads and with asyncio have in common.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    def __init__(self, name: str) -> None:
        self.name = check_resource_name(name)
        self._lock = threading.Lock()
        self._free: list[Any] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @abstractmethod
    def open(self) -> Any:
        """A new session."""

    @driven
    def acquire(self) -> Work[Any]:
        """A free session that is usable, or a new one."""
        while True:
            with self._lock:
                free = self._free.pop() if self._free else None
            if free is None:
                return (yield self.open)
            if (yield free.usable):
                return free
            yield free.close

    @driven
    def started(self, xid: Xid) -> Work[Any]:
        """A session that works for the branch *xid*.

        A free session may have been lost since it was last used. Nothing was done in it, so a new one will do as well.

        Raises:
            XAException: the resource manager refuses, or is out of reach.
        """
        session = yield self.acquire
        try:
            yield from _started(session, xid)
        except XAER_RMFAIL:
            session = yield self.open
            yield from _started(session, xid)
        return session

    @driven
    def release(self, session: Any) -> Work[None]:
        """The transaction is over."""
        if session.own and (yield session.usable):
            with self._lock:
                kept = len(self._free) < IDLE_SESSIONS
                if kept:
                    self._free.append(session)
            if kept:
                return
        yield session.close

    @driven
    def close(self) -> Work[None]:
        """Close the free sessions."""
        with self._lock:
            free, self._free = self._free, []
        for session in free:
            yield session.close


def _started(session: Any, xid: Xid) -> Work[None]:
    """Start the branch; a session in which that fails is closed."""
    try:
        yield partial(session.start, xid)
    except BaseException:
        yield session.close
        raise


class Resource(Pool, Generic[Handle]):
    """Where sessions come from; any thread may use it.

    Args:
        name: 1 to 56 letters, digits, ``.``, ``-`` or ``_``. It is the bqual of the branches, and stands in the log.
    """

    @abstractmethod
    def open(self) -> ResourceSession[Handle]:
        """A new session.

        Raises:
            XAER_RMFAIL: the resource manager is out of reach.
        """

    @abstractmethod
    def around(self, handle: Handle) -> ResourceSession[Handle]:
        """A session on a connection or channel of the application's own, which stays open when it is done."""


class DtxResource(Resource[BlockingChannel]):
    """A virtual host of a dtx, with pika's BlockingConnection. What applications work with is a channel.

    Args:
        name: see :class:`Resource`.
        connect: a URL, or what makes a connection; several addresses of a service and its standby go there.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.
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
        """A new connection and a channel."""
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
        """A session on a channel of the application's."""
        return DtxSession(handle, self._timeout, own=False)


class AnyDtxSession(ResourceSession[Handle]):
    """A channel for work, and one beside it for outcomes: a refused one must not cost the application its channel.

    Args:
        work: the channel's XAResource, of either kind.
        outcomes: the Coordinator of its connection, of the same kind.
        own: whether the connection is to be closed with the session.
    """

    one_phase_repeatable = True

    def __init__(self, work: Any, outcomes: Any, *, own: bool) -> None:
        super().__init__(own=own)
        self._work, self._outcomes = work, outcomes
        self._ended = True

    @abstractmethod
    def _scan(self) -> Any:
        """All branches that the coordinator recovers."""

    @abstractmethod
    def _alive(self) -> Any:
        """Whether channel and connection are open."""

    @abstractmethod
    def _leave(self) -> Any:
        """Close what is to be closed with the session; raises nothing."""

    @property
    def handle(self) -> Handle:
        """The channel."""
        return self._work.channel  # type: ignore[no-any-return]

    @driven
    def start(self, xid: Xid) -> Work[None]:
        """Associate the channel."""
        yield partial(self._work.start, xid)
        self._ended = False

    @driven
    def end(self, xid: Xid) -> Work[None]:
        """Dissociate the channel. What was published is on its way before: the channel keeps the order."""
        self._ended = True
        yield partial(self._work.end, xid)

    @driven
    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """First phase."""
        vote: XaFlag = yield partial(self._outcomes.prepare, xid)
        return vote

    @driven
    def commit(self, xid: Xid) -> Work[None]:
        """Second phase."""
        yield partial(self._outcomes.commit, xid)

    @driven
    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """The only phase."""
        yield partial(self._outcomes.commit, xid, one_phase=True)

    @driven
    def rollback(self, xid: Xid) -> Work[None]:
        """Roll back. A branch that was not ended is ended as failed; where that cannot be, its channel is gone."""
        if not self._ended:
            self._ended = True
            with suppress(XAException):
                yield partial(self._work.end, xid, fail=True)
        with suppress(XARollback):
            yield partial(self._outcomes.rollback, xid)

    @driven
    def forget(self, xid: Xid) -> Work[None]:
        """Discard a heuristic outcome."""
        yield partial(self._outcomes.forget, xid)

    @driven
    def recover(self) -> Work[list[Xid]]:
        """One whole scan."""
        found: list[Xid] = yield self._scan
        return found

    @driven
    def usable(self) -> Work[bool]:
        """Whether it is outside of a branch, and open."""
        if not self._ended:
            return False
        alive: bool = yield self._alive
        return alive

    @driven
    def close(self) -> Work[None]:
        """Close the connection, if it is the session's."""
        yield self._leave


class DtxSession(AnyDtxSession[BlockingChannel]):
    """A session on a channel of pika.

    Args:
        channel: open.
        timeout: seconds.
        own: whether the connection is to be closed with the session.
    """

    def __init__(self, channel: BlockingChannel, timeout: float | None, *, own: bool) -> None:
        outcomes = Coordinator(channel.connection, timeout=timeout)
        super().__init__(XAResource(channel, timeout=timeout), outcomes, own=own)

    def _scan(self) -> list[Xid]:
        return list(self._outcomes.recover())

    def _alive(self) -> bool:
        """Looks for what the server said meanwhile."""
        return alive(self.handle.connection) and bool(self.handle.is_open)

    def _leave(self) -> None:
        if self.own:
            _close(self.handle.connection)
        else:
            self._outcomes.close()


def _close(connection: BlockingConnection) -> None:
    # AttributeError: pika's own, where the server's close comes in while pika closes the channels one by one
    with suppress(AMQPError, OSError, AttributeError):
        connection.close()


class Pep249Resource(Resource[Any]):
    """A database. What applications work with is a connection.

    Within a transaction the application neither commits nor rolls back itself (psycopg refuses it).

    Args:
        name: see :class:`Resource`.
        connect: makes a connection, not in autocommit mode. It is called again whenever one is lost.
    """

    def __init__(self, name: str, connect: Callable[[], Any]) -> None:
        super().__init__(name)
        self._connect = connect

    def open(self) -> "Pep249Session":
        """A new connection."""
        try:
            return Pep249Session(self._connect(), own=True)
        except Exception as error:
            raise XAER_RMFAIL(f"{self.name} is out of reach: {words(error)}") from error

    def around(self, handle: Any) -> "Pep249Session":
        """A session on a connection of the application's."""
        return Pep249Session(handle, own=False)


class Pep249Session(ResourceSession[Any]):
    """One connection, whose two-phase methods are functions, or coroutines with asyncio.

    Args:
        connection: open, outside of a transaction.
        own: whether it is to be closed with the session.
    """

    def __init__(self, connection: Any, *, own: bool) -> None:
        super().__init__(own=own)
        self._connection = connection
        self._current: Xid | None = None
        """The branch that the connection itself is in."""

    @property
    def handle(self) -> Any:
        """The connection."""
        return self._connection

    @driven
    def start(self, xid: Xid) -> Work[None]:
        """``tpc_begin``."""
        try:
            yield partial(self._connection.tpc_begin, _xid_of(self._connection, xid))
        except Exception as error:
            raise _refusal(self._connection, error, XAER_RMERR) from error
        self._current = xid

    @driven
    def end(self, xid: Xid) -> Work[None]:  # noqa: ARG002 - see below
        """Nothing to do: PEP 249 ends a branch where it prepares it."""
        yield from ()

    @driven
    def prepare(self, xid: Xid) -> Work[XaFlag]:
        """``tpc_prepare``."""
        if (yield from self._first(xid, "tpc_prepare")) is False:
            self._current = None
            return XaFlag.RDONLY
        return XaFlag.OK

    @driven
    def commit_one_phase(self, xid: Xid) -> Work[None]:
        """``tpc_commit`` without prepare."""
        yield from self._first(xid, "tpc_commit")
        self._current = None

    def _first(self, xid: Xid, method: str) -> Work[Any]:
        """Ask what can be refused: then the branch is rolled back. What the driver returns."""
        if self._current != xid:
            raise XAER_PROTO(f"the connection is not in the branch {xid}")
        if _info(self._connection, "transaction_status", _INTRANS) != _INTRANS:
            raise XA_RBROLLBACK("a statement failed, or the transaction was ended by hand")
        try:
            return (yield getattr(self._connection, method))
        except Exception as error:
            raise _refusal(self._connection, error, XA_RBROLLBACK) from error

    @driven
    def commit(self, xid: Xid) -> Work[None]:
        """``tpc_commit`` of a prepared transaction, this connection's own or one found by recovery."""
        yield from self._second(xid, "tpc_commit")

    @driven
    def rollback(self, xid: Xid) -> Work[None]:
        """``tpc_rollback``, of whatever state."""
        yield from self._second(xid, "tpc_rollback")

    def _second(self, xid: Xid, method: str) -> Work[None]:
        own = self._current == xid
        if not own and self._current is not None:
            raise XAER_PROTO(f"the connection is in another branch ({self._current})")
        try:
            yield partial(getattr(self._connection, method), *(() if own else (_xid_of(self._connection, xid),)))
        except Exception as error:
            code = _sqlstate(error)
            if code == _UNDEFINED_OBJECT or (code is None and (yield from self._gone(xid))):
                raise XAER_NOTA(words(error)) from error
            raise XAER_RMFAIL(words(error)) from error
        self._current = None

    def _gone(self, xid: Xid) -> Work[bool]:
        """Whether a database whose errors have no SQLSTATE does not have the branch in doubt."""
        try:
            return xid not in (yield self.recover)
        except XAER_RMFAIL:
            return False

    @driven
    def forget(self, xid: Xid) -> Work[None]:  # noqa: ARG002 - see below
        """Nothing to do: PEP 249 knows no heuristic outcomes."""
        yield from ()

    @driven
    def recover(self) -> Work[list[Xid]]:
        """``tpc_recover``, this database's alone."""
        try:
            found = yield self._connection.tpc_recover
            yield self._connection.rollback  # psycopg begins a transaction for the query
        except Exception as error:
            raise XAER_RMFAIL(words(error)) from error
        return _xids(found, _info(self._connection, "dbname", None))

    @driven
    def usable(self) -> Work[bool]:
        """Whether it is open and outside of a transaction."""
        yield from ()
        closed = bool(getattr(self._connection, "closed", False))
        return self._current is None and not closed and not _info(self._connection, "transaction_status", 0)

    @driven
    def close(self) -> Work[None]:
        """Close the connection, if it is the session's."""
        if self.own:
            with suppress(Exception):
                yield self._connection.close


def _xid_of(connection: Any, xid: Xid) -> Any:
    """*xid* as the driver wants it."""
    return connection.xid(xid.format_id, xid.gtrid.decode("ascii"), xid.bqual.decode("ascii"))


def _refusal(connection: Any, error: Exception, otherwise: type[XAException]) -> XAException:
    """XAER_RMFAIL where the connection is lost: then nobody knows; else *otherwise*."""
    lost = bool(getattr(connection, "closed", False))
    return (XAER_RMFAIL if lost else otherwise)(words(error))


def words(error: BaseException) -> str:
    """What a driver says, on one line; with what to do where that is known."""
    text = " ".join(str(error).split()) or type(error).__name__
    if "max_prepared_transactions" in text or "prepared transactions are disabled" in text:
        text += " (PostgreSQL needs max_prepared_transactions: at least one for each transaction at a time)"
    return text


def _sqlstate(error: BaseException) -> str | None:
    """As psycopg and psycopg2 give it."""
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def _info(connection: Any, name: str, otherwise: Any) -> Any:
    """What the driver says about the connection, as psycopg's do; *otherwise* where it says nothing."""
    return getattr(getattr(connection, "info", None), name, otherwise)


def _xids(found: Any, database: object) -> list[Xid]:
    """The branches among what ``tpc_recover`` gives; what is no xid is somebody else's."""
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
    """*name*, if it can stand in a bqual.

    Raises:
        Misuse: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise Misuse(f"resource name {name!r} is not made of 1 to 56 letters, digits, ., - or _")
    return name

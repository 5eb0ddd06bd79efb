"""Databases as resources: every PEP 249 connection with the two-phase extension, psycopg's above all.

What PEP 249 leaves open is where money is lost, so it is closed here:

- An exception in the second phase is XAER_RMFAIL, "ask again", unless the database says that it does not know the
  branch (XAER_NOTA): by SQLSTATE 42704, or where errors have none, by not listing it.
- PostgreSQL answers PREPARE TRANSACTION in a failed transaction with a silent ROLLBACK. So where the driver shows the
  status of the transaction, as psycopg does, one that is not intact is not prepared (XA_RBROLLBACK).
- PEP 249 has no vote "read-only", but Oracle's drivers do: ``tpc_prepare`` returns False where nothing is to be
  committed, and to commit it is an error then.
- ``pg_prepared_xacts`` lists the branches of all databases of a server; those of others are left out.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from dtx.client.errors import XA_RBROLLBACK, XAER_NOTA, XAER_PROTO, XAER_RMERR, XAER_RMFAIL, XAException
from dtx.client.tm.resources import Resource, Session, driven
from dtx.client.tm.steps import Work
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid

_INTRANS: Final = 2
"""libpq: the connection is within a transaction that is intact."""
_UNDEFINED_OBJECT: Final = "42704"
"""SQLSTATE of PostgreSQL: there is no prepared transaction of that name."""


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


class Pep249Session(Session[Any]):
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
        if not _intact(self._connection):
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
            if _missing(error) or (_sqlstate(error) is None and (yield from self._gone(xid))):
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
        return _xids(found, _database_of(self._connection))

    @driven
    def usable(self) -> Work[bool]:
        """Whether it is open and outside of a transaction."""
        yield from ()
        closed = bool(getattr(self._connection, "closed", False))
        return self._current is None and not closed and _idle(self._connection)

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


def _missing(error: BaseException) -> bool:
    """Whether PostgreSQL says that it has no such prepared transaction."""
    return _sqlstate(error) == _UNDEFINED_OBJECT


def _intact(connection: Any) -> bool:
    """Whether a transaction is under way in which nothing failed; taken for granted where the driver does not say."""
    status = getattr(getattr(connection, "info", None), "transaction_status", _INTRANS)
    return bool(status == _INTRANS)


def _idle(connection: Any) -> bool:
    """Whether no transaction is under way; taken for granted where the driver does not say."""
    return not getattr(getattr(connection, "info", None), "transaction_status", 0)


def _database_of(connection: Any) -> str | None:
    """The name of the database, where the driver says it."""
    name = getattr(getattr(connection, "info", None), "dbname", None)
    return name if isinstance(name, str) else None


def _xids(found: Any, database: str | None) -> list[Xid]:
    """The branches among what ``tpc_recover`` gives; what is no xid is somebody else's."""
    branches = []
    for xid in found:
        if database is not None and getattr(xid, "database", None) not in (None, database):
            continue
        format_id, gtrid, bqual = xid[0], xid[1], xid[2]
        if not (isinstance(format_id, int) and isinstance(gtrid, str) and isinstance(bqual, str)):
            continue
        with suppress(XaError, UnicodeError):
            branches.append(Xid(format_id, gtrid.encode("utf-8", "surrogateescape"), bqual.encode("utf-8")))
    return branches

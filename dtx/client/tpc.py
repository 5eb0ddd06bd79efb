"""The two-phase commit methods of PEP 249. Code written for the ``tpc_*`` methods of psycopg reads the same.

A :class:`TwoPhaseConnection` uses one channel of the program. The transaction contains all messages that the program
publishes and acknowledges with that channel between :meth:`~TwoPhaseConnection.tpc_begin` and
:meth:`~TwoPhaseConnection.tpc_prepare`.

The states and errors are those of psycopg:

- ``tpc_commit()`` without prepare is a one-phase commit.
- ``tpc_commit(xid)`` completes a prepared transaction of any program. It is refused while the connection has a
  transaction of its own.
- After ``tpc_prepare`` only ``tpc_commit`` and ``tpc_rollback`` are allowed.

The exceptions are those of PEP 249. Their attribute ``xa`` holds the XAException that caused them.

The differences from psycopg and from PEP 249 are:

- An xid has three parts. psycopg also accepts a plain string, as PostgreSQL does. XA has no such xids, so this module
  refuses a string.
- A gtrid has at least one byte. PostgreSQL accepts an empty one.
- Only ``tpc_begin`` begins a transaction. Work outside a transaction takes effect at once. ``commit`` and ``rollback``
  do nothing there.
- There are no cursors. The program works with the channel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import NamedTuple, Protocol

from pika.adapters.blocking_connection import BlockingChannel

from dtx.client.coordination import Coordinator, XAResource
from dtx.client.errors import (
    XAER_DUPID,
    XAER_INVAL,
    XAER_NOTA,
    XAER_OUTSIDE,
    XAER_PROTO,
    PeerIsNotDtx,
    XAException,
    XAHeuristic,
    XARollback,
)
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid


class Error(Exception):
    """PEP 249: the base of all errors here.

    Args:
        message: the description of the error.
        xa: the XAException that caused the error; ``None`` where there was none.
    """

    def __init__(self, message: str, xa: XAException | None = None) -> None:
        super().__init__(message)
        self.xa = xa


class DatabaseError(Error):
    """PEP 249: an error of the resource manager."""


class OperationalError(DatabaseError):
    """PEP 249: errors "not necessarily under the control of the programmer": rolled back, heuristic, unreachable."""


class ProgrammingError(DatabaseError):
    """PEP 249: the call is not allowed in this state or for this xid."""


class NotSupportedError(DatabaseError):
    """PEP 249: the server is not dtx and has no two-phase commit."""


class XidParts(Protocol):
    """PEP 249 of an xid: "it must provide sequence behaviour, allowing access to the three components"."""

    def __getitem__(self, index: int, /) -> int | str | None: ...


_PROGRAMMING = (XAER_DUPID, XAER_INVAL, XAER_NOTA, XAER_OUTSIDE, XAER_PROTO)


class TransactionId(NamedTuple):
    """A transaction id in three parts, as text. PEP 249 calls it an xid.

    Bytes that are not UTF-8 become lone surrogates (``surrogateescape``). A conversion of any xid to text and back
    therefore changes nothing.
    """

    format_id: int
    gtrid: str
    bqual: str

    @classmethod
    def from_xid(cls, xid: Xid) -> "TransactionId":
        """Return the text form of *xid*."""
        return cls(xid.format_id, _text(xid.gtrid), _text(xid.bqual))

    def to_xid(self) -> Xid:
        """Return the xid with its parts as bytes.

        Raises:
            ProgrammingError: a part is too long or out of range, or is not UTF-8.
        """
        try:
            return Xid(self.format_id, _octets(self.gtrid), _octets(self.bqual))
        except XaError as error:
            raise ProgrammingError(error.reason) from error
        except UnicodeEncodeError:
            raise ProgrammingError(f"a part of the transaction id is not UTF-8: {tuple(self)!r}") from None


class _State(Enum):
    """The state of the connection's own transaction."""

    NONE = "no"
    BEGUN = "a two-phase"
    PREPARED = "a prepared two-phase"
    READ_ONLY = "a read-only two-phase"
    """The transaction was prepared and had nothing to commit. The server has removed it."""


class TwoPhaseConnection:
    """The two-phase methods of a PEP 249 connection.

    Args:
        channel: an open channel of a BlockingConnection to dtx. The program uses it as before.
        timeout: seconds to wait for each answer. ``None`` means: as long as the connection is open.

    Raises:
        NotSupportedError: the server is not dtx.
        OperationalError: the connection is not open.
    """

    def __init__(self, channel: BlockingChannel, *, timeout: float | None = None) -> None:
        with _translated():
            self._work = XAResource(channel, timeout=timeout)
            # Commit and rollback use a separate channel: a refusal must not close the program's channel.
            self._outcome = Coordinator(channel.connection, timeout=timeout)
        self._state = _State.NONE
        self._xid: Xid | None = None

    @property
    def channel(self) -> BlockingChannel:
        """The channel whose work the transactions contain."""
        return self._work.channel

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, for calls that PEP 249 does not have: ``forget`` of a heuristic outcome, timeouts."""
        return self._outcome

    def xid(self, format_id: int, gtrid: str, bqual: str) -> TransactionId:
        """Make a transaction id for the other methods.

        Args:
            format_id: an unsigned integer of 32 bits.
            gtrid: the global transaction, 1 to 64 bytes of UTF-8.
            bqual: the branch within it, at most 64 bytes of UTF-8.

        Returns:
            The transaction id.

        Raises:
            ProgrammingError: a part is too long or out of range.
        """
        made = TransactionId(format_id, gtrid, bqual)
        _branch(made)
        return made

    def tpc_begin(self, xid: XidParts | Xid) -> None:
        """Begin a transaction.

        Args:
            xid: the result of :meth:`xid`, or any other sequence of the three parts, for example an xid of psycopg.

        Raises:
            ProgrammingError: the connection has a transaction already; the xid exists already; or the channel has
                unfinished work outside the transaction.
            OperationalError: the server refused, or is unreachable.
        """
        if self._state is not _State.NONE:
            raise ProgrammingError(f"tpc_begin() must be called outside {self._state.value} transaction")
        branch = _branch(xid)
        with _translated():
            self._work.start(branch)
        self._state, self._xid = _State.BEGUN, branch

    def tpc_prepare(self) -> None:
        """Prepare the transaction: the first phase.

        After this call returns, the transaction can be committed even if the program or the server fails.

        Raises:
            ProgrammingError: the connection has no transaction, or the transaction is prepared already.
            OperationalError: the transaction cannot be committed. Call ``tpc_rollback``.
        """
        if self._state is not _State.BEGUN:
            raise ProgrammingError(f"tpc_prepare() cannot be used in {self._state.value} transaction")
        # As with psycopg, only tpc_commit and tpc_rollback are allowed from here on, even if this fails.
        self._state = _State.PREPARED
        with _translated():
            self._work.end(self._own())
            if self._outcome.prepare(self._own()) is XaFlag.RDONLY:
                self._state = _State.READ_ONLY

    def tpc_commit(self, xid: XidParts | Xid | None = None) -> None:
        """Commit a transaction.

        Args:
            xid: a prepared transaction of any program, for example from :meth:`tpc_recover`. ``None`` means the
                connection's own transaction. If that one is prepared, this is the second phase. Otherwise it is a
                one-phase commit.

        Raises:
            ProgrammingError: *xid* is given while the connection has a transaction; *xid* is ``None`` while it has
                none; or the server does not know the xid.
            OperationalError: the transaction is rolled back, or completed by hand, or not finished yet. ``error.xa``
                tells these cases apart.
        """
        self._complete("tpc_commit", xid, self._outcome.commit, self._commit_one_phase)

    def tpc_rollback(self, xid: XidParts | Xid | None = None) -> None:
        """Roll back a transaction. Arguments and errors are those of :meth:`tpc_commit`."""
        self._complete("tpc_rollback", xid, self._outcome.rollback, self._rollback_begun)

    def tpc_recover(self) -> list[TransactionId]:
        """List the prepared and the heuristically completed transactions of the virtual host.

        Returns:
            The transactions that the user of the connection may complete.

        Raises:
            ProgrammingError: the connection has a transaction.
            OperationalError: the server is unreachable.
        """
        if self._state is not _State.NONE:
            raise ProgrammingError(f"tpc_recover() must be called outside {self._state.value} transaction")
        with _translated():
            return [TransactionId.from_xid(xid) for xid in self._outcome.recover()]

    def commit(self) -> None:
        """Do nothing: work outside a two-phase transaction is not transactional.

        Raises:
            ProgrammingError: the connection has a two-phase transaction. PEP 249 requires this error.
        """
        self._plain("commit()")

    def rollback(self) -> None:
        """Do nothing, as :meth:`commit` does. Errors are the same."""
        self._plain("rollback()")

    def close(self) -> None:
        """Close the channel of the coordinator. The program's channel and connection stay open."""
        with _translated():
            self._outcome.close()

    def _plain(self, method: str) -> None:
        if self._state is not _State.NONE:
            raise ProgrammingError(f"{method} cannot be used during {self._state.value} transaction")

    def _own(self) -> Xid:
        assert self._xid is not None
        return self._xid

    def _done(self) -> Xid:
        """Leave the transaction and return its xid."""
        xid = self._own()
        self._state, self._xid = _State.NONE, None
        return xid

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Leave the transaction when its outcome is known. Otherwise keep it, so that the call can be repeated."""
        try:
            with _translated():
                yield
        except Error as error:
            if isinstance(error.xa, XARollback | XAHeuristic | XAER_NOTA):
                self._done()
            raise
        self._done()

    def _complete(
        self,
        method: str,
        xid: XidParts | Xid | None,
        second_phase: Callable[[Xid], object],
        only_phase: Callable[[Xid], None],
    ) -> None:
        """Complete the prepared transaction *xid*, or the connection's own transaction if *xid* is ``None``."""
        if xid is not None:
            if self._state is not _State.NONE:
                raise ProgrammingError(f"{method}() with xid must be called outside a two-phase transaction")
            branch = _branch(xid)
            with _translated():
                second_phase(branch)
            return
        match self._state:
            case _State.NONE:
                raise ProgrammingError(f"{method}() without xid must be called inside a two-phase transaction")
            case _State.BEGUN:
                only_phase(self._done())
            case _State.PREPARED:
                with self._finishing():
                    second_phase(self._own())
            case _State.READ_ONLY:
                self._done()

    def _commit_one_phase(self, xid: Xid) -> None:
        # As with psycopg, no transaction remains after a failed commit, neither here nor at the server.
        try:
            self._work.end(xid)
        except XAException as error:
            with suppress(XAException):
                self._outcome.rollback(xid)
            raise _pep249(error)(str(error), error) from error
        with _translated():
            self._outcome.commit(xid, one_phase=True)

    def _rollback_begun(self, xid: Xid) -> None:
        # If the channel is closed, the branch is rollback-only already. The rollback needs only its xid.
        with suppress(XAException):
            self._work.end(xid, fail=True)
        with _translated():
            self._outcome.rollback(xid)


@contextmanager
def _translated() -> Iterator[None]:
    """Replace an XAException by the matching exception of PEP 249."""
    try:
        yield
    except XAException as error:
        raise _pep249(error)(str(error), error) from error


def _pep249(error: XAException) -> type[DatabaseError]:
    if isinstance(error, PeerIsNotDtx):
        return NotSupportedError
    return ProgrammingError if isinstance(error, _PROGRAMMING) else OperationalError


def _branch(xid: XidParts | Xid) -> Xid:
    if isinstance(xid, Xid):
        return xid
    try:
        format_id, gtrid, bqual = (xid[index] for index in range(3))
    except (LookupError, TypeError):
        raise ProgrammingError(f"not a transaction id: {xid!r}") from None
    if not (isinstance(format_id, int) and isinstance(gtrid, str) and isinstance(bqual, str)):
        raise ProgrammingError(f"not a transaction id: {xid!r}")
    return TransactionId(format_id, gtrid, bqual).to_xid()


def _text(octets: bytes) -> str:
    return octets.decode("utf-8", "surrogateescape")


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

"""Two-phase commit as PEP 249 has it, so that code written for psycopg's ``tpc_*`` methods reads the same.

A :class:`TwoPhaseConnection` stands on one channel. Between :meth:`~TwoPhaseConnection.tpc_begin` and
:meth:`~TwoPhaseConnection.tpc_prepare` what is published and acked with that channel belongs to the transaction.

States and errors are psycopg's: ``tpc_commit()`` without prepare is a one-phase commit, ``tpc_commit(xid)`` completes
somebody's prepared transaction and is refused within one of our own, and after ``tpc_prepare`` only ``tpc_commit`` and
``tpc_rollback`` are left. The exceptions are those of PEP 249, with the XAException that caused them as ``xa``.

What differs from psycopg and from PEP 249:

- An xid has three parts. psycopg takes a plain string, too, as PostgreSQL does; XA has no such xids, so it is refused.
- A gtrid has at least one octet. PostgreSQL takes an empty one.
- Nothing begins a transaction but ``tpc_begin``. Work outside it takes effect at once, and ``commit`` and ``rollback``
  do nothing there.
- There are no cursors: work is done with the channel.
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
        message: what went wrong.
        xa: the refusal behind it, where there was one.
    """

    def __init__(self, message: str, xa: XAException | None = None) -> None:
        super().__init__(message)
        self.xa = xa


class DatabaseError(Error):
    """PEP 249: an error of the resource manager."""


class OperationalError(DatabaseError):
    """PEP 249: errors "not necessarily under the control of the programmer": rolled back, heuristic, out of reach."""


class ProgrammingError(DatabaseError):
    """PEP 249: the call is wrong in this state or for this xid."""


class NotSupportedError(DatabaseError):
    """PEP 249: the server has no two-phase commit: it is not dtx."""


class XidParts(Protocol):
    """PEP 249 of an xid: "it must provide sequence behaviour, allowing access to the three components"."""

    def __getitem__(self, index: int, /) -> int | str | None: ...


_PROGRAMMING = (XAER_DUPID, XAER_INVAL, XAER_NOTA, XAER_OUTSIDE, XAER_PROTO)


class TransactionId(NamedTuple):
    """What PEP 249 calls an xid: three parts, as text.

    Octets that are not UTF-8 are kept as lone surrogates (``surrogateescape``), so every xid survives the way through
    text unchanged.
    """

    format_id: int
    gtrid: str
    bqual: str

    @classmethod
    def from_xid(cls, xid: Xid) -> "TransactionId":
        """The text form of *xid*."""
        return cls(xid.format_id, _text(xid.gtrid), _text(xid.bqual))

    def to_xid(self) -> Xid:
        """The octets.

        Raises:
            ProgrammingError: a part is too long or out of range.
        """
        try:
            return Xid(self.format_id, _octets(self.gtrid), _octets(self.bqual))
        except XaError as error:
            raise ProgrammingError(error.reason) from error
        except UnicodeEncodeError:
            raise ProgrammingError(f"a part of the transaction id is not UTF-8: {tuple(self)!r}") from None


class _State(Enum):
    """Where the connection's own transaction is."""

    NONE = "no"
    BEGUN = "a two-phase"
    PREPARED = "a prepared two-phase"
    READ_ONLY = "a read-only two-phase"
    """Prepared, and already gone: there was nothing to commit."""


class TwoPhaseConnection:
    """The two-phase methods of a PEP 249 connection.

    Args:
        channel: open; of a BlockingConnection to dtx. The program works with it as ever.
        timeout: seconds to wait for each answer, ``None``: as long as the connection lives.

    Raises:
        NotSupportedError: the server is not dtx.
        OperationalError: the connection is not open.
    """

    def __init__(self, channel: BlockingChannel, *, timeout: float | None = None) -> None:
        with _translated():
            self._work = XAResource(channel, timeout=timeout)
            # Outcomes go by a channel of their own: a refused one must not cost the program its channel.
            self._outcome = Coordinator(channel.connection, timeout=timeout)
        self._state = _State.NONE
        self._xid: Xid | None = None

    @property
    def channel(self) -> BlockingChannel:
        """The channel whose work the transactions are about."""
        return self._work.channel

    @property
    def coordinator(self) -> Coordinator:
        """For what PEP 249 has no word for: ``forget`` of a heuristic outcome, timeouts."""
        return self._outcome

    def xid(self, format_id: int, gtrid: str, bqual: str) -> TransactionId:
        """A transaction id for the other methods.

        Args:
            format_id: unsigned, 32 bit.
            gtrid: the global transaction, 1 to 64 octets of UTF-8.
            bqual: the branch within it, at most 64 octets of UTF-8.

        Raises:
            ProgrammingError: a part is too long or out of range.
        """
        made = TransactionId(format_id, gtrid, bqual)
        _branch(made)
        return made

    def tpc_begin(self, xid: XidParts | Xid) -> None:
        """Begin a transaction.

        Args:
            xid: from :meth:`xid`, or any other three parts: psycopg's own xid will do.

        Raises:
            ProgrammingError: within a transaction; the xid exists already; the channel has other work under way.
            OperationalError: the server refused, or is out of reach.
        """
        if self._state is not _State.NONE:
            raise ProgrammingError(f"tpc_begin() must be called outside {self._state.value} transaction")
        branch = _branch(xid)
        with _translated():
            self._work.start(branch)
        self._state, self._xid = _State.BEGUN, branch

    def tpc_prepare(self) -> None:
        """First phase. When it returns, the transaction can be committed whatever dies.

        Raises:
            ProgrammingError: not within a transaction, or prepared already.
            OperationalError: it cannot be committed; ``tpc_rollback`` is what is left.
        """
        if self._state is not _State.BEGUN:
            raise ProgrammingError(f"tpc_prepare() cannot be used in {self._state.value} transaction")
        # As with psycopg the way back to plain work is closed from here on, even if this fails.
        self._state = _State.PREPARED
        with _translated():
            self._work.end(self._own())
            if self._outcome.prepare(self._own()) is XaFlag.RDONLY:
                self._state = _State.READ_ONLY

    def tpc_commit(self, xid: XidParts | Xid | None = None) -> None:
        """Commit.

        Args:
            xid: somebody's prepared transaction, found by :meth:`tpc_recover`. Without it, the connection's own: by
                the second phase when it is prepared, else in one phase.

        Raises:
            ProgrammingError: with *xid* within a transaction, without it outside one; the xid is not known.
            OperationalError: it is rolled back, or completed by hand, or not finished yet: ``error.xa`` says which.
        """
        self._complete("tpc_commit", xid, self._outcome.commit, self._commit_one_phase)

    def tpc_rollback(self, xid: XidParts | Xid | None = None) -> None:
        """Roll back; arguments and errors as for :meth:`tpc_commit`."""
        self._complete("tpc_rollback", xid, self._outcome.rollback, self._rollback_begun)

    def tpc_recover(self) -> list[TransactionId]:
        """Every prepared or heuristically completed transaction of the virtual host that the user may complete.

        Raises:
            ProgrammingError: within a transaction.
            OperationalError: the server is out of reach.
        """
        if self._state is not _State.NONE:
            raise ProgrammingError(f"tpc_recover() must be called outside {self._state.value} transaction")
        with _translated():
            return [TransactionId.from_xid(xid) for xid in self._outcome.recover()]

    def commit(self) -> None:
        """Nothing to do: work outside a two-phase transaction is not transactional.

        Raises:
            ProgrammingError: within a two-phase transaction; PEP 249 has it so.
        """
        self._plain("commit()")

    def rollback(self) -> None:
        """As :meth:`commit`."""
        self._plain("rollback()")

    def close(self) -> None:
        """Close the channel for outcomes; the program's channel and connection stay open."""
        with _translated():
            self._outcome.close()

    def _plain(self, method: str) -> None:
        if self._state is not _State.NONE:
            raise ProgrammingError(f"{method} cannot be used during {self._state.value} transaction")

    def _own(self) -> Xid:
        assert self._xid is not None
        return self._xid

    def _done(self) -> Xid:
        """Leave the transaction; whose it was."""
        xid = self._own()
        self._state, self._xid = _State.NONE, None
        return xid

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Leave the transaction when its outcome is known; else it stays, and the call can be repeated."""
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
        """Complete somebody's prepared transaction, or the connection's own."""
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
        # As with psycopg a failed commit leaves no transaction behind, here or at the server.
        try:
            self._work.end(xid)
        except XAException as error:
            with suppress(XAException):
                self._outcome.rollback(xid)
            raise _pep249(error)(str(error), error) from error
        with _translated():
            self._outcome.commit(xid, one_phase=True)

    def _rollback_begun(self, xid: Xid) -> None:
        # The channel may be gone: then the branch is rollback-only already, and is rolled back by its xid.
        with suppress(XAException):
            self._work.end(xid, fail=True)
        with _translated():
            self._outcome.rollback(xid)


@contextmanager
def _translated() -> Iterator[None]:
    """XAException in, PEP 249 out."""
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

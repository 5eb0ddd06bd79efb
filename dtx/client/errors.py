"""What an XA call raises, under the names and numbers of X/Open.

Three families, as in X/Open CAE "The XA Specification", chapter 6:

- :class:`XARollback` (``XA_RB*``): the branch was, or can only be, rolled back.
- :class:`XAHeuristic` (``XA_HEUR*``): somebody completed the branch without its transaction manager.
- :class:`XAError` (``XAER_*``): the call was refused, or its outcome is not known.

``except XAER_NOTA`` and ``except XAException as error: error.name == "XAER_NOTA"`` say the same.
"""
# ruff: noqa: N801 - the classes carry the names that X/Open prints, so that they are found by them

from typing import ClassVar, Final

from dtx.wire.amqp09.closes import facts_of
from dtx.xa.codes import ReplyCode, XaFlag


class XAException(Exception):
    """An XA call that did not end as it was asked to.

    Args:
        reason: the server's words, or what went wrong on the way to it.
        reply_code: the AMQP reply code behind it, where there was one.
    """

    name: ClassVar[str] = "XA"
    """X/Open's name."""
    code: ClassVar[int] = 0
    """X/Open's number, as in ``xa.h`` and ``javax.transaction.xa``."""

    def __init__(self, reason: str, reply_code: int | None = None) -> None:
        super().__init__(reason, reply_code)
        self.reason = reason
        self.reply_code = reply_code
        self.call = ""
        """What was tried, for example ``commit of 1:6774:62``; set when the exception is raised by a call."""

    @property
    def facts(self) -> dict[str, str]:
        """What the server tells programs: ``state`` of the branch (503); how it ``ended``, and ``at`` what time (404).

        Decide on these alone: the sentence behind them is for people, and may change.
        """
        return facts_of(self.reason)

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.name, self.call, self.reason)))


class XARollback(XAException):
    """The branch is rolled back, or marked so that it can only be rolled back."""


class XA_RBROLLBACK(XARollback):
    """xa-rbrollback: "The rollback was caused by an unspecified reason"."""

    name = "XA_RBROLLBACK"
    code = 100


class XA_RBTIMEOUT(XARollback):
    """xa-rbtimeout: "A transaction branch took too long"."""

    name = "XA_RBTIMEOUT"
    code = 106


class XAHeuristic(XAException):
    """The branch was completed without its transaction manager; the record stays until ``forget``."""


class XA_HEURMIX(XAHeuristic):
    """xa-heurmix: "The transaction branch has been heuristically committed and rolled back"."""

    name = "XA_HEURMIX"
    code = 5


class XA_HEURRB(XAHeuristic):
    """xa-heurrb: "The transaction branch has been heuristically rolled back"."""

    name = "XA_HEURRB"
    code = 6


class XA_HEURCOM(XAHeuristic):
    """xa-heurcom: "The transaction branch has been heuristically committed"."""

    name = "XA_HEURCOM"
    code = 7


class XA_HEURHAZ(XAHeuristic):
    """xa-heurhaz: "The transaction branch may have been heuristically completed"."""

    name = "XA_HEURHAZ"
    code = 8


class XAError(XAException):
    """The call was refused, or its outcome is not known."""


class XAER_RMERR(XAError):
    """The resource manager refused (403, 506), or failed inside (541): a branch may or may not be prepared then."""

    name = "XAER_RMERR"
    code = -3


class XAER_NOTA(XAError):
    """The xid is not known (404)."""

    name = "XAER_NOTA"
    code = -4


class XAER_INVAL(XAError):
    """An argument was not acceptable (502), or asks for what is not supported (540)."""

    name = "XAER_INVAL"
    code = -5


class XAER_PROTO(XAError):
    """The call came in the wrong state (503)."""

    name = "XAER_PROTO"
    code = -6


class XAER_RMFAIL(XAError):
    """The resource manager is out of reach, or did not come to an end: the outcome is *not known*; ask again."""

    name = "XAER_RMFAIL"
    code = -7


class XAER_DUPID(XAError):
    """The xid exists already (530)."""

    name = "XAER_DUPID"
    code = -8


class XAER_OUTSIDE(XAError):
    """The channel has work outside any branch: unsettled deliveries, confirm or tx mode (406)."""

    name = "XAER_OUTSIDE"
    code = -9


class PeerIsNotDtx(XAER_RMERR):
    """The server at the other end does not announce the capability ``dtx``; nothing was sent to it."""


_BY_FLAG: Final[dict[XaFlag, type[XAException] | None]] = {
    XaFlag.RBROLLBACK: XA_RBROLLBACK,
    XaFlag.RBTIMEOUT: XA_RBTIMEOUT,
    XaFlag.HEURHAZ: XA_HEURHAZ,
    XaFlag.HEURCOM: XA_HEURCOM,
    XaFlag.HEURRB: XA_HEURRB,
    XaFlag.HEURMIX: XA_HEURMIX,
    XaFlag.RDONLY: None,
    XaFlag.OK: None,
}

_BY_REPLY_CODE: Final[dict[ReplyCode, type[XAError]]] = {
    ReplyCode.ACCESS_REFUSED: XAER_RMERR,
    ReplyCode.NOT_FOUND: XAER_NOTA,
    ReplyCode.RESOURCE_LOCKED: XAER_RMERR,
    ReplyCode.PRECONDITION_FAILED: XAER_OUTSIDE,
    ReplyCode.SYNTAX_ERROR: XAER_INVAL,
    ReplyCode.COMMAND_INVALID: XAER_PROTO,
    ReplyCode.RESOURCE_ERROR: XAER_RMERR,
    ReplyCode.NOT_ALLOWED: XAER_DUPID,
    ReplyCode.NOT_IMPLEMENTED: XAER_INVAL,
    ReplyCode.INTERNAL_ERROR: XAER_RMERR,
}

SECOND_PHASE: Final = frozenset({"commit", "one-phase commit", "rollback", "forget"})
"""Calls after which X/Open lets a transaction manager read XAER_RMERR as "it is rolled back, forget it"."""


def raised_by_flag(flag: XaFlag) -> type[XAException] | None:
    """The exception that stands for *flag*; ``None`` where it is a success (xa-ok, xa-rdonly)."""
    return _BY_FLAG[flag]


def raised_by_reply_code(operation: str, reply_code: int) -> type[XAError]:
    """The exception that stands for a channel exception of a dtx method. Total: unknown codes are XAER_RMERR.

    541 in a second phase is XAER_RMFAIL, not XAER_RMERR: X/Open's xa_commit says of XAER_RMERR that "the branch's
    work has been rolled back", while here the branch is decided still and the call may be repeated.
    """
    if reply_code == ReplyCode.INTERNAL_ERROR and operation in SECOND_PHASE:
        return XAER_RMFAIL
    try:
        return _BY_REPLY_CODE[ReplyCode(reply_code)]
    except ValueError:
        return XAER_RMERR

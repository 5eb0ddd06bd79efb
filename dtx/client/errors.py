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

__all__ = [
    "XAER_DUPID",
    "XAER_INVAL",
    "XAER_NOTA",
    "XAER_OUTSIDE",
    "XAER_PROTO",
    "XAER_RMERR",
    "XAER_RMFAIL",
    "XA_HEURCOM",
    "XA_HEURHAZ",
    "XA_HEURMIX",
    "XA_HEURRB",
    "XA_RBROLLBACK",
    "XA_RBTIMEOUT",
    "PeerIsNotDtx",
    "XAError",
    "XAException",
    "XAHeuristic",
    "XARollback",
]


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

    def __init_subclass__(cls, *, code: int | None = None) -> None:
        if code is not None:
            cls.name, cls.code = cls.__name__, code

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


class XA_RBROLLBACK(XARollback, code=100):
    """xa-rbrollback: "The rollback was caused by an unspecified reason"."""


class XA_RBTIMEOUT(XARollback, code=106):
    """xa-rbtimeout: "A transaction branch took too long"."""


class XAHeuristic(XAException):
    """The branch was completed without its transaction manager; the record stays until ``forget``."""


class XA_HEURMIX(XAHeuristic, code=5):
    """xa-heurmix: "The transaction branch has been heuristically committed and rolled back"."""


class XA_HEURRB(XAHeuristic, code=6):
    """xa-heurrb: "The transaction branch has been heuristically rolled back"."""


class XA_HEURCOM(XAHeuristic, code=7):
    """xa-heurcom: "The transaction branch has been heuristically committed"."""


class XA_HEURHAZ(XAHeuristic, code=8):
    """xa-heurhaz: "The transaction branch may have been heuristically completed"."""


class XAError(XAException):
    """The call was refused, or its outcome is not known."""


class XAER_RMERR(XAError, code=-3):
    """The resource manager refused (403, 506), or failed inside (541): a branch may or may not be prepared then."""


class XAER_NOTA(XAError, code=-4):
    """The xid is not known (404)."""


class XAER_INVAL(XAError, code=-5):
    """An argument was not acceptable (502), or asks for what is not supported (540)."""


class XAER_PROTO(XAError, code=-6):
    """The call came in the wrong state (503)."""


class XAER_RMFAIL(XAError, code=-7):
    """The resource manager is out of reach, or did not come to an end: the outcome is *not known*; ask again."""


class XAER_DUPID(XAError, code=-8):
    """The xid exists already (530)."""


class XAER_OUTSIDE(XAError, code=-9):
    """The channel has work outside any branch: unsettled deliveries, confirm or tx mode (406)."""


class PeerIsNotDtx(XAER_RMERR):
    """The server at the other end does not announce the capability ``dtx``; nothing was sent to it."""


_BY_FLAG: Final[dict[XaFlag, type[XAException] | None]] = {
    flag: None if flag in (XaFlag.OK, XaFlag.RDONLY) else globals()[f"XA_{flag.name}"] for flag in XaFlag
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

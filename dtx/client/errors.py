"""The exceptions that XA calls raise. They have the names and numbers of X/Open.

There are three families, as in X/Open CAE "The XA Specification", chapter 6:

- :class:`XARollback` (``XA_RB*``): the branch is rolled back, or can only be rolled back.
- :class:`XAHeuristic` (``XA_HEUR*``): the branch was completed without its transaction manager.
- :class:`XAError` (``XAER_*``): the call was refused, or its outcome is not known.

``except XAER_NOTA`` and ``except XAException as error: error.name == "XAER_NOTA"`` are equivalent.
"""
# ruff: noqa: N801 - the classes have the names of the X/Open text, so that a search for a name finds its class

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
    """The base of all errors of XA calls: the call did not do what it was asked to do.

    Args:
        reason: the text from the server, or a description of the failure to reach the server.
        reply_code: the AMQP reply code of the refusal; ``None`` where there was none.
    """

    name: ClassVar[str] = "XA"
    """The name in X/Open."""
    code: ClassVar[int] = 0
    """The number in X/Open, as in ``xa.h`` and ``javax.transaction.xa``."""

    def __init_subclass__(cls, *, code: int | None = None) -> None:
        if code is not None:
            cls.name, cls.code = cls.__name__, code

    def __init__(self, reason: str, reply_code: int | None = None) -> None:
        super().__init__(reason, reply_code)
        self.reason = reason
        self.reply_code = reply_code
        self.call = ""
        """The call that failed, for example ``commit of 1:6774:62``. A call that raises the exception sets it."""

    @property
    def facts(self) -> dict[str, str]:
        """The facts in the server's answer that programs can read.

        The server gives ``state`` (of the branch) with reply code 503, or ``member`` (the address of the dtx that has
        the branch). It gives ``ended`` (the outcome of the branch) and ``at`` (the time of its end) with reply code
        404. Programs must use only these facts: the text after them is for people and may change.
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
    """The branch was completed without its transaction manager. The server keeps the record until ``forget``."""


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
    """The resource manager refused the call (403, 405, 506), or had an internal error (541).

    After an internal error the branch may or may not be prepared.
    """


class XAER_NOTA(XAError, code=-4):
    """The xid is not known (404)."""


class XAER_INVAL(XAError, code=-5):
    """An argument is not valid (502), or asks for a feature that is not supported (540)."""


class XAER_PROTO(XAError, code=-6):
    """The call is not allowed in the current state (503)."""


class XAER_RMFAIL(XAError, code=-7):
    """The resource manager is unreachable, or did not finish the call.

    The outcome is *not known*. Repeat the call.
    """


class XAER_DUPID(XAError, code=-8):
    """The xid exists already (530)."""


class XAER_OUTSIDE(XAError, code=-9):
    """The channel has work outside any branch: unsettled deliveries, confirm or tx mode (406)."""


class PeerIsNotDtx(XAER_RMERR):
    """The server does not announce the capability ``dtx``. The client sent nothing to it."""


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
"""Calls after which X/Open lets a transaction manager treat XAER_RMERR as: the branch is rolled back, forget it."""


def raised_by_flag(flag: XaFlag) -> type[XAException] | None:
    """Return the exception for *flag*; ``None`` where the flag is a success (xa-ok, xa-rdonly)."""
    return _BY_FLAG[flag]


def raised_by_reply_code(operation: str, reply_code: int) -> type[XAError]:
    """Return the exception for a channel exception of a dtx method.

    Unknown codes are XAER_RMERR. 541 in a second phase is XAER_RMFAIL, not XAER_RMERR. The xa_commit text of X/Open
    says of XAER_RMERR that "the branch's work has been rolled back". In dtx the branch is still decided after 541, and
    the call may be repeated.

    Args:
        operation: the name of the call, for example ``commit``.
        reply_code: the AMQP reply code of the channel exception.
    """
    if reply_code == ReplyCode.INTERNAL_ERROR and operation in SECOND_PHASE:
        return XAER_RMFAIL
    try:
        return _BY_REPLY_CODE[ReplyCode(reply_code)]
    except ValueError:
        return XAER_RMERR

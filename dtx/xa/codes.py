"""XA answers and errors, with the numbers of the AMQP dtx classes.

Sources: the constants of the AMQP 0-9 dtx preview (``xa-rbrollback`` … ``xa-ok``), and the return codes of
X/Open CAE "Distributed Transaction Processing: The XA Specification", chapter 6.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum


class XaFlag(IntEnum):
    """The ``flags`` field of start-ok, end-ok, prepare-ok, commit-ok and rollback-ok."""

    RBROLLBACK = 1
    RBTIMEOUT = 2
    HEURHAZ = 3
    HEURCOM = 4
    HEURRB = 5
    HEURMIX = 6
    RDONLY = 7
    OK = 8

    @property
    def wire_name(self) -> str:
        """The constant's name in the XML, for example ``xa-rbrollback``."""
        return _WIRE_NAME[self]


_WIRE_NAME = {flag: f"xa-{flag.name.lower()}" for flag in XaFlag}


class ReplyCode(IntEnum):
    """The AMQP reply codes that close a channel: those of the dtx classes, and those for queues and exchanges."""

    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


class Heuristic(StrEnum):
    """How a branch ended without its transaction manager."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled-back"
    MIXED = "mixed"
    HAZARD = "hazard"

    @classmethod
    def of(cls, *, committed: int, rolled_back: int, unknown: int = 0) -> "Heuristic":
        """The outcome of a branch, from the number of its messages that went each way.

        Args:
            committed: messages published, or consumed for good.
            rolled_back: messages never published, or back in their queues.
            unknown: messages of which neither is known.
        """
        if unknown:
            return cls.HAZARD
        if committed and rolled_back:
            return cls.MIXED
        return cls.ROLLED_BACK if rolled_back else cls.COMMITTED

    @property
    def flag(self) -> XaFlag:
        """The answer to commit and rollback until ``forget``."""
        return _HEURISTIC_FLAG[self]


_HEURISTIC_FLAG = {
    Heuristic.COMMITTED: XaFlag.HEURCOM,
    Heuristic.ROLLED_BACK: XaFlag.HEURRB,
    Heuristic.MIXED: XaFlag.HEURMIX,
    Heuristic.HAZARD: XaFlag.HEURHAZ,
}


class RefusalCause(StrEnum):
    """Why an object is not deleted, for programs that use the HTTP API: AMQP has one reply code for both."""

    NOT_EMPTY = "not-empty"
    IN_USE = "in-use"


class XaError(Exception):
    """An operation was refused, or its outcome is not known.

    Args:
        code: the AMQP reply code for the peer.
        reason: for people; lower case, no full stop: what was tried, and on what.
        facts: for programs: ``state`` of the branch, or the address of the ``member`` that has it (503); how it
            ``ended``, and the time ``at`` which it ended (404).
        cause: for programs that use the HTTP API.
    """

    def __init__(
        self,
        code: ReplyCode,
        reason: str,
        facts: Mapping[str, str] | None = None,
        cause: RefusalCause | None = None,
    ) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.facts = facts or {}
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.code.value}: {self.reason}"

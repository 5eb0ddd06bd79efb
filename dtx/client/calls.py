"""The ten XA operations as data: what is sent, which answer belongs to it, and what the answer means.

Nothing here talks to anybody; every front (blocking, asyncio, callbacks) sends the same calls.

Which answers are results and which are raised: an answer that says that what was asked for has happened is a result,
every other one is raised. So ``xa-ok`` and ``xa-rdonly`` are results everywhere; ``xa-rbrollback`` and ``xa-rbtimeout``
are results of ``rollback`` and of ``end(fail=True)``, and are raised by ``start``, ``end``, ``prepare`` and ``commit``;
``xa-heur*`` are always raised, because the record stays until ``forget``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from dtx.client.errors import XAER_RMERR, XARollback, raised_by_flag
from dtx.client.pika_methods import DtxCoordination, DtxDemarcation
from dtx.xa.codes import XaError, XaFlag
from dtx.xa.xid import Xid

T = TypeVar("T")

DTX_CLASSES: Final = frozenset({DtxDemarcation.INDEX, DtxCoordination.INDEX})
"""A channel exception that names one of these classes is the answer to a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request.

    Args:
        operation: its name, for messages.
        xid: the branch concerned, if there is one.
        request: the method to send.
        reply: the class of the method that answers it.
        read: turns the answer into the result, or raises an XAException.
    """

    operation: str
    xid: Xid | None
    request: Any
    reply: type[Any]
    read: Callable[[Any], T]

    def __str__(self) -> str:
        return self.operation if self.xid is None else f"{self.operation} of {self.xid}"


def select() -> Call[None]:
    """Use distributed transactions on the channel."""
    return Call(
        operation="select",
        xid=None,
        request=DtxDemarcation.Select(),
        reply=DtxDemarcation.SelectOk,
        read=_nothing,
    )


def start(xid: Xid, *, join: bool, resume: bool) -> Call[XaFlag]:
    """Associate the channel with a branch."""
    return Call(
        operation="start",
        xid=xid,
        request=DtxDemarcation.Start(xid=xid.to_wire(), join=join, resume=resume),
        reply=DtxDemarcation.StartOk,
        read=_read_flag,
    )


def end(xid: Xid, *, fail: bool, suspend: bool) -> Call[XaFlag]:
    """Dissociate the channel from a branch."""
    return Call(
        operation="end",
        xid=xid,
        request=DtxDemarcation.End(xid=xid.to_wire(), fail=fail, suspend=suspend),
        reply=DtxDemarcation.EndOk,
        read=_read_rollback_flag if fail else _read_flag,
    )


def prepare(xid: Xid) -> Call[XaFlag]:
    """Ask for the vote."""
    return Call(
        operation="prepare",
        xid=xid,
        request=DtxCoordination.Prepare(xid=xid.to_wire()),
        reply=DtxCoordination.PrepareOk,
        read=_read_flag,
    )


def commit(xid: Xid, *, one_phase: bool) -> Call[XaFlag]:
    """Commit a branch."""
    return Call(
        operation="one-phase commit" if one_phase else "commit",
        xid=xid,
        request=DtxCoordination.Commit(xid=xid.to_wire(), one_phase=one_phase),
        reply=DtxCoordination.CommitOk,
        read=_read_flag,
    )


def rollback(xid: Xid) -> Call[XaFlag]:
    """Roll a branch back."""
    return Call(
        operation="rollback",
        xid=xid,
        request=DtxCoordination.Rollback(xid=xid.to_wire()),
        reply=DtxCoordination.RollbackOk,
        read=_read_rollback_flag,
    )


def forget(xid: Xid) -> Call[None]:
    """Discard a heuristic outcome."""
    return Call(
        operation="forget",
        xid=xid,
        request=DtxCoordination.Forget(xid=xid.to_wire()),
        reply=DtxCoordination.ForgetOk,
        read=_nothing,
    )


def recover(*, startscan: bool, endscan: bool) -> Call[list[Xid]]:
    """One batch of a recovery scan."""
    return Call(
        operation="recover",
        xid=None,
        request=DtxCoordination.Recover(startscan=startscan, endscan=endscan),
        reply=DtxCoordination.RecoverOk,
        read=_read_xids,
    )


def get_timeout(xid: Xid) -> Call[int]:
    """The timeout of a branch, in seconds."""
    return Call(
        operation="get-timeout",
        xid=xid,
        request=DtxCoordination.GetTimeout(xid=xid.to_wire()),
        reply=DtxCoordination.GetTimeoutOk,
        read=_read_timeout,
    )


def set_timeout(xid: Xid, seconds: int) -> Call[None]:
    """Set the timeout of a branch, in seconds."""
    if not 0 <= seconds <= 0xFFFFFFFF:
        raise ValueError(f"timeout of {seconds} s is not an unsigned 32 bit number")
    return Call(
        operation="set-timeout",
        xid=xid,
        request=DtxCoordination.SetTimeout(xid=xid.to_wire(), timeout=seconds),
        reply=DtxCoordination.SetTimeoutOk,
        read=_nothing,
    )


def _nothing(_answer: Any) -> None:
    return None


def _read_timeout(answer: Any) -> int:
    return int(answer.timeout)


def _read_xids(answer: Any) -> list[Xid]:
    try:
        return list(answer.decoded())
    except XaError as error:
        raise XAER_RMERR(f"the server answered recover with {error.reason}") from None


def _read_flag(answer: Any) -> XaFlag:
    """xa-ok and xa-rdonly are results, everything else is raised."""
    flag = _flag(answer)
    raised = raised_by_flag(flag)
    if raised is not None:
        raise raised(f"the server answered {flag.wire_name}")
    return flag


def _read_rollback_flag(answer: Any) -> XaFlag:
    """As :func:`_read_flag`, where xa-rb* says that what was asked for has happened."""
    flag = _flag(answer)
    raised = raised_by_flag(flag)
    if raised is not None and not issubclass(raised, XARollback):
        raise raised(f"the server answered {flag.wire_name}")
    return flag


def _flag(answer: Any) -> XaFlag:
    try:
        return XaFlag(answer.flags)
    except ValueError:
        raise XAER_RMERR(f"the server answered with unknown flags {answer.flags}") from None

"""Which failpoints stand around the answers to the dtx methods."""

from typing import Final, TypeVar

from dtx import failpoint
from dtx.failpoint import Point
from dtx.wire.amqp09.calls import DtxMethod
from dtx.xa.codes import XaError

_AROUND: Final = {
    DtxMethod.SELECT_OK: (Point.REPLY_SELECT_BEFORE, Point.REPLY_SELECT_SENT),
    DtxMethod.START_OK: (Point.REPLY_START_BEFORE, Point.REPLY_START_SENT),
    DtxMethod.END_OK: (Point.REPLY_END_BEFORE, Point.REPLY_END_SENT),
    DtxMethod.PREPARE_OK: (Point.REPLY_PREPARE_BEFORE, Point.REPLY_PREPARE_SENT),
    DtxMethod.COMMIT_OK: (Point.REPLY_COMMIT_BEFORE, Point.REPLY_COMMIT_SENT),
    DtxMethod.ROLLBACK_OK: (Point.REPLY_ROLLBACK_BEFORE, Point.REPLY_ROLLBACK_SENT),
    DtxMethod.FORGET_OK: (Point.REPLY_FORGET_BEFORE, Point.REPLY_FORGET_SENT),
    DtxMethod.RECOVER_OK: (Point.REPLY_RECOVER_BEFORE, Point.REPLY_RECOVER_SENT),
    DtxMethod.GET_TIMEOUT_OK: (Point.REPLY_GET_TIMEOUT_BEFORE, Point.REPLY_GET_TIMEOUT_SENT),
    DtxMethod.SET_TIMEOUT_OK: (Point.REPLY_SET_TIMEOUT_BEFORE, Point.REPLY_SET_TIMEOUT_SENT),
}
_EXCEPTION: Final = (Point.REPLY_EXCEPTION_BEFORE, Point.REPLY_EXCEPTION_SENT)
_Reply = TypeVar("_Reply", bytes, XaError)


def replying(answer: _Reply) -> _Reply:
    """A dtx method is answered with *answer*, in this turn of the event loop.

    Args:
        answer: the frame, or the reason of the channel's end; an empty one when nobody is left to be told.
    """
    if failpoint.armed and answer != b"":
        before, sent = _around(answer)
        failpoint.at(before)
        failpoint.when_written(sent)
    return answer


def saying(method: DtxMethod) -> None:
    """What is said now, in this turn of the event loop, is what *method* says, in another protocol."""
    if failpoint.armed:
        before, sent = _AROUND[method]
        failpoint.at(before)
        failpoint.when_written(sent)


def _around(answer: bytes | XaError) -> tuple[Point, Point]:
    return _EXCEPTION if isinstance(answer, XaError) else _AROUND[DtxMethod.from_bytes(answer[7:11])]

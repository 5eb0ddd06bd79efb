"""Which failpoints stand around the answers to the dtx methods."""

from typing import Final, TypeVar

from dtx import failpoint
from dtx.failpoint import Point
from dtx.wire.amqp09.methods import (
    DtxCommitOk,
    DtxEndOk,
    DtxForgetOk,
    DtxGetTimeoutOk,
    DtxPrepareOk,
    DtxRecoverOk,
    DtxRollbackOk,
    DtxSelectOk,
    DtxSetTimeoutOk,
    DtxStartOk,
)
from dtx.xa.codes import XaError

_AROUND: Final = {
    DtxSelectOk.KEY: (Point.REPLY_SELECT_BEFORE, Point.REPLY_SELECT_SENT),
    DtxStartOk.KEY: (Point.REPLY_START_BEFORE, Point.REPLY_START_SENT),
    DtxEndOk.KEY: (Point.REPLY_END_BEFORE, Point.REPLY_END_SENT),
    DtxPrepareOk.KEY: (Point.REPLY_PREPARE_BEFORE, Point.REPLY_PREPARE_SENT),
    DtxCommitOk.KEY: (Point.REPLY_COMMIT_BEFORE, Point.REPLY_COMMIT_SENT),
    DtxRollbackOk.KEY: (Point.REPLY_ROLLBACK_BEFORE, Point.REPLY_ROLLBACK_SENT),
    DtxForgetOk.KEY: (Point.REPLY_FORGET_BEFORE, Point.REPLY_FORGET_SENT),
    DtxRecoverOk.KEY: (Point.REPLY_RECOVER_BEFORE, Point.REPLY_RECOVER_SENT),
    DtxGetTimeoutOk.KEY: (Point.REPLY_GET_TIMEOUT_BEFORE, Point.REPLY_GET_TIMEOUT_SENT),
    DtxSetTimeoutOk.KEY: (Point.REPLY_SET_TIMEOUT_BEFORE, Point.REPLY_SET_TIMEOUT_SENT),
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


def saying(key: int) -> None:
    """What is said now, in this turn of the event loop, is what the method *key* says, in another protocol."""
    if failpoint.armed:
        before, sent = _AROUND[key]
        failpoint.at(before)
        failpoint.when_written(sent)


def _around(answer: bytes | XaError) -> tuple[Point, Point]:
    return _EXCEPTION if isinstance(answer, XaError) else _AROUND[int.from_bytes(answer[7:11], "big")]

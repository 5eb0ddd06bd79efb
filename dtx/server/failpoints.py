"""The failpoints before and after the answers to dtx methods."""

from typing import Final, TypeVar, get_args

from dtx import failpoint
from dtx.failpoint import Point
from dtx.wire.amqp09.methods import DtxCall
from dtx.xa.codes import XaError


def _points(call: type[DtxCall]) -> tuple[Point, Point]:
    name = call.NAME.partition(".")[2].replace("-", "_").upper()
    return Point[f"REPLY_{name}_BEFORE"], Point[f"REPLY_{name}_SENT"]


_AROUND: Final = {call.ANSWER.KEY: _points(call) for call in get_args(DtxCall)}
_EXCEPTION: Final = (Point.REPLY_EXCEPTION_BEFORE, Point.REPLY_EXCEPTION_SENT)
_Reply = TypeVar("_Reply", bytes, XaError)


def around_reply(answer: _Reply) -> _Reply:
    """Run the failpoints of *answer*, which is sent in this turn of the event loop.

    Args:
        answer: the frame, or the error that closes the channel; empty if the channel is already closed.

    Returns:
        *answer*.
    """
    if failpoint.armed and answer != b"":
        before, sent = _points_around(answer)
        failpoint.at(before)
        failpoint.when_written(sent)
    return answer


def around_answer(key: int) -> None:
    """Run the failpoints of the method *key* for the equivalent answer of another protocol."""
    if failpoint.armed:
        before, sent = _AROUND[key]
        failpoint.at(before)
        failpoint.when_written(sent)


def _points_around(answer: bytes | XaError) -> tuple[Point, Point]:
    return _EXCEPTION if isinstance(answer, XaError) else _AROUND[int.from_bytes(answer[7:11], "big")]

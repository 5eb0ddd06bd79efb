"""The server's answers to dtx methods, each a whole frame made with one pack."""

from collections.abc import Sequence
from struct import Struct
from typing import Final

from dtx.wire.amqp09.calls import DtxMethod
from dtx.wire.amqp09.frames import FRAME_END, METHOD
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid

_EMPTY: Final = Struct(">BHIIB")
_FLAGS: Final = Struct(">BHIIHB")
_TIMEOUT: Final = Struct(">BHIIIB")
_RECOVER: Final = Struct(">BHIIIB4scI")
_RECOVER_FIXED: Final = _RECOVER.size + 1
MAX_XIDS: Final = 20_000
"""Of one recover-ok: short ones would fill a large frame by the hundred thousand, and others wait while it is made."""


def flags_ok(channel: int, answer: DtxMethod, flag: XaFlag) -> bytes:
    """start-ok, end-ok, commit-ok, prepare-ok or rollback-ok.

    Args:
        channel: number.
        answer: which of them.
        flag: the outcome.
    """
    return _FLAGS.pack(METHOD, channel, 6, answer, flag, FRAME_END)


def empty_ok(channel: int, answer: DtxMethod) -> bytes:
    """select-ok, forget-ok or set-timeout-ok."""
    return _EMPTY.pack(METHOD, channel, 4, answer, FRAME_END)


def get_timeout_ok(channel: int, timeout: int) -> bytes:
    """get-timeout-ok; *timeout* in seconds."""
    return _TIMEOUT.pack(METHOD, channel, 8, DtxMethod.GET_TIMEOUT_OK, timeout, FRAME_END)


def recover_ok(channel: int, xids: Sequence[Xid]) -> bytes:
    """recover-ok: a table with the key ``xids``, type S: wire forms, each with its length octet before it.

    Args:
        channel: number.
        xids: as many as :func:`split_recover` says fit; none ends the scan.
    """
    data = b"".join(bytes((len(wire),)) + wire for wire in map(Xid.to_wire, xids))
    size = len(data)
    head = _RECOVER.pack(METHOD, channel, size + 18, DtxMethod.RECOVER_OK, size + 10, 4, b"xids", b"S", size)
    return head + data + bytes((FRAME_END,))


def split_recover(xids: Sequence[Xid], frame_max: int, start: int = 0) -> int:
    """How many of *xids*, from *start* on, come in one recover-ok frame: as many as fit, :data:`MAX_XIDS` at most.

    Args:
        xids: a snapshot.
        frame_max: negotiated frame-max, octets; 0 for none. It is never below 4096, so at least 30 fit.
        start: index of the first.
    """
    end = min(len(xids), start + MAX_XIDS)
    if not frame_max:
        return end - start
    room = frame_max - _RECOVER_FIXED
    index = start
    while index < end:
        room -= 7 + len(xids[index].gtrid) + len(xids[index].bqual)
        if room < 0:
            break
        index += 1
    return index - start

"""The xids in recover-ok: a table with one entry ``xids`` of type S. It contains wire forms as shortstrs."""

from collections.abc import Iterable, Sequence
from typing import Final

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import syntax_error
from dtx.wire.amqp09.methods import DtxRecoverOk
from dtx.xa.xid import Xid

_XIDS: Final = b"xids"
MAX_XIDS: Final = 20_000
"""The maximum number of xids in one recover-ok. A large frame could hold hundreds of thousands of short xids, and all
clients wait while it is made."""


def write_xids(xids: Iterable[bytes]) -> bytes:
    """Make the table of recover-ok from wire forms."""
    return tables.entry(_XIDS, b"S", b"".join([bytes((len(xid),)) + xid for xid in xids]))


def read_xids(table: bytes) -> list[bytes]:
    """Return the wire forms in the table of recover-ok. Other entries are ignored.

    Raises:
        WireError: 502 if the table or its xids are malformed or of another type.
    """
    found: list[bytes] = []
    for entry in tables.entries(table):
        if entry.key == _XIDS:
            if entry.kind not in (b"S", b"x"):
                raise syntax_error(f"{DtxRecoverOk.NAME} has xids of type {entry.kind!r}")
            found += split_xids(entry.value)
    return found


def split_xids(data: bytes) -> list[bytes]:
    """Return the wire forms in the value of the entry ``xids``.

    Raises:
        WireError: 502 if it is truncated.
    """
    found: list[bytes] = []
    position = 0
    while position < len(data):
        xid, position = tables.short_string(data, position)
        found.append(xid)
    return found


def recover_ok(channel: int, xids: Sequence[Xid]) -> bytes:
    """Make a whole recover-ok frame.

    Args:
        channel: the number of the channel.
        xids: at most as many as :func:`split_recover` returns; no xid ends the scan.
    """
    return DtxRecoverOk(write_xids(map(Xid.to_wire, xids))).frame(channel)


_RECOVER_FIXED: Final = len(recover_ok(0, ()))


def split_recover(xids: Sequence[Xid], frame_max: int, start: int = 0) -> int:
    """Return how many of *xids*, from *start* on, fit into one recover-ok frame: :data:`MAX_XIDS` at most.

    Args:
        xids: a snapshot.
        frame_max: negotiated frame-max in bytes; 0 for none. It is never below 4096, so at least 30 fit.
        start: index of the first xid.
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

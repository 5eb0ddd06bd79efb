"""Xids as databases write them. Pure: whatever cannot be an xid is ``None``, never a guess."""

import base64
import re
from typing import Final

from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

_GID: Final = re.compile(r"(-?\d{1,10})_([A-Za-z0-9+/]*={0,2})_([A-Za-z0-9+/]*={0,2})", re.ASCII)
_HEX: Final = re.compile(r"0[xX]([0-9A-Fa-f]*)", re.ASCII)


def from_gid(gid: str) -> Xid | None:
    """The xid behind a global identifier of PostgreSQL's ``PREPARE TRANSACTION``.

    psycopg, pgjdbc and :mod:`dtx.client.tm` all write ``format_base64(gtrid)_base64(bqual)``; Java's are signed.
    """
    match = _GID.fullmatch(gid)
    if match is None:
        return None
    try:
        return _xid(int(match[1]), base64.b64decode(match[2], validate=True), base64.b64decode(match[3], validate=True))
    except ValueError:
        return None


def from_recover(format_id: int, gtrid_length: int, bqual_length: int, data: bytes) -> Xid | None:
    """The xid of a line of ``XA RECOVER``: the two parts stand behind each other, as octets or, converted, as 0x…"""
    total = gtrid_length + bqual_length
    if len(data) != total:
        match = _HEX.fullmatch(data.decode("latin-1"))
        if match is None or len(match[1]) != 2 * total:
            return None
        data = bytes.fromhex(match[1])
    return _xid(format_id, data[:gtrid_length], data[gtrid_length:])


def _xid(format_id: int, gtrid: bytes, bqual: bytes) -> Xid | None:
    if format_id < 0:
        format_id += 1 << 32
    try:
        return Xid(format_id, gtrid, bqual)
    except XaError:
        return None

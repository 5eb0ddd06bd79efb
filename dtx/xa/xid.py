"""The transaction branch identifier, in its wire form and in its form for people.

AMQP 0-9 dtx preview, domain ``Xid``: format_id (long), gtrid_length (octet), bqual_length (octet), data.
"The sum of the two lengths must equal the length of the data field."
"""

from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, Self

from dtx.xa.codes import ReplyCode, XaError

MAX_GTRID: Final = 64
"""X/Open XA 4.2: MAXGTRIDSIZE, bytes."""
MAX_BQUAL: Final = 64
"""X/Open XA 4.2: MAXBQUALSIZE, bytes."""
_HEAD: Final = Struct(">LBB")
MAX_WIRE: Final = _HEAD.size + MAX_GTRID + MAX_BQUAL
"""Length of the longest wire form, bytes."""


class _Parts(NamedTuple):
    format_id: int
    gtrid: bytes
    bqual: bytes = b""


class Xid(_Parts):
    """One transaction branch of one global transaction: a tuple, since each branch needs ten look-ups.

    Args:
        format_id: unsigned, 32 bits.
        gtrid: the global transaction, 1 to 64 bytes of any value.
        bqual: the branch within it, 0 to 64 bytes of any value.

    Raises:
        XaError: 502 when a part is out of range.
    """

    __slots__ = ()

    def __new__(cls, format_id: int, gtrid: bytes, bqual: bytes = b"") -> Self:  # noqa: D102 - of these parts
        if not 0 <= format_id <= 0xFFFFFFFF:
            raise XaError(ReplyCode.SYNTAX_ERROR, f"xid format id {format_id} is not an unsigned 32 bit number")
        if not 1 <= len(gtrid) <= MAX_GTRID:
            raise XaError(ReplyCode.SYNTAX_ERROR, f"xid gtrid of {len(gtrid)} bytes, must be 1 to {MAX_GTRID}")
        if len(bqual) > MAX_BQUAL:
            raise XaError(ReplyCode.SYNTAX_ERROR, f"xid bqual of {len(bqual)} bytes, must be at most {MAX_BQUAL}")
        return super().__new__(cls, format_id, gtrid, bqual)

    def to_wire(self) -> bytes:
        """The content of the longstr that carries this xid."""
        return _HEAD.pack(self.format_id, len(self.gtrid), len(self.bqual)) + self.gtrid + self.bqual

    @classmethod
    def from_wire(cls, data: bytes) -> "Xid":
        """Read the content of an xid longstr.

        Raises:
            XaError: 502 when the lengths do not agree or are out of range.
        """
        return read_xid(bytes(data))

    def __str__(self) -> str:
        """``format:gtrid-hex:bqual-hex``, the form that all commands accept."""
        return f"{self.format_id}:{self.gtrid.hex()}:{self.bqual.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the form that :meth:`__str__` writes.

        Raises:
            XaError: 502 when *text* is not ``format:gtrid-hex:bqual-hex``, or a part is out of range.
        """
        try:
            format_id, gtrid, bqual = text.split(":")
            parts = int(format_id), bytes.fromhex(gtrid), bytes.fromhex(bqual)
        except ValueError:
            raise XaError(
                ReplyCode.SYNTAX_ERROR, f"not an xid: {text!r}, expected format:gtrid-hex:bqual-hex"
            ) from None
        return cls(*parts)

    @property
    def readable(self) -> str | None:
        """The two parts as text where every byte is printable ASCII, else ``None``."""
        parts = (self.gtrid, self.bqual)
        if all(0x20 <= octet < 0x7F for part in parts for octet in part):
            return "/".join(part.decode("ascii") for part in parts)
        return None


@lru_cache(maxsize=4096)
def read_xid(data: bytes) -> Xid:
    """As :meth:`Xid.from_wire`, with a cache: each branch is named about five times within moments.

    Args:
        data: hashable: ``bytes``, no other buffer.

    Raises:
        XaError: 502 when the lengths do not agree or are out of range.
    """
    if len(data) < _HEAD.size:
        raise XaError(ReplyCode.SYNTAX_ERROR, f"xid of {len(data)} bytes is truncated")
    format_id, gtrid_length, bqual_length = _HEAD.unpack_from(data)
    split = _HEAD.size + gtrid_length
    if len(data) != split + bqual_length:
        raise XaError(
            ReplyCode.SYNTAX_ERROR,
            f"xid declares {gtrid_length}+{bqual_length} bytes of data and has {len(data) - _HEAD.size}",
        )
    return Xid(format_id, data[_HEAD.size : split], data[split:])

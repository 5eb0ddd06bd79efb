"""The methods of classes 101 (dtx-demarcation) and 105 (dtx-coordination) as pika knows methods.

Importing this module registers them with pika, so that its frame decoder and its channels understand them. An xid is
the ``bytes`` of its wire form here, as every longstr is; :class:`dtx.xa.xid.Xid` reads and writes it.

On the wire (AMQP 0-9 dtx preview): ``ticket`` is a short and comes first, except that get-timeout has none; bits that
follow each other share an octet, the first in bit 0; ``endscan`` is a *long*, not a bit; flags are a short. The answers
are not ``synchronous`` here, though the XML says so of every method: to pika the word means "wait for the answer".

Every ``decode`` raises WireError 502 when the arguments are truncated or something comes after them.
"""

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Final, Self

from pika import amqp_object, spec

from dtx.wire.amqp09 import tables
from dtx.wire.amqp09.errors import syntax_error
from dtx.xa.xid import Xid

_SHORT: Final = Struct(">H")
_LONG: Final = Struct(">I")
_RECOVER: Final = Struct(">HBI")
XIDS: Final = b"xids"
"""The key of the only entry of recover-ok's table."""


class Method(amqp_object.Method):  # type: ignore[misc]  # pika has no types
    """Reads to the end of its arguments and never past it; fields are set by :meth:`_read`, written by ``encode``."""

    INDEX: int
    NAME: str
    synchronous = False

    def encode(self) -> list[bytes]:
        """The arguments, for pika to join."""
        return []

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """Read the arguments from *offset* to the end of *encoded*.

        Raises:
            WireError: 502.
        """
        end = self._read(encoded, offset)
        if end != len(encoded):
            what = "truncated" if end > len(encoded) else f"followed by {len(encoded) - end} octets"
            raise syntax_error(f"{self.NAME} is {what}")
        return self

    def _read(self, encoded: bytes, offset: int) -> int:  # noqa: ARG002
        """Set the fields; where they end, which is past the end of *encoded* when it is truncated."""
        return offset


def bit_octet(encoded: bytes, offset: int) -> int:
    """The octet of bits at *offset*; 0 past the end, which is found out when the fields are through."""
    return encoded[offset] if offset < len(encoded) else 0


def join_xids(xids: Iterable[bytes]) -> bytes:
    """The value of the entry ``xids`` of recover-ok: each wire form with its length octet before it."""
    return b"".join(bytes((len(xid),)) + xid for xid in xids)


def split_xids(data: bytes) -> list[bytes]:
    """The wire forms in the value of the entry ``xids`` of recover-ok.

    Raises:
        WireError: 502 when it is truncated.
    """
    found: list[bytes] = []
    position = 0
    while position < len(data):
        xid, position = tables.short_string(data, position)
        found.append(xid)
    return found


class _Flags(Method):
    def __init__(self, flags: int = 0) -> None:
        self.flags = flags

    def encode(self) -> list[bytes]:
        return [_SHORT.pack(self.flags)]

    def _read(self, encoded: bytes, offset: int) -> int:
        self.flags = int.from_bytes(encoded[offset : offset + 2], "big")
        return offset + 2


class _Branch(Method):
    """A method whose arguments are ticket and xid, and maybe more after them."""

    synchronous = True

    def __init__(self, ticket: int = 0, xid: bytes = b"") -> None:
        self.ticket = ticket
        self.xid = xid

    def encode(self) -> list[bytes]:
        return [_SHORT.pack(self.ticket), tables.put_long(self.xid)]

    def _read(self, encoded: bytes, offset: int) -> int:
        self.ticket = int.from_bytes(encoded[offset : offset + 2], "big")
        self.xid, offset = tables.long_string(encoded, offset + 2)
        return offset


class DtxDemarcation(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """Class 101: which work belongs to which branch."""

    INDEX = 0x0065
    NAME = "DtxDemarcation"

    class Select(Method):
        """Use distributed transactions on this channel."""

        INDEX = 0x0065000A
        NAME = "DtxDemarcation.Select"
        synchronous = True

    class SelectOk(Method):
        """The channel uses distributed transactions."""

        INDEX = 0x0065000B
        NAME = "DtxDemarcation.SelectOk"

    class Start(_Branch):
        """Work from here on is done on behalf of *xid*."""

        INDEX = 0x00650014
        NAME = "DtxDemarcation.Start"

        def __init__(self, ticket: int = 0, xid: bytes = b"", join: bool = False, resume: bool = False) -> None:
            super().__init__(ticket, xid)
            self.join = join
            self.resume = resume

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [*super().encode(), bytes((self.join | self.resume << 1,))]

        def _read(self, encoded: bytes, offset: int) -> int:
            offset = super()._read(encoded, offset)
            bits = bit_octet(encoded, offset)
            self.join, self.resume = bool(bits & 1), bool(bits & 2)
            return offset + 1

    class StartOk(_Flags):
        """The branch is started, or is rollback-only."""

        INDEX = 0x00650015
        NAME = "DtxDemarcation.StartOk"

    class End(_Branch):
        """The work on behalf of *xid* is finished, has failed or is suspended."""

        INDEX = 0x0065001E
        NAME = "DtxDemarcation.End"

        def __init__(self, ticket: int = 0, xid: bytes = b"", fail: bool = False, suspend: bool = False) -> None:
            super().__init__(ticket, xid)
            self.fail = fail
            self.suspend = suspend

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [*super().encode(), bytes((self.fail | self.suspend << 1,))]

        def _read(self, encoded: bytes, offset: int) -> int:
            offset = super()._read(encoded, offset)
            bits = bit_octet(encoded, offset)
            self.fail, self.suspend = bool(bits & 1), bool(bits & 2)
            return offset + 1

    class EndOk(_Flags):
        """The channel is no longer associated with the branch."""

        INDEX = 0x0065001F
        NAME = "DtxDemarcation.EndOk"


class DtxCoordination(amqp_object.Class):  # type: ignore[misc]  # pika has no types
    """Class 105: what becomes of a branch."""

    INDEX = 0x0069
    NAME = "DtxCoordination"

    class Commit(_Branch):
        """Make produced messages available and discard consumed ones."""

        INDEX = 0x0069000A
        NAME = "DtxCoordination.Commit"

        def __init__(self, ticket: int = 0, xid: bytes = b"", one_phase: bool = False) -> None:
            super().__init__(ticket, xid)
            self.one_phase = one_phase

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [*super().encode(), bytes((self.one_phase,))]

        def _read(self, encoded: bytes, offset: int) -> int:
            offset = super()._read(encoded, offset)
            self.one_phase = bool(bit_octet(encoded, offset) & 1)
            return offset + 1

    class CommitOk(_Flags):
        """The branch is committed, or how it ended instead."""

        INDEX = 0x0069000B
        NAME = "DtxCoordination.CommitOk"

    class Forget(_Branch):
        """Discard the knowledge of a heuristically completed branch."""

        INDEX = 0x00690014
        NAME = "DtxCoordination.Forget"

    class ForgetOk(Method):
        """The branch is forgotten."""

        INDEX = 0x00690015
        NAME = "DtxCoordination.ForgetOk"

    class GetTimeout(Method):
        """Ask for the timeout of a branch. The only method on a branch that has no ticket."""

        INDEX = 0x0069001E
        NAME = "DtxCoordination.GetTimeout"
        synchronous = True

        def __init__(self, xid: bytes = b"") -> None:
            self.xid = xid

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [tables.put_long(self.xid)]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.xid, offset = tables.long_string(encoded, offset)
            return offset

    class GetTimeoutOk(Method):
        """The timeout in seconds."""

        INDEX = 0x0069001F
        NAME = "DtxCoordination.GetTimeoutOk"

        def __init__(self, timeout: int = 0) -> None:
            self.timeout = timeout

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [_LONG.pack(self.timeout)]

        def _read(self, encoded: bytes, offset: int) -> int:
            self.timeout = int.from_bytes(encoded[offset : offset + 4], "big")
            return offset + 4

    class Prepare(_Branch):
        """Prepare for commitment whatever was produced or consumed on behalf of *xid*."""

        INDEX = 0x00690028
        NAME = "DtxCoordination.Prepare"

    class PrepareOk(_Flags):
        """The vote."""

        INDEX = 0x00690029
        NAME = "DtxCoordination.PrepareOk"

    class Recover(Method):
        """Ask for branches that are prepared or heuristically completed."""

        INDEX = 0x00690032
        NAME = "DtxCoordination.Recover"
        synchronous = True

        def __init__(self, ticket: int = 0, startscan: bool = False, endscan: bool = False) -> None:
            self.ticket = ticket
            self.startscan = startscan
            self.endscan = endscan

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [_RECOVER.pack(self.ticket, self.startscan, self.endscan)]

        def _read(self, encoded: bytes, offset: int) -> int:
            if len(encoded) - offset >= _RECOVER.size:
                self.ticket, bits, endscan = _RECOVER.unpack_from(encoded, offset)
                self.startscan, self.endscan = bool(bits & 1), endscan != 0
            return offset + _RECOVER.size

    class RecoverOk(Method):
        """A batch of a recovery scan; an empty one is its end.

        ``xids`` are wire forms. Other entries of the table are ignored.
        """

        INDEX = 0x00690033
        NAME = "DtxCoordination.RecoverOk"

        def __init__(self, xids: Sequence[bytes] = ()) -> None:
            self.xids = list(xids)

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [tables.put_long(tables.entry(XIDS, b"S", join_xids(self.xids)))]

        def _read(self, encoded: bytes, offset: int) -> int:
            table, end = tables.long_string(encoded, offset)
            self.xids = []
            for entry in tables.entries(table):
                if entry.key == XIDS:
                    if entry.kind not in (b"S", b"x"):
                        raise syntax_error(f"{self.NAME} has xids of type {entry.kind!r}")
                    self.xids += split_xids(entry.value)
            return end

        def decoded(self) -> list[Xid]:
            """The xids as values.

            Raises:
                XaError: 502 when one of them is malformed.
            """
            return [Xid.from_wire(xid) for xid in self.xids]

    class Rollback(_Branch):
        """Discard produced messages and requeue consumed ones."""

        INDEX = 0x0069003C
        NAME = "DtxCoordination.Rollback"

    class RollbackOk(_Flags):
        """The branch is rolled back, or how it ended instead."""

        INDEX = 0x0069003D
        NAME = "DtxCoordination.RollbackOk"

    class SetTimeout(_Branch):
        """Set the timeout of a branch, in seconds; 0 is the default again."""

        INDEX = 0x00690046
        NAME = "DtxCoordination.SetTimeout"

        def __init__(self, ticket: int = 0, xid: bytes = b"", timeout: int = 0) -> None:
            super().__init__(ticket, xid)
            self.timeout = timeout

        def encode(self) -> list[bytes]:
            """The arguments, for pika to join."""
            return [*super().encode(), _LONG.pack(self.timeout)]

        def _read(self, encoded: bytes, offset: int) -> int:
            offset = super()._read(encoded, offset)
            self.timeout = int.from_bytes(encoded[offset : offset + 4], "big")
            return offset + 4

    class SetTimeoutOk(Method):
        """The timeout is set."""

        INDEX = 0x00690047
        NAME = "DtxCoordination.SetTimeoutOk"


METHODS: Final[dict[int, type[Method]]] = {
    method.INDEX: method
    for group in (DtxDemarcation, DtxCoordination)
    for method in vars(group).values()
    if isinstance(method, type) and issubclass(method, Method)
}
"""Every method of both classes by class << 16 | method."""


def register() -> None:
    """Make pika's frame decoder know :data:`METHODS`. Done on import; doing it again changes nothing."""
    spec.methods.update(METHODS)


register()

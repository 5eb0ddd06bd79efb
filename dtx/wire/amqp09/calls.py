"""The dtx methods as the server sees them: requests as values, answers as whole frames.

pika's method objects are for clients; this is the same wire form (see :mod:`dtx.client.pika_methods`) without them, for
the path that every branch takes five times. Whatever is wrong with the arguments of a dtx method is a *channel*
exception, so it is an XaError.

The XML has ``endscan`` as a long, and nothing but a long is accepted: an octet with two bits is a truncated recover.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, assert_never

from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.value import value
from dtx.xa.xid import Xid

DTX_CLASSES: Final = frozenset((101, 105))


class DtxMethod(IntEnum):
    """Class << 16 | method."""

    SELECT = 0x0065000A
    SELECT_OK = 0x0065000B
    START = 0x00650014
    START_OK = 0x00650015
    END = 0x0065001E
    END_OK = 0x0065001F
    COMMIT = 0x0069000A
    COMMIT_OK = 0x0069000B
    FORGET = 0x00690014
    FORGET_OK = 0x00690015
    GET_TIMEOUT = 0x0069001E
    GET_TIMEOUT_OK = 0x0069001F
    PREPARE = 0x00690028
    PREPARE_OK = 0x00690029
    RECOVER = 0x00690032
    RECOVER_OK = 0x00690033
    ROLLBACK = 0x0069003C
    ROLLBACK_OK = 0x0069003D
    SET_TIMEOUT = 0x00690046
    SET_TIMEOUT_OK = 0x00690047

    @property
    def wire_name(self) -> str:
        """As the XML has it, for example ``dtx-coordination.get-timeout``."""
        group = "dtx-demarcation" if self >> 16 == 101 else "dtx-coordination"
        return f"{group}.{self.name.lower().replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Use distributed transactions on this channel."""


@value
class Start:
    """Work from here on belongs to *xid*."""

    xid: Xid
    join: bool = False
    resume: bool = False


@value
class End:
    """The work on behalf of *xid* is finished, has failed or is suspended."""

    xid: Xid
    fail: bool = False
    suspend: bool = False


@value
class Commit:
    """Commit *xid*."""

    xid: Xid
    one_phase: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Discard the knowledge of the heuristically completed *xid*."""

    xid: Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class GetTimeout:
    """Ask for the timeout of *xid*."""

    xid: Xid


@value
class Prepare:
    """Vote on *xid*."""

    xid: Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class Recover:
    """Ask for the next batch of xids in doubt."""

    startscan: bool
    endscan: bool


@value
class Rollback:
    """Roll *xid* back."""

    xid: Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimeout:
    """Set the timeout of *xid*, seconds; 0 is the default again."""

    xid: Xid
    timeout: int


Call = Select | Start | End | Commit | Forget | GetTimeout | Prepare | Recover | Rollback | SetTimeout

_LONG: Final = Struct(">I")
_TICKET_XID: Final = Struct(">IHI")
_RECOVER: Final = Struct(">IHBI")


def _malformed(method: int, payload: bytes) -> XaError:
    return XaError(
        ReplyCode.SYNTAX_ERROR, f"{DtxMethod(method).wire_name} of {len(payload)} octets is truncated or too long"
    )


def _xid(payload: bytes, method: int, tail: int, head: int = 10) -> Xid:
    """The xid whose longstr ends its length at *head*, exactly *tail* octets before the end of *payload*."""
    end = len(payload) - tail
    if end < head or _LONG.unpack_from(payload, head - 4)[0] != end - head:
        raise _malformed(method, payload)
    return Xid.from_wire(payload[head:end])


def _select(payload: bytes) -> Call:
    if len(payload) != 4:
        raise _malformed(DtxMethod.SELECT, payload)
    return Select()


def _start(payload: bytes) -> Call:
    xid = _xid(payload, DtxMethod.START, 1)
    bits = payload[-1]
    return Start(xid=xid, join=bits & 1 != 0, resume=bits & 2 != 0)


def _end(payload: bytes) -> Call:
    xid = _xid(payload, DtxMethod.END, 1)
    bits = payload[-1]
    return End(xid=xid, fail=bits & 1 != 0, suspend=bits & 2 != 0)


def _commit(payload: bytes) -> Call:
    xid = _xid(payload, DtxMethod.COMMIT, 1)
    return Commit(xid=xid, one_phase=payload[-1] & 1 != 0)


def _recover(payload: bytes) -> Call:
    if len(payload) != _RECOVER.size:
        raise _malformed(DtxMethod.RECOVER, payload)
    _, _, bits, endscan = _RECOVER.unpack(payload)
    return Recover(startscan=bits & 1 != 0, endscan=endscan != 0)


def _set_timeout(payload: bytes) -> Call:
    xid = _xid(payload, DtxMethod.SET_TIMEOUT, 4)
    return SetTimeout(xid=xid, timeout=int.from_bytes(payload[-4:], "big"))


_DECODERS: Final[dict[int, Callable[[bytes], Call]]] = {
    DtxMethod.SELECT.value: _select,
    DtxMethod.START.value: _start,
    DtxMethod.END.value: _end,
    DtxMethod.COMMIT.value: _commit,
    DtxMethod.FORGET.value: lambda payload: Forget(xid=_xid(payload, DtxMethod.FORGET, 0)),
    DtxMethod.GET_TIMEOUT.value: lambda payload: GetTimeout(xid=_xid(payload, DtxMethod.GET_TIMEOUT, 0, 8)),
    DtxMethod.PREPARE.value: lambda payload: Prepare(xid=_xid(payload, DtxMethod.PREPARE, 0)),
    DtxMethod.RECOVER.value: _recover,
    DtxMethod.ROLLBACK.value: lambda payload: Rollback(xid=_xid(payload, DtxMethod.ROLLBACK, 0)),
    DtxMethod.SET_TIMEOUT.value: _set_timeout,
}
_ANSWERS: Final = frozenset(method.value for method in DtxMethod) - _DECODERS.keys()


def decode_call(payload: bytes) -> Call:
    """Read a method of class 101 or 105 that a client sent.

    Args:
        payload: of the method frame, class and method (at least these four octets) first.

    Raises:
        XaError: 502 when the arguments or the xid are malformed, 503 for a method that only a server sends, 540 for one
            that the XML does not have.
    """
    (key,) = _LONG.unpack_from(payload)
    decoder = _DECODERS.get(key)
    if decoder is not None:
        return decoder(payload)
    if key in _ANSWERS:
        raise XaError(ReplyCode.COMMAND_INVALID, f"{DtxMethod(key).wire_name} is sent by servers only")
    raise XaError(ReplyCode.NOT_IMPLEMENTED, f"class {key >> 16} has no method {key & 0xFFFF}")


def encode_call(call: Call, ticket: int = 0) -> bytes:
    """The payload that :func:`decode_call` reads; for tests and load generators.

    Args:
        call: the request.
        ticket: access ticket, where the method has one.
    """
    match call:
        case Select():
            return _LONG.pack(DtxMethod.SELECT)
        case Start(xid=xid, join=join, resume=resume):
            return _branch(DtxMethod.START, ticket, xid) + bytes((join | resume << 1,))
        case End(xid=xid, fail=fail, suspend=suspend):
            return _branch(DtxMethod.END, ticket, xid) + bytes((fail | suspend << 1,))
        case Commit(xid=xid, one_phase=one_phase):
            return _branch(DtxMethod.COMMIT, ticket, xid) + bytes((one_phase,))
        case Forget(xid=xid):
            return _branch(DtxMethod.FORGET, ticket, xid)
        case GetTimeout(xid=xid):
            data = xid.to_wire()
            return _LONG.pack(DtxMethod.GET_TIMEOUT) + _LONG.pack(len(data)) + data
        case Prepare(xid=xid):
            return _branch(DtxMethod.PREPARE, ticket, xid)
        case Recover(startscan=startscan, endscan=endscan):
            return _RECOVER.pack(DtxMethod.RECOVER, ticket, startscan, endscan)
        case Rollback(xid=xid):
            return _branch(DtxMethod.ROLLBACK, ticket, xid)
        case SetTimeout(xid=xid, timeout=timeout):
            return _branch(DtxMethod.SET_TIMEOUT, ticket, xid) + _LONG.pack(timeout)
        case _:
            assert_never(call)


def _branch(method: DtxMethod, ticket: int, xid: Xid) -> bytes:
    data = xid.to_wire()
    return _TICKET_XID.pack(method, ticket, len(data)) + data

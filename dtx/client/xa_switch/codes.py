"""Numbers of ``xa.h`` that only a C interface has, and which flags each call knows.

X/Open CAE C193, chapters 4.3 and 5.
"""

from enum import IntEnum
from typing import Final, NoReturn

from dtx.client.errors import XAER_INVAL, XAError

TMNOFLAGS: Final = 0x00000000
TMASYNC: Final = 0x80000000
TMONEPHASE: Final = 0x40000000
TMFAIL: Final = 0x20000000
TMNOWAIT: Final = 0x10000000
TMRESUME: Final = 0x08000000
TMSUCCESS: Final = 0x04000000
TMSUSPEND: Final = 0x02000000
TMSTARTRSCAN: Final = 0x01000000
TMENDRSCAN: Final = 0x00800000
TMMULTIPLE: Final = 0x00400000
TMJOIN: Final = 0x00200000
TMMIGRATE: Final = 0x00100000

XA_OK: Final = 0
XA_RDONLY: Final = 3
XA_NOMIGRATE: Final = 9
DTX_EMPTY: Final = 1
"""Ours: the queue has no message."""
DTX_TRUNCATED: Final = 2
"""Ours: the buffer is too small."""

NULL_FORMAT: Final = -1
"""The format identifier of an xid that is none."""


class XAER_ASYNC(XAError):  # noqa: N801 - X/Open's name
    """An asynchronous call was asked for; the switch does not say TMUSEASYNC."""

    name = "XAER_ASYNC"
    code = -2


class Call(IntEnum):
    """The calls that name a branch; the numbers are those of ``enum dtx_call`` in ``entry.c``."""

    START = 0
    END = 1
    ROLLBACK = 2
    PREPARE = 3
    COMMIT = 4
    FORGET = 5


POSSIBLE: Final[dict[Call, frozenset[int]]] = {
    # TMJOIN excludes TMRESUME; nothing here waits for other branches, so TMNOWAIT is met
    Call.START: frozenset(how | wait for how in (TMNOFLAGS, TMJOIN, TMRESUME) for wait in (TMNOFLAGS, TMNOWAIT)),
    # one of the three has to be set, and TMMIGRATE belongs to TMSUSPEND
    Call.END: frozenset({TMSUCCESS, TMFAIL, TMSUSPEND, TMSUSPEND | TMMIGRATE}),
    Call.ROLLBACK: frozenset({TMNOFLAGS}),
    Call.PREPARE: frozenset({TMNOFLAGS}),
    Call.COMMIT: frozenset(how | wait for how in (TMNOFLAGS, TMONEPHASE) for wait in (TMNOFLAGS, TMNOWAIT)),
    Call.FORGET: frozenset({TMNOFLAGS}),
}
"""Every legal combination of flags."""


def check_flags(call: str, flags: int, possible: frozenset[int]) -> None:
    """Make sure that a call can be done with its flags.

    Args:
        call: its name, for the message.
        flags: what the transaction manager gave.
        possible: the combinations without TMASYNC.

    Raises:
        XAER_ASYNC: TMASYNC is set, and the switch does not have TMUSEASYNC.
        XAER_INVAL: none of these.
    """
    if flags & TMASYNC:
        raise XAER_ASYNC(f"{call}: asynchronous calls are not possible")
    if flags not in possible:
        no_such_flags(call, flags)


def no_such_flags(call: str, flags: int) -> NoReturn:
    """Raises:
    XAER_INVAL: always.
    """
    raise XAER_INVAL(f"{call}: flags 0x{flags & 0xFFFFFFFF:08x} are not possible")

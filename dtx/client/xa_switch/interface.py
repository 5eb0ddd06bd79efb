"""The arguments of X/Open's calls (CAE specification C193): numbers of ``xa.h``, flags, and open strings.

Numbers and flags are those of chapters 4.3 and 5 that only a C interface has. An open string is
``url=amqp://user:password@host:5673/vhost;coordination=amqp://...;answer-timeout=60``.
Keys and values are separated by ``=``, pairs by ``;``. A ``;`` within a URL is written ``%3B``. An X/Open open string
has at most 255 bytes; the switch accepts longer ones if the transaction manager does.

============================ ====================================================================================
``url``                      server and user for the program's work. Required.
``coordination``             server and user to prepare, commit, roll back, forget and recover branches: their owner,
                             or a user that ``--coordinator`` names. The virtual host must be that of ``url``. Default:
                             the connection of ``url``.
``answer-timeout``           seconds to wait for each answer; then the call ends in XAER_RMFAIL. Default: 60; 0 sets no
                             limit.
``transaction-timeout``      seconds from xa_start to xa_prepare, for branches that this string starts. 0, the default:
                             the timeout of the server.
============================ ====================================================================================
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import pika

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
"""Of dtx: the queue has no message."""
DTX_TRUNCATED: Final = 2
"""Of dtx: the buffer is too small."""

NULL_FORMAT: Final = -1
"""The format identifier of the null xid."""

ANSWER_SECONDS: Final = 60.0
"""The default of answer-timeout."""
_KEYS: Final = ("url", "coordination", "answer-timeout", "transaction-timeout")
_MOST_SECONDS: Final = 0xFFFFFFFF
# No code reads from a connection between two calls, so heartbeats would have no answer. TCP options replace them.
_TCP: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class XAER_ASYNC(XAError, code=-2):  # noqa: N801 - X/Open's name
    """TMASYNC was set, but the switch does not have TMUSEASYNC."""


class SwitchCall(IntEnum):
    """The calls that name a branch; the numbers are those of ``enum dtx_call`` in ``entry.c``."""

    START = 0
    END = 1
    ROLLBACK = 2
    PREPARE = 3
    COMMIT = 4
    FORGET = 5


POSSIBLE: Final[dict[SwitchCall, frozenset[int]]] = {
    # TMJOIN excludes TMRESUME. TMNOWAIT is permitted: these calls never wait for other branches.
    SwitchCall.START: frozenset(how | wait for how in (TMNOFLAGS, TMJOIN, TMRESUME) for wait in (TMNOFLAGS, TMNOWAIT)),
    # Exactly one of the three must be set; TMMIGRATE requires TMSUSPEND.
    SwitchCall.END: frozenset({TMSUCCESS, TMFAIL, TMSUSPEND, TMSUSPEND | TMMIGRATE}),
    SwitchCall.ROLLBACK: frozenset({TMNOFLAGS}),
    SwitchCall.PREPARE: frozenset({TMNOFLAGS}),
    SwitchCall.COMMIT: frozenset(how | wait for how in (TMNOFLAGS, TMONEPHASE) for wait in (TMNOFLAGS, TMNOWAIT)),
    SwitchCall.FORGET: frozenset({TMNOFLAGS}),
}
"""Every legal combination of flags."""


def check_flags(call: str, flags: int, possible: frozenset[int]) -> None:
    """Check the flags of a call.

    Args:
        call: its name, for the message.
        flags: the flags of the transaction manager.
        possible: the permitted combinations.

    Raises:
        XAER_ASYNC: TMASYNC is set, but the switch does not have TMUSEASYNC.
        XAER_INVAL: the combination is not permitted.
    """
    if flags & TMASYNC:
        raise XAER_ASYNC(f"{call}: asynchronous calls are not possible")
    if flags not in possible:
        no_such_flags(call, flags)


def no_such_flags(call: str, flags: int) -> NoReturn:
    """Raise XAER_INVAL for *flags* of *call*."""
    raise XAER_INVAL(f"{call}: flags 0x{flags & 0xFFFFFFFF:08x} are not possible")


@dataclass(frozen=True, slots=True)
class Info:
    """A parsed open string.

    Args:
        work: parameters of the connection for work.
        coordination: parameters of the connection for outcomes; ``None`` for that of *work*.
        answer_timeout: seconds; ``None`` sets no limit.
        transaction_timeout: seconds; 0 for the timeout of the server.
    """

    work: Any
    coordination: Any
    answer_timeout: float | None
    transaction_timeout: int


def parse(text: str) -> Info:
    """Read an open string.

    Raises:
        XAER_INVAL: it is malformed; the message has no passwords.
    """
    values: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, value = pair.partition("=")
        key = key.strip()
        if key not in _KEYS or not equals:
            raise XAER_INVAL(f"open string: unknown key {key[:40]!r}; known are {', '.join(_KEYS)}")
        if key in values:
            raise XAER_INVAL(f"open string: {key} is given twice")
        values[key] = value.strip()
    if "url" not in values:
        raise XAER_INVAL("open string: url is missing, as in url=amqp://guest:guest@127.0.0.1:5673/")
    work = _parameters("url", values["url"])
    coordination = _parameters("coordination", values["coordination"]) if "coordination" in values else None
    if coordination is not None and coordination.virtual_host != work.virtual_host:
        raise XAER_INVAL("open string: coordination and url must have the same virtual host")
    answer = _seconds("answer-timeout", values.get("answer-timeout"), ANSWER_SECONDS)
    timeout = _seconds("transaction-timeout", values.get("transaction-timeout"), 0)
    if timeout != int(timeout):
        raise XAER_INVAL("open string: transaction-timeout must be whole seconds")
    return Info(work, coordination, answer or None, int(timeout))


def _parameters(key: str, url: str) -> Any:
    try:
        if urlsplit(url).scheme not in {"amqp", "amqps"} or not urlsplit(url).hostname:
            raise XAER_INVAL(f"open string: {key} is no amqp:// or amqps:// URL with a host")
        parameters = pika.URLParameters(url)
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError, OSError):
        raise XAER_INVAL(f"open string: pika cannot parse the URL of {key}") from None
    if parameters.heartbeat is None:
        parameters.heartbeat = 0
    if parameters.tcp_options is None:
        parameters.tcp_options = dict(_TCP)
    return parameters


def _seconds(key: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MOST_SECONDS:
        raise XAER_INVAL(f"open string: {key} is not a number of seconds")
    return seconds

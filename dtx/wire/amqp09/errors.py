"""The edge of the 0-9 front: what goes wrong inside, and the close frame that the peer is sent for it.

Two kinds of failure cross this edge. An :class:`~dtx.xa.codes.XaError` is the answer to a dtx method: "the server MUST
raise a *channel* exception with reply code …" (AMQP 0-9 dtx preview), so it closes the channel even where 0-9-1 calls
the code a hard error, and the connection lives on. A :class:`WireError` is a peer that does not speak the protocol:
after it nothing that follows in the stream can be trusted, so it closes the connection. Whatever else is raised is our
own mistake: the peer is told "internal error" and no more.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Final

from dtx.wire.amqp09 import keys
from dtx.xa.codes import ReplyCode, XaError

MAX_REPLY_TEXT: Final = 255
"""Longest reply text, octets: it is a shortstr."""

_NAME: Final = re.compile("[A-Z_]+ - ")
_FACT: Final = re.compile("(?P<key>[a-z]+)=(?P<token>[^; ]+); ")
_OLD_TEXT: Final = re.compile(
    "unknown xid, completed: (?P<ended>[^ ]+) at (?P<at>[^ ]+)|[a-z -]+ is illegal in state (?P<state>[^ ]+)"
)

_CLOSE: Final = Struct(">BHIIHB")
_TAIL: Final = Struct(">IB")


class HardCode(IntEnum):
    """Reply codes of AMQP 0-9-1 that close the connection."""

    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


class WireError(Exception):
    """The peer sent what the protocol does not allow; the connection cannot go on.

    Args:
        code: the AMQP reply code that the peer is told.
        reason: lower case, no full stop; never holds a secret or a body.
    """

    def __init__(self, code: HardCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code.value}: {self.reason}"


class FrameError(WireError):
    """A frame is malformed.

    Args:
        code: 501, or 502 for a method frame without a method.
        reason: what is wrong with it.
        buffer: see *frames*.
        frames: the complete frames before the bad one, in the form of ``FrameSplitter.feed``: they were sent first
            and are to be handled first.
    """

    def __init__(
        self, code: HardCode, reason: str, buffer: bytes = b"", frames: list[tuple[int, int, int, int]] | None = None
    ) -> None:
        super().__init__(code, reason)
        self.buffer = buffer
        self.frames = frames or []


def syntax_error(reason: str) -> WireError:
    """The error for a field that does not parse: 502, "illegal values for one or more fields"."""
    return WireError(HardCode.SYNTAX_ERROR, reason)


def reply_text(text: str) -> bytes:
    """*text* as a shortstr may hold it: UTF-8, cut to 255 octets between two characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_REPLY_TEXT:
        return data
    return data[:MAX_REPLY_TEXT].decode("utf-8", "ignore").encode("utf-8")


def _close(channel: int, method: int, code: int, text: str, key: int) -> bytes:
    data = reply_text(text)
    head = _CLOSE.pack(1, channel, 11 + len(data), method, code, len(data))
    return head + data + _TAIL.pack(key, 0xCE)


def channel_close(channel: int, code: int, text: str, key: int = 0) -> bytes:
    """A whole channel.close frame.

    Args:
        channel: number of the channel that closes.
        code: reply code.
        text: reply text, cut to 255 octets.
        key: class << 16 | method of the method that failed; 0 where none did.
    """
    return _close(channel, keys.CHANNEL_CLOSE, code, text, key)


def connection_close(code: int, text: str, key: int = 0) -> bytes:
    """A whole connection.close frame; arguments as for :func:`channel_close`."""
    return _close(0, keys.CONNECTION_CLOSE, code, text, key)


def describe(code: ReplyCode | HardCode, reason: str, facts: Mapping[str, str] | None = None) -> str:
    """The reply text as brokers write it: ``NOT_FOUND - unknown xid 1:6774:62``.

    Facts for programs come first, so that they are never cut off: ``COMMAND_INVALID - state=idle; commit is illegal``.
    """
    return f"{code.name} - {''.join(f'{key}={token}; ' for key, token in (facts or {}).items())}{reason}"


def facts_of(text: str) -> dict[str, str]:
    """The facts in a reply text of dtx; none in any other text.

    Servers of dtx 0.1 have no such fields: the sentences in which they said the same are read as well.
    """
    start = _NAME.match(text)
    position = start.end() if start else 0
    facts = {}
    while found := _FACT.match(text, position):
        facts[found["key"]] = found["token"]
        position = found.end()
    if not facts and (old := _OLD_TEXT.match(text, position)):
        facts = {key: token for key, token in old.groupdict().items() if token is not None}
    return facts


def close_frame(error: BaseException, channel: int, key: int = 0) -> bytes:
    """The frame that tells the peer about *error*. Total: there is an answer for everything that can be raised.

    Args:
        error: what was raised while a frame was handled.
        channel: where that frame came from.
        key: class << 16 | method of that frame; 0 where it is no method.

    Returns:
        channel.close for an XaError, connection.close for everything else.
    """
    match error:
        case XaError():
            return channel_close(channel, error.code, describe(error.code, error.reason, error.facts), key)
        case WireError():
            return connection_close(error.code, describe(error.code, error.reason), key)
        case _:
            return connection_close(HardCode.INTERNAL_ERROR, describe(HardCode.INTERNAL_ERROR, "internal error"), key)

"""The close frames that AMQP 0-9 peers are sent for errors, and the reply texts in them.

An :class:`~dtx.xa.codes.XaError` is the answer to a dtx method: "the server MUST raise a *channel* exception with reply
code …" (AMQP 0-9 dtx preview). It closes the channel only, even where 0-9-1 calls the code a hard error. A
:class:`~dtx.wire.amqp09.errors.WireError` means that the peer violated the protocol. The rest of the stream cannot be
trusted, so it closes the connection. Any other exception is a defect of dtx. The peer receives "internal error" only.
"""

import re
from collections.abc import Mapping
from typing import Final

from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import ChannelClose, ConnectionClose
from dtx.xa.codes import ReplyCode, XaError

MAX_REPLY_TEXT: Final = 255
"""The maximum size of a reply text in bytes: it is a shortstr."""

_NAME: Final = re.compile("[A-Z_]+ - ")
_FACT: Final = re.compile("(?P<key>[a-z]+)=(?P<token>[^; ]+); ")
_OLD_TEXT: Final = re.compile(
    "unknown xid, completed: (?P<ended>[^ ]+) at (?P<at>[^ ]+)|[a-z -]+ is illegal in state (?P<state>[^ ]+)"
)


def reply_text(text: str) -> bytes:
    """Encode *text* for a shortstr: UTF-8, cut to 255 bytes between two characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_REPLY_TEXT:
        return data
    return data[:MAX_REPLY_TEXT].decode("utf-8", "ignore").encode("utf-8")


def channel_close(channel: int, code: int, text: str, key: int = 0) -> bytes:
    """Make a whole channel.close frame.

    Args:
        channel: number of the channel that closes.
        code: reply code.
        text: reply text, cut to 255 bytes.
        key: class << 16 | method of the method that failed; 0 where none did.
    """
    return ChannelClose(code, reply_text(text), key).frame(channel)


def connection_close(code: int, text: str, key: int = 0) -> bytes:
    """Make a whole connection.close frame; arguments as for :func:`channel_close`."""
    return ConnectionClose(code, reply_text(text), key).frame(0)


def describe(code: ReplyCode | HardCode, reason: str, facts: Mapping[str, str] | None = None) -> str:
    """Make a reply text in the form that brokers use: ``NOT_FOUND - unknown xid 1:6774:62``.

    Facts for programs come first, so that they are never cut off: ``COMMAND_INVALID - state=idle; commit is illegal``.
    """
    return f"{code.name} - {''.join(f'{key}={token}; ' for key, token in (facts or {}).items())}{reason}"


def facts_of(text: str) -> dict[str, str]:
    """Return the facts in a reply text of dtx; none for any other text.

    Servers of dtx 0.1 write no such fields. For them the function reads the facts from their sentences.
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
    """Make the close frame for *error*. The function is total: it accepts every exception.

    Args:
        error: the exception that a frame of the peer caused.
        channel: the number of the channel of that frame.
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

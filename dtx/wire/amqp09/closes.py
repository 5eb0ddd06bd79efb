"""The edge of the 0-9 front: the close frame that a peer is sent for what goes wrong, and the words in it.

Two kinds of failure cross this edge. An :class:`~dtx.xa.codes.XaError` is the answer to a dtx method: "the server MUST
raise a *channel* exception with reply code …" (AMQP 0-9 dtx preview), so it closes the channel even where 0-9-1 calls
the code a hard error, and the connection lives on. A :class:`~dtx.wire.amqp09.errors.WireError` is a peer that does not
speak the protocol: after it nothing that follows in the stream can be trusted, so it closes the connection. Whatever
else is raised is our own mistake: the peer is told "internal error" and no more.
"""

import re
from collections.abc import Mapping
from typing import Final

from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.methods import ChannelClose, ConnectionClose
from dtx.xa.codes import ReplyCode, XaError

MAX_REPLY_TEXT: Final = 255
"""Longest reply text in bytes: it is a shortstr."""

_NAME: Final = re.compile("[A-Z_]+ - ")
_FACT: Final = re.compile("(?P<key>[a-z]+)=(?P<token>[^; ]+); ")
_OLD_TEXT: Final = re.compile(
    "unknown xid, completed: (?P<ended>[^ ]+) at (?P<at>[^ ]+)|[a-z -]+ is illegal in state (?P<state>[^ ]+)"
)


def reply_text(text: str) -> bytes:
    """*text* as a shortstr may hold it: UTF-8, cut to 255 bytes between two characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_REPLY_TEXT:
        return data
    return data[:MAX_REPLY_TEXT].decode("utf-8", "ignore").encode("utf-8")


def channel_close(channel: int, code: int, text: str, key: int = 0) -> bytes:
    """A whole channel.close frame.

    Args:
        channel: number of the channel that closes.
        code: reply code.
        text: reply text, cut to 255 bytes.
        key: class << 16 | method of the method that failed; 0 where none did.
    """
    return ChannelClose(code, reply_text(text), key).frame(channel)


def connection_close(code: int, text: str, key: int = 0) -> bytes:
    """A whole connection.close frame; arguments as for :func:`channel_close`."""
    return ConnectionClose(code, reply_text(text), key).frame(0)


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

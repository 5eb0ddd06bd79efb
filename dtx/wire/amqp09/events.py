"""What the engine tells its shell: one closed union. Channels are named by their numbers.

The shell handles an event before the engine looks at the next frame. All own their bytes, but for
:class:`FramesPassed`, which is for now only. They are not frozen: that doubles what it costs to make one.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.frames import Frame
from dtx.wire.amqp09.methods import (
    ChannelClose,
    ConnectionClose,
    ConnectionStart,
    ConnectionStartOk,
    ConnectionTune,
    ConnectionTuneOk,
)
from dtx.xa.codes import XaError

_START: Final = itemgetter(2)
_END: Final = itemgetter(3)

# -- the handshake


@dataclass(slots=True)
class ServerStarted:
    """The server offers mechanisms; ``log_in`` answers. Client end only."""

    start: ConnectionStart


@dataclass(slots=True)
class LoginReceived:
    """The client says who it is; ``tune`` or ``refuse_login`` answers. Its repr hides the response."""

    login: ConnectionStartOk


@dataclass(slots=True)
class SecureReceived:
    """A SASL challenge (client end), or the response to one (server end)."""

    data: bytes

    def __repr__(self) -> str:
        return "SecureReceived()"


@dataclass(slots=True)
class TuneReceived:
    """The server offers limits; ``tune_ok`` answers. Client end only."""

    tune: ConnectionTune


@dataclass(slots=True)
class TuneAgreed:
    """The client has taken limits within those that were offered."""

    tune: ConnectionTuneOk


@dataclass(slots=True)
class VhostRequested:
    """connection.open; ``open_ok`` answers."""

    vhost: bytes


@dataclass(slots=True)
class ConnectionOpened:
    """The server has let the client in. Client end only."""


# -- work


@dataclass(slots=True)
class ConnectionMethodReceived:
    """connection.update-secret, blocked or unblocked."""

    method: Method


@dataclass(slots=True)
class ChannelOpened:
    """The client opens a channel, and ``open_ok`` answers; at the client end: the server has opened it."""

    channel: int


@dataclass(slots=True)
class MethodReceived:
    """A method without content.

    ``mark`` counts the commands of the channel so far, this one included; ``ticket`` is the access ticket of a method
    that has one, else 0.
    """

    channel: int
    method: Method
    mark: int
    ticket: int


@dataclass(slots=True)
class ContentReceived:
    """A method with its content.

    ``properties`` are bytes from the property flags on; ``number`` counts publishes from 1 in confirm mode, else it is
    0.
    """

    channel: int
    method: Method
    properties: bytes
    body: bytes
    number: int


@dataclass(slots=True)
class ContentStarted:
    """A content begins, on a channel that ``announces`` them: ``size`` bytes come behind it, if any.

    They are dropped unless ``take_content`` or ``pass_content`` is called: then :class:`ContentReceived` follows, or a
    :class:`FramePassed` for each part. Without any, nothing follows.
    """

    channel: int
    method: Method
    size: int
    properties: bytes


@dataclass(slots=True)
class FramePassed:
    """``buffer[start:end]`` is a frame of a channel, or of a content, that passes.

    ``key`` is class << 16 | method, or its kind.
    """

    channel: int
    key: int
    buffer: bytes
    start: int
    end: int


@dataclass(slots=True)
class FramesPassed:
    """``buffer[start:end]`` is all that came in a row, on channels whose frames pass joined; ``read`` is around it."""

    buffer: bytes
    start: int
    end: int
    read: list[Frame]

    @property
    def frames(self) -> list[Frame]:
        """Where the frames lie in the buffer."""
        return self.read[bisect_left(self.read, self.start, key=_START) : bisect_right(self.read, self.end, key=_END)]


# -- ends


@dataclass(slots=True)
class ChannelClosing:
    """The peer closes a channel. At the server end the shell answers with ``close_ok``; at a client's it is done."""

    channel: int
    close: ChannelClose


@dataclass(slots=True)
class ChannelFailed:
    """The peer's mistake has closed a channel; the close has been sent."""

    channel: int
    error: XaError


@dataclass(slots=True)
class ChannelClosed:
    """The peer has confirmed a close: the number is free."""

    channel: int


@dataclass(slots=True)
class ConnectionClosing:
    """The peer closes the connection, see :class:`ChannelClosing`. All that it sent before has been handled."""

    close: ConnectionClose


@dataclass(slots=True)
class ConnectionFailed:
    """The peer's mistake has closed the connection; the close has been sent."""

    error: WireError


@dataclass(slots=True)
class ConnectionClosed:
    """The peer has confirmed a close."""


@dataclass(slots=True)
class PeerSilent:
    """Nothing has come for two heartbeat intervals: "the peer should close the connection" (AMQP 0-9-1, 4.2.7)."""


ChannelEvent = ContentReceived | ContentStarted | MethodReceived | ChannelOpened | ChannelClosing | ChannelClosed
EngineEvent = (
    ChannelEvent
    | FramePassed
    | FramesPassed
    | ChannelFailed
    | ConnectionMethodReceived
    | ServerStarted
    | LoginReceived
    | SecureReceived
    | TuneReceived
    | TuneAgreed
    | VhostRequested
    | ConnectionOpened
    | ConnectionClosing
    | ConnectionFailed
    | ConnectionClosed
    | PeerSilent
)

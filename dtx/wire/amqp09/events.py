"""The events of the engine: one closed union. ``channel`` is the number of a channel.

The shell handles an event before the engine handles the next frame. All events own their bytes, except
:class:`FramesPassed`: it is valid only until then. Events are not frozen, because that doubles the cost of making one.
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
    """The server offers mechanisms; the shell answers with ``log_in``. Client end only."""

    start: ConnectionStart


@dataclass(slots=True)
class LoginReceived:
    """The client logs in. The shell answers with ``tune``, ``secure`` or ``refuse_login``."""

    login: ConnectionStartOk


@dataclass(slots=True)
class SecureReceived:
    """A SASL challenge (client end), or the response to one (server end)."""

    data: bytes

    def __repr__(self) -> str:
        return "SecureReceived()"


@dataclass(slots=True)
class TuneReceived:
    """The server offers limits; the shell answers with ``tune_ok``. Client end only."""

    tune: ConnectionTune


@dataclass(slots=True)
class TuneAgreed:
    """The client has chosen limits within the offered ones."""

    tune: ConnectionTuneOk


@dataclass(slots=True)
class VhostRequested:
    """connection.open; the shell answers with ``open_ok``."""

    vhost: bytes


@dataclass(slots=True)
class ConnectionOpened:
    """The server has sent connection.open-ok. Client end only."""


# -- work


@dataclass(slots=True)
class ConnectionMethodReceived:
    """connection.update-secret, update-secret-ok, blocked or unblocked."""

    method: Method


@dataclass(slots=True)
class ChannelOpened:
    """Server end: the client opens a channel; the shell answers with ``open_ok``. Client end: the channel is open."""

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

    ``properties`` are the bytes from the property flags on. ``number`` counts publishes from 1 at the server end in
    confirm mode; otherwise it is 0.
    """

    channel: int
    method: Method
    properties: bytes
    body: bytes
    number: int


@dataclass(slots=True)
class ContentStarted:
    """A content begins on a channel with ``announces`` set. Its body has ``size`` bytes.

    After ``take_content``, :class:`ContentReceived` follows. After ``pass_content``, a :class:`FramePassed` follows for
    each part. Without a call, the engine drops the body. For an empty body, nothing follows.
    """

    channel: int
    method: Method
    size: int
    properties: bytes


@dataclass(slots=True)
class FramePassed:
    """``buffer[start:end]`` is a frame that passes unread: of a channel, or of a content.

    ``key`` is class << 16 | method, or the frame type.
    """

    channel: int
    key: int
    buffer: bytes
    start: int
    end: int


@dataclass(slots=True)
class FramesPassed:
    """``buffer[start:end]`` holds consecutive frames of channels whose frames pass joined.

    ``read`` are all frames in the buffer.
    """

    buffer: bytes
    start: int
    end: int
    read: list[Frame]

    @property
    def frames(self) -> list[Frame]:
        """The positions of these frames in the buffer."""
        return self.read[bisect_left(self.read, self.start, key=_START) : bisect_right(self.read, self.end, key=_END)]


# -- ends


@dataclass(slots=True)
class ChannelClosing:
    """The peer closes a channel. At the server end the shell answers with ``close_ok``; a client's engine answers."""

    channel: int
    close: ChannelClose


@dataclass(slots=True)
class ChannelFailed:
    """The engine has closed a channel because of an error of the peer, and has sent the close."""

    channel: int
    error: XaError


@dataclass(slots=True)
class ChannelClosed:
    """The peer has confirmed a close. The number of the channel is free."""

    channel: int


@dataclass(slots=True)
class ConnectionClosing:
    """The peer closes the connection, see :class:`ChannelClosing`. All its earlier frames have been handled."""

    close: ConnectionClose


@dataclass(slots=True)
class ConnectionFailed:
    """The engine has closed the connection because of an error of the peer, and has sent the close."""

    error: WireError


@dataclass(slots=True)
class ConnectionClosed:
    """The peer has confirmed a close."""


@dataclass(slots=True)
class PeerSilent:
    """No data arrived for two heartbeat intervals: "the peer should close the connection" (AMQP 0-9-1, 4.2.7)."""


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

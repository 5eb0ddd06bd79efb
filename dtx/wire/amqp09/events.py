"""What the engine tells its shell: one closed union. Channels are named by their numbers.

All of them own their bytes. The shell handles an event before the engine looks at the next frame.
"""

from typing import NamedTuple

from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.errors import WireError
from dtx.wire.amqp09.methods import (
    ChannelClose,
    ConnectionClose,
    ConnectionStart,
    ConnectionStartOk,
    ConnectionTune,
    ConnectionTuneOk,
)
from dtx.xa.codes import XaError

# -- the handshake


class ServerStarted(NamedTuple):
    """The server offers mechanisms; ``log_in`` answers. Client end only."""

    start: ConnectionStart


class LoginReceived(NamedTuple):
    """The client says who it is; ``tune`` or ``refuse_login`` answers. Its repr hides the response."""

    login: ConnectionStartOk


class SecureReceived(NamedTuple):
    """A SASL challenge (client end), or the response to one (server end)."""

    data: bytes

    def __repr__(self) -> str:
        return "SecureReceived()"


class TuneReceived(NamedTuple):
    """The server offers limits; ``tune_ok`` answers. Client end only."""

    tune: ConnectionTune


class TuneAgreed(NamedTuple):
    """The client has taken limits within those that were offered."""

    tune: ConnectionTuneOk


class VhostRequested(NamedTuple):
    """connection.open; ``open_ok`` answers."""

    vhost: bytes


class ConnectionOpened(NamedTuple):
    """The server has let the client in. Client end only."""


# -- work


class ConnectionMethodReceived(NamedTuple):
    """connection.update-secret, blocked or unblocked."""

    method: Method


class ChannelOpened(NamedTuple):
    """The client opens a channel, and ``open_ok`` answers; at the client end: the server has opened it."""

    channel: int


class MethodReceived(NamedTuple):
    """A method without content.

    ``mark`` counts the commands of the channel so far, this one included; ``ticket`` is the access ticket of a method
    that has one, else 0.
    """

    channel: int
    method: Method
    mark: int
    ticket: int


class ContentReceived(NamedTuple):
    """A method with its content.

    ``properties`` are bytes from the property flags on; ``number`` counts publishes from 1 in confirm mode, else it is
    0.
    """

    channel: int
    method: Method
    properties: bytes
    body: bytes
    number: int


# -- ends


class ChannelClosing(NamedTuple):
    """The peer closes a channel. At the server end the shell answers with ``close_ok``; at a client's it is done."""

    channel: int
    close: ChannelClose


class ChannelFailed(NamedTuple):
    """The peer's mistake has closed a channel; the close has been sent."""

    channel: int
    error: XaError


class ChannelClosed(NamedTuple):
    """The peer has confirmed a close: the number is free."""

    channel: int


class ConnectionClosing(NamedTuple):
    """The peer closes the connection, see :class:`ChannelClosing`. All that it sent before has been handled."""

    close: ConnectionClose


class ConnectionFailed(NamedTuple):
    """The peer's mistake has closed the connection; the close has been sent."""

    error: WireError


class ConnectionClosed(NamedTuple):
    """The peer has confirmed a close."""


class PeerSilent(NamedTuple):
    """Nothing has come for two heartbeat intervals: "the peer should close the connection" (AMQP 0-9-1, 4.2.7)."""


EngineEvent = (
    ContentReceived
    | MethodReceived
    | ChannelOpened
    | ChannelClosing
    | ChannelFailed
    | ChannelClosed
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

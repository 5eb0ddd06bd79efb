"""The way from the broker to the client: frames are passed on as slices of what was read."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dtx.server.alongside.reading import Reading, kept
from dtx.server.alongside.unsettled import ANSWERS
from dtx.store.rabbitmq.upstream import Upstream
from dtx.wire.amqp09 import keys
from dtx.wire.amqp09.frames import HEARTBEAT, Frame

if TYPE_CHECKING:
    from dtx.server.alongside.session import Session

_TO_CLIENT: Final = ANSWERS | {
    keys.ACCESS_REQUEST_OK,
    keys.CHANNEL_CLOSE,
    keys.CHANNEL_CLOSE_OK,
    keys.CHANNEL_FLOW_OK,
    keys.QUEUE_DECLARE_OK,
}
"""Methods of the broker that do not pass unseen."""


class ProxyUpstream(Upstream, asyncio.BufferedProtocol):
    """The client's connection to the broker.

    Args:
        session: whose it is.
    """

    def __init__(self, session: "Session") -> None:
        super().__init__()
        self._session = session
        self._reading = Reading(self.splitter)

    @property
    def kept_free(self) -> int:
        """See :class:`Upstream`: what the client was granted is there when it opens a channel."""
        return self._session.unopened

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where to read to."""
        return self._reading.room(behind=self._session.client_is_behind)

    def buffer_updated(self, nbytes: int) -> None:
        """Octets from the broker."""
        self._received(self._reading.take, nbytes)

    def frames(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Hand frames on, and keep dtx's own answers out of the midst of a message."""
        contents = self._session.contents
        contents.passing = True
        try:
            self._pass_on(buffer, frames)
        finally:
            contents.passing = False
        if self._session.unsettled.by_upstream:
            self._session.unsettled.from_broker(buffer, frames)
        contents.passed(buffer, frames)

    def _pass_on(self, buffer: bytes, frames: Sequence[Frame]) -> None:
        """Pass on what has no handler, as slices."""
        handlers = self.handlers
        session = self._session
        begin = end_of_run = 0
        for key, channel, start, end in frames:
            if channel not in handlers and key not in _TO_CLIENT:
                end_of_run = end
                continue
            if end_of_run > begin:
                session.pass_to_client(buffer, begin, end_of_run)
            begin = end_of_run = end
            handler = handlers.get(channel) or session.channels.get(channel)
            if handler is not None:
                buffer = kept(buffer, frames)
                handler.frame(key, buffer, start, end)
        if end_of_run > begin:
            session.pass_to_client(buffer, begin, end_of_run)

    def pause_writing(self) -> None:
        """The broker is slow: so is the client, from now on."""
        self._session.hold_client(self)

    def resume_writing(self) -> None:
        """The broker has caught up."""
        self._session.release_client(self)

    def on_lost(self, reason: str) -> None:
        """The session ends."""
        self._session.upstream_lost(reason)


class ChannelZero:
    """The connection class, as the broker speaks it.

    Args:
        session: whose connection it is.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame of the broker on channel 0."""
        if key != HEARTBEAT:
            self._session.broker_said(key, buffer[start:end])

    def lost(self, reason: str) -> None:
        """The session hears of it from the connection."""

"""The way from the broker to the client: frames are passed on as slices of what was read."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
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
_AT_ONCE: Final = 0.001
"""Seconds for which frames are handed on before others may have their turn."""
_END: Final = itemgetter(3)


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
        if self._slices.busy:  # TLS has some more
            self._received(self.splitter.feed, self._reading.copy(nbytes))
        else:
            self._received(self._reading.take, nbytes)

    def frames(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[None]:
        """Hand frames on, and keep dtx's own answers out of the midst of a message."""
        contents, unsettled = self._session.contents, self._session.unsettled
        passing = self._pass_on(buffer, frames)
        begin = 0
        while begin < len(frames):
            contents.passing = True
            try:
                buffer, end = next(passing, (buffer, frames[-1][3]))
            finally:
                contents.passing = False
            passed = frames[begin : bisect_right(frames, end, key=_END)]
            begin += len(passed)
            if unsettled.by_upstream:
                unsettled.from_broker(buffer, passed)
            contents.passed(buffer, passed)
            yield

    def _pass_on(self, buffer: bytes, frames: Sequence[Frame]) -> Iterator[tuple[bytes, int]]:
        """Pass on what has no handler, as slices.

        Yields:
            After long work, a buffer with all *frames*, and where those that are not handed on begin.
        """
        until = time.monotonic() + _AT_ONCE
        handlers = self.handlers
        session = self._session
        begin = end_of_run = frames[0][2]
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
                if time.monotonic() >= until:
                    yield buffer, end
                    until = time.monotonic() + _AT_ONCE
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

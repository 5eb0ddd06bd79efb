"""The connections of other members to this one: they send requests, which run side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from dtx import failpoint
from dtx.failpoint import Point
from dtx.manager import Requester
from dtx.server.connection import Stage, connection_numbers
from dtx.server.listener import AcceptedConnection
from dtx.server.members.messages import (
    CLIENT,
    MAX_MESSAGE,
    SERVER,
    MalformedMessage,
    MessageSplitter,
    encode,
    new_greeting,
    number_of,
    proof,
    proven,
    read_greeting,
)
from dtx.telemetry import get_logger

_log = get_logger(part="members")

MAX_UNDER_WAY: Final = 256
"""Requests of one connection that run at once; above it, dtx stops reading from the peer."""
_SILENCE: Final = 90.0
"""Seconds without data and without requests after which a peer is gone: a live peer closes its connection earlier."""

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Handles a request, and returns its answer. Neither has the keys ``id`` and ``failed``: the transport uses them."""


class PeerServer:
    """Serves requests of other members.

    Args:
        name: of this member.
        secrets: returns the valid secrets, at most four.
        handler: handles the requests.
        handshake_timeout: seconds.
    """

    def __init__(
        self,
        name: str,
        secrets: Callable[[], Sequence[bytes]],
        handler: Handler,
        *,
        handshake_timeout: float,
    ) -> None:
        self.name = name
        self.secrets = secrets
        self.handler = handler
        self.handshake_timeout = handshake_timeout
        self.requests: set[asyncio.Task[None]] = set()
        """Requests under way. They go on after their connection has ended."""
        self._has_warned = False

    def session(self, connection: AcceptedConnection) -> "PeerSession":
        """The session of a connection that has sent the header of members."""
        return PeerSession(self, connection)

    def warn_unencrypted(self, peer: str) -> None:
        """Log once that members send requests without TLS."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("members connect without TLS", peer=peer, remedy="set --tls-cert and --tls-key")

    async def close(self) -> None:
        """Cancel all requests. Call it after the listener has closed the connections."""
        for task in self.requests:
            task.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)


class PeerSession:
    """One connection of another member; implements :class:`ClientSession`.

    Args:
        server: its secrets and its handler.
        transport: the peer's socket.
    """

    def __init__(self, server: PeerServer, transport: AcceptedConnection) -> None:
        self.id = next(connection_numbers)
        self.who = Requester("", "")
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.stage = Stage.OPENING
        self.channels: dict[int, Any] = {}
        self._server = server
        self._transport = transport
        self._greeting = new_greeting(server.name)
        self._messages = MessageSplitter()
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_slow = False
        self._is_paused = False
        self._timer = self._loop.call_later(server.handshake_timeout, self._give_up)

    async def connect(self) -> None:
        """See :class:`ClientSession`."""
        self._transport.write(encode(self._greeting._asdict()))

    def client_data(self, data: bytes) -> None:
        """See :class:`ClientSession`."""
        if self.stage is Stage.RUNNING:
            self._expect_data()
        self._messages.feed(data)
        self._read()

    def _read(self) -> None:
        """Handle the messages that were read, as far as there is room."""
        try:
            while self._has_room and (message := self._messages.next()) is not None:
                if self.stage is Stage.OPENING:
                    self._log_in(message)
                else:
                    self._begin(number_of(message), message)
        except MalformedMessage as error:
            _log.info("a peer broke the protocol", connection=self.id, peer=self._transport.peer, reason=str(error))
            self.abort()
        if self._is_paused is self._has_room:
            self._is_paused = not self._has_room
            (self._transport.pause_reading if self._is_paused else self._transport.resume_reading)()

    @property
    def _has_room(self) -> bool:
        is_open = self.stage is Stage.OPENING or self.stage is Stage.RUNNING
        return is_open and not self._is_slow and len(self._under_way) < MAX_UNDER_WAY

    def _log_in(self, message: dict[str, Any]) -> None:
        theirs, peer = read_greeting(message), self._transport.peer
        secret = proven(self._server.secrets(), message.get("proofs"), CLIENT, self._greeting, theirs)
        if secret is not None:
            self.who = Requester(theirs.name, "")
        if secret is None or not self._transport.opened(self.who):
            reason = "wrong secret" if secret is None else "no room for more connections"
            _log.warning("a peer is refused", connection=self.id, peer=peer, reason=reason)
            self.stop(b"")
            return
        arrived = self._transport.arrived
        if not self._transport.is_local and arrived is not None and not arrived.tls:
            self._server.warn_unencrypted(peer)
        self.stage = Stage.RUNNING
        self._messages.limit = MAX_MESSAGE
        self._expect_data()
        self._transport.write(encode({"proof": proof(secret, SERVER, theirs, self._greeting)}))

    def _begin(self, number: int, request: dict[str, Any]) -> None:
        task = self._loop.create_task(self._handle(number, request))
        for tasks in (self._under_way, self._server.requests):
            tasks.add(task)
        task.add_done_callback(self._done)

    async def _handle(self, number: int, request: dict[str, Any]) -> None:
        del request["id"]
        failpoint.at(Point.FORWARDED_BEFORE)
        try:
            answer = encode({**await self._server.handler(request), "id": number})
        except Exception:  # noqa: BLE001 - logged; the peer gets no details
            _log.exception("request of a peer failed", connection=self.id)
            answer = encode({"id": number, "failed": "internal error"})
        failpoint.at(Point.FORWARDED_AFTER)
        self._transport.write(answer)
        failpoint.at(Point.FORWARDED_SENT)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._server.requests.discard(task)
        if self.stage is Stage.RUNNING:
            self._read()
        elif not self._under_way:
            self._transport.close()
            self._end()

    # -- the end

    def client_is_slow(self) -> None:
        """See :class:`ClientSession`: a peer that does not read its answers sends no more requests."""
        self._is_slow = True
        self._read()

    def client_has_caught_up(self) -> None:
        """See :class:`ClientSession`."""
        self._is_slow = False
        self._read()

    def _expect_data(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(_SILENCE, self._give_up)

    def _give_up(self) -> None:
        if self._under_way:
            self._expect_data()
        else:
            _log.info("a peer is silent", connection=self.id, peer=self._transport.peer)
            self.abort()

    def stop(self, frame: bytes) -> None:  # noqa: ARG002 - the peer's protocol is not AMQP
        """See :class:`ClientSession`: answers that are under way are sent first."""
        if self.stage is Stage.ENDED:
            return
        self.stage = Stage.CLOSING
        self._timer.cancel()
        if not self._under_way:
            self._transport.close()

    def abort(self) -> None:
        """See :class:`ClientSession`."""
        self._transport.abort()
        self.client_disconnected()

    def client_disconnected(self) -> None:
        """See :class:`ClientSession`: requests go on, because their sender can find their outcome in the log."""
        self.stage = Stage.ENDED
        self._timer.cancel()
        self._end()

    def _end(self) -> None:
        if self.stage is Stage.ENDED and not self._under_way and not self.ended.done():
            self.ended.set_result(None)

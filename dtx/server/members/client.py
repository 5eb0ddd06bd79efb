"""Requests to another member: one connection carries them all."""

import asyncio
import math
import ssl
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Final, cast
from urllib.parse import urlsplit

from dtx import failpoint
from dtx.config import Address
from dtx.failpoint import Point
from dtx.server.members.messages import (
    CLIENT,
    MAX_MESSAGE,
    SERVER,
    Greeting,
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
from dtx.wire.amqp09.frames import Protocol

_log = get_logger(part="members")

MAX_WAITING: Final = 1000
"""Requests to one member that wait for their answers."""
CONNECT_SECONDS: Final = 2.0
"""Time for a connection and its handshake."""
PAUSE: Final = 0.2
"""Seconds between attempts to connect."""
IDLE_SECONDS: Final = 60.0
"""Time after which a connection without requests is closed."""
_MAX_UNSENT: Final = 1 << 20
"""Bytes of requests that wait for a member that does not read."""


class PeerUnreachable(Exception):
    """The request was not sent: the member has certainly not handled it."""


class PeerLost(Exception):
    """The request was sent, and its answer is missing: whether the member has handled it is not known."""


class PeerClient:
    """Sends requests to one member. It connects at the first request, and again after the connection was lost.

    Args:
        address: ``amqp://host:port`` or ``amqps://host:port``.
        name: of this member.
        secrets: returns the valid secrets, at most four.
        tls: for ``amqps``; it verifies the certificate of the member.
        peer: name of the member; ``None``: any. Another one at its address would answer for it.

    Raises:
        ValueError: *address* has another form.
    """

    def __init__(
        self,
        address: str,
        name: str,
        secrets: Callable[[], Sequence[bytes]],
        tls: ssl.SSLContext | None = None,
        *,
        peer: str | None = None,
    ) -> None:
        url = urlsplit(address)
        if url.scheme not in ("amqp", "amqps") or not url.hostname:
            raise ValueError("the address of a member is amqp://host:port or amqps://host:port")
        self._tls = (tls or ssl.create_default_context()) if url.scheme == "amqps" else None
        self.address = Address(url.hostname, url.port or (5672 if self._tls is None else 5671))
        self.name = name
        self.secrets = secrets
        self.peer = peer
        self.link: PeerLink | None = None
        """The connection for new requests."""
        self._connecting: asyncio.Task[None] | None = None
        self._refusal = ""
        self._refused_until = 0.0
        self._asking = 0
        self._numbers = count(1)

    async def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, and wait for its answer. Neither has the keys ``id`` and ``failed``: the transport uses them.

        Args:
            request: is sent as a JSON object of at most 64 KiB.
            seconds: time for the connection and the answer together.

        Raises:
            PeerUnreachable: the request was not sent.
            PeerLost: the request was sent; then the connection was lost, the time was over, or the handler failed.
        """
        if self._asking >= MAX_WAITING:
            raise PeerUnreachable(f"{MAX_WAITING} requests wait for the member at {self.address}")
        until = asyncio.get_running_loop().time() + seconds
        number = next(self._numbers)
        try:
            data = encode({**request, "id": number})
        except MalformedMessage as error:
            raise PeerUnreachable(str(error)) from None
        self._asking += 1
        try:
            link = self.link or await self._connected(seconds)
            answer = await link.ask(number, data, until)
        finally:
            self._asking -= 1
        if "failed" in answer:
            raise PeerLost(f"the handler of the member at {self.address} failed")
        del answer["id"]
        return answer

    async def _connected(self, seconds: float) -> "PeerLink":
        loop = asyncio.get_running_loop()
        if self._connecting is None:
            if loop.time() < self._refused_until:
                raise PeerUnreachable(self._refusal)
            self._connecting = loop.create_task(self._connect())
        done, _ = await asyncio.wait((self._connecting,), timeout=seconds)
        if self.link is None:
            raise PeerUnreachable(self._refusal if done else f"no connection to {self.address} within {seconds:g} s")
        return self.link

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        link, reason = PeerLink(self), self._refusal
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await loop.create_connection(lambda: link, *self.address, ssl=self._tls)
                reason = await link.proven or "the connection was lost"
        except TimeoutError:
            reason = f"no connection to {self.address} within {CONNECT_SECONDS:g} s"
        except (OSError, UnicodeError) as error:
            reason = str(error)
        finally:
            self._connecting = None
            if self.link is link:
                self._refusal = ""
            else:
                link.abort()
                if reason != self._refusal:
                    _log.warning("a member cannot be reached", address=str(self.address), reason=reason)
                self._refusal, self._refused_until = reason, loop.time() + PAUSE

    def retire(self, link: "PeerLink") -> None:
        """Send no new requests over *link*."""
        if self.link is link:
            self.link = None

    async def close(self) -> None:
        """Close the connection; requests that wait get :exc:`PeerLost` or :exc:`PeerUnreachable`."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        self._refusal, self._refused_until = "dtx is shutting down", math.inf
        if self.link is not None:
            self.link.abort()


class PeerLink(asyncio.Protocol):
    """One connection to a member.

    Args:
        client: has the secrets.
    """

    def __init__(self, client: PeerClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self.proven: asyncio.Future[str] = self._loop.create_future()
        """Why the handshake failed, or an empty text after the member has proved the secret."""
        self._transport: asyncio.Transport | None = None
        self._messages = MessageSplitter()
        self._greeting = new_greeting(client.name)
        self._theirs: Greeting | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._reads = 0

    async def ask(self, number: int, data: bytes, until: float) -> dict[str, Any]:
        """Send the request *data* with its *number*. See :meth:`PeerClient.ask`; *until* is a time of the loop."""
        assert self._transport is not None, "it is connected"
        if self._transport.get_write_buffer_size() > _MAX_UNSENT or self._loop.time() >= until:
            raise PeerUnreachable(f"the member at {self._client.address} is slow")
        answer = self._waiting[number] = self._loop.create_future()
        if self._idle is not None:
            self._idle.cancel()
        reads = self._reads
        self._transport.write(data)
        failpoint.at(Point.FORWARD_SENT)
        try:
            async with asyncio.timeout_at(until):
                message: dict[str, Any] | None = await answer
        except TimeoutError:
            if self._reads == reads:  # perhaps the network is cut: then a new connection is refused, or works
                self._client.retire(self)
            raise PeerLost(f"no answer from {self._client.address} in time") from None
        finally:
            del self._waiting[number]
            self.rest()
        if message is None:
            raise PeerLost(f"the connection to {self._client.address} was lost")
        return message

    def rest(self) -> None:
        """If no request waits, close the connection: later, or at once if it gets no more requests."""
        if not self._waiting:
            self._idle = self._loop.call_later(IDLE_SECONDS if self._client.link is self else 0, self._close)

    def _close(self) -> None:
        self._client.retire(self)
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._client.retire(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered as that
        self._transport.write(Protocol.DTX_MEMBER.value)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._reads += 1
        self._messages.feed(data)
        try:
            while (message := self._messages.next()) is not None:
                self._receive(message)
        except MalformedMessage as error:
            if not self.proven.done():
                self.proven.set_result(f"the server is no member of this version ({error})")
            else:
                _log.warning("a member broke the protocol", address=str(self._client.address), reason=str(error))
            self.abort()

    def _receive(self, message: dict[str, Any]) -> None:
        assert self._transport is not None, "it is connected"
        secrets = self._client.secrets
        if self._theirs is None:
            self._theirs = read_greeting(message)
            proofs = [proof(secret, CLIENT, self._theirs, self._greeting) for secret in secrets()]
            self._transport.write(encode({**self._greeting._asdict(), "proofs": proofs}))
        elif not self.proven.done():
            if proven(secrets(), [message.get("proof")], SERVER, self._greeting, self._theirs) is None:
                self.proven.set_result("the server has another secret")
                return
            if self._client.peer not in (None, self._theirs.name):
                self.proven.set_result(f"it is another member, {self._theirs.name}: correct --advertise")
                return
            self._messages.limit = MAX_MESSAGE
            self.proven.set_result("")
            self._client.link = self
            self.rest()
        else:
            answer = self._waiting.get(number_of(message))
            if answer is not None and not answer.done():
                answer.set_result(message)

    def eof_received(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._client.retire(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See :class:`asyncio.Protocol`."""
        self._client.retire(self)
        if self._idle is not None:
            self._idle.cancel()
        if not self.proven.done():
            self.proven.set_result("the server closed the connection in the handshake: its log has the reason")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)

"""TLS listeners: a socket counts from when it is accepted, and not only when its handshake is over.

An event loop's own TLS servers tell of a socket when its handshake has succeeded, and hold as many that have not begun
it as there are file descriptors. Upgrading an accepted transport is no way around that: under uvloop the client's first
octets may be read before, and are lost.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from dtx.telemetry import get_logger

_log = get_logger(part="listener")
_AGAIN: Final = 1.0
"""Seconds before the next try to accept when the system has no more file descriptors, as asyncio has it."""


def common_name(certificate: Mapping[str, Any]) -> str | None:
    """The one common name (CN) of the subject of a certificate; ``None`` where it has none, or several.

    Args:
        certificate: as :meth:`ssl.SSLSocket.getpeercert` has it.
    """
    names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return names[0] if len(names) == 1 and names[0] else None


class TlsServer:
    """Sockets that are accepted one by one.

    Args:
        tls: certificate, and what is asked of clients.
        handshake_timeout: seconds.
        admit: whether there is room for one more socket, of a client's address; makes its protocol.
        dismiss: a protocol that was made has not come to life.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        handshake_timeout: float,
        admit: Callable[[socket.socket, str], asyncio.Protocol | None],
        dismiss: Callable[[asyncio.Protocol], None],
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._admit = admit
        self._dismiss = dismiss
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False

    async def bind(self, host: str, port: int) -> None:
        """Take an address; nobody can connect before :meth:`start_serving`.

        Raises:
            OSError: it is taken, or not ours.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            self.take(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)

    def take(self, listening: socket.socket) -> None:
        """Use a socket of the caller's, too."""
        listening.setblocking(False)
        self.sockets.append(listening)

    def start_serving(self, backlog: int) -> None:
        """Accept clients; *backlog* of them may wait."""
        self._serving = True
        for listening in self.sockets:
            listening.listen(backlog)
            self._spawn(self._accept(listening))

    def close(self) -> None:
        """Accept nobody any more, and end the handshakes that are under way."""
        for task in self._tasks:
            task.cancel()
        if not self._serving:
            for listening in self.sockets:
                listening.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listening: socket.socket) -> None:
        with listening:  # closed when the loop has let go of it
            await self._accept_all(listening)

    async def _accept_all(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                _log.warning("no client can be accepted", reason=str(error))
                await asyncio.sleep(_AGAIN)
                continue
            protocol = self._admit(accepted, address[0])
            if protocol is None:
                accepted.close()
            else:
                self._spawn(self._shake_hands(accepted, protocol))

    async def _shake_hands(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        loop, timeout = asyncio.get_running_loop(), self._handshake_timeout
        try:
            await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=timeout)
        except OSError as error:  # ssl.SSLError is one
            _log.debug("TLS handshake failed", reason=str(error))
            self._dismiss(protocol)
        except BaseException:
            self._dismiss(protocol)
            raise

"""TLS listeners, and facts of certificates.

A socket counts against limits from its acceptance, not only from the end of its handshake.

The TLS servers of an event loop report a socket when its handshake has succeeded. So sockets without a handshake are
limited only by the number of file descriptors. An upgrade of an accepted transport is no solution: under uvloop the
client's first bytes may be read before it, and are lost.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from dtx.telemetry import get_logger

_log = get_logger(part="listener")
_AGAIN: Final = 1.0
"""Seconds before the next attempt to accept when the system has no file descriptor left, as in asyncio."""
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
"""The tag of the version, which certificates of version 1 do not have."""


def common_name(certificate: Mapping[str, Any]) -> str | None:
    """The common name (CN) of the subject of a certificate; ``None`` if it has none or several.

    Args:
        certificate: as from :meth:`ssl.SSLSocket.getpeercert`.
    """
    names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return names[0] if len(names) == 1 and names[0] else None


def expirations(pem: str) -> list[datetime]:
    """The time until which each certificate is valid.

    Args:
        pem: certificates, and perhaps other text.
    """
    return [_not_after(ssl.PEM_cert_to_DER_cert(found)) for found in _CERTIFICATE.findall(pem)]


def _not_after(der: bytes) -> datetime:
    """``notAfter`` of a certificate (RFC 5280, 4.1). The standard library only has the one of a peer."""
    signed = next(_elements(next(_elements(der))[1]))[1]
    _serial, _algorithm, _issuer, validity, *_ = (content for tag, content in _elements(signed) if tag != _VERSION)
    _, (_, moment) = _elements(validity)
    text = moment.decode("ascii")
    if len(text) == len("YYMMDDHHMMSSZ"):  # "Where YY is greater than or equal to 50, the year SHALL be … 19YY"
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of a DER encoding: tag and content."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:  # the number of bytes that have the length
            end = at + (length & 0x7F)
            length, at = int.from_bytes(der[at:end]), end
        yield tag, der[at : at + length]
        at += length


class TlsServer:
    """Listens on sockets, and accepts clients one by one.

    Args:
        tls: certificate, and requirements on client certificates.
        handshake_timeout: seconds.
        admit: makes the protocol for an accepted socket and the client's address; ``None`` refuses the client.
        remove: called with a protocol whose handshake has failed.
    """

    def __init__(
        self,
        tls: ssl.SSLContext,
        handshake_timeout: float,
        admit: Callable[[socket.socket, str], asyncio.Protocol | None],
        remove: Callable[[asyncio.Protocol], None],
    ) -> None:
        self.sockets: list[socket.socket] = []
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._admit = admit
        self._remove = remove
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False

    async def bind(self, host: str, port: int, *, shared: bool = False) -> None:
        """Bind an address. Clients cannot connect before :meth:`start_serving`.

        Args:
            host: a name or an address.
            port: 0 lets the system choose.
            shared: whether other processes of this user listen on it as well (SO_REUSEPORT).

        Raises:
            OSError: the address is in use, or not one of this machine.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            self.take(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)

    def take(self, listening: socket.socket) -> None:
        """Add a listening socket of the caller."""
        listening.setblocking(False)
        self.sockets.append(listening)

    def start_serving(self, backlog: int) -> None:
        """Accept clients; *backlog* of them may wait for each socket."""
        self._serving = True
        for listening in self.sockets:
            listening.listen(backlog)
            self._spawn(self._accept(listening))

    def close(self) -> None:
        """Stop accepting clients, and cancel pending handshakes."""
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
        with listening:  # closed only when the event loop no longer uses it
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
                self._spawn(self._run_handshake(accepted, protocol))

    async def _run_handshake(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        loop, timeout = asyncio.get_running_loop(), self._handshake_timeout
        try:
            await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls, ssl_handshake_timeout=timeout)
        except OSError as error:  # ssl.SSLError is one
            _log.debug("TLS handshake failed", reason=str(error))
            self._remove(protocol)
        except BaseException:
            self._remove(protocol)
            raise

"""The listener: accepts sockets, reads the 8-byte protocol header, and creates the session for that protocol.

A client that sends an unknown header gets ``AMQP 0 0 9 1`` and is closed (AMQP 0-9-1, 4.2.2). A client that sends no
header is closed after a timeout.
"""

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Final, cast

from dtx.auth.login_throttle import source_of
from dtx.config import Address, ConfigError
from dtx.manager import Requester
from dtx.server.client_session import ClientSession
from dtx.server.memory import Leftovers
from dtx.store.rabbitmq.upstream import MOST_UNSENT
from dtx.telemetry import Metrics, RateSample, get_logger
from dtx.tls import TlsServer, common_name
from dtx.wire.amqp09.frames import Protocol, protocol_header

_log = get_logger(part="listener")

_LINGER = 10.0
"""Seconds that a closed socket has to send its remaining data."""

_BACKLOG: Final = 1024
"""Sockets that wait to be accepted: many clients may reconnect at once."""

_RESERVED: Final = 16
"""Connections above the limit for coordinators and members, which complete the branches of the other clients."""

_GRACE: Final = 5.0
"""Seconds after which a handshake may be ended to make room for another client."""

NewSession = Callable[["AcceptedConnection", bytes], ClientSession | None]
"""Makes the session of a connection from its protocol header; ``None`` if dtx does not serve that protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Facts about a connection, for operators and the log.

    Args:
        address: the client's ``host:port``.
        local: dtx's own ``host:port``.
        since: when the protocol header was read, seconds since the epoch.
        protocol: the protocol of the header.
        tls: whether the socket is encrypted.
        traffic: bytes that the client has sent, and bytes that were sent to it.
        sample: for their rates.
    """

    address: str
    local: str
    since: float
    protocol: str
    tls: bool
    traffic: Callable[[], tuple[int, int]] = field(compare=False)
    sample: RateSample = field(default_factory=RateSample, compare=False)


MEMBER: Final = "dtx member"
"""The protocol of other members."""
_NAMES: Final = {
    Protocol.AMQP_0_9_1.value: "AMQP 0-9-1",
    Protocol.AMQP_0_9.value: "AMQP 0-9",
    Protocol.AMQP_1_0.value: "AMQP 1.0",
    Protocol.AMQP_1_0_SASL.value: "AMQP 1.0",
    Protocol.DTX_MEMBER.value: MEMBER,
}


class AcceptedConnection(asyncio.Protocol):
    """One socket of a client; implements :class:`ClientTransport`.

    Args:
        listener: accepted the socket.
        accepted: the socket, if a TLS handshake comes first.
        only_members: whether it is refused to clients.
    """

    def __init__(
        self, listener: "Listener", accepted: socket.socket | None = None, *, only_members: bool = False
    ) -> None:
        self.only_members = only_members
        self._listener = listener
        self._accepted = accepted
        self._transport: asyncio.Transport | None = None
        self.arrived: Arrival | None = None
        """Set when the protocol header has been read."""
        self.is_open = False
        """The handshake is complete."""
        self.session: ClientSession | None = None
        """Set when the protocol header has been read."""
        self._start = b""
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0
        self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not registered as that
        self._transport.set_write_buffer_limits(high=MOST_UNSENT, low=MOST_UNSENT // 4)
        if not self._listener.admit(self, self.peer):
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._listener.header_timeout, self.abort_unless_begun)

    def abort_unless_begun(self) -> None:
        """Close the socket at once if no protocol header has been read."""
        if self.session is None and self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._received += len(data)
        if self.session is not None:
            self.session.client_data(data)
        else:
            self._sniff(data)

    def _sniff(self, data: bytes) -> None:
        self._start += data
        assert self._transport is not None
        match protocol_header(self._start):
            case None:
                return
            case Protocol.UNKNOWN:
                self._refuse(self._transport)
            case _:
                header, rest = self._start[:8], self._start[8:]
                self._start = b""
                if self._timer is not None:
                    self._timer.cancel()
                self.session = self._listener.begin(self, header)
                if self.session is None:
                    self._refuse(self._transport)
                elif rest:
                    self.session.client_data(rest)

    @staticmethod
    def _refuse(transport: asyncio.Transport) -> None:
        """Send the supported protocol header and close."""
        transport.write(Protocol.AMQP_0_9_1.value)
        transport.close()

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        if self.session is not None:
            self.session.client_is_slow()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        if self.session is not None:
            self.session.client_has_caught_up()

    def eof_received(self) -> bool:
        """See :class:`asyncio.Protocol`."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See :class:`asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        self._listener.remove(self)
        if self.session is not None:
            self.session.client_disconnected()

    # -- the socket of a session

    @property
    def unsent(self) -> int:
        """See :class:`ClientTransport`."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_local(self) -> bool:
        """See :class:`ClientTransport`."""
        peer = self.peer
        if not peer:
            return False
        address = ip_address(peer)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return (mapped or address).is_loopback

    @property
    def peer(self) -> str:
        """See :class:`ClientTransport`."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(name[0]).partition("%")[0] if name else ""

    @property
    def certificate_name(self) -> str | None:
        """See :class:`ClientTransport`."""
        found = None if self._transport is None else self._transport.get_extra_info("peercert")
        return common_name(found) if found else None

    def opened(self, who: Requester) -> bool:
        """See :class:`ClientTransport`."""
        self.is_open = self._listener.has_room_for(self, who)
        return self.is_open

    def arrival(self, header: bytes) -> Arrival:
        """The facts about this connection; *header* is its protocol header."""
        return Arrival(
            address=self._address("peername"),
            local=self._address("sockname"),
            since=time.time(),
            protocol=_NAMES[header],
            tls=self._transport is not None and self._transport.get_extra_info("sslcontext") is not None,
            traffic=lambda: (self._received, self._sent),
        )

    def _address(self, end: str) -> str:
        name = None if self._transport is None else self._transport.get_extra_info(end)
        host, port = ("", 0) if not name else name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def write(self, data: bytes | memoryview) -> None:
        """See :class:`ClientTransport`."""
        if self._transport is not None and not self._transport.is_closing():
            self._sent += len(data)
            self._transport.write(data)

    def pause_reading(self) -> None:
        """See :class:`ClientTransport`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See :class:`ClientTransport`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """See :class:`ClientTransport`; the remaining data has :data:`_LINGER` seconds."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            self._timer = asyncio.get_running_loop().call_later(_LINGER, self._transport.abort)

    def abort(self) -> None:
        """See :class:`ClientTransport`."""
        if self._transport is not None:
            self._transport.abort()
        elif self._accepted is not None:
            with suppress(OSError):  # closed already
                self._accepted.shutdown(socket.SHUT_RDWR)  # ends the TLS handshake


class Listener:
    """Accepts clients and enforces the connection limits.

    At a limit, the oldest handshake ends to make room: of the same address, or of the address with the most handshakes.
    It must be at least :data:`_GRACE` seconds old; otherwise the new client is closed at once.

    Args:
        max_connections: maximum number of clients. Clients in a TLS handshake count. Clients that have left count while
            a branch needs their connection to the broker.
        max_handshakes: maximum number of unfinished handshakes of one address.
        coordinators: users with some places above *max_connections*.
        members: whether other members connect, which have these places as well.
        header_timeout: seconds for the protocol header, and for a TLS handshake.
        metrics: counts the connections.
    """

    def __init__(
        self,
        *,
        max_connections: int,
        max_handshakes: int,
        coordinators: frozenset[str] = frozenset(),
        members: bool = False,
        header_timeout: float,
        metrics: Metrics,
    ) -> None:
        self.header_timeout = header_timeout
        self.sessions: dict[ClientSession, Arrival] = {}
        """Sessions whose protocol header has been read, in order of arrival."""
        self.addresses: list[tuple[str, int, bool]] = []
        """The bound addresses: host, port, and whether it is for TLS."""
        self._new_session: NewSession | None = None
        self._max_connections = max_connections
        self._max_handshakes = max_handshakes
        self._coordinators = coordinators
        self._reserved = _RESERVED if coordinators or members else 0
        self._metrics = metrics
        metrics.connections_limit.set(max_connections)
        self._connections: dict[AcceptedConnection, str] = {}
        """Open sockets, with the key of their address (:func:`source_of`)."""
        self._handshakes: dict[str, dict[AcceptedConnection, float]] = {}
        """By key of the address: sockets in a handshake, oldest first, with their start (loop seconds)."""
        self._left: set[ClientSession] = set()
        """Sessions that continue after their client has left."""
        self._servers: list[asyncio.Server] = []
        self._tls_servers: list[TlsServer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._full = False
        self._leftovers = Leftovers(lambda: len(self.sessions))

    async def bind(
        self, host: str, port: int, tls: ssl.SSLContext | None, *, shared: bool = False, only_members: bool = False
    ) -> tuple[str, int]:
        """Bind an address. No client is accepted before :meth:`accept`.

        Args:
            host: a name or an address.
            port: 0 lets the system choose.
            tls: certificate, and requirements on those of clients.
            shared: whether other processes of this user listen on it as well (SO_REUSEPORT).
            only_members: whether it is for other members alone.

        Returns:
            The bound host and port.

        Raises:
            OSError: the address is in use.
            ConfigError: the address is not of this machine, or this user may not bind it.
        """
        try:
            server = await self._bind(host, port, tls, shared, only_members)
        except OSError as error:
            raise not_bound(Address(host, port), error) from error
        name = server.sockets[0].getsockname()
        if not only_members:
            self.addresses.append((name[0], name[1], tls is not None))
        return name[0], name[1]

    async def _bind(
        self, host: str, port: int, tls: ssl.SSLContext | None, shared: bool, only_members: bool
    ) -> asyncio.Server | TlsServer:
        if tls is None:
            new = partial(AcceptedConnection, self, only_members=only_members)
            server = await asyncio.get_running_loop().create_server(
                new, host, port, backlog=_BACKLOG, reuse_port=shared, start_serving=False
            )
            self._servers.append(server)
            return server
        admit = partial(self._admit_tls, only_members)
        tls_server = TlsServer(tls, self.header_timeout, admit, self._remove_tls)
        self._tls_servers.append(tls_server)
        await tls_server.bind(host, port, shared=shared)
        return tls_server

    def _admit_tls(self, only_members: bool, accepted: socket.socket, peer: str) -> AcceptedConnection | None:
        connection = AcceptedConnection(self, accepted, only_members=only_members)
        return connection if self.admit(connection, peer) else None

    def _remove_tls(self, protocol: asyncio.Protocol) -> None:
        self.remove(cast("AcceptedConnection", protocol))

    async def accept(self, new_session: NewSession) -> None:
        """Accept clients on all bound addresses; *new_session* makes their sessions."""
        self._new_session = new_session
        for server in self._servers:
            await server.start_serving()
        for tls_server in self._tls_servers:
            tls_server.start_serving(_BACKLOG)

    def admit(self, connection: AcceptedConnection, peer: str) -> bool:
        """Admit a socket from the address *peer*; false if there is no room: then the caller closes it. Idempotent."""
        if connection in self._connections:
            return True
        source = source_of(peer)
        if not self._make_room(source):
            if not self._full:
                self._full = True
                _log.warning("no room for more connections", peer=peer, max_connections=self._max_connections)
            return False
        self._full = False
        self._connections[connection] = source
        self._handshakes.setdefault(source, {})[connection] = asyncio.get_running_loop().time()
        self._metrics.connections.inc()
        return True

    def _make_room(self, source: str) -> bool:
        """Whether there is room for one more handshake of *source*; may end an old handshake for it."""
        handshakes = self._handshakes.get(source, {})
        if len(handshakes) < self._max_handshakes:
            if len(self._connections) + len(self._left) < self._max_connections + self._reserved:
                return True
            handshakes = max(self._handshakes.values(), key=len, default={})
        oldest = next(iter(handshakes), None)
        if oldest is None or asyncio.get_running_loop().time() - handshakes[oldest] < _GRACE:
            return False
        _log.info("handshake ended to make room", peer=oldest.peer)
        self.remove(oldest)
        oldest.abort()
        return True

    def has_room_for(self, connection: AcceptedConnection, who: Requester) -> bool:
        """Complete the handshake of *connection*; false if there is no room.

        The last places are for coordinators and members.
        """
        within_handshake = sum(map(len, self._handshakes.values()))
        others = len(self._connections) + len(self._left) - within_handshake
        is_member = connection.arrived is not None and connection.arrived.protocol == MEMBER
        if others >= self._max_connections and not is_member and who.user not in self._coordinators:
            return False
        self._end_handshake(connection)
        _log.info("connection opened", **_described(connection))
        return True

    def _end_handshake(self, connection: AcceptedConnection) -> None:
        source = self._connections.get(connection, "")
        ours = self._handshakes.get(source, {})
        if connection in ours:
            del ours[connection]
            if not ours:
                del self._handshakes[source]

    def remove(self, connection: AcceptedConnection) -> None:
        """Remove a closed socket from the counts. Idempotent."""
        if connection not in self._connections:
            return
        if connection.session in self.sessions:
            self._left.add(connection.session)
        self._end_handshake(connection)
        del self._connections[connection]
        self._metrics.connections.dec()
        if connection.is_open:
            _log.info("connection closed", **_described(connection))
        elif connection.session is not None:  # the broker's log of a refused login has the address of dtx only
            _log.info("connection closed in its handshake", **_described(connection))

    def begin(self, connection: AcceptedConnection, header: bytes) -> ClientSession | None:
        """Start the session of *connection* for its protocol *header*; ``None`` if dtx does not serve that protocol."""
        assert self._new_session is not None, "clients are accepted only after that"
        if connection.only_members and header != Protocol.DTX_MEMBER.value:
            return None
        session = self._new_session(connection, header)
        if session is None:
            return None
        self.sessions[session] = connection.arrived = connection.arrival(header)
        task = asyncio.get_running_loop().create_task(self._run_session(session))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return session

    async def _run_session(self, session: ClientSession) -> None:
        try:
            await session.connect()
            await session.ended
        except Exception:  # noqa: BLE001 - logged; one session must not end the others
            _log.exception("session failed", connection=session.id)
            session.abort()
        finally:
            self.sessions.pop(session, None)
            self._left.discard(session)
            self._leftovers.add()

    def stop_accepting(self) -> None:
        """Close the listening sockets."""
        for server in self._servers:
            server.close()
        for tls_server in self._tls_servers:
            tls_server.close()

    async def close(self, frame: bytes, seconds: float) -> None:
        """End all sessions and wait for them.

        Args:
            frame: connection.close of AMQP 0-9-1 for the clients.
            seconds: after this time, the remaining sessions are aborted.
        """
        for connection in list(self._connections):
            connection.abort_unless_begun()
        for session in list(self.sessions):
            session.stop(frame)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for connection in list(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._leftovers.close()


def not_bound(address: Address, error: OSError) -> OSError | ConfigError:
    """The error to raise if *address* cannot be bound: an ``OSError`` if it is in use, otherwise a ``ConfigError``."""
    # the event loop's own message has a Python tuple, or no address at all
    number = error.errno or 0  # the numbers of the resolver are negative
    reason = os.strerror(number) if number > 0 else str(error.strerror or error)
    message = f"cannot listen on {address}: {reason.lower()} (change --listen)"
    return OSError(error.errno, message) if error.errno == errno.EADDRINUSE else ConfigError(message)


def _described(connection: AcceptedConnection) -> dict[str, object]:
    session, arrived = connection.session, connection.arrived
    assert session is not None, "it is there once the header has been read"
    assert arrived is not None, "so is this"
    who = session.who
    return {
        "connection": session.id,
        "peer": arrived.address,
        "protocol": arrived.protocol,
        "tls": arrived.tls,
        "user": who.user,
        "vhost": who.vhost,
    }

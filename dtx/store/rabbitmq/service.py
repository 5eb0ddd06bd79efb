"""dtx's own connections to the broker, with its service credentials."""

import asyncio
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast
from urllib.parse import unquote, urlsplit

import dtx
from dtx.config.values import Address, single_hosts
from dtx.store.rabbitmq.upstream import EventHandler, Upstream, UpstreamLost, words
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import events, handshake, methods, tables
from dtx.wire.amqp09.events import EngineEvent

_log = get_logger(part="service connection")
_CAPABILITIES: Final = (
    b"connection.blocked",
    b"consumer_cancel_notify",
    b"authentication_failure_close",
    b"basic.nack",
)
_FRAME_MAX: Final = 128 * 1024
_CONNECT: Final = 10.0
"""Seconds for each step of a connection."""
_CLUSTER_HEARTBEAT: Final = 4
"""The longest heartbeat in seconds if there are other nodes to go on with: it is given up after 8 to 10 seconds."""
_CLUSTER_CONNECT: Final = 5.0
"""The same if there are other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """The address of the broker, and the credentials of dtx there.

    Args:
        hosts: its addresses; several for the nodes of a cluster.
        user, password: of dtx.
        tls: for ``amqps://``.
        heartbeat: seconds between heartbeats, on every upstream connection.
        connect_timeout: seconds.
    """

    hosts: tuple[Address, ...]
    user: str
    password: str
    tls: ssl.SSLContext | None = None
    heartbeat: int = 10
    connect_timeout: float = _CONNECT
    _failures: list[Address] = field(default_factory=list, compare=False)
    """The host that failed last, if one did: the others are tried before it."""

    @classmethod
    def from_url(cls, url: str, *, ca: Path | None = None, heartbeat: int = 10) -> "Broker":
        """Read ``amqp[s]://user:password@host:port[,host:port…]``. Missing parts get the defaults of RabbitMQ.

        Args:
            url: the URL.
            ca: file with the certificate authority; ``None`` for those of the system.
            heartbeat: seconds; at most 4 are used with several hosts.
        """
        hosts = [urlsplit(one) for one in single_hosts(url)]
        parts = hosts[0]
        secure = parts.scheme == "amqps"
        port = 5671 if secure else 5672
        return cls(
            hosts=tuple(Address(host.hostname or "127.0.0.1", host.port or port) for host in hosts),
            user=unquote(parts.username) if parts.username else "guest",
            password=unquote(parts.password) if parts.password else "guest",
            tls=ssl.create_default_context(cafile=ca) if secure else None,
            heartbeat=min(heartbeat, _CLUSTER_HEARTBEAT) if len(hosts) > 1 else heartbeat,
            connect_timeout=_CLUSTER_CONNECT if len(hosts) > 1 else _CONNECT,
        )

    async def connect(self, protocol: Upstream) -> Address:
        """Open a socket to the broker for *protocol*, at the first of its hosts that answers.

        Returns:
            The host.

        Raises:
            OSError: none can be reached (TimeoutError included); the error of the last one.
        """
        loop = asyncio.get_running_loop()
        error: OSError = ConnectionError("the broker has no host")
        for host in sorted(self.hosts, key=lambda host: host in self._failures):
            try:
                async with asyncio.timeout(self.connect_timeout):
                    await loop.create_connection(
                        lambda: protocol,
                        host.host,
                        host.port,
                        ssl=self.tls,
                        server_hostname=host.host if self.tls is not None else None,
                    )
            except OSError as failure:
                self.failed(host)
                error = failure
            else:
                return host
        raise error

    def failed(self, host: Address) -> None:
        """Try *host* after the others from now on: it does not answer, or its node ended the connection."""
        self._failures[:] = (host,)

    def __str__(self) -> str:
        return f"{'amqps' if self.tls else 'amqp'}://{','.join(map(str, self.hosts))}"


class BrokerLoginRefused(Exception):
    """The broker refused the login of dtx, or the vhost.

    Args:
        reason: for people.
        code: reply code of the broker's connection.close.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class ServiceConnection(Upstream):
    """A connection on which dtx is the client.

    Args:
        broker: its address and credentials.
        name: shown in the broker's list of connections.
    """

    def __init__(self, broker: Broker, name: str) -> None:
        super().__init__()
        self._broker = broker
        self._name = name
        self._step: asyncio.Future[Exception | None] | None = None
        """Done when this step of the handshake is complete, or has failed."""
        self._agreed = methods.ConnectionTuneOk(channel_max=0, frame_max=0, heartbeat=0)
        self.host: Address | None = None
        """The host of the broker that it is connected to."""
        self.version: tuple[int, ...] = ()
        """The version of the broker, for example (4, 0, 5); empty if it does not say so."""
        self.lost = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection is lost."""

    async def login(self, vhost: str) -> None:
        """Connect, authenticate and open *vhost*.

        Raises:
            OSError, UpstreamLost: the broker cannot be reached, or the connection is lost.
            BrokerLoginRefused: wrong credentials, or no access to the vhost.
        """
        await self.authenticate()
        await self.open(vhost)

    async def authenticate(self) -> None:
        """Connect and authenticate; :meth:`open` comes next.

        Raises:
            OSError, UpstreamLost: the broker cannot be reached, or the connection is lost.
            BrokerLoginRefused: wrong credentials.
        """
        self.host = await self._broker.connect(self)
        self.engine.start()
        await self._take_step()

    async def open(self, vhost: str) -> None:
        """Open *vhost*, after :meth:`authenticate`.

        Raises:
            OSError, UpstreamLost: the connection is lost, or does not answer in time.
            BrokerLoginRefused: no access to the vhost.
        """
        self.engine.tune_ok(self._agreed, vhost.encode())
        self.start_heartbeats()
        await self._take_step()

    async def _take_step(self) -> None:
        """Send the engine's output, and wait until the next step of the handshake is due."""
        if self.is_lost:
            raise UpstreamLost("the broker closed the connection")
        self._step = asyncio.get_running_loop().create_future()
        try:
            self.flush()
            async with asyncio.timeout(self._broker.connect_timeout):
                error = await self._step
            if error is not None:
                raise error
        except BaseException:
            if self.host is not None:
                self._broker.failed(self.host)
            self.abort("login failed")
            raise

    def _properties(self) -> bytes:
        capabilities = b"".join(tables.entry(name, b"t", b"\x01") for name in _CAPABILITIES)
        texts = {b"product": b"dtx", b"version": dtx.__version__.encode(), b"connection_name": self._name.encode()}
        entries = [tables.entry(key, b"S", value) for key, value in texts.items()]
        return b"".join((*entries, tables.entry(b"capabilities", b"F", capabilities)))

    # -- from the broker

    def data_received(self, data: bytes) -> None:
        """Handle bytes from the broker."""
        self.run(self._handle(data))

    def _handle(self, data: bytes) -> Iterator[None]:
        for event in self.engine.receive(data):
            self.handle(event)
            yield
        self.flush()
        if self.engine.behind:
            yield from self._handle(b"")

    def handle(self, event: EngineEvent) -> None:
        """Handle an event of the engine."""
        match event:
            case _ if isinstance(event, events.ChannelEvent):
                cast("EventHandler", self.handlers[event.channel]).event(event)
            case events.FramePassed():
                self.handlers[event.channel].frame(event.key, event.buffer, event.start, event.end)
            case events.ServerStarted():
                user, password = self._broker.user.encode(), self._broker.password.encode()
                self.version, response = handshake.version(event.start), handshake.plain(user, password)
                self.engine.log_in(
                    methods.ConnectionStartOk(self._properties(), handshake.PLAIN, response, locale=b"en_US")
                )
            case events.TuneReceived(tune):
                frame_max = min(tune.frame_max or _FRAME_MAX, _FRAME_MAX)
                self._agreed = methods.ConnectionTuneOk(tune.channel_max or 0xFFFF, frame_max, self._broker.heartbeat)
                self._step_done()
            case events.ConnectionOpened():
                self._step_done()
            case events.ConnectionMethodReceived(methods.ConnectionBlocked()):
                self.blocked = True
                _log.warning("the broker takes no publishes, it has an alarm (memory or disk)", connection=self._name)
            case events.ConnectionMethodReceived():
                self.blocked = False
                _log.info("the broker takes publishes again", connection=self._name)
            case events.ConnectionClosing(close):
                self._step_done(
                    BrokerLoginRefused(f"the broker refused {self._broker}: {words(close)}", close.reply_code)
                )
                self.flush()
                self.abort(f"the broker closed the connection: {words(close)}")
            case events.ConnectionFailed(error):
                self.flush()
                self.abort(f"the broker sent something that is not AMQP 0-9-1: {error}")
            case _:
                self.abort(f"the broker sent something that dtx does not expect: {type(event).__name__}")

    def _step_done(self, error: Exception | None = None) -> None:
        step, self._step = self._step, None
        if step is not None and not step.done():
            step.set_result(error)

    def on_lost(self, reason: str) -> None:
        """End the login step with an error, and tell the callers that wait for the end of the connection."""
        self._step_done(UpstreamLost(reason))
        if not self.lost.done():
            self.lost.set_result(reason)

"""dtx's own connections to the broker, with its service credentials."""

import asyncio
import ssl
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import dtx
from dtx.store.rabbitmq.upstream import Upstream, UpstreamLost, words
from dtx.telemetry import get_logger
from dtx.wire.amqp09 import handshake, methods, tables
from dtx.wire.amqp09.frames import Protocol

_log = get_logger(part="service connection")
_CAPABILITIES: Final = (
    b"connection.blocked",
    b"consumer_cancel_notify",
    b"authentication_failure_close",
    b"basic.nack",
)
_FRAME_MAX: Final = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Where the broker is, and who dtx is there.

    Args:
        host, port: its address.
        user, password: dtx's own.
        tls: for ``amqps://``.
        heartbeat: seconds between signs of life, on every upstream connection.
        connect_timeout: seconds.
    """

    host: str
    port: int
    user: str
    password: str
    tls: ssl.SSLContext | None = None
    heartbeat: int = 10
    connect_timeout: float = 10.0

    @classmethod
    def from_url(cls, url: str, *, ca: Path | None = None, heartbeat: int = 10) -> "Broker":
        """Read ``amqp[s]://user:password@host:port``; parts that are missing are those of a fresh RabbitMQ."""
        parts = urlsplit(url)
        secure = parts.scheme == "amqps"
        return cls(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or (5671 if secure else 5672),
            user=unquote(parts.username) if parts.username else "guest",
            password=unquote(parts.password) if parts.password else "guest",
            tls=ssl.create_default_context(cafile=ca) if secure else None,
            heartbeat=heartbeat,
        )

    async def connect(self, protocol: Upstream) -> None:
        """Open a socket to the broker for *protocol*.

        Raises:
            OSError: it is not there (TimeoutError included).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.connect_timeout):
            await loop.create_connection(
                lambda: protocol,
                self.host,
                self.port,
                ssl=self.tls,
                server_hostname=self.host if self.tls is not None else None,
            )

    def __str__(self) -> str:
        return f"{'amqps' if self.tls else 'amqp'}://{self.host}:{self.port}"


class LoginRefused(Exception):
    """The broker does not let dtx in; the message says why.

    Args:
        reason: for people.
        code: reply code of the broker's close.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class ServiceConnection(Upstream):
    """A connection on which dtx is the client.

    Args:
        broker: where to.
        name: shown in the broker's list of connections.
    """

    def __init__(self, broker: Broker, name: str) -> None:
        super().__init__()
        self._broker = broker
        self._name = name
        self._step: asyncio.Future[bytes] | None = None
        self._wanted = 0
        self._agreed = methods.ConnectionTuneOk(channel_max=0, frame_max=0, heartbeat=0)
        self.server_properties = b""
        self.gone = asyncio.get_running_loop().create_future()
        """Done, with the reason, when the connection is lost."""
        self.handlers[0] = self

    async def login(self, vhost: str) -> None:
        """Connect, authenticate and open *vhost*.

        Raises:
            OSError, UpstreamLost: the broker is not there, or went away.
            LoginRefused: wrong credentials, or no access to the vhost.
        """
        await self.authenticate()
        await self.open(vhost)

    async def authenticate(self) -> None:
        """Connect and authenticate; :meth:`open` comes next.

        Raises:
            OSError, UpstreamLost: the broker is not there, or went away.
            LoginRefused: wrong credentials.
        """
        await self._broker.connect(self)
        await self._within_time(self._authenticate())

    async def open(self, vhost: str) -> None:
        """Open *vhost*, after the login.

        Raises:
            OSError, UpstreamLost: the broker went away.
            LoginRefused: no access to the vhost.
        """
        agreed = self._agreed
        self.start_heartbeats(agreed.heartbeat)
        frames = agreed.frame(0)
        frames += methods.ConnectionOpen(vhost.encode()).frame(0)
        await self._within_time(self._say(frames, methods.ConnectionOpenOk.KEY))

    async def _within_time(self, work: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._broker.connect_timeout):
                await work
        except BaseException:
            self.abort("login failed")
            raise

    async def _authenticate(self) -> None:
        broker = self._broker
        start = methods.ConnectionStart.decode(await self._say(Protocol.AMQP_0_9_1.value, methods.ConnectionStart.KEY))
        self.server_properties = start.server_properties
        start_ok = methods.ConnectionStartOk(
            client_properties=self._properties(),
            mechanism=handshake.PLAIN,
            response=handshake.plain(broker.user.encode(), broker.password.encode()),
            locale=b"en_US",
        )
        tune = methods.ConnectionTune.decode(await self._say(start_ok.frame(0), methods.ConnectionTune.KEY))
        agreed = methods.ConnectionTuneOk(
            channel_max=tune.channel_max or 0xFFFF,
            frame_max=min(tune.frame_max or _FRAME_MAX, _FRAME_MAX),
            heartbeat=broker.heartbeat,
        )
        self.channel_max, self.frame_max = agreed.channel_max, agreed.frame_max
        self.splitter.max_frame = agreed.frame_max
        self._agreed = agreed

    def _properties(self) -> bytes:
        capabilities = b"".join(tables.entry(name, b"t", b"\x01") for name in _CAPABILITIES)
        texts = {b"product": b"dtx", b"version": dtx.__version__.encode(), b"connection_name": self._name.encode()}
        entries = [tables.entry(key, b"S", value) for key, value in texts.items()]
        return b"".join((*entries, tables.entry(b"capabilities", b"F", capabilities)))

    async def _say(self, data: bytes, wanted: int) -> bytes:
        if self.is_lost:
            raise UpstreamLost("the broker closed the connection")
        self._wanted = wanted
        self._step = asyncio.get_running_loop().create_future()
        self.write(data)
        return await self._step

    def frame(self, key: int, buffer: bytes, start: int, end: int) -> None:
        """A frame on channel 0."""
        payload = buffer[start + 7 : end - 1]
        if self._step is not None and not self._step.done() and key == self._wanted:
            self._step.set_result(payload)
        elif key == methods.ConnectionClose.KEY:
            close = methods.ConnectionClose.decode(payload)
            self.write(methods.ConnectionCloseOk().frame(0))
            self._refuse(LoginRefused(f"the broker refused {self._broker}: {words(close)}", close.reply_code))
            self.abort(f"the broker closed the connection: {words(close)}")
        elif key == methods.ConnectionBlocked.KEY:
            self.blocked = True
            _log.warning("the broker takes no publishes, it has an alarm (memory or disk)", connection=self._name)
        elif key == methods.ConnectionUnblocked.KEY:
            self.blocked = False
            _log.info("the broker takes publishes again", connection=self._name)

    def _refuse(self, error: Exception) -> None:
        if self._step is not None and not self._step.done():
            self._step.set_exception(error)

    def lost(self, reason: str) -> None:
        """As a handler of channel 0: the login cannot go on."""
        self._refuse(UpstreamLost(reason))

    def on_lost(self, reason: str) -> None:
        """Tell whoever waits for the end."""
        if not self.gone.done():
            self.gone.set_result(reason)

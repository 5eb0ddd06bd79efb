"""Serving the API: in the event loop of dtx itself, on a socket of its own."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtx.admin.desk import Desk
from dtx.admin.guard import PAGES, Guard
from dtx.admin.routes import api
from dtx.admin.web.pulse import Pulse
from dtx.admin.web.site import website
from dtx.auth.turns import source_of
from dtx.telemetry import get_logger
from dtx.tls import TlsServer

_log = get_logger(part="admin")
_MOST_CONNECTIONS: Final = 400
"""At the same time: those that have a request answered (see the guard), and as many that do not."""
_MOST_OF_ADDRESS: Final = 100
"""Connections of one address that have no request answered."""
_MOST_HEADERS: Final = 32 * 1024
"""Octets of a request's head."""
_REQUEST_SECONDS: Final = 30
"""A whole request has arrived this long after its connection was made, or after the answer before it."""
_STALL_SECONDS: Final = 60
"""A client that takes nothing of an answer for this long is closed."""
_GOODBYE_SECONDS: Final = 5


def application(desk: Desk, pulse: Pulse) -> FastAPI:
    """The API, and the web pages."""
    app = api(desk)
    app.mount(PAGES, website(desk, pulse))

    @app.get("/", include_in_schema=False)
    async def show_pages() -> RedirectResponse:
        """Whoever comes with a browser wants the pages."""
        return RedirectResponse(f"{PAGES}/")

    return app


class _Connection(H11Protocol):
    """A connection with deadlines, which makes room for others while no whole request of it is here.

    Of uvicorn's own limits, none bounds the time that a request takes to arrive, and the one for connections answers
    503 to everybody while slow sockets use it up.
    """

    accepted: socket.socket | None = None
    """Within a TLS handshake: the socket."""
    waits_since: float | None = None
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def shake_hands(self, accepted: socket.socket, address: str) -> None:
        """The socket is accepted, and TLS begins: until :meth:`connection_made`."""
        self.accepted = accepted
        self.source = source_of(address)
        self.waits_since = self.loop.time()
        self.connections.add(self)
        self._make_room()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client may ask."""
        super().connection_made(transport)
        self.source = source_of(self.client[0] if self.client else "")
        self.accepted = self.waits_since = None
        self._watch()
        self._make_room()

    def _make_room(self) -> None:
        """Beyond a limit, the connection that has waited longest for a request is closed."""
        others = [one for one in self.connections if isinstance(one, _Connection)]
        waiting = [one for one in others if one.waits_since is not None]  # this one does
        ours = [one for one in waiting if one.source == self.source]
        if len(ours) > _MOST_OF_ADDRESS or len(others) > _MOST_CONNECTIONS:
            crowd = ours if len(ours) > _MOST_OF_ADDRESS else waiting
            min(crowd, key=lambda one: one.waits_since or 0.0).give_up("too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer was sent: the next request may come."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        super().pause_writing()
        self._stalled = self.loop.call_later(_STALL_SECONDS, self.give_up, "the client does not read")

    def resume_writing(self) -> None:
        """The client takes data again."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _watch(self) -> None:
        """Begin, or end, to wait for the rest of a request."""
        waits = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()
        if waits and self.waits_since is None:
            self.waits_since = self.loop.time()
            self._deadline = self.loop.call_later(_REQUEST_SECONDS, self.give_up, "no whole request has come")
        elif not waits and self._deadline is not None:
            self.waits_since = None
            self._deadline.cancel()

    def give_up(self, reason: str) -> None:
        """Close at once."""
        _log.debug("operator's connection closed", peer=self.source, reason=reason)
        self.connections.discard(self)  # counts no more, though connection_lost comes later
        if self.accepted is None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # closed already
                self.accepted.shutdown(socket.SHUT_RDWR)  # ends the handshake


class _Server(uvicorn.Server):
    """Signals are the service's, and TLS is dtx's own: connections count within their handshake, too."""

    _tls: TlsServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients on *sockets*."""
        certificate = self.config.ssl
        if certificate is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._tls = TlsServer(certificate, _REQUEST_SECONDS, self._admit, self._dismiss)
        for listening in sockets or ():
            self._tls.take(listening)
        self._tls.start_serving(self.config.backlog)

    def _admit(self, accepted: socket.socket, address: str) -> _Connection:
        connection = _Connection(self.config, self.server_state, self.lifespan.state)
        connection.shake_hands(accepted, address)
        return connection

    def _dismiss(self, connection: asyncio.Protocol) -> None:
        self.server_state.connections.discard(cast("_Connection", connection))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no clients any more; what is being answered goes on for some seconds."""
        if self._tls is not None:
            self._tls.close()
            await asyncio.sleep(0)  # those within a handshake are dismissed
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Listens, and answers once it is told what about.

    Args:
        host, port: address; port 0 lets the system choose.
        names: under which it is reached, besides that address and those of the machine.
        certificate, key: PEM files, for TLS.
        proxies: addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are believed.

    Raises:
        OSError: the address is taken, or is none of this machine.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        names: Sequence[str] = (),
        certificate: Path | None = None,
        key: Path | None = None,
        proxies: Sequence[str] = (),
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            reason = f"the operators' API cannot listen on {where} (--admin-listen names another, --no-admin none)"
            raise OSError(error.errno, f"{reason}: {error.strerror}") from None
        self._names = (host, *names)
        self._certificate = certificate
        self._key = key
        self._proxies = list(proxies)
        self._pulse: Pulse | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if self._certificate is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def begin(self, desk: Desk) -> None:
        """Answer from now on."""
        self._pulse = Pulse(desk)
        self._pulse.begin()
        self._serve(Guard(application(desk, self._pulse), self._names))

    def _serve(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(self._proxies),
            forwarded_allow_ips=self._proxies,
            h11_max_incomplete_event_size=_MOST_HEADERS,
            timeout_keep_alive=_REQUEST_SECONDS,
            timeout_graceful_shutdown=_GOODBYE_SECONDS,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket]), name="dtx-admin"
        )

    async def close(self) -> None:
        """Finish what is being answered, and end."""
        if self._pulse is not None:
            await self._pulse.close()  # pages that watch would be waited for
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()

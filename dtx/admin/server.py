"""The HTTP server of API and pages, in the event loop of dtx, and the checks that every request passes first.

The checks: the host name of the request is known, its size is limited, and no page of another site sends it. Unexpected
errors are answered as "internal error" only.

Browsers send basic credentials with every request that a page makes. A request that changes something must therefore
be one that a page of another origin cannot make without a CORS preflight. Its body is JSON, and its origin, if the
browser sends it, is this server. Forms of dtx's pages (:mod:`dtx.admin.web`) are not JSON; for them the browser must
send the origin, and the form has a secret of the session.

These checks compare headers of the browser with the host name of the request. The owner of a domain can let its name
resolve to this machine (DNS rebinding), and a page of that name then has the same origin. So only known names are
answered. IP addresses are always answered, because no other site can redirect one.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dtx.admin.api import api
from dtx.admin.api_context import API, ApiContext
from dtx.admin.problems import Problem, answer, as_problem
from dtx.admin.rate_sampler import sample_rates
from dtx.admin.web.live_updates import LiveUpdates
from dtx.admin.web.rendering import PAGES
from dtx.admin.web.site import website
from dtx.auth.login_throttle import source_of
from dtx.telemetry import get_logger
from dtx.tls import TlsServer

_log = get_logger(part="admin")
_MOST_CONNECTIONS: Final = 400
"""Simultaneous connections: those with a request under way (see ``Guard``), and as many without."""
_MOST_OF_ADDRESS: Final = 100
"""Connections from one address without a request under way."""
_MOST_HEADERS: Final = 32 * 1024
"""Bytes of the head of a request."""
_REQUEST_SECONDS: Final = 30
"""A request must be complete this long after the connection was made, or after the previous answer."""
_STALL_SECONDS: Final = 60
"""A connection is closed when its client is this far behind a client that reads ``_SLOWEST``."""
_SLOWEST: Final = 16 * 1024
"""Bytes per second that a client must read of an answer that does not fit into the buffers."""
_SHUTDOWN_SECONDS: Final = 5
MOST_BODY: Final = 1 << 20
"""Bytes of a request: enough for an order with the positions of all messages of a large branch."""
_MOST_SIGN_IN: Final = 64 << 10
"""Bytes of the form of the sign-in, which anyone may send."""
MOST_DEFINITIONS: Final = 4 << 20
"""Bytes of definitions to import: ten thousand queues and more."""
_DEFINITIONS: Final = re.compile(r"/api/definitions(?:/[^/]*)?")
MOST_REQUESTS: Final = 200
"""Simultaneous requests; further ones get 503."""
_OPEN: Final = frozenset({"/healthz", "/readyz"})
"""Answered for any host name: load balancers and Kubernetes use names of their own. The answers have no secrets."""
_UNCOUNTED: Final = _OPEN | {"/metrics"}
"""Not limited by ``MOST_REQUESTS``: an orchestrator restarts a dtx whose health it cannot read."""
_CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Of the other methods, routes accept only GET, HEAD and OPTIONS; the rest gets 405."""
_PREFLIGHT: Final = frozenset({"PUT", "DELETE"})
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
_FORMER: Final = re.compile(
    r"/api(/(?:archive|associations|audit|branches|bulk|connections|journal|outcomes|scans|status|tokens|transactions"
    r"|users|vhosts)(?:/.*)?)",
    re.DOTALL,
)
"""Paths of dtx's own resources before they moved to ``API``; they work for one more version."""
_RABBITMQ: Final = re.compile(r"(?!POST ).* /api/(?:users|vhosts|connections(?!/\d+$))(?:/.*)?", re.DOTALL)
"""Requests with such paths that belong to RabbitMQ's management API in standalone mode."""
_DEPRECATION: Final = (b"deprecation", b"@1795737600")
"""The day from which the former paths are deprecated (RFC 9745)."""
_HSTS: Final = (b"strict-transport-security", b"max-age=31536000")
"""Browsers use only HTTPS for this host for a year (RFC 6797)."""


class Guard:
    """The outermost ASGI application, which makes the checks.

    Args:
        app: the application behind it.
        names: host names of this server, as well as addresses, localhost and the name of the machine.
        standalone: whether there is no broker, so that dtx has the paths of RabbitMQ's management API.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = (), *, standalone: bool = False) -> None:
        self._app = app
        self._standalone = standalone
        self._names = frozenset(name.lower().rstrip(".") for name in ("localhost", socket.gethostname(), *names))
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] != "http":
            return
        begun = False
        received = 0
        former = _FORMER.fullmatch(scope["path"])
        if former is not None and not self._is_rabbitmq(scope):
            scope = {**scope, "path": API + former[1]}
        elif scope["path"].startswith("/api/"):
            former = None
            scope = {**scope, "path": scope.get("raw_path", b"").decode("ascii")}  # names have escaped slashes there
        refused: Problem | None = None

        async def bounded() -> Message:
            nonlocal received, refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                refused = Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have at most {most} bytes")
                raise refused
            return message

        async def hardened(message: Message) -> None:
            nonlocal begun
            if refused is not None and not begun:
                return  # the application would answer that the body cannot be parsed
            if message["type"] == "http.response.start":
                begun = True
                given = list(message.get("headers", ()))
                names = {name for name, _ in given}
                added = (*_HEADERS, _HSTS) if scope.get("scheme") == "https" else _HEADERS
                if former is not None:
                    added = (*added, _DEPRECATION)
                message["headers"] = [*given, *(pair for pair in added if pair[0] not in names)]
            await send(message)

        most = _most_body(scope["path"])
        counts = scope["path"] not in _UNCOUNTED
        self._requests += counts
        try:
            if counts and self._requests > MOST_REQUESTS:
                raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_REQUESTS} requests are under way already")
            self._require_known_host(scope)
            _require_own_page(scope)
            await self._app(scope, bounded, hardened)
            if refused is not None and not begun:
                raise refused
        except Exception as error:  # the edge: only documented errors leave it
            problem = as_problem(error)
            if begun:
                raise
            refused = None
            await answer(problem.status, problem.detail, problem.headers)(scope, receive, hardened)
        finally:
            self._requests -= counts

    def _is_rabbitmq(self, scope: Scope) -> bool:
        """Whether a path that dtx formerly had is now one of RabbitMQ's management API."""
        return self._standalone and _RABBITMQ.fullmatch(f"{scope['method']} {scope['path']}") is not None

    def _require_known_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "")
        if scope["path"] not in _OPEN and not _is_address(name := _without_port(host)) and name not in self._names:
            detail = f"{host[:260]!r} is not a known name of this dtx: add it to --admin-host"
            raise Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)


def _most_body(path: str) -> int:
    """Bytes that a request of *path* may have."""
    if path == f"{PAGES}/sign-in":
        return _MOST_SIGN_IN
    return MOST_DEFINITIONS if _DEFINITIONS.fullmatch(path) else MOST_BODY


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    bare = name if name and (port.isdigit() or not port) else host
    return bare.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _require_own_page(scope: Scope) -> None:
    if scope["method"] not in _CHANGING:
        return
    headers = Headers(scope=scope)
    page = scope["path"].startswith(f"{PAGES}/")
    kind = "application/x-www-form-urlencoded" if page else "application/json"
    # RabbitMQ's tools send no type without a body. A page of another origin needs a preflight for these methods.
    bare = scope["method"] in _PREFLIGHT and "content-type" not in headers
    if not bare and headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a request that changes something must have the content type {kind}"
        )
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in {None, "none", "same-origin"}:
        raise Problem(HTTPStatus.FORBIDDEN, "a page of another site may not send this request")
    if origin is not None and urlsplit(origin).netloc != headers.get("host", ""):
        raise Problem(HTTPStatus.FORBIDDEN, "a page of another origin may not send this request")
    if page and site is None and origin is None:
        raise Problem(HTTPStatus.FORBIDDEN, "the browser does not tell which page sends this request")


def application(context: ApiContext, pulse: LiveUpdates) -> FastAPI:
    """The application with API and web pages."""
    app = api(context)
    # FastAPI completes included routes when a request is first compared with them, which would hold the event loop.
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    app.mount(PAGES, website(context, pulse))

    @app.get("/", include_in_schema=False)
    async def show_pages() -> RedirectResponse:
        """Redirect browsers to the pages."""
        return RedirectResponse(f"{PAGES}/")

    return app


class _Connection(H11Protocol):
    """A connection with deadlines. While it has no complete request, it may be closed in favour of others.

    uvicorn has no limit for the time in which a request arrives. Its limit for connections answers 503 to all clients
    while slow sockets use it up.
    """

    accepted: socket.socket | None = None
    """The socket, during the TLS handshake."""
    waits_since: float | None = None
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _patience: float = _STALL_SECONDS
    _paused: float = 0.0

    def start_handshake(self, accepted: socket.socket, address: str) -> None:
        """Begin the TLS handshake of an accepted socket, which lasts until :meth:`connection_made`."""
        self.accepted = accepted
        self.source = source_of(address)
        self.waits_since = self.loop.time()
        self.connections.add(self)
        self._make_room()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client may send requests."""
        super().connection_made(transport)
        self.source = source_of(self.client[0] if self.client else "")
        self.accepted = self.waits_since = None
        self.app = self._counted
        self._watch()
        self._make_room()

    def _make_room(self) -> None:
        """If a limit is exceeded, close the connection that has waited longest for a request."""
        others = [one for one in self.connections if isinstance(one, _Connection)]
        waiting = [one for one in others if one.waits_since is not None]  # this one does
        ours = [one for one in waiting if one.source == self.source]
        if len(ours) > _MOST_OF_ADDRESS or len(others) > _MOST_CONNECTIONS:
            candidates = ours if len(ours) > _MOST_OF_ADDRESS else waiting
            min(candidates, key=lambda one: one.waits_since or 0.0).give_up("too many connections")

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
        """An answer was sent; wait for the next request."""
        super().on_response_complete()
        self._watch()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application; with each part of an answer, the client gets time to read it."""

        async def count(message: Message) -> None:
            self._patience = min(_STALL_SECONDS, self._patience + len(message.get("body", b"")) / _SLOWEST)
            await send(message)

        await self.config.loaded_app(scope, receive, count)

    def pause_writing(self) -> None:
        """Bytes wait for the client; begin its deadline."""
        super().pause_writing()
        self._paused = self.loop.time()
        self._stalled = self.loop.call_later(self._patience, self.give_up, "the client reads too slowly")

    def resume_writing(self) -> None:
        """The client has read most of them."""
        super().resume_writing()
        self._patience -= self.loop.time() - self._paused
        if self._stalled is not None:
            self._stalled.cancel()

    def _watch(self) -> None:
        """Start or stop the deadline for a complete request."""
        waits = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()
        if waits and self.waits_since is None:
            self.waits_since = self.loop.time()
            self._deadline = self.loop.call_later(_REQUEST_SECONDS, self.give_up, "no complete request has arrived")
        elif not waits and self._deadline is not None:
            self.waits_since = None
            self._deadline.cancel()

    def give_up(self, reason: str) -> None:
        """Close the connection at once."""
        _log.debug("operator's connection closed", peer=self.source, reason=reason)
        self.connections.discard(self)  # it no longer counts, although connection_lost is called later
        if self.accepted is None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # closed already
                self.accepted.shutdown(socket.SHUT_RDWR)  # ends the handshake


class _Server(uvicorn.Server):
    """A server that leaves signals to the service, and TLS to dtx, so that connections count during the handshake."""

    _tls: TlsServer | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept clients on *sockets*."""
        certificate = self.config.ssl
        if certificate is None:
            await super().startup(sockets)
            return
        await super().startup([])
        self._tls = TlsServer(certificate, _REQUEST_SECONDS, self._admit, self._remove)
        for listening in sockets or ():
            self._tls.take(listening)
        self._tls.start_serving(self.config.backlog)

    def _admit(self, accepted: socket.socket, address: str) -> _Connection:
        connection = _Connection(self.config, self.server_state, self.lifespan.state)
        connection.start_handshake(accepted, address)
        return connection

    def _remove(self, connection: asyncio.Protocol) -> None:
        self.server_state.connections.discard(cast("_Connection", connection))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no further clients; requests under way have a few seconds to finish."""
        if self._tls is not None:
            self._tls.close()
            await asyncio.sleep(0)  # connections in their handshake are dismissed
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Listens from its construction on, and answers once :meth:`begin` is called.

    Args:
        host: address to listen on.
        port: its port; 0 lets the system choose one.
        names: further host names of this server.
        certificate: PEM file, for TLS.
        key: PEM file of its private key.
        proxies: addresses and networks whose X-Forwarded-For and X-Forwarded-Proto are trusted.

    Raises:
        OSError: the address is in use, or does not belong to this machine.
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
            reason = f"the operators' API cannot listen on {where} (change --admin-listen, or use --no-admin)"
            raise OSError(error.errno, f"{reason}: {error.strerror}") from None
        self._names = (host, *names)
        self._certificate = certificate
        self._key = key
        self._proxies = list(proxies)
        self._pulse: LiveUpdates | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._rates: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port and scheme."""
        host, port = self._socket.getsockname()[:2]
        return host, port, "http" if self._certificate is None else "https"

    @property
    def url(self) -> str:
        """The URL of the API."""
        host, port, scheme = self.address
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def begin(self, context: ApiContext) -> None:
        """Answer requests from now on."""
        self._pulse = LiveUpdates(context)
        self._pulse.begin()
        self._rates = asyncio.get_running_loop().create_task(sample_rates(context), name="dtx-rates")
        self._serve(Guard(application(context, self._pulse), self._names, standalone=context.standalone))

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
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._key,
        )
        self._server = _Server(config)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket]), name="dtx-admin"
        )

    async def close(self) -> None:
        """Finish requests under way, then stop."""
        if self._pulse is not None:
            await self._pulse.close()  # the shutdown would wait for pages with live updates
        if self._rates is not None:
            self._rates.cancel()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()

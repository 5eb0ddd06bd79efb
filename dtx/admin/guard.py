"""What every request passes first: it is meant for this server, its size is bounded, nobody else's page sends it; and
nothing unexpected gets out.

Browsers send basic credentials along with whatever a page makes them send. So a request that changes something must be
one that no page of another origin can make without being asked for by name: its body is JSON, and its origin, where
the browser tells it, is this server. The forms of our own pages (:mod:`dtx.admin.web`) are no JSON; there the browser
must tell the origin, and they carry a mark of the session besides.

All of that compares what the browser tells with the name under which this server was asked. Whoever owns a name can
let it lead to this machine (DNS rebinding), and a page of that name is then of the same origin. So only names that are
known here are answered; an address is nobody's to redirect.
"""

import socket
from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtx.admin.problems import Problem, answer, as_problem

MOST_BODY: Final = 1 << 20
"""Octets of a request: an order with the positions of all messages of a large branch."""
PAGES: Final = "/console"
"""Where the web pages are. They bring their own headers."""
MOST_REQUESTS: Final = 200
"""At the same time; more are told 503."""
_OPEN: Final = frozenset({"/healthz", "/readyz"})
"""They tell nothing; what asks them (balancers, Kubernetes) names hosts as it likes."""
_UNCOUNTED: Final = _OPEN | {"/metrics"}
"""Answered however many other requests there are: an orchestrator restarts a dtx whose health it cannot read."""
_CHANGING: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Of the others, no route takes more than GET, HEAD and OPTIONS: the rest is told 405."""
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)
_HSTS: Final = (b"strict-transport-security", b"max-age=31536000")
"""For a year, browsers ask this host by HTTPS alone (RFC 6797)."""


class Guard:
    """The outermost application.

    Args:
        app: what is guarded.
        names: of this server, besides addresses, localhost and the name of the machine.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = frozenset(name.lower().rstrip(".") for name in ("localhost", socket.gethostname(), *names))
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        begun = False
        received = 0
        refused: Problem | None = None

        async def bounded() -> Message:
            nonlocal received, refused
            message = await receive()
            received += len(message.get("body", b""))
            if received > MOST_BODY:
                refused = Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has {MOST_BODY} octets at most")
                raise refused
            return message

        async def hardened(message: Message) -> None:
            nonlocal begun
            if refused is not None and not begun:
                return  # the application takes it for a body that cannot be parsed, and would say so
            if message["type"] == "http.response.start":
                begun = True
                given = list(message.get("headers", ()))
                names = {name for name, _ in given}
                added = (*_HEADERS, _HSTS) if scope.get("scheme") == "https" else _HEADERS
                message["headers"] = [*given, *(pair for pair in added if pair[0] not in names)]
            await send(message)

        counts = scope["path"] not in _UNCOUNTED
        self._requests += counts
        try:
            if counts and self._requests > MOST_REQUESTS:
                raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MOST_REQUESTS} requests are being answered already")
            self._require_known_host(scope)
            _require_own_page(scope)
            await self._app(scope, bounded, hardened)
            if refused is not None and not begun:
                raise refused
        except Exception as error:  # the edge: nothing but documented errors comes out
            problem = as_problem(error)
            if begun:
                raise
            refused = None
            await answer(problem.status, problem.detail, problem.headers)(scope, receive, hardened)
        finally:
            self._requests -= counts

    def _require_known_host(self, scope: Scope) -> None:
        host = Headers(scope=scope).get("host", "")
        if scope["path"] not in _OPEN and not _is_address(name := _without_port(host)) and name not in self._names:
            detail = f"this dtx is not known as {host[:260]!r}: --admin-host has to name it"
            raise Problem(HTTPStatus.MISDIRECTED_REQUEST, detail)


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
    if headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"what changes something is asked for as {kind}")
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in {None, "none", "same-origin"}:
        raise Problem(HTTPStatus.FORBIDDEN, "another site's page may not ask for that")
    if origin is not None and urlsplit(origin).netloc != headers.get("host", ""):
        raise Problem(HTTPStatus.FORBIDDEN, "another origin's page may not ask for that")
    if page and site is None and origin is None:
        raise Problem(HTTPStatus.FORBIDDEN, "the browser does not tell which page asks for that")

"""What every request passes first: its size is bounded, nobody else's page sends it, and nothing unexpected gets out.

Browsers send basic credentials along with whatever a page makes them send. So a request that changes something must be
one that no page of another origin can make without being asked for by name: its body is JSON, and its origin, where
the browser tells it, is this server. The forms of our own pages (:mod:`dtx.admin.web`) are no JSON; there the browser
must tell the origin, and they carry a mark of the session besides.
"""

from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dtx.admin.problems import Problem, answer, as_problem

MOST_BODY: Final = 1 << 20
"""Octets of a request: an order with the positions of all messages of a large branch."""
PAGES: Final = "/console"
"""Where the web pages are. They bring their own headers."""
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
)


class Guard:
    """The outermost application.

    Args:
        app: what is guarded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
                message["headers"] = [*given, *(pair for pair in _HEADERS if pair[0] not in names)]
            await send(message)

        try:
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


def _require_own_page(scope: Scope) -> None:
    if scope["method"] in _SAFE:
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

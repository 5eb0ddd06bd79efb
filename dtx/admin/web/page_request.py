"""Requests for pages: sessions, fields of forms, and error pages.

The secret of a session is 256 random bits in a cookie that scripts cannot read. dtx keeps only its hash, in memory. So
a restart of dtx ends all sessions, and nothing in the database can be used to sign in. Each request checks the identity
and role again (:meth:`~dtx.admin.identity.Authenticator.again`). So removing a user or revoking a token ends its
sessions at once.
"""

import hashlib
import inspect
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dtx.admin.api_context import ApiContext, context_of
from dtx.admin.identity import ApiCredentials, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.admin.web.live_updates import LiveUpdates
from dtx.admin.web.rendering import PAGES, address, redirect_to, render
from dtx.log.reader import LogReader

COOKIE: Final = "dtx_session"
PART: Final = "x-dtx-part"
"""Header of requests that the script of a page makes; it shows only a part of the answer."""
LIVE: Final = "live"
"""Value of the header for live updates, which are not caused by the user."""
MARK: Final = "mark"
"""Field of every form with the secret against forms of other sites."""
_MOST_FIELDS: Final = 2_000
_KEYS: Final = "query_keys"
"""Attribute of the functions of pages, see :func:`reads`."""
IDLE_SECONDS: Final = 3600.0
"""A session ends after this time without a request; live updates do not count."""
LONGEST_SECONDS: Final = 12 * 3600.0
"""A session ends after this time in any case."""
MOST_DRY_RUNS: Final = 20
"""Dry runs of one session whose orders have not followed yet: one in each window."""
MOST_SESSIONS: Final = 1000
"""Simultaneous sessions, about 1 KiB each; beyond it the least recently used one ends."""
_Model = TypeVar("_Model", bound=BaseModel)
_Page = TypeVar("_Page", bound=Callable[..., object])


@dataclass(slots=True, kw_only=True)
class WebSession:
    """The session of a browser.

    Args:
        badge: its credentials.
        begun: time of the sign-in, seconds of the clock.
        used: time of the last request, seconds of the clock.
        mark: secret that every form of its pages sends back, so that pages of other sites cannot send forms.
        notice: text at the top of the next page.
    """

    badge: ApiCredentials
    begun: float
    used: float
    mark: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    notice: str | None = None
    _dry_runs: list[bytes] = field(default_factory=list, repr=False)

    def pop_notice(self) -> str | None:
        """Return the notice and remove it."""
        notice, self.notice = self.notice, None
        return notice

    def add_dry_run(self, order: str, version: str) -> None:
        """Remember that the dry run of an order was shown.

        Args:
            order: the order.
            version: version of the branch in the dry run.
        """
        self._dry_runs = [*self._dry_runs[-MOST_DRY_RUNS + 1 :], _hash(f"{version} {order}")]

    def take_dry_run(self, order: str, version: str) -> bool:
        """Whether the dry run of exactly this order was shown; true only once for each dry run."""
        key = _hash(f"{version} {order}")
        if key not in self._dry_runs:
            return False
        self._dry_runs.remove(key)
        return True


class Sessions:
    """All sessions.

    Args:
        clock: returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, WebSession] = OrderedDict()
        """Sessions by the hash of the cookie; the least recently used one comes first."""

    def begin(self, badge: ApiCredentials) -> str:
        """Begin a session and return the text of its cookie, which is not stored."""
        secret = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_hash(secret)] = WebSession(badge=badge, begun=now, used=now)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return secret

    def find(self, secret: str, *, touch: bool = True) -> WebSession | None:
        """The session of a cookie, unless it has ended.

        Args:
            secret: the cookie's text.
            touch: whether this counts as use.
        """
        key = _hash(secret)
        session = self._sessions.get(key)
        if session is None:
            return None
        now = self._clock()
        if now - session.used >= IDLE_SECONDS or now - session.begun >= LONGEST_SECONDS:
            del self._sessions[key]
            return None
        if touch:
            session.used = now
            self._sessions.move_to_end(key)
        return session

    def end(self, secret: str) -> None:
        """End a session. Idempotent."""
        self._sessions.pop(_hash(secret), None)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class SignInNeeded(Exception):
    """The request has no valid session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request with a valid session.

    Args:
        who: the identity and role.
        session: of the browser.
        context: the context of the API.
        pulse: the source of live updates.
        here: path and query.
        part: whether the script of a page shows only a part of the answer.
    """

    who: Identity
    session: WebSession
    context: ApiContext
    pulse: LiveUpdates
    here: str
    part: bool = False

    def show(self, template: str, code: HTTPStatus = HTTPStatus.OK, /, **context: Any) -> Response:
        """The response with a page."""
        return render(template, {**frame(self), **context}, code)


async def total(
    visit: Visit, shown: Sequence[object], cursor: object, following: object, count: Callable[[LogReader], int]
) -> int:
    """The number of rows of a list. They are counted only if the list has more than the page that is shown."""
    return await visit.context.read(count) if cursor or following else len(shown)


def frame(visit: Visit | None) -> dict[str, Any]:
    """The values that the frame of every page needs."""
    if visit is None:
        return {
            "me": None,
            "mark": "",
            "notice": None,
            "here": "",
            "rm": "",
            "active": True,
            "live": None,
            "standalone": False,
        }
    return {
        "me": visit.who,
        "mark": visit.session.mark,
        "notice": None if visit.part else visit.session.pop_notice(),
        "here": visit.here,
        "rm": visit.context.rm,
        "standalone": visit.context.standalone,
        "active": visit.context.active is not None and visit.context.active.lease_valid(),
        "live": None,
    }


def sessions_of(request: Request) -> Sessions:
    """The sessions of the application that serves *request*."""
    sessions: Sessions = request.app.state.sessions
    return sessions


def client_address(request: Request) -> str:
    """The IP address of the browser."""
    return request.client.host if request.client is not None else ""


async def visit_of(request: Request) -> Visit:
    """Check the session of a request.

    Raises:
        SignInNeeded: it has no valid session.
    """
    secret = request.cookies.get(COOKIE, "")
    sessions, context = sessions_of(request), context_of(request)
    part = request.headers.get(PART)
    session = sessions.find(secret, touch=part != LIVE)
    if session is None:
        raise SignInNeeded
    try:
        who = await context.gate.again(session.badge, client_address(request))
    except Problem:
        sessions.end(secret)
        raise SignInNeeded from None
    query = request.url.query
    here = request.url.path + (f"?{query}" if query else "")
    return Visit(
        who=who, session=session, context=context, pulse=request.app.state.pulse, here=here, part=part is not None
    )


async def _visitor(request: Request) -> Visit:
    return await visit_of(request)


Visitor = Annotated[Visit, Depends(_visitor)]


def reads(*names: str) -> Callable[[_Page], _Page]:
    """Name the keys of the query that a page reads from the request, as well as those in its signature."""

    def mark(page: _Page) -> _Page:
        setattr(page, _KEYS, names)
        return page

    return mark


@cache
def known_keys(page: Callable[..., object]) -> frozenset[str]:
    """The keys that a page may have in its query."""
    found: set[str] = set(getattr(page, _KEYS, ()))
    for name, parameter in inspect.signature(page).parameters.items():
        given = getattr(parameter.annotation, "__origin__", parameter.annotation)
        if isinstance(given, type) and issubclass(given, BaseModel):
            found.update(field.alias or key for key, field in given.model_fields.items())
        elif name not in ("request", "visit", "view"):
            of_type = getattr(parameter.annotation, "__metadata__", ())
            found.add(next((each.alias for each in of_type if getattr(each, "alias", None)), name))
    return frozenset(found)


async def require_known_keys(request: Request) -> None:
    """Check the keys of the query: with a key that is ignored, a page would show more than the user asked for.

    Raises:
        Problem: 422, the page has no such key.
    """
    for name in request.query_params:
        if name not in known_keys(request.scope["endpoint"]):
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"this page has no query key {name[:100]!r}")


class Fields:
    """The fields of a form.

    Args:
        pairs: names and values.
    """

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def getlist(self, name: str) -> list[str]:
        """All values of that name as they were typed."""
        return self._values.get(name, [])

    def all(self, name: str) -> list[str]:
        """All values of that name that are not empty, without blanks around them."""
        return [value.strip() for value in self.getlist(name) if value.strip()]

    def one(self, name: str) -> str:
        """The last value of that name, without blanks around it; empty if there is none."""
        return self.exactly(name).strip()

    def exactly(self, name: str) -> str:
        """The last value of that name as it was typed, for passwords and names."""
        return next(iter(reversed(self.getlist(name))), "")

    def non_empty(self, *names: str) -> dict[str, Any]:
        """The values of those of *names* that are not empty."""
        return {name: self.exactly(name) for name in names if self.one(name)}


async def read_fields(request: Request) -> Fields:
    """Read the fields of a form.

    Raises:
        Problem: 400, the body is no form.
    """
    body = await request.body()
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"the body is no form: {error}") from None
    return Fields(pairs)


async def read_form(request: Request, visit: Visit) -> Fields:
    """Read the fields of a form and check that a page of this session has sent it.

    Raises:
        Problem: 400, the body is no form; 403, the form is not of this session.
    """
    fields = await read_fields(request)
    if not secrets.compare_digest(fields.one(MARK).encode(), visit.session.mark.encode()):
        raise Problem(HTTPStatus.FORBIDDEN, "the form belongs to another session: open the page again")
    return fields


def build(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """A form of the API, from values that were typed.

    Raises:
        Problem: 422, a value is malformed.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}" for item in error.errors()[:5])
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, details) from None


def to_sign_in(request: Request) -> Response:
    """Redirect to the sign-in page, and from there back to the requested page."""
    if request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site":
        # Browsers do not send the cookie when a link of another site is followed. A reload by a page of dtx sends it.
        return render("again.html", frame(None))
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return redirect_to(address("sign-in", next=wanted if request.method == "GET" else None))


def local(wanted: str) -> str:
    """*wanted* if it is a page of dtx, else the overview: the sign-in never redirects to another site."""
    plain = wanted.startswith(f"{PAGES}/") and "\\" not in wanted and wanted.isprintable()
    return quote(wanted, safe="/?&=%:+-._~!$'()*,;@") if plain else f"{PAGES}/"


async def show_error(request: Request, error: Exception) -> Response:
    """The page for an error."""
    problem = as_problem(error)
    try:
        visit: Visit | None = await visit_of(request)
    except Exception:  # noqa: BLE001 - a second error must not hide the first one
        visit = None
    context = {**frame(visit), "status": problem.status, "detail": problem.detail}
    response = render("error.html", context, problem.status)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response

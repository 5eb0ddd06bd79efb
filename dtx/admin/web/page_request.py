"""A request for a page: which browser has signed in, who looks, what forms send, and how errors look.

A session is known by 256 random bits in a cookie that scripts cannot read; only a hash of them is kept, in memory. So a
restart of dtx signs everybody out, and nothing in the database lets anybody in. Who somebody is and what that permits
is looked at again with each request (:meth:`~dtx.admin.identity.Gate.again`): a user that is removed, or a token that
is revoked, is out at once.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dtx.admin.api_context import ApiContext, context_of
from dtx.admin.identity import Badge, Identity
from dtx.admin.problems import Problem, as_problem
from dtx.admin.web.live_updates import Pulse
from dtx.admin.web.rendering import PAGES, address, go_to, render

COOKIE: Final = "dtx_session"
PART: Final = "x-dtx-part"
"""The header of requests by the script of a page, which shows a part of the answer."""
LIVE: Final = "live"
"""Its value where nobody has asked: the page keeps itself up to date."""
MARK: Final = "mark"
"""The field of every form that says whose page it is on."""
_MOST_FIELDS: Final = 2_000
IDLE_SECONDS: Final = 3600.0
"""Without a request for this long a session ends; pages that keep themselves up to date do not count."""
LONGEST_SECONDS: Final = 12 * 3600.0
"""However busy it is: a working day."""
MOST_DRY_RUNS: Final = 20
"""Of one session, to be followed by their orders: one in each of its windows."""
MOST_SESSIONS: Final = 1000
"""At the same time, of about 1 KiB each; beyond it the one that was not used for longest ends."""
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(slots=True, kw_only=True)
class WebSession:
    """One browser that has signed in.

    Args:
        badge: as whom.
        begun, used: seconds of the clock.
        mark: that every form of its pages sends back, so that no other page can send one.
        notice: what the next page says first.
    """

    badge: Badge
    begun: float
    used: float
    mark: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    notice: str | None = None
    _dry_runs: list[bytes] = field(default_factory=list, repr=False)

    def take_notice(self) -> str | None:
        """What is to be said, once."""
        notice, self.notice = self.notice, None
        return notice

    def add_dry_run(self, order: str, version: str) -> None:
        """The dry run of an order has been shown.

        Args:
            order: what was asked for.
            version: of the branch that the dry run saw.
        """
        self._dry_runs = [*self._dry_runs[-MOST_DRY_RUNS + 1 :], _hash(f"{version} {order}")]

    def take_dry_run(self, order: str, version: str) -> bool:
        """Whether the dry run of just that was shown; once."""
        key = _hash(f"{version} {order}")
        if key not in self._dry_runs:
            return False
        self._dry_runs.remove(key)
        return True


class Sessions:
    """All of them.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, WebSession] = OrderedDict()
        """By the hash of the cookie; what was used last comes last."""

    def begin(self, badge: Badge) -> str:
        """A new session; the text of its cookie is told this once."""
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
        """Sign out. Idempotent."""
        self._sessions.pop(_hash(secret), None)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class SignInNeeded(Exception):
    """Nobody has signed in, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of somebody who has signed in.

    Args:
        who: may do what its role permits.
        session: of the browser.
        context: what everything stands on.
        pulse: what changes.
        here: path and query.
        part: whether a part of the answer is shown alone.
    """

    who: Identity
    session: WebSession
    context: ApiContext
    pulse: Pulse
    here: str
    part: bool = False

    def show(self, template: str, code: HTTPStatus = HTTPStatus.OK, /, **context: Any) -> Response:
        """A page for this visitor."""
        return render(template, {**frame(self), **context}, code)


def frame(visit: Visit | None) -> dict[str, Any]:
    """What every page has around it."""
    if visit is None:
        return {"me": None, "mark": "", "notice": None, "here": "", "rm": "", "active": True, "live": None}
    return {
        "me": visit.who,
        "mark": visit.session.mark,
        "notice": None if visit.part else visit.session.take_notice(),
        "here": visit.here,
        "rm": visit.context.rm,
        "active": visit.context.active is not None and visit.context.active.lease_valid(),
        "live": None,
    }


def sessions_of(request: Request) -> Sessions:
    """Who has signed in."""
    sessions: Sessions = request.app.state.sessions
    return sessions


def client_address(request: Request) -> str:
    """Where the browser is."""
    return request.client.host if request.client is not None else ""


async def visit_of(request: Request) -> Visit:
    """Who looks.

    Raises:
        SignInNeeded: nobody that is known.
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


class Fields:
    """What a form has sent.

    Args:
        pairs: names and values.
    """

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def all(self, name: str) -> list[str]:
        """Every value of that name that is not empty, without blanks around it."""
        return [value.strip() for value in self._values.get(name, []) if value.strip()]

    def one(self, name: str) -> str:
        """The last value of that name, without blanks around it; empty where there is none."""
        return self.exactly(name).strip()

    def exactly(self, name: str) -> str:
        """The same as it was typed: a password."""
        return next(iter(reversed(self._values.get(name, []))), "")

    def given(self, *names: str) -> dict[str, Any]:
        """Those of *names* that are not empty."""
        return {name: self.one(name) for name in names if self.one(name)}


async def read_fields(request: Request) -> Fields:
    """What a form has sent.

    Raises:
        Problem: 400, it is none.
    """
    body = await request.body()
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise Problem(HTTPStatus.BAD_REQUEST, f"that is no form: {error}") from None
    return Fields(pairs)


async def read_form(request: Request, visit: Visit) -> Fields:
    """What a form of one of our pages has sent.

    Raises:
        Problem: 400, it is none; 403, it is not of a page of this session.
    """
    fields = await read_fields(request)
    if not secrets.compare_digest(fields.one(MARK).encode(), visit.session.mark.encode()):
        raise Problem(HTTPStatus.FORBIDDEN, "the form is of another session: open the page again")
    return fields


def build(model: type[_Model], values: Mapping[str, Any]) -> _Model:
    """A form of the API, from what people have typed.

    Raises:
        Problem: 422, it is not as it must be.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg'].lower()}" for item in error.errors()[:5])
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, said) from None


def to_sign_in(request: Request) -> Response:
    """The way in, and from there to the page that was wanted."""
    if request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site":
        # The cookie does not come along from another site's link. Asked for by our own page, it does.
        return render("again.html", frame(None))
    wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return go_to(address("sign-in", next=wanted if request.method == "GET" else None))


def local(wanted: str) -> str:
    """*wanted* where it is one of our pages, else the first one: nobody is sent elsewhere."""
    plain = wanted.startswith(f"{PAGES}/") and "\\" not in wanted and wanted.isprintable()
    return quote(wanted, safe="/?&=%:+-._~!$'()*,;@") if plain else f"{PAGES}/"


async def show_error(request: Request, error: Exception) -> Response:
    """Every error as a page."""
    problem = as_problem(error)
    try:
        visit: Visit | None = await visit_of(request)
    except Exception:  # noqa: BLE001 - whoever it is, and whatever else is wrong: this is about the first error
        visit = None
    context = {**frame(visit), "status": problem.status, "detail": problem.detail}
    response = render("error.html", context, problem.status)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response

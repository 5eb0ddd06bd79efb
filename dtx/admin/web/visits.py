"""Who looks at a page, what forms send, and how errors look."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qsl, quote

from fastapi import Depends, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dtx.admin.desk import Desk
from dtx.admin.guard import PAGES
from dtx.admin.identity import Identity
from dtx.admin.problems import Problem, as_problem
from dtx.admin.web.pulse import Pulse
from dtx.admin.web.rendering import address, go_to, render
from dtx.admin.web.sessions import Session, Sessions

COOKIE: Final = "dtx_session"
PART: Final = "x-dtx-part"
"""The header of requests by the script of a page, which shows a part of the answer."""
LIVE: Final = "live"
"""Its value where nobody has asked: the page keeps itself up to date."""
MARK: Final = "mark"
"""The field of every form that says whose page it is on."""
_MOST_FIELDS: Final = 2_000
_Model = TypeVar("_Model", bound=BaseModel)


class SignInNeeded(Exception):
    """Nobody has signed in, or not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One request of somebody who has signed in.

    Args:
        who: may do what its role permits.
        session: of the browser.
        desk: what everything stands on.
        pulse: what changes.
        here: path and query.
        part: whether a part of the answer is shown alone.
    """

    who: Identity
    session: Session
    desk: Desk
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
        "rm": visit.desk.rm,
        "active": visit.desk.active is not None and visit.desk.active.lease_valid(),
        "live": None,
    }


def desk_of(request: Request) -> Desk:
    """What the pages stand on."""
    desk: Desk = request.app.state.desk
    return desk


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
    sessions, desk = sessions_of(request), desk_of(request)
    part = request.headers.get(PART)
    session = sessions.find(secret, touch=part != LIVE)
    if session is None:
        raise SignInNeeded
    try:
        who = await desk.gate.again(session.badge, client_address(request))
    except Problem:
        sessions.end(secret)
        raise SignInNeeded from None
    query = request.url.query
    here = request.url.path + (f"?{query}" if query else "")
    return Visit(who=who, session=session, desk=desk, pulse=request.app.state.pulse, here=here, part=part is not None)


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

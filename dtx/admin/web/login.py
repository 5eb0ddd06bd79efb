"""Sign-in and sign-out, static files, and the stream of live updates."""

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from dtx.admin.api_context import context_of
from dtx.admin.identity import ApiCredentials
from dtx.admin.problems import Problem
from dtx.admin.web.page_request import (
    COOKIE,
    LONGEST_SECONDS,
    SignInNeeded,
    Visitor,
    client_address,
    frame,
    local,
    read_fields,
    read_form,
    sessions_of,
    visit_of,
)
from dtx.admin.web.rendering import HEADERS, PAGES, STATIC, address, redirect_to, render, static_content, static_version

router = APIRouter()
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_CHECKED: Final = 5
"""Beats between two checks of the session of a stream. The contents of pages are not in it: each request is checked."""


@router.get("/static/{name}")
async def show_file(name: str, v: str = "") -> Response:
    """A static file; without authentication."""
    if name not in STATIC:
        raise Problem(HTTPStatus.NOT_FOUND, f"there is no file {name}")
    kept = _FOR_EVER if v == static_version(name) else "no-cache"
    return Response(static_content(name), media_type=STATIC[name], headers={**HEADERS, "Cache-Control": kept})


@router.get("/sign-in")
async def show_sign_in(
    request: Request, next_page: Annotated[str, Query(alias="next", max_length=4000)] = ""
) -> Response:
    """The sign-in page."""
    try:
        await visit_of(request)
    except SignInNeeded:
        return _sign_in_page(next_page)
    return redirect_to(local(next_page))


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Sign in with user and password, or with a token. Attempts after a wrong password are delayed."""
    fields = await read_fields(request)
    name, password, wanted = fields.one("name"), fields.exactly("password"), fields.one("next")
    context, where = context_of(request), client_address(request)
    try:
        if name:
            badge = await context.gate.by_password(name.encode(), password.encode(), where)
        elif password:
            badge = await context.gate.by_token(password.strip(), where)
        else:
            raise Problem(HTTPStatus.UNAUTHORIZED, "enter a name and a password, or only a token")
    except Problem as problem:
        return _sign_in_page(wanted, name=name, problem=problem)

    async def work() -> tuple[str, ApiCredentials]:
        return f"signed in as {badge.identity.role}", badge

    await context.audited(badge.identity, "sign-in", "web pages", "", {}, work)
    sessions_of(request).end(request.cookies.get(COOKIE, ""))
    response = redirect_to(local(wanted))
    _set_cookie(request, response, sessions_of(request).begin(badge), round(LONGEST_SECONDS))
    return response


def _sign_in_page(wanted: str, *, name: str = "", problem: Problem | None = None) -> Response:
    context = {
        **frame(None),
        "next": wanted,
        "name": name,
        "problem": None if problem is None else problem.detail,
        "ended": bool(wanted) and problem is None,
    }
    return render("sign-in.html", context, HTTPStatus.OK if problem is None else problem.status)


@router.post("/sign-out")
async def sign_out(request: Request, visit: Visitor) -> Response:
    """End the session at once."""
    await read_form(request, visit)
    sessions_of(request).end(request.cookies.get(COOKIE, ""))
    response = redirect_to(address("sign-in"))
    _set_cookie(request, response, "", 0)
    return response


def _set_cookie(request: Request, response: Response, secret: str, seconds: int) -> None:
    response.set_cookie(
        COOKIE,
        secret,
        max_age=seconds,
        path=PAGES,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


@router.get("/live")
async def watch(request: Request, visit: Visitor) -> Response:
    """The stream of live updates, until the session ends. The stream does not prolong the session."""
    visit.pulse.require_room()
    secret = request.cookies.get(COOKIE, "")

    async def events() -> AsyncIterator[bytes]:
        count = 0
        async for event in visit.pulse.watch():
            count += 1
            if count % _CHECKED == 0 and sessions_of(request).find(secret, touch=False) is None:
                yield b"event: signed-out\ndata: {}\n\n"
                return
            yield event

    headers = {**HEADERS, "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)

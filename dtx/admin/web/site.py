"""The web pages as one application within that of the API."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dtx.admin.desk import Desk
from dtx.admin.problems import Problem
from dtx.admin.web import branch, branches, connections, entrance, overview, reconciliation, records
from dtx.admin.web.pulse import Pulse
from dtx.admin.web.sessions import Sessions
from dtx.admin.web.visits import SignInNeeded, show_error, to_sign_in
from dtx.log.api import LogError
from dtx.xa.codes import XaError


def website(desk: Desk, pulse: Pulse) -> FastAPI:
    """The pages.

    Args:
        desk: what they stand on, as the API does.
        pulse: keeps them up to date.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.desk = desk
    app.state.pulse = pulse
    app.state.sessions = Sessions()
    for part in (entrance, overview, branches, branch, records, reconciliation, connections):
        app.include_router(part.router, include_in_schema=False)

    async def to_entrance(request: Request, _: Exception) -> Response:
        return to_sign_in(request)

    app.add_exception_handler(SignInNeeded, to_entrance)
    for kind in (Problem, XaError, LogError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, show_error)
    return app

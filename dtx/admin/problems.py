"""Errors as problem+json (RFC 9457): the mapping from exceptions to HTTP statuses and details."""

import re
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dtx.auth.operators import TokenError
from dtx.auth.users import EditError
from dtx.log.api import LogError
from dtx.telemetry import get_logger
from dtx.wire.amqp09.errors import WireError
from dtx.xa.codes import RefusalCause, ReplyCode, XaError

_log = get_logger(part="admin")
MEDIA_TYPE: Final = "application/problem+json"
STATUS: Final = {
    ReplyCode.ACCESS_REFUSED: HTTPStatus.FORBIDDEN,
    ReplyCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    ReplyCode.RESOURCE_LOCKED: HTTPStatus.CONFLICT,
    ReplyCode.PRECONDITION_FAILED: HTTPStatus.PRECONDITION_FAILED,
    ReplyCode.SYNTAX_ERROR: HTTPStatus.BAD_REQUEST,
    ReplyCode.COMMAND_INVALID: HTTPStatus.CONFLICT,
    ReplyCode.RESOURCE_ERROR: HTTPStatus.SERVICE_UNAVAILABLE,
    ReplyCode.NOT_ALLOWED: HTTPStatus.CONFLICT,
    ReplyCode.NOT_IMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    ReplyCode.INTERNAL_ERROR: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""The status for each code of XaError. 541 becomes 503: the outcome is not known, and the client should ask again."""


ELSEWHERE: Final = "dtx runs alongside a broker: use the management API of RabbitMQ, by default on port 15672"
_ABSENT: Final = {
    "(?:operator-)?policies": "dtx has no policies: give each queue and exchange its arguments when it is declared",
    "(?:global-)?parameters|shovels|federation-links": "dtx has no parameters, shovels and federation: "
    "use a client that consumes here and publishes there",
    "(?:vhost|user)-limits": "dtx has no limits that the API can set: start it with --quota",
    "feature-flags|deprecated-features": "dtx has no feature flags: each version has all its features",
    "rebalance|queues/[^/]*/[^/]*/actions": "dtx has one copy of each queue: there is nothing to move or synchronize",
    "reset": "dtx has no statistics that can be reset: its counters begin with its start",
    "nodes/[^/]*/memory": "dtx does not divide its memory into parts: /metrics has process_resident_memory_bytes",
    "traces|trace-files": "dtx does not trace messages: --traces has the calls of transactions",
    "stream": "dtx has no streams: declare a classic or quorum queue",
    "vhosts/[^/]*/start": "each virtual host of dtx runs all the time",
    "all-configuration": "the definitions are at /api/definitions",
    "health/checks": "dtx has no such check: the reference of its HTTP API lists those that it has",
}
"""Paths of RabbitMQ's API that dtx does not have: the reason, or what to do instead."""
NOT_ACTIVE: Final = "This dtx is not the active one."
UNKNOWN_OUTCOME: Final = "This dtx is not the active one; or the outcome is not known yet: ask again."


def refusals(reasons: dict[HTTPStatus, str]) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route, for the OpenAPI document.

    Args:
        reasons: a sentence for each status. Statuses that every route may have are left out.
    """
    schema = {"$ref": "#/components/schemas/ProblemForm"}
    return {
        status.value: {"description": reason, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status, reason in reasons.items()
    }


class Problem(Exception):
    """A request cannot be served.

    Args:
        status: of the answer.
        detail: text for the client, lower case, no full stop.
        headers: of the answer.
        cause: for programs.
    """

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        headers: dict[str, str] | None = None,
        cause: RefusalCause | None = None,
    ) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.cause = cause


def answer(status: HTTPStatus, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The HTTP response for a problem."""
    content = {"type": "about:blank", "title": status.phrase, "status": status.value, "detail": detail}
    return JSONResponse(content, status.value, headers, MEDIA_TYPE)


_RABBITMQ: Final = {
    HTTPStatus.UNAUTHORIZED: "not_authorised",
    HTTPStatus.FORBIDDEN: "not_authorised",
    HTTPStatus.NOT_FOUND: "Object Not Found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: "internal_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable",
}
"""The words of RabbitMQ's management API for statuses. Others become 400, bad_request."""


def _as_rabbitmq(problem: Problem) -> JSONResponse:
    """The response for a problem, as from RabbitMQ's management API, which has 401 instead of 403.

    Its ``code`` is only from dtx.
    """
    status = problem.status if problem.status in _RABBITMQ else HTTPStatus.BAD_REQUEST
    if status is HTTPStatus.FORBIDDEN:
        status = HTTPStatus.UNAUTHORIZED
    word = _RABBITMQ.get(status, "bad_request")
    code = {} if problem.cause is None else {"code": problem.cause}
    return JSONResponse({"error": word, "reason": problem.detail, **code}, status.value, problem.headers)


def as_problem(error: Exception) -> Problem:
    """The problem for *error*. An unexpected error is logged; the client gets only "internal error"."""
    match error:
        case Problem():
            return error
        case XaError():
            return Problem(STATUS[error.code], error.reason, cause=error.cause)
        case WireError():
            return Problem(HTTPStatus.BAD_REQUEST, error.reason)
        case TokenError() | EditError():
            return Problem(HTTPStatus.CONFLICT, str(error))
        case LogError():
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        case RequestValidationError():
            details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
            return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, details)
        case HTTPException():
            return Problem(HTTPStatus(error.status_code), str(error.detail).lower(), dict(error.headers or {}))
        case _:
            _log.error("request failed", exc_info=error)
            return Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")


def _without_route(request: Request, problem: Problem) -> Problem:
    """The problem of a request to RabbitMQ's API for which there is no route."""
    if not request.app.state.context.standalone:
        return Problem(HTTPStatus.NOT_FOUND, ELSEWHERE)
    for paths, reason in _ABSENT.items():
        if re.fullmatch(f"/api/(?:{paths})(?:/.*)?", request.url.path, re.DOTALL):
            # rabbitmqadmin shows the reason of 400, but not that of 404
            makes = request.method in {"PUT", "POST"}
            return Problem(HTTPStatus.BAD_REQUEST if makes else HTTPStatus.NOT_FOUND, reason)
    return problem


def install(app: FastAPI) -> None:
    """Let *app* answer every error with a problem."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        problem = as_problem(error)
        if request.url.path.startswith("/api/"):
            if isinstance(error, HTTPException):
                problem = _without_route(request, problem)
            return _as_rabbitmq(problem)
        return answer(problem.status, problem.detail, problem.headers)

    for kind in (Problem, XaError, LogError, WireError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)

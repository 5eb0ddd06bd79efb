"""Routes of the API without a database: their methods, and the types in the OpenAPI document."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Message

from dtx.admin import routes_orders
from dtx.admin.api import api
from dtx.admin.identity import Authenticator
from dtx.admin.server import Guard, application
from dtx.manager.operators import Forecast
from dtx.xa.codes import ReplyCode, XaError
from dtx.xa.model import State
from dtx.xa.xid import Xid

NOTHING: Any = SimpleNamespace()


@pytest.fixture(scope="module")
def guard() -> Guard:
    """All routes of API and pages."""
    context: Any = SimpleNamespace(gate=Authenticator(NOTHING, NOTHING), standalone=True)
    return Guard(application(context, NOTHING), standalone=True)


async def answer_of(guard: Guard, method: str, path: str, *body: bytes, kind: bytes = b"application/json") -> Message:
    """The head of the answer to a request. A request that reads more than *body* fails."""
    said: list[Message] = []
    parts = list(body)

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        said.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", kind), (b"origin", b"http://localhost")],
        "query_string": b"",
    }
    await guard(scope, receive, send)
    return said[0]


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PROPFIND"])
@pytest.mark.parametrize("path", ["/", "/dtx/v1/branches", "/healthz", "/metrics", "/console/sign-in"])
async def test_a_method_that_no_route_takes_is_not_allowed(guard: Guard, method: str, path: str) -> None:
    """RFC 9110, 15.5.6: "The origin server MUST generate an Allow header field in a 405 response"."""
    head = await answer_of(guard, method, path, b"")
    assert head["status"] == 405
    assert b"GET" in dict(head["headers"])[b"allow"]


async def test_no_body_is_read_before_the_login(guard: Guard) -> None:
    found = [("POST", "/api/definitions")]
    for path, methods in api(NOTHING).openapi()["paths"].items():
        found += [(method.upper(), path) for method, route in methods.items() if "requestBody" in route]
    assert len(found) > 20
    for method, path in found:
        assert (await answer_of(guard, method, path))["status"] == 401, path


async def test_the_sign_in_reads_only_a_small_form(guard: Guard) -> None:
    form = b"application/x-www-form-urlencoded"
    parts = [b"next=" + b"x" * 65_536]
    assert (await answer_of(guard, "POST", "/console/sign-in", *parts, kind=form))["status"] == 413


def test_the_api_document_has_the_type_of_the_metrics() -> None:
    answers = api(NOTHING).openapi()["paths"]["/metrics"]["get"]["responses"]
    assert list(answers["200"]["content"]) == [CONTENT_TYPE_LATEST]


async def test_a_bulk_order_keeps_all_its_results() -> None:
    """An order that was carried out is reported as done, even where its effects cannot be shown."""

    async def carry_out(order: Any) -> Any:
        if order.vhost == "refused":
            raise XaError(ReplyCode.NOT_FOUND, "unknown xid")
        forecast: Any = Forecast(
            state=State.PREPARED, version=1, becomes=State.PREPARED, outcome=None, later_answer="", steps=()
        )
        if order.vhost == "odd":
            forecast = SimpleNamespace(steps=(), archived="no number")
        return SimpleNamespace(forecast=forecast, answer="xa-ok")

    operators = SimpleNamespace(carry_out=carry_out)
    orders = {"commit": SimpleNamespace(inc=lambda: None)}
    context: Any = SimpleNamespace(require_active=lambda: (None, operators), metrics=SimpleNamespace(orders=orders))
    form: Any = SimpleNamespace(action="commit", reason="", dry_run=False)
    found: Any = [
        SimpleNamespace(branch=SimpleNamespace(vhost=vhost, xid=Xid(1, b"g", b"b"), version=1))
        for vhost in ("/", "odd", "refused")
    ]
    results = await routes_orders._many(context, SimpleNamespace(name="olga"), form, found)  # type: ignore[arg-type]
    assert [(each.vhost, each.done, each.answer) for each in results] == [
        ("/", True, "xa-ok"),
        ("odd", True, "xa-ok"),
        ("refused", False, "unknown xid"),
    ]

"""What each role may do at the operators' API: every route of its OpenAPI document."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from tests.support.crash import StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.routes import ROUTES
from tests.support.service import ADMIN

_PLACES: Final = {
    "{xid}": "1:61:",
    "{position}": "0",
    "{action}": "commit",
    "{gtrid}": "61",
    "{branch}": "00000000-0000-0000-0000-000000000000",
    "{number}": "999999",
    "{name}": "nobody",
    "{vhost}": "%2F",
    "{user}": "nobody",
    "{source}": "amq.topic",
    "{destination}": "amq.fanout",
    "{props}": "~",
    "{protocol}": "amqp091",
    "{within}": "1",
    "{unit}": "weeks",
}


@pytest.fixture(scope="module")
def dtx(postgres: PostgresServer) -> Iterator[StandaloneStage]:
    """A dtx without a broker, for all tests of this module."""
    with StandaloneStage(postgres, options=ADMIN) as stage:
        yield stage


@pytest.fixture(scope="module")
def people(dtx: StandaloneStage) -> dict[OperatorRole, Operator]:
    """One operator of each role."""
    trail = OperatorLog(dtx.database, "dtx")
    return {
        role: Operator(dtx.service.admin_url, token=trail.make_token(str(role), role, "test")) for role in OperatorRole
    }


@pytest.fixture(scope="module")
def document(dtx: StandaloneStage) -> dict[str, Any]:
    """The OpenAPI document of the API."""
    found: dict[str, Any] = Operator(dtx.service.admin_url, user="").get("/openapi.json")
    return found


def test_every_route_is_here(document: dict[str, Any]) -> None:
    there = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert there == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES)
def test_each_role_gets_only_its_own_actions(
    dtx: StandaloneStage, people: dict[OperatorRole, Operator], document: dict[str, Any], route: str
) -> None:
    """And the answer has a status that the document lists for the route, or that every route may have."""
    method, _, path = route.partition(" ")
    role, body = ROUTES[route]
    listed = set(document["paths"][path][method.lower()]["responses"])
    for place, value in {**_PLACES, "{port}": str(dtx.service.port)}.items():
        path = path.replace(place, value)
    sent = {} if method == "DELETE" else body
    nobody = Operator(dtx.service.admin_url, user="").ask(method, path, sent)
    assert (nobody.status == 401) == (role is not None), nobody
    for having, person in people.items():
        answer = person.ask(method, path, sent)
        allowed = role is None or having.includes(role)
        assert (answer.status in {401, 403}) != allowed, (having, answer)
        assert answer.status < 500, answer
        assert not allowed or str(answer.status) in listed, answer
        if not allowed:
            rabbitmq = path.startswith("/api/")
            assert answer.headers["content-type"] == f"application/{'json' if rabbitmq else 'problem+json'}"
            assert f"token:{having} is a" in answer.body["reason" if rabbitmq else "detail"]
            if method != "GET":
                written = OperatorLog(dtx.database, "dtx").audit_lines(limit=1)[0]
                assert (written.actor, (written.result or "")[:3]) == (f"token:{having}", "403")


def test_no_secret_is_in_the_trail_of_all_that(dtx: StandaloneStage) -> None:
    lines = OperatorLog(dtx.database, "dtx").audit_lines(limit=1000)
    assert {"make-user", "set-password", "make-token"} <= {line.action for line in lines}
    said = json.dumps([[line.subject, line.reason, line.detail, line.result] for line in lines])
    assert "s3cret-w0rd" not in said + dtx.service.log_path.read_text()


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    """References resolve, path parameters are described, ids are unique, errors and credentials are documented."""
    assert document["openapi"].startswith("3.1")
    ids, references = [], set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            ids.append(operation["operationId"])
            described = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert described == {part[1:-1] for part in path.split("/") if part.startswith("{")}, path
            assert operation["summary"]
            assert operation["description"]
            problem = operation["responses"]["default"]["content"]
            assert problem == {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemForm"}}}
            assert "422" not in operation["responses"], "all errors have the same form"
            role, _ = ROUTES[f"{method.upper()} {path}"]
            assert operation.get("security", document["security"]) == (
                [] if role is None else [{"token": []}, {"user": []}]
            )
    assert len(ids) == len(set(ids))
    for word in json.dumps(document).split('"$ref": "')[1:]:
        references.add(word.partition('"')[0])
    assert {scheme["scheme"] for scheme in document["components"]["securitySchemes"].values()} == {"bearer", "basic"}
    problem = {"type": "about:blank", "title": "Not Found", "status": 404, "detail": "unknown xid"}
    assert document["components"]["schemas"]["ProblemForm"]["required"] == list(problem)
    assert references <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}

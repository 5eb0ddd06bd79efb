"""Changes by RabbitMQ's management API of a dtx without a broker, beside the answers of a real RabbitMQ."""

import hashlib
import json
import socket
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from tests.servers.admin.conftest import somebody
from tests.support.crash import StandaloneStage
from tests.support.operator import Answered, Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmqadmin import Admin
from tests.support.service import ADMIN

EVERYTHING: Final = {"configure": ".*", "write": ".*", "read": ".*"}
_GET: Final = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
_SENT: Final = {"properties": {}, "payload_encoding": "string"}
REQUESTS: Final[list[tuple[str, str, Any]]] = [
    ("PUT", "/vhosts/v", None),
    ("PUT", "/vhosts/v", {}),
    ("PUT", "/queues/v/q", {"durable": "true", "arguments": {"x-max-length": 5}}),
    ("PUT", "/queues/v/q", {"durable": True, "arguments": {"x-max-length": 5}}),
    ("PUT", "/queues/v/q", {}),
    ("PUT", "/queues/v/bad", {"durable": "maybe"}),
    ("PUT", "/queues/v/amq.bad", {}),
    ("PUT", "/queues/v/bad", {"arguments": {"x-max-length": "many"}}),
    ("PUT", "/queues/nowhere/q", {}),
    ("PUT", "/exchanges/v/x", {"type": "topic", "durable": True}),
    ("PUT", "/exchanges/v/x", {"type": "topic", "durable": True}),
    ("PUT", "/exchanges/v/x", {"type": "fanout", "durable": True}),
    ("PUT", "/exchanges/v/bad", {"type": "unknown"}),
    ("PUT", "/exchanges/v/plain", {}),
    ("POST", "/bindings/v/e/x/q/q", {"routing_key": "a.*"}),
    ("POST", "/bindings/v/e/x/q/q", {"routing_key": "a.*"}),
    ("POST", "/bindings/v/e/x/q/q", {}),
    ("POST", "/bindings/v/e/x/e/plain", {"routing_key": "b"}),
    ("POST", "/bindings/v/e/x/q/nothing", {}),
    ("POST", "/bindings/v/e/nothing/q/q", {}),
    ("DELETE", "/bindings/v/e/x/q/q/~", None),
    ("DELETE", "/bindings/v/e/x/q/q/~", None),
    ("DELETE", "/bindings/v/e/x/e/plain/b", None),
    ("POST", "/exchanges/v/x/publish", {"routing_key": "a.b", **_SENT, "payload": "1"}),
    (
        "POST",
        "/exchanges/v/amq.default/publish",
        {
            "routing_key": "q",
            "payload": "//4=",
            "payload_encoding": "base64",
            "properties": {"delivery_mode": 2, "headers": {"n": 1, "t": True, "s": "x", "l": [1, "a"]}, "timestamp": 5},
        },
    ),
    ("POST", "/exchanges/v/x/publish", {"routing_key": "c", **_SENT, "payload": "1"}),
    ("POST", "/exchanges/v/nothing/publish", {"routing_key": "c", **_SENT, "payload": "1"}),
    ("POST", "/exchanges/v/x/publish", {"routing_key": "c", "payload": "1", "properties": {}}),
    ("POST", "/queues/v/q/get", {**_GET, "truncate": 1}),
    ("POST", "/queues/v/q/get", {**_GET, "count": 1, "ackmode": "ack_requeue_false", "encoding": "base64"}),
    ("POST", "/queues/v/q/get", {**_GET, "count": 1, "ackmode": "reject_requeue_true"}),
    ("POST", "/queues/v/q/get", {**_GET, "ackmode": "reject_requeue_false"}),
    ("POST", "/queues/v/q/get", _GET),
    ("POST", "/queues/v/q/get", {"count": 1, "encoding": "auto"}),
    ("POST", "/queues/v/nothing/get", _GET),
    ("POST", "/exchanges/v/x/publish", {"routing_key": "a.b", **_SENT, "payload": "é"}),
    ("DELETE", "/queues/v/q?if-empty=true", None),
    ("DELETE", "/queues/v/q/contents", None),
    ("DELETE", "/queues/v/nothing/contents", None),
    ("DELETE", "/queues/v/q?if-empty=true", None),
    ("DELETE", "/queues/v/q", None),
    ("DELETE", "/exchanges/v/amq.topic", None),
    ("DELETE", "/exchanges/v/x", None),
    ("DELETE", "/exchanges/v/x", None),
    ("DELETE", "/exchanges/v/plain", None),
    ("PUT", "/users/somebody", {"password": "secret", "tags": "monitoring"}),
    ("PUT", "/users/somebody", {"password": "secret", "tags": "monitoring,administrator"}),
    ("GET", "/users/somebody", None),
    ("PUT", "/users/without", {"password": "secret"}),
    ("PUT", "/permissions/v/somebody", EVERYTHING),
    ("PUT", "/permissions/v/somebody", EVERYTHING),
    ("PUT", "/permissions/v/nobody", EVERYTHING),
    ("PUT", "/permissions/nowhere/somebody", EVERYTHING),
    ("PUT", "/permissions/v/somebody", {**EVERYTHING, "read": "["}),
    ("PUT", "/permissions/v/somebody", {"configure": ".*"}),
    ("PUT", "/topic-permissions/v/somebody", {"exchange": "amq.topic", "write": "a", "read": "b"}),
    ("GET", "/topic-permissions/v/somebody", None),
    ("DELETE", "/topic-permissions/v/somebody", None),
    ("DELETE", "/permissions/v/somebody", None),
    ("DELETE", "/permissions/v/somebody", None),
    ("DELETE", "/users/somebody", None),
    ("DELETE", "/users/somebody", None),
    ("DELETE", "/connections/nothing", None),
    ("DELETE", "/vhosts/v", None),
    ("DELETE", "/vhosts/v", None),
    ("POST", "/queues", {}),
    ("PUT", "/overview", {}),
]


@pytest.fixture(scope="module")
def broker(shared_rabbitmq: RabbitNode) -> Iterator[Operator]:
    """A real RabbitMQ, without the objects of these tests."""
    boss = Operator(shared_rabbitmq.management_url)
    yield boss
    for path in ("/vhosts/v", "/users/somebody", "/users/without"):
        boss.ask("DELETE", f"/api{path}")


def test_each_change_gets_the_answer_of_rabbitmq(broker: Operator, shared: StandaloneStage) -> None:
    dtx = Operator(shared.service.admin_url)
    different = []
    for method, path, body in REQUESTS:
        theirs, ours = (_shown(one.ask(method, f"/api{path}", body)) for one in (broker, dtx))
        if ours != theirs:
            different.append((method, path, body, ours, theirs))
    assert different == []


def _shown(answer: Answered) -> tuple[int, Any, str | None]:
    """What is the same in both: not the words of errors, nor the hash of a password."""
    found = answer.body if answer.status < 300 else None
    if isinstance(found, dict) and "tags" in found:
        found = {"name": found["name"], "tags": sorted(found["tags"])}
    return answer.status, found, answer.headers.get("location")


def test_a_refused_deletion_has_a_code(shared: StandaloneStage) -> None:
    """RabbitMQ's fields error and reason, and a code for programs."""
    shared.declare("full")
    shared.fill("full", b"1")
    boss = Operator(shared.service.admin_url)
    boss.ask("PUT", "/api/exchanges/%2F/used", {"type": "topic"})
    boss.ask("POST", "/api/bindings/%2F/e/used/q/full", {})
    for path, code in (("queues/%2F/full?if-empty=true", "not-empty"), ("exchanges/%2F/used?if-unused=true", "in-use")):
        answer = boss.ask("DELETE", f"/api/{path}")
        assert (answer.status, answer.body["error"], answer.body["code"]) == (400, "bad_request", code)
    assert "code" not in boss.ask("DELETE", "/api/queues/%2F/none").body
    with shared.connected() as connection:
        connection.channel().basic_consume("full", lambda *_: None)
        assert boss.ask("DELETE", "/api/queues/%2F/full?if-unused=true").body["code"] == "in-use"
    for path in ("queues/%2F/full", "exchanges/%2F/used"):
        assert boss.ask("DELETE", f"/api/{path}").status == 204


def test_rabbitmqadmin_makes_uses_and_deletes_objects(shared_rabbitmq: RabbitNode, shared: StandaloneStage) -> None:
    boss = Operator(shared.service.admin_url)
    admin = Admin(shared_rabbitmq, boss)
    admin.do("declare", "vhost", "name=shop")
    admin.do("declare", "user", "name=ann", "password=secret", "tags=operator")
    admin.do("declare", "permission", "vhost=shop", "user=ann", "configure=^o", "write=.*", "read=.*")
    ann = Admin(shared_rabbitmq, Operator(shared.service.admin_url, user="ann", password="secret"))
    here = ("--vhost=shop",)
    ann.do(*here, "declare", "queue", "name=orders", "durable=true", 'arguments={"x-max-length":10}')
    refused = ann.run(*here, "declare", "queue", "name=invoices")
    assert (refused.returncode, "Access refused" in refused.stderr) == (1, True)
    ann.do(*here, "declare", "exchange", "name=o", "type=topic")
    ann.do(*here, "declare", "binding", "source=o", "destination=orders", "routing_key=new.*")
    ann.do(*here, "publish", "exchange=o", "routing_key=new.1", "payload=one", 'properties={"delivery_mode":2}')
    ann.do(*here, "publish", "routing_key=orders", stdin="two")
    assert ann.rows(*here, "list", "queues", "name", "messages") == [{"name": "orders", "messages": 2}]
    got = json.loads(ann.do(*here, "--format=raw_json", "get", "queue=orders", "count=5"))
    assert [(row["payload"], row["properties"]) for row in got] == [("one", {"delivery_mode": 2}), ("two", [])]
    ann.do(*here, "get", "queue=orders", "ackmode=ack_requeue_false")
    ann.do(*here, "purge", "queue", "name=orders")
    assert ann.rows(*here, "list", "queues", "messages") == [{"messages": 0}]
    ann.do(
        *here,
        "delete", "binding", "source=o", "destination_type=queue", "destination=orders", "properties_key=new.%2A",
    )  # fmt: skip
    ann.do(*here, "delete", "queue", "name=orders")
    ann.do(*here, "delete", "exchange", "name=o")
    for kind, name in (("permission", "user=ann"), ("user", "name=ann"), ("vhost", "name=shop")):
        admin.do("delete", kind, name, *(["vhost=shop"] if kind == "permission" else []))
    assert [row["name"] for row in boss.get("/api/users")] == ["guest"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("policy name=p pattern=.* definition={}", "give each queue and exchange its arguments when it is declared"),
        ("operator_policy name=p pattern=.* definition={}", "dtx has no policies"),
        ("parameter component=federation name=p value={}", "a client that consumes here and publishes there"),
        ("vhost_limit vhost=/ name=max-queues value=5", "start it with --quota"),
    ],
)
def test_rabbitmqadmin_shows_the_alternative_to_a_policy(
    shared_rabbitmq: RabbitNode, shared: StandaloneStage, words: str, reason: str
) -> None:
    done = Admin(shared_rabbitmq, Operator(shared.service.admin_url)).run("declare", *words.split())
    assert (done.returncode, reason in done.stderr) == (1, True), done


@pytest.mark.parametrize(
    ("asked", "status", "reason"),
    [
        ("DELETE /policies/%2F/p", 404, "dtx has no policies"),
        ("PUT /policies/%2F", 400, "dtx has no policies"),
        ("GET /shovels/%2F", 404, "no parameters, shovels and federation"),
        ("PUT /parameters/shovel/%2F/s", 400, "no parameters, shovels and federation"),
        ("PUT /feature-flags/quorum_queue/enable", 400, "each version has all its features"),
        ("POST /rebalance/queues", 400, "one copy of each queue"),
        ("POST /queues/%2F/a%2Fb/actions", 400, "one copy of each queue"),
        ("DELETE /reset", 404, "its counters begin with its start"),
        ("GET /nodes/rabbit@a/memory", 404, "process_resident_memory_bytes"),
        ("GET /health/checks/nothing", 404, "dtx has no such check"),
        ("GET /policiesx", 404, "not found"),
        ("POST /queues/%2F", 405, "method not allowed"),
    ],
)
def test_paths_that_dtx_lacks_give_the_reason(shared: StandaloneStage, asked: str, status: int, reason: str) -> None:
    method, _, path = asked.partition(" ")
    answer = Operator(shared.service.admin_url).ask(method, f"/api{path}", None if method == "GET" else {})
    assert (answer.status, reason in answer.body["reason"]) == (status, True), answer


def test_a_connection_can_be_closed_by_its_name(shared: StandaloneStage) -> None:
    boss = Operator(shared.service.admin_url)
    with shared.connected():
        name = next(row["name"] for row in boss.get("/api/connections"))
        assert boss.ask("DELETE", f"/api/connections/{quote(name, safe='')}").status == 204
        wait_until(lambda: boss.get("/api/connections") == [], what="the end of the connection")


def test_roles_and_permissions_are_checked_before_each_effect(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    alone.fill("q", b"secret")
    people = {}
    for name, tags in (("sees", "monitoring"), ("acts", "operator"), ("limited", "administrator")):
        assert boss.ask("PUT", f"/api/users/{name}", {"password": name, "tags": tags}).status == 201
        people[name] = Operator(alone.service.admin_url, user=name, password=name)
    boss.ask("PUT", "/api/permissions/%2F/sees", EVERYTHING)
    boss.ask("PUT", "/api/permissions/%2F/limited", {"configure": "^mine", "write": "", "read": "^mine"})
    changes = [(method, path, body) for method, path, body in _CHANGES if method != "GET"]
    for name, person in people.items():
        for method, path, body in changes:
            if name == "limited" and path.startswith(("/users", "/vhosts", "/permissions")):
                continue
            answer = person.ask(method, f"/api{path}", body)
            assert (answer.status, answer.body["error"]) == (401, "not_authorised"), (name, method, path, answer)
    lines = OperatorLog(alone.database, "dtx").audit_lines(actor="sees", limit=100)
    assert len(lines) == len(changes)
    assert {(line.result or "")[:3] for line in lines} == {"403"}
    assert boss.get("/api/queues/%2F/q")["messages"] == 1
    assert [row["name"] for row in boss.get("/api/vhosts")] == ["/"]
    assert people["limited"].ask("PUT", "/api/queues/%2F/mine", {}).status == 201


_CHANGES: Final = [
    ("PUT", "/queues/%2F/new", {}),
    ("PUT", "/exchanges/%2F/new", {}),
    ("DELETE", "/queues/%2F/q", None),
    ("DELETE", "/queues/%2F/q/contents", None),
    ("POST", "/bindings/%2F/e/amq.topic/q/q", {}),
    ("POST", "/exchanges/%2F/amq.default/publish", {"routing_key": "q", **_SENT, "payload": ""}),
    ("POST", "/queues/%2F/q/get", _GET),
    ("PUT", "/vhosts/new", {}),
    ("PUT", "/users/new", {"password": "x", "tags": ""}),
    ("PUT", "/permissions/%2F/sees", EVERYTHING),
]


def test_a_token_needs_the_role_coordinator_for_changes(alone: StandaloneStage) -> None:
    alone.declare("q")
    alone.fill("q", b"secret")
    operator, boss = (somebody(alone, role) for role in (OperatorRole.OPERATOR, OperatorRole.COORDINATOR))
    for method, path, body in [*_CHANGES, ("DELETE", "/connections/nothing", None)]:
        assert operator.ask(method, f"/api{path}", body).status == 401, (method, path)
    assert operator.get("/api/queues/%2F/q")["messages"] == 1
    (got,) = boss.ask("POST", "/api/queues/%2F/q/get", {**_GET, "ackmode": "ack_requeue_false"}).body
    assert got["payload"] == "secret"


def test_the_hash_of_a_password_can_be_set(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    salted = b"salt" + hashlib.sha256(b"saltfirst").digest()
    given = {"password_hash": b64encode(salted).decode(), "tags": "monitoring"}
    assert boss.ask("PUT", "/api/users/ann", given).status == 201
    ann = Operator(alone.service.admin_url, user="ann", password="first")
    assert ann.get("/api/whoami")["tags"] == ["monitoring"]
    for wrong in ({"password_hash": "AAAA"}, {"password": "\0"}):
        assert boss.ask("PUT", "/api/users/ann", {**wrong, "tags": "administrator"}).status == 400
    assert ann.get("/api/whoami")["tags"] == ["monitoring"]
    assert boss.ask("PUT", "/api/users/ann", {"password_hash": "", "tags": "monitoring"}).status == 204
    assert ann.ask("GET", "/api/whoami").status == 401


def test_long_bodies_stay_in_the_queue_unless_truncated(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    alone.fill("q", b"x" * (3 << 20), b"y" * (3 << 20), b"z" * (5 << 20))
    once = {**_GET, "ackmode": "ack_requeue_false"}
    first = boss.ask("POST", "/api/queues/%2F/q/get", once).body
    assert [(got["payload"][0], got["payload_bytes"]) for got in first] == [("x", 3 << 20)]
    assert len(boss.ask("POST", "/api/queues/%2F/q/get", once).body) == 1
    refused = boss.ask("POST", "/api/queues/%2F/q/get", once)
    assert (refused.status, "use truncate" in refused.body["reason"]) == (400, True)
    wait_until(lambda: boss.get("/api/queues/%2F/q")["messages_ready"] == 1, what="the message's return")
    (last,) = boss.ask("POST", "/api/queues/%2F/q/get", {**once, "truncate": 3}).body
    assert (last["payload"], last["payload_bytes"], last["redelivered"]) == ("zzz", 5 << 20, True)
    assert boss.get("/api/queues/%2F/q")["messages"] == 0


_LONG: Final = "n" * 256
_TOO_LARGE: Final = [
    ("PUT", f"/queues/%2F/{_LONG}", {"durable": True}),
    ("PUT", f"/exchanges/%2F/{_LONG}", {"durable": True}),
    ("PUT", "/queues/%2F/new", {"durable": True, "arguments": {"long": "x" * 200_000}}),
    ("POST", "/bindings/%2F/e/amq.topic/q/q", {"routing_key": _LONG}),
    ("POST", "/exchanges/%2F/amq.fanout/publish", {"routing_key": _LONG, **_SENT, "payload": ""}),
    ("POST", "/exchanges/%2F/amq.fanout/publish", {"routing_key": "", **_SENT, "payload": "x" * 2001}),
    (
        "POST",
        "/exchanges/%2F/amq.fanout/publish",
        {"routing_key": "", **_SENT, "payload": "", "properties": {"headers": {"long": "x" * 200_000}}},
    ),
    ("POST", "/definitions", {"queues": [{"vhost": "/", "name": _LONG, "durable": True}]}),
    (
        "POST",
        "/definitions",
        {
            "bindings": [
                {
                    "vhost": "/",
                    "source": "amq.topic",
                    "destination": "q",
                    "destination_type": "queue",
                    "routing_key": _LONG,
                    "arguments": {},
                }
            ]
        },
    ),
]


def test_requests_have_the_limits_of_frames_and_messages(postgres: PostgresServer) -> None:
    with StandaloneStage(postgres, options=(*ADMIN, "--max-message-bytes", "2000")) as stage:
        boss = Operator(stage.service.admin_url)
        stage.declare("q")
        assert boss.ask("POST", "/api/bindings/%2F/e/amq.fanout/q/q", {}).status == 201
        before = boss.get("/api/definitions")
        for method, path, body in _TOO_LARGE:
            answer = boss.ask(method, f"/api{path}", body)
            assert (answer.status, answer.body["error"]) == (400, "bad_request"), (method, path, answer)
        assert boss.get("/api/definitions") == before
        assert boss.get("/api/queues/%2F/q")["messages"] == 0
        largest = {"routing_key": _LONG[1:], **_SENT, "payload": "x" * 2000}
        assert boss.ask("POST", "/api/exchanges/%2F/amq.fanout/publish", largest).body == {"routed": True}
        (got,) = boss.ask("POST", "/api/queues/%2F/q/get", _GET).body
        assert (got["routing_key"], got["payload_bytes"]) == (_LONG[1:], 2000)


def _deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return {"deep": found}


_MALFORMED: Final = [
    ("PUT", "/queues/%2F/%ff", {}),
    ("PUT", "/queues/%2F/%0d%0a", {}),
    ("PUT", "/queues/%2F/a%0ab", {}),
    ("PUT", "/exchanges/%2F/a%0db", {}),
    ("POST", "/definitions", {"queues": [{"vhost": "/", "name": ""}]}),
    ("PUT", "/queues/%2F/deep", {"arguments": _deep(65)}),
    ("PUT", "/queues/%2F/deep", {"arguments": _deep(900)}),
    ("PUT", "/exchanges/%2F/many", {"arguments": {"many": [1] * 5000}}),
    ("POST", "/bindings/%2F/e/amq.topic/q/q", {"arguments": _deep(900)}),
    ("POST", "/bindings/%2F/e/amq.topic/q/q", {"routing_key": "\ud800"}),
    (
        "POST",
        "/exchanges/%2F/amq.default/publish",
        {"routing_key": "q", **_SENT, "payload": "", "properties": {"headers": _deep(900)}},
    ),
    (
        "POST",
        "/exchanges/%2F/amq.default/publish",
        {"routing_key": "q", **_SENT, "payload": "", "properties": {"type": _deep(900)}},
    ),
    ("POST", "/exchanges/%2F/amq.default/publish", {"routing_key": "q", **_SENT, "payload": "\ud800"}),
    (
        "POST",
        "/exchanges/%2F/amq.default/publish",
        {"routing_key": "q", "properties": {}, "payload": "a", "payload_encoding": "base64"},
    ),
]


def test_malformed_names_and_values_get_400(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    before = [boss.get(f"/api/{kind}") for kind in ("exchanges", "bindings")]
    assert boss.ask("PUT", "/api/users/sees", {"password": "sees", "tags": "monitoring"}).status == 201
    sees = Operator(alone.service.admin_url, user="sees", password="sees")
    for method, path, body in _MALFORMED:
        answer = boss.ask(method, f"/api{path}", body)
        assert (answer.status, answer.body["error"]) == (400, "bad_request"), (method, path, answer)
        if "deep" in path or body.get("payload_encoding") == "base64":
            assert sees.ask(method, f"/api{path}", body).status == 401, "the role is checked first"
    assert [boss.get(f"/api/{kind}") for kind in ("exchanges", "bindings")] == before
    assert boss.get("/api/queues/%2F/q")["messages"] == 0


def test_messages_stay_if_the_client_has_gone(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    alone.declare("q")
    alone.fill("q", b"kept")
    body = json.dumps({**_GET, "ackmode": "ack_requeue_false"}).encode()
    credentials = b64encode(b"guest:guest").decode()
    head = (
        "POST /api/queues/%2F/q/get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Basic {credentials}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(alone.service.admin_url)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'dtx.audit'::regclass"
    with psycopg.connect(alone.database) as database:
        database.execute("LOCK TABLE dtx.audit IN EXCLUSIVE MODE")  # the request waits before it takes messages
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(head.encode() + body)
            wait_until(lambda: database.execute(waiting).fetchone() == (1,), what="the begin of the request")
    wait_until(
        lambda: any(
            line.action == "get" and line.result for line in OperatorLog(alone.database, "dtx").audit_lines(limit=5)
        ),
        what="the end of the request",
    )
    assert boss.get("/api/queues/%2F/q")["messages_ready"] == 1


def test_changes_and_views_are_in_the_audit_log(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    boss.ask("PUT", "/api/queues/%2F/q", {})
    boss.ask("PUT", "/api/users/ann", {"password": "s3cret-w0rd", "tags": "operator,unknown"})
    boss.ask("POST", "/api/queues/%2F/q/get", _GET)
    boss.ask("DELETE", "/api/queues/%2F/q")
    lines = OperatorLog(alone.database, "dtx").audit_lines(limit=4)[::-1]
    assert [(line.action, line.subject, line.result) for line in lines] == [
        ("declare-queue", "/ q", "done"),
        ("make-user", "ann", "done"),
        ("get", "/ q", "0 messages"),
        ("delete-queue", "/ q", "done"),
    ]
    assert json.loads(lines[1].detail) == {"tags": ["operator"]}
    assert "s3cret-w0rd" not in "".join(line.detail for line in lines)

"""Definitions that a real RabbitMQ exported are imported into dtx, and exported again."""

import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from dtx.auth.passwords import imported_hash, is_password
from tests.support.client import connected
from tests.support.crash import StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmqadmin import Admin
from tests.support.service import ADMIN

_LISTS: Final = ("vhosts", "permissions", "topic_permissions", "queues", "exchanges", "bindings")


def _fill(node: RabbitNode) -> None:
    """Make one of each kind in RabbitMQ."""
    vhost = node.add_vhost("shop/eu")
    node.add_user("ann", "pässword", tags="monitoring,policymaker", vhost=vhost, configure="^o", write="", read=".*")
    node.add_user("bob", "", vhost="/")
    node.set_topic_permissions("ann", "events", vhost=vhost, write="^{username}", read=".*")
    node.set_policy("ttl", ".*", {"message-ttl": 1000}, vhost=vhost)
    with connected(node.url(vhost=vhost)) as connection:
        channel = connection.channel()
        channel.exchange_declare("events", "topic", durable=True, arguments={"alternate-exchange": "rest"})
        channel.exchange_declare("rest", "fanout", durable=True, internal=True)
        limits = {
            "x-max-length": 10,
            "x-overflow": "reject-publish",
            "x-dead-letter-exchange": "rest",
            "own": [1, {"a": "b"}],
        }
        channel.queue_declare("orders", durable=True, arguments=limits)
        channel.queue_declare("safe", durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 3})
        channel.queue_declare("gone", auto_delete=True)
        channel.queue_bind("orders", "events", "new.*", arguments={"a": True})
        channel.queue_bind("safe", "rest")
        channel.exchange_bind("rest", "events", "old.#")


def _lists(definitions: Any) -> dict[str, list[Any]]:
    found = {name: sorted(definitions[name], key=lambda row: json.dumps(row, sort_keys=True)) for name in _LISTS}
    durable = [row["name"] for row in found["queues"] if row["durable"]]
    found["queues"] = [row for row in found["queues"] if row["name"] in durable]
    return found


def test_definitions_of_rabbitmq_come_back_from_dtx(
    own_rabbitmq: RabbitNode, alone: StandaloneStage, postgres: PostgresServer, tmp_path: Path
) -> None:
    _fill(own_rabbitmq)
    given = own_rabbitmq.api("GET", "/api/definitions")
    file = tmp_path / "definitions.json"
    file.write_text(json.dumps(given))
    boss = Operator(alone.service.admin_url)
    admin = Admin(own_rabbitmq, boss)
    admin.do("import", str(file))
    admin.do("import", str(file))  # changes nothing
    admin.do("export", str(file))
    exported = json.loads(file.read_text())
    assert _lists(exported) == _lists(given)
    assert [(user["name"], user["tags"]) for user in exported["users"]] == [
        ("ann", ["monitoring"]), ("bob", []), ("guest", ["administrator", "impersonator"])
    ]  # fmt: skip
    _ann_can_log_in(alone)
    assert not _logs_in(alone, "bob", "")
    with StandaloneStage(postgres, options=ADMIN) as second:
        Admin(own_rabbitmq, Operator(second.service.admin_url)).do("import", str(file))
        again = Operator(second.service.admin_url).get("/api/definitions")
        assert _lists(again) == _lists(exported)
        assert again["users"] == exported["users"]
        _ann_can_log_in(second)
    one = boss.get(f"/api/definitions/{quote('shop/eu', safe='')}")
    own_rabbitmq.add_vhost("copy")
    own_rabbitmq.api("POST", "/api/definitions/copy", one)
    theirs = own_rabbitmq.api("GET", "/api/definitions/copy")
    for kind in ("queues", "exchanges", "bindings"):
        assert sorted(map(str, theirs[kind])) == sorted(map(str, one[kind]))


def _ann_can_log_in(stage: StandaloneStage) -> None:
    assert Operator(stage.service.admin_url, user="ann", password="pässword").get("/api/whoami")["name"] == "ann"
    assert not _logs_in(stage, "ann", "password")
    with connected(stage.service.url("ann", "pässword", "shop/eu")) as connection:
        connection.channel().queue_declare("orders", passive=True)


def _logs_in(stage: StandaloneStage, user: str, password: str) -> bool:
    answer = Operator(stage.service.admin_url, user=user, password=password).ask("GET", "/api/whoami")
    return "login refused" not in answer.body.get("reason", "")


@pytest.mark.parametrize(
    ("definitions", "reason"),
    [
        ({"queues": [{"vhost": "/"}]}, "queues.0.name"),
        ({"queues": {}}, "queues is no list"),
        ([], "character 0 is none of {"),
        ({"queues": [{"name": "q", "vhost": "/", "arguments": {"long": "x" * 300_000}}]}, "no JSON of at most"),
        ({"queues": [{"name": "q", "vhost": "nowhere"}]}, "queue 'q': no virtual host 'nowhere'"),
        ({"queues": [{"name": "s", "vhost": "/", "arguments": {"x-queue-type": "stream"}}]}, "no streams"),
        ({"users": [{"name": "a", "tags": "", "password_hash": "AAAA"}]}, "user 'a': password_hash"),
        ({"users": [{"name": "a", "tags": "", "password_hash": "$argon2id$v=19$m=9999999,t=2,p=1$a$b",
                     "hashing_algorithm": "argon2id"}]}, "user 'a': password_hash"),
        ({"permissions": [{"user": "nobody", "vhost": "/", "configure": "", "write": "", "read": ""}]}, "nobody"),
    ],
)  # fmt: skip
def test_an_import_that_is_not_possible_names_the_object(
    shared: StandaloneStage, definitions: object, reason: str
) -> None:
    answer = Operator(shared.service.admin_url).ask("POST", "/api/definitions", definitions)
    assert (answer.status, answer.body["error"]) == (400, "bad_request")
    assert reason in answer.body["reason"]


def test_definitions_may_be_longer_than_other_requests(shared: StandaloneStage) -> None:
    boss = Operator(shared.service.admin_url)
    queues = [{"name": f"imported-{number}", "vhost": "/", "arguments": {"note": "x" * 1000}} for number in range(2000)]
    assert boss.ask("POST", "/api/definitions", {"queues": queues}).status == 204
    assert boss.get("/api/queues", page=1, name="imported-")["filtered_count"] == 2000
    refused = boss.ask("POST", "/api/definitions", {"queues": queues * 2})
    assert refused.status == 413


def test_hashes_of_rabbitmq_are_hashed_again() -> None:
    """RabbitMQ's documentation, "Credentials and Passwords": the test vector with salt 908DC60A."""
    stored = imported_hash("kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR", "rabbit_password_hashing_sha256")
    assert is_password(b"test12", stored)
    assert not is_password(b"test13", stored)
    assert stored.startswith("$argon2id$")
    assert imported_hash(stored, "argon2id") == stored
    assert not is_password(b"", imported_hash("", "rabbit_password_hashing_sha256"))

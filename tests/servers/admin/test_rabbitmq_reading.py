"""RabbitMQ's management API of a dtx without a broker: what it shows, beside the answers of a real RabbitMQ."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import pika
import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from tests.servers.admin.conftest import somebody
from tests.support.client import connected
from tests.support.crash import Stage, StandaloneStage
from tests.support.operator import Answered, Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmqadmin import Admin
from tests.support.service import ADMIN

VHOST: Final = "a/b"
_IN: Final = quote(VHOST, safe="")


@dataclass(frozen=True)
class Pair:
    """The same request to RabbitMQ and to dtx, which have the same objects in a virtual host of their own."""

    rabbitmq: Operator
    dtx: Operator
    names: dict[str, str]
    """The name of the connection in RabbitMQ, by that in dtx."""

    def ask(self, path: str) -> tuple[Answered, Answered]:
        """The answer of RabbitMQ, and that of dtx."""
        return self.rabbitmq.ask("GET", path), self.dtx.ask("GET", path)


def _fill(url: str, stack: ExitStack) -> None:
    """Make objects, and keep a consumer."""
    channel = stack.enter_context(connected(url)).channel()
    channel.queue_declare("old", durable=True, arguments={"x-message-ttl": 600_000, "x-dead-letter-exchange": "x"})
    channel.queue_declare("new", auto_delete=True)
    channel.queue_declare("replicated", durable=True, arguments={"x-queue-type": "quorum"})
    channel.exchange_declare("events", "topic", durable=True, arguments={"alternate-exchange": "amq.fanout"})
    channel.exchange_declare("by-header", "headers", auto_delete=True)
    channel.queue_bind("old", "events", "a.*")
    channel.queue_bind("new", "by-header", "", arguments={"x-match": "all", "deep": [1, {"a": True}]})
    channel.exchange_bind("by-header", "events", "to ~ all")
    for body in (b"1", b"2", b"3"):
        channel.basic_publish("", "old", body, pika.BasicProperties(delivery_mode=2))
    channel.basic_qos(prefetch_count=7)
    channel.basic_consume("new", lambda *_: None, consumer_tag="tagged")


@pytest.fixture(scope="module")
def pair(postgres: PostgresServer) -> Iterator[Pair]:
    """Both with the same objects. The node is not shared: other tests would change its totals."""
    with ExitStack() as stack:
        node = stack.enter_context(RabbitNode(in_memory=True))
        dtx = stack.enter_context(StandaloneStage(postgres, options=ADMIN))
        asked = Pair(Operator(node.management_url), Operator(dtx.service.admin_url), {})
        for one in (asked.rabbitmq, asked.dtx):
            if one is asked.dtx:
                one.ask("POST", "/dtx/v1/vhosts", {"name": VHOST})
                everything = dict.fromkeys(("configure", "write", "read"), ".*")
                one.ask("POST", "/dtx/v1/users/grant", {"name": "guest", "vhost": VHOST, **everything})
            else:
                node.add_vhost(VHOST)
        for url in (node.url(vhost=VHOST), dtx.service.url(vhost=VHOST)):
            _fill(url, stack)
        wait_until(lambda: all(map(_has_numbers, (asked.rabbitmq, asked.dtx))), what="the numbers of all objects")
        (theirs,), (ours,) = (one.get(f"/api/vhosts/{_IN}/connections") for one in (asked.rabbitmq, asked.dtx))
        asked.names[ours["name"]] = theirs["name"]
        yield asked


def _has_numbers(one: Operator) -> bool:
    queue = one.get(f"/api/queues/{_IN}/old")
    consumers = one.get(f"/api/consumers/{_IN}")
    connections = one.get(f"/api/vhosts/{_IN}/connections")
    return queue.get("messages") == 3 and bool(consumers) and any(each.get("channels") for each in connections)


PATHS: Final = tuple(
    f"""
    /overview /cluster-name /nodes /whoami /vhosts /vhosts/{_IN} /vhosts/{_IN}/connections /vhosts/{_IN}/channels
    /vhosts/{_IN}/permissions /vhosts/{_IN}/topic-permissions /connections /channels /consumers /consumers/{_IN}
    /exchanges /exchanges/{_IN} /exchanges/{_IN}/events /exchanges/{_IN}/events/bindings/source
    /exchanges/{_IN}/by-header/bindings/destination /queues /queues/{_IN} /queues/{_IN}/old
    /queues/{_IN}/old/bindings /bindings /bindings/{_IN} /bindings/{_IN}/e/events/q/old
    /bindings/{_IN}/e/events/q/old/a.%252A /bindings/{_IN}/e/events/e/by-header /users /users/guest
    /users/guest/permissions /users/guest/topic-permissions /users/without-permissions /permissions
    /permissions/{_IN}/guest /topic-permissions /topic-permissions/{_IN}/guest /policies /parameters
    /operator-policies /vhost-limits /user-limits /policies/{_IN} /policies/nowhere /policies/{_IN}/mine
    /operator-policies/{_IN} /parameters/federation /parameters/federation/{_IN} /vhost-limits/{_IN}
    /user-limits/guest /health/checks/alarms /health/checks/local-alarms
    /health/checks/virtual-hosts /health/checks/port-listener/1 /health/checks/protocol-listener/amqp091
    /health/checks/protocol-listener/mqtt /health/checks/node-is-quorum-critical
    /health/checks/node-is-mirror-sync-critical /health/checks/certificate-expiration/1/months
    /healthchecks/node /healthchecks/node/nothing /nothing /queues/nowhere /queues/{_IN}/nothing
    /exchanges/{_IN}/nothing /bindings/{_IN}/e/events/q/old/nothing /vhosts/nowhere /users/nobody
    /permissions/{_IN}/nobody /connections/nothing /channels/nothing /queues?page=1 /queues?page=99 /queues?page=x
    /queues?page=1&page_size=501 /queues?page=1&name=[&use_regex=true /queues/{_IN}?page=1&page_size=2
    /queues/{_IN}?page=2&page_size=2 /queues/{_IN}?page=1&name=L /queues/{_IN}?page=1&name=^.e&use_regex=true
    /queues/{_IN}?sort=messages&sort_reverse=true /queues/{_IN}?sort=name&sort_reverse=true
    /queues/{_IN}?columns=name,messages /queues/{_IN}/old?columns=name /aliveness-test/{_IN}
    """.split()
)
_OWN: Final = frozenset(
    """
    node cluster_name product_name product_version host os_pid exclusive_consumer_tag oldest_ready_age
    message_stats
    """.split()  # noqa: SIM905 - shorter than a list
)
"""Fields that differ, that only dtx has, or that RabbitMQ leaves out at times."""
_SAME: Final = frozenset(
    """
    name vhost durable auto_delete exclusive internal type arguments messages messages_ready consumers source
    destination destination_type routing_key consumer_tag ack_required prefetch_count active activity_status
    protocol channels client_properties channel_max frame_max timeout auth_mechanism ssl user number confirm
    transactional consumer_count configure write read page page_count page_size item_count filtered_count status
    error
    """.split()  # noqa: SIM905 - shorter than a list
)
"""Fields with the same values in both."""


def _of_vhost(answer: Any) -> Any:
    """Without rows of other virtual hosts, which other tests use, and in one order."""
    if not isinstance(answer, list):
        return answer
    return [
        row
        for row in answer
        if row.get("vhost", row.get("queue", {}).get("vhost", VHOST)) == VHOST
        if row.get("name") != "amq.rabbitmq.trace"
    ]


@pytest.mark.parametrize("path", PATHS)
def test_the_answer_is_that_of_rabbitmq(pair: Pair, path: str) -> None:
    theirs, ours = pair.ask(f"/api{path}")
    assert ours.status == theirs.status, (ours, theirs)
    _compare(pair, _of_vhost(theirs.body), _of_vhost(ours.body), path)


def _compare(pair: Pair, theirs: Any, ours: Any, path: str) -> None:
    if isinstance(ours, list) and isinstance(theirs, list):
        if "vhosts" not in path and not path.startswith(("/users", "/nodes")):
            assert len(ours) == len(theirs), (path, theirs, ours)
        ordered = "sort" in path or "page" in path
        key = (lambda _: "") if ordered else (lambda row: json.dumps([row.get(word) for word in _KEYS]))
        for one, other in zip(sorted(theirs, key=key), sorted(ours, key=key), strict=False):
            _compare(pair, one, other, path)
    elif isinstance(ours, dict):
        missing = set(ours) - set(theirs) - _OWN
        if path == "/vhosts":  # RabbitMQ has no numbers of a virtual host that was never used
            missing = {field for field in missing if not field.startswith("messages")}
        assert not missing, (path, missing)
        for field, value in ours.items():
            if field == "items":
                _compare(pair, theirs[field], value, path)
            elif field in _SAME and field in theirs and not (field in {"name", "error"} and path.count("/") == 1):
                assert _named(pair, value) == theirs[field], (path, field)


_KEYS: Final = ("name", "source", "destination", "routing_key", "consumer_tag", "user")


def _named(pair: Pair, value: Any) -> Any:
    if isinstance(value, str):
        for ours, theirs in pair.names.items():
            value = value.replace(ours, theirs)
    return value


def test_rabbitmqadmin_lists_every_kind_of_object(pair: Pair, shared_rabbitmq: RabbitNode) -> None:
    admin = Admin(shared_rabbitmq, pair.dtx)
    for kind in ("connections", "channels", "consumers", "exchanges", "queues", "bindings", "users", "vhosts"):
        assert admin.rows("list", kind), kind
    for kind in ("permissions", "nodes"):
        assert admin.rows("list", kind), kind
    for kind in ("parameters", "policies", "operator_policies", "vhost_limits"):
        assert admin.rows("list", kind) == []
    assert admin.rows("--vhost", VHOST, "list", "queues", "name", "messages") == [
        {"name": "new", "messages": 0},
        {"name": "old", "messages": 3},
        {"name": "replicated", "messages": 0},
    ]
    (overview,) = admin.rows("show", "overview")
    assert (overview["queue_totals.messages"], overview["cluster_name"]) == (3, "dtx")


def test_pages_of_many_queues_hold_each_queue_once(shared: StandaloneStage) -> None:
    boss = Operator(shared.service.admin_url)
    names = sorted(f"many-{number}" for number in range(1, 2501))
    with shared.connected() as connection:
        channel = connection.channel()
        for name in names:
            channel.queue_declare(name, auto_delete=True)
        found: list[str] = []
        for page in range(1, 26):
            answer = boss.get("/api/queues/%2F", page=page, page_size=100, name="many-", columns="name")
            assert (answer["filtered_count"], answer["page_count"]) == (2500, 25)
            found += [row["name"] for row in answer["items"]]
        assert found == names
        everything = boss.get("/api/queues", sort="name", sort_reverse="true", columns="name")
        assert [row["name"] for row in everything if row["name"].startswith("many-")] == names[::-1]
        for name in names:
            channel.queue_delete(name)


def test_a_tag_decides_which_lists_a_user_sees(alone: StandaloneStage) -> None:
    boss = Operator(alone.service.admin_url)
    for name, tags in (("none", []), ("sees", ["monitoring"])):
        boss.ask("POST", "/dtx/v1/users", {"name": name, "password": name, "tags": tags})
    nobody, sees = (Operator(alone.service.admin_url, user=name, password=name) for name in ("none", "sees"))
    wrong = Operator(alone.service.admin_url, user="sees", password="wrong")
    for one in (nobody, wrong, Operator(alone.service.admin_url, user="")):
        answer = one.ask("GET", "/api/overview")
        assert (answer.status, answer.body["error"]) == (401, "not_authorised")
    assert sees.get("/api/whoami") == {"name": "sees", "tags": ["monitoring"]}
    assert sees.get("/api/queues") == []
    for path in ("/api/users", "/api/permissions", "/api/users/sees", "/api/vhosts/%2F/permissions"):
        assert sees.ask("GET", path).status == 401
    secret = OperatorLog(alone.database, "dtx").make_token("robot", OperatorRole.COORDINATOR, "test")
    holder = Operator(alone.service.admin_url, token=secret)
    assert holder.get("/api/whoami") == {"name": "token:robot", "tags": ["administrator"]}
    assert [row["name"] for row in holder.get("/api/users")] == ["guest", "none", "sees"]
    assert "password_hash" not in json.dumps(holder.get("/api/users"))


def test_alongside_a_broker_the_paths_name_that_of_rabbitmq(
    shared_rabbitmq: RabbitNode, postgres: PostgresServer
) -> None:
    with Stage(shared_rabbitmq, postgres, options=ADMIN) as stage:
        boss = somebody(stage, OperatorRole.COORDINATOR)
        for path in ("/api/queues", "/api/overview", "/api/anything", "/api/exchanges/%2F/a%2Fb"):
            answer = boss.ask("GET", path)
            assert answer.status == 404
            assert "use the management API of RabbitMQ" in answer.body["reason"]
        assert boss.ask("GET", "/api/vhosts").headers["deprecation"]

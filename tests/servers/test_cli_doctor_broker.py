"""``dtx doctor`` against a real broker: the tests cause each known fault, and doctor finds it."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtx.cli.doctor import DoctorCheck, Status
from dtx.cli.doctor.broker import check_broker
from dtx.config import Settings
from tests.support.postgres import PostgresServer
from tests.support.processes import free_port
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

TAGS = "impersonator,monitoring,policymaker"
AddUser = Callable[..., str]


@pytest.fixture
def add_user(rabbitmq: RabbitNode, vhost: str) -> Iterator[AddUser]:
    """Adds users of the fresh vhost and returns their URLs."""
    made: list[str] = []

    def add(**more: Any) -> str:
        made.append(f"u-{secrets.token_hex(4)}")
        return rabbitmq.add_user(made[-1], vhost=vhost, **{"tags": TAGS, **more})

    yield add
    rabbitmq.mend()
    for name in made:
        rabbitmq.delete_user(name)


def look(node: RabbitNode, url: str, **more: object) -> dict[str, DoctorCheck]:
    settings = Settings.model_validate({"broker": url, "management": node.management_url, **more})
    return {check.name: check for check in check_broker(settings)}


def test_a_well_prepared_service_user_passes_every_check(rabbitmq: RabbitNode, add_user: AddUser) -> None:
    found = look(rabbitmq, add_user())
    if rabbitmq.api("GET", "/api/overview")["rabbitmq_version"].startswith(("3.10.", "4.0.")):
        assert found["broker.version"].status is Status.OK
    else:  # a container image
        assert "is not one of the versions" in found["broker.version"].sentence
    assert {check.status for name, check in found.items() if name != "broker.version"} == {Status.OK}, found
    assert set(found) == {
        "broker.reachable", "broker.version", "broker.permissions", "broker.impersonator", "broker.exchanges",
        "broker.management", "broker.receipts",
    }  # fmt: skip


def test_the_checks_leave_no_queue_and_no_message_behind(rabbitmq: RabbitNode, add_user: AddUser, vhost: str) -> None:
    with rabbitmq.channel(vhost) as channel:
        channel.queue_declare("bound")
        for exchange in ("amq.fanout", "amq.topic"):
            channel.queue_bind("bound", exchange, "#")
    look(rabbitmq, add_user())
    assert [queue["name"] for queue in rabbitmq.api("GET", f"/api/queues/{vhost}")] == ["bound"]
    assert rabbitmq.count("bound", vhost) == 0


def test_a_missing_impersonator_tag_is_noticed(rabbitmq: RabbitNode, add_user: AddUser) -> None:
    check = look(rabbitmq, add_user(tags="monitoring,policymaker"))["broker.impersonator"]
    assert check.status is Status.WARNING
    assert "set_user_tags" in check.sentence
    assert "406" in check.sentence


def test_a_user_without_write_permission_is_noticed(rabbitmq: RabbitNode, add_user: AddUser) -> None:
    found = look(rabbitmq, add_user(write="^$"))
    assert found["broker.permissions"].status is Status.FAILED
    assert found["broker.put-back"].status is Status.FAILED
    assert "set_permissions" in found["broker.put-back"].sentence


def test_an_exchange_without_write_permission_is_named(rabbitmq: RabbitNode, add_user: AddUser, vhost: str) -> None:
    with rabbitmq.channel(vhost) as channel:
        channel.exchange_declare("orders", "topic")
    found = look(rabbitmq, add_user(write="^(?!orders).*$"))
    assert found["broker.exchanges"].status is Status.WARNING
    assert "orders" in found["broker.exchanges"].sentence
    assert found["broker.permissions"].status is Status.OK


def test_without_the_management_api_the_predeclared_exchanges_are_tried(
    rabbitmq: RabbitNode, add_user: AddUser
) -> None:
    found = look(rabbitmq, add_user(write="^(?!amq[.]topic).*$"), management=f"http://127.0.0.1:{free_port()}")
    assert found["broker.management"].status is Status.WARNING
    assert "rabbitmq_management" in found["broker.management"].sentence
    assert "amq.topic" in found["broker.exchanges"].sentence


def test_a_user_without_management_tags_gets_the_tag_named(rabbitmq: RabbitNode, add_user: AddUser) -> None:
    check = look(rabbitmq, add_user(tags="impersonator"))["broker.management"]
    assert check.status is Status.WARNING
    assert "tag monitoring" in check.sentence


def test_a_policy_that_eats_receipts_is_named(rabbitmq: RabbitNode, add_user: AddUser, vhost: str) -> None:
    """Policies with wildcards (message-ttl, max-length) can remove receipts."""
    rabbitmq.set_policy("short-lived", ".*", {"message-ttl": 1000}, vhost=vhost)
    check = look(rabbitmq, add_user())["broker.receipts"]
    assert check.status is Status.WARNING
    assert "short-lived" in check.sentence
    assert "leave out names that begin with 'dtx.'" in check.sentence


def test_a_policy_for_other_queues_is_no_reason_for_distrust(
    rabbitmq: RabbitNode, add_user: AddUser, vhost: str
) -> None:
    rabbitmq.set_policy("harmless", "^orders", {"max-length": 1}, vhost=vhost)
    assert look(rabbitmq, add_user())["broker.receipts"].status is Status.OK


def test_queues_that_refuse_messages_are_named(rabbitmq: RabbitNode, add_user: AddUser, vhost: str) -> None:
    """A receipt proves that tx.commit was processed, not that every queue accepted."""
    with rabbitmq.channel(vhost) as channel:
        channel.queue_declare("full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    check = look(rabbitmq, add_user())["broker.receipts"]
    assert check.status is Status.WARNING
    assert "full" in check.sentence


def test_quorum_queues_that_drop_messages_are_named(rabbitmq: RabbitNode, add_user: AddUser, vhost: str) -> None:
    """RabbitMQ 4 drops a message of a quorum queue after 20 returns, unless the queue has a dead-letter exchange."""
    with rabbitmq.channel(vhost) as channel:
        for name, more in (
            ("drops", {"x-delivery-limit": 3}),
            ("moves", {"x-delivery-limit": 3, "x-dead-letter-exchange": ""}),
            ("default", {}),
        ):
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", **more})
    check = look(rabbitmq, add_user())["broker.delivery-limit"]
    assert check.status is Status.WARNING
    assert f"{1 if rabbitmq.version.startswith('3') else 2} quorum queue(s)" in check.sentence
    assert "'drops' after 3" in check.sentence
    assert "'moves'" not in check.sentence


def test_a_name_that_belongs_to_another_log_is_noticed(
    rabbitmq: RabbitNode, add_user: AddUser, vhost: str, postgres: PostgresServer
) -> None:
    url, (first, second) = add_user(), [postgres.create_migrated_database() for _ in range(2)]
    assert "broker.name" not in look(rabbitmq, url, database=first)
    with DtxService(broker=rabbitmq.url(vhost=vhost), database=first):
        assert look(rabbitmq, url, database=first)["broker.name"].status is Status.OK
    check = look(rabbitmq, url, database=second)["broker.name"]
    assert check.status is Status.FAILED
    assert "belongs to another log" in check.sentence
    for database in (first, second):
        postgres.drop_database(database)


def test_a_memory_alarm_is_reported_and_blocks_no_check(rabbitmq: RabbitNode, add_user: AddUser) -> None:
    url = add_user()
    rabbitmq.memory_alarm(on=True)
    found = look(rabbitmq, url)
    assert "memory" in found["broker.alarms"].sentence
    assert found["broker.blocked"].status is Status.FAILED


def test_wrong_credentials_wrong_vhost_and_missing_broker_differ(
    rabbitmq: RabbitNode, add_user: AddUser, vhost: str
) -> None:
    wrong = look(rabbitmq, f"amqp://guest:s3cret@127.0.0.1:{rabbitmq.port}/")
    assert "refuses user guest" in wrong["broker.reachable"].sentence
    foreign = look(rabbitmq, rabbitmq.url(vhost="absent"))
    assert "there is no vhost absent: run 'rabbitmqctl add_vhost absent'" in foreign["broker.reachable"].sentence
    closed = look(rabbitmq, add_user().replace(vhost, "%2F"))
    assert "may not use vhost /: run 'rabbitmqctl set_permissions -p /" in closed["broker.reachable"].sentence
    port = free_port()
    nobody = look(rabbitmq, f"amqp://guest:s3cret@127.0.0.1:{port}/")
    assert f"no broker answers at 127.0.0.1:{port}" in nobody["broker.reachable"].sentence
    for found in (wrong, foreign, closed, nobody):
        assert [check.status for check in found.values()] == [Status.FAILED]
        assert "s3cret" not in str(found)


def test_an_unknown_authority_differs_from_an_unreachable_broker(certificates: Path) -> None:
    with RabbitNode(tls=certificates) as node:
        url = node.url(tls=True).replace("127.0.0.1", "localhost")
        unknown = look(node, url)
        assert unknown["broker.reachable"].status is Status.FAILED
        assert "--broker-ca" in unknown["broker.reachable"].sentence
        assert look(node, url, broker_ca=certificates / "ca.pem")["broker.reachable"].status is Status.OK

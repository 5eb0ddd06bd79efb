"""Names of dtx's own queues: two logs never share a queue, even if their resource managers have the same name."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dtx.client import XAException, XAResource
from tests.support.client import connected, new_xid
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService

Start = Callable[..., DtxService]


@pytest.fixture
def start(rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[Start]:
    """Starts a dtx with the resource manager ``bank`` on a virtual host, with a new log or the log in *database*."""
    with ExitStack() as stack:

        def make(vhost: str, database: str | None = None, *, wait: bool = True) -> DtxService:
            if database is None:
                database = postgres.create_migrated_database()
                stack.callback(postgres.drop_database, database)
            broker = rabbitmq.url(vhost=vhost)
            options = ("--rm", "bank", "--management", rabbitmq.management_url)
            service = stack.enter_context(DtxService(broker=broker, database=database, options=options, start=False))
            service.start(wait=wait)
            return service

        yield make


@contextmanager
def selected(service: DtxService, vhost: str) -> Iterator[None]:
    """A connection with a selected channel that has had an empty branch."""
    with connected(service.url(vhost=vhost)) as connection:
        xa, xid = XAResource(connection.channel()), new_xid()
        xa.start(xid)
        xa.end(xid)
        xa.rollback(xid)
        yield


def queues(rabbitmq: RabbitNode, vhost: str) -> list[str]:
    return [queue["name"] for queue in rabbitmq.api("GET", f"/api/queues/{vhost}?columns=name")]


def test_a_second_log_with_the_name_is_refused_at_start(start: Start, vhost: str) -> None:
    start(vhost)
    other = start(vhost, wait=False)
    assert other.wait() == 4
    said = other.log_path.read_text()
    assert f"resource manager 'bank' in virtual host '{vhost}' of the broker belongs to another log" in said
    assert "--rm" in said


def test_a_second_log_with_the_name_is_refused_per_vhost(start: Start, rabbitmq: RabbitNode, vhost: str) -> None:
    """The second dtx starts in another virtual host, and is refused when it uses this one."""
    with selected(start(vhost), vhost):
        pass
    home = rabbitmq.add_vhost()
    try:
        with pytest.raises(XAException, match="another log"), selected(start(home), vhost):
            pass
    finally:
        rabbitmq.delete_vhost(home)


def test_a_restart_has_the_name_and_leaves_no_queue_behind(start: Start, rabbitmq: RabbitNode, vhost: str) -> None:
    service = start(vhost)
    for _ in range(2):
        with selected(service, vhost):
            assert {name.split(".")[1] for name in queues(rabbitmq, vhost)} == {"lock", "receipts"}
        assert service.stop() == 0
        wait_until(lambda: queues(rabbitmq, vhost) == [], what="the end of all queues of dtx")
        service.start()


def test_receipt_queues_stay_while_the_log_has_a_branch(start: Start, rabbitmq: RabbitNode, vhost: str) -> None:
    """After the next start, a unit that is logged but not sent may need them."""
    service = start(vhost)
    with connected(service.url(vhost=vhost)) as connection:
        channel = connection.channel()
        xa, xid = XAResource(channel), new_xid()
        xa.start(xid)
        channel.basic_publish("", "nowhere", b"x")
        xa.end(xid)
        xa.prepare(xid)
    assert service.stop() == 0
    assert any(name.startswith("dtx.receipts.") for name in queues(rabbitmq, vhost))


def test_a_commit_connection_of_a_deleted_vhost_ends(start: Start, rabbitmq: RabbitNode, vhost: str) -> None:
    service = start(vhost)
    other = rabbitmq.add_vhost()
    with selected(service, other):
        pass
    rabbitmq.delete_vhost(other)
    wait_until(
        lambda: b"commit connection ended" in service.log_path.read_bytes(), what="the end of the commit connection"
    )
    rabbitmq.add_vhost(other)
    try:
        with selected(service, other):
            pass  # it has a commit connection again
    finally:
        rabbitmq.delete_vhost(other)

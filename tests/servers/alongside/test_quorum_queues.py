"""Branches on quorum queues: the same answers, and the same messages, as on classic ones."""

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress

import pika
import pytest
from pika.exceptions import NackError

from dtx.client import XAER_RMFAIL, XAResource, Xid
from dtx.xa.codes import XaFlag
from tests.conftest import ServiceFactory
from tests.support.client import bodies, connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode

PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def quorum_queue(rabbitmq: RabbitNode) -> Iterator[str]:
    """A fresh quorum queue with two messages."""
    name = f"quorum-{secrets.token_hex(6)}"
    with rabbitmq.channel() as channel:
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        for body in (b"one", b"two"):
            channel.basic_publish("", name, body, PERSISTENT)
    yield name
    with rabbitmq.channel() as channel:
        channel.queue_delete(name)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
@pytest.mark.parametrize("killed", [True, False], ids=["dtx killed in between", "undisturbed"])
def test_a_branch_on_a_quorum_queue_gets_its_managers_decision(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, quorum_queue: str, commit: bool, killed: bool
) -> None:
    """commit: "Any produced messages are made available and any consumed messages are discarded"; rollback: neither."""
    service = dtx_service("--management", rabbitmq.management_url)
    xid = new_xid()
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(xid)
        method, _, body = channel.basic_get(quorum_queue)
        assert (body, method is None) == (b"one", False)
        channel.basic_ack(method.delivery_tag)
        channel.basic_publish("", quorum_queue, b"three", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        if killed:
            service.kill9()
    if killed:
        service.start()
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        assert list(xa.recover()) == [xid]
        assert (xa.commit if commit else xa.rollback)(xid) is XaFlag.OK
    assert bodies(rabbitmq, quorum_queue) == ([b"two", b"three"] if commit else [b"two", b"one"])


def test_a_full_quorum_queue_that_refuses_loses_no_message(dtx_service: ServiceFactory, rabbitmq: RabbitNode) -> None:
    """RabbitMQ answers tx.commit with commit-ok and drops the message; a confirm would be a nack."""
    service = dtx_service("--management", rabbitmq.management_url)
    full, free = (f"{name}-{secrets.token_hex(6)}" for name in ("full", "free"))
    limits = {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}
    with rabbitmq.channel() as channel:
        channel.queue_declare(full, durable=True, arguments=limits)
        channel.queue_declare(free, durable=True)
        channel.confirm_delivery()
        with suppress(NackError):
            for _ in range(20):
                channel.basic_publish("", full, b"in the way", PERSISTENT)
                time.sleep(0.1)
    there = rabbitmq.count(full)
    xid = new_xid()
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(xid)
        for queue in (free, full, free):
            channel.basic_publish("", queue, b"kept", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        with pytest.raises(XAER_RMFAIL, match="a queue did not take 1 of the messages"):
            xa.commit(xid)
    assert (rabbitmq.count(full), rabbitmq.count(free)) == (there, 2)
    with rabbitmq.channel() as channel:
        channel.queue_purge(full)
    service.restart()
    with connected(service.url()) as connection:
        xa = XAResource(connection.channel())
        assert list(xa.recover()) == [xid]
        assert xa.commit(xid) is XaFlag.OK
    assert bodies(rabbitmq, full) == [b"kept"]
    with rabbitmq.channel() as channel:  # otherwise no dtx of a later test trusts receipts
        for queue in (full, free):
            channel.queue_delete(queue)


def test_a_quorum_queue_without_a_leader_loses_no_message(
    dtx_service: ServiceFactory, rabbitmq: RabbitNode, quorum_queue: str
) -> None:
    """RabbitMQ answers tx.commit with commit-ok and drops the message, until the queue has a leader again."""
    service = dtx_service("--management", rabbitmq.management_url)
    server = f'{{list_to_atom("%2F_{quorum_queue}"), node()}}'
    xid = new_xid()
    with connected(service.url()) as connection:
        channel = connection.channel()
        xa = XAResource(channel)
        xa.start(xid)
        channel.basic_publish("", quorum_queue, b"three", PERSISTENT)
        xa.end(xid)
        assert xa.prepare(xid) is XaFlag.OK
        rabbitmq.ctl("eval", f"ok = ra:stop_server(quorum_queues, {server}).")
        try:
            with pytest.raises(XAER_RMFAIL):
                xa.commit(xid)
        finally:
            rabbitmq.ctl("eval", f"ok = ra:restart_server(quorum_queues, {server}).")
    wait_until(lambda: _commits(service.url(), xid), what="a commit once the queue has a leader")
    assert bodies(rabbitmq, quorum_queue) == [b"one", b"two", b"three"]


def _commits(url: str, xid: Xid) -> bool:
    with connected(url) as connection, suppress(XAER_RMFAIL):
        return XAResource(connection.channel()).commit(xid) is XaFlag.OK
    return False

"""The largest message: dtx asks the broker for its limit, and refuses a larger message before the branch votes."""

from collections.abc import Iterator

import pika
import pytest

from dtx.client import XaFlag, XAResource
from dtx.client.errors import XAER_RMFAIL
from dtx.store.rabbitmq.commit_connection import CommitConnection, CommitSettings
from dtx.store.rabbitmq.message_limit import announced_limit
from dtx.store.rabbitmq.service import Broker
from tests.conftest import ServiceFactory
from tests.support.branches import new_identity
from tests.support.client import connected, new_xid
from tests.support.rabbitmq import RabbitNode

MOST = 1 << 20


@pytest.fixture(scope="module")
def strict(needs_rabbitmq4: None) -> Iterator[RabbitNode]:
    """A node of version 4 that accepts messages up to 1 MiB."""
    with RabbitNode(config={"max_message_size": str(MOST)}, version="4", in_memory=True) as node:
        yield node


async def limit_of(node: RabbitNode, asked: int = 0) -> int:
    commits = CommitConnection(
        Broker.from_url(node.url()), "/", CommitSettings(identity=new_identity("limit"), max_message_bytes=asked)
    )
    try:
        await commits.ready(60)
        return commits.max_message_bytes
    finally:
        await commits.close()


async def test_the_limit_of_rabbitmq_4_overrides_a_higher_setting(strict: RabbitNode) -> None:
    assert [await limit_of(strict, asked) for asked in (0, MOST * 2, MOST // 2)] == [MOST, MOST, MOST // 2]


async def test_older_brokers_announce_no_limit(rabbitmq: RabbitNode) -> None:
    if rabbitmq.version == "3":
        assert [await limit_of(rabbitmq, asked) for asked in (0, MOST)] == [128 << 20, MOST]


async def test_a_server_that_refuses_the_login_announces_nothing(strict: RabbitNode) -> None:
    broker = Broker.from_url(strict.url(password="wrong"))
    assert await announced_limit(broker, broker.hosts[0], "/", b"q") is None


async def test_links_of_amqp_1_0_announce_it(dtx_service: ServiceFactory, strict: RabbitNode) -> None:
    service = dtx_service(broker=strict.url())
    with connected(service.url()) as connection:
        connection.channel().queue_declare("announced", durable=True)
    broker = Broker.from_url(service.url())
    assert await announced_limit(broker, broker.hosts[0], "/", b"announced") == MOST


def test_a_message_too_large_to_commit_is_refused_at_publish(dtx_service: ServiceFactory, strict: RabbitNode) -> None:
    service = dtx_service(broker=strict.url())
    with connected(service.url()) as connection:
        for size, fits in ((MOST, True), (MOST + 1, False)):
            channel: pika.adapters.blocking_connection.BlockingChannel = connection.channel()
            channel.queue_declare("large", durable=True)
            resource, xid = XAResource(channel), new_xid()
            resource.start(xid)
            channel.basic_publish("", "large", bytes(size))
            if fits:
                resource.end(xid)
                assert resource.commit(xid, one_phase=True) == XaFlag.OK
            else:
                with pytest.raises(XAER_RMFAIL, match=f"406.*message size {size} is larger than configured"):
                    resource.end(xid)
    assert strict.count("large") == 1

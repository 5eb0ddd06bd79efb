"""A cluster of three nodes: soon after the death of any node, branches succeed again."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pika
import pytest
from pika.exceptions import AMQPError

from dtx.client import Coordinator, XAError, XaFlag, XAResource
from dtx.xa.xid import Xid
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import Kind, chosen, find_rabbitmq
from tests.support.service import DtxService

QUEUE = "cluster-orders"
LONGEST = 15.0
"""The longest time without a commit after the death of a node, seconds."""
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RabbitNode]]:
    """Three nodes, with a quorum queue on all of them."""
    if find_rabbitmq(chosen()).kind is Kind.DOCKER:
        pytest.skip("containers make no cluster: install rabbitmq-server")
    with ExitStack() as stack:
        first = stack.enter_context(RabbitNode(in_memory=True))
        others = [stack.enter_context(RabbitNode(in_memory=True, joins=first)) for _ in range(2)]
        with first.channel() as channel:
            channel.queue_declare(QUEUE, durable=True, arguments=QUORUM)
        yield [first, *others]


@pytest.fixture
def service(dtx_service: ServiceFactory, nodes: list[RabbitNode]) -> DtxService:
    """A dtx that may connect to each node."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return dtx_service("--management", nodes[2].management_url, broker=f"amqp://guest:guest@{hosts}/")


def prepared(service: DtxService, body: bytes) -> Xid:
    with connected(service.url()) as connection:
        channel = connection.channel()
        resource, xid = XAResource(channel), new_xid()
        resource.start(xid)
        channel.basic_publish("", QUEUE, body, pika.BasicProperties(delivery_mode=2))
        resource.end(xid)
        assert resource.prepare(xid) == XaFlag.OK
    return xid


def committed(service: DtxService, xid: Xid) -> None:
    with connected(service.url()) as connection:
        assert Coordinator(connection).commit(xid) == XaFlag.OK


def seconds_until_a_commit(service: DtxService) -> float:
    """The time until a whole branch succeeds without an error, seconds."""
    began = time.monotonic()
    while True:
        try:
            committed(service, prepared(service, b"again"))
        except (AMQPError, XAError, OSError):
            assert time.monotonic() - began < 120
            time.sleep(0.1)
        else:
            return time.monotonic() - began


def test_the_death_of_any_node_stops_no_branch_for_long(service: DtxService, nodes: list[RabbitNode]) -> None:
    """The first node has the connections, locks and receipts of dtx."""
    bodies: list[bytes] = []
    for number, node in enumerate(nodes):
        xid = prepared(service, b"prepared %d" % number)
        bodies.append(b"prepared %d" % number)
        node.kill9()
        assert seconds_until_a_commit(service) < LONGEST
        bodies.append(b"again")
        committed(service, xid)
        node.start()
        print(
            "COUNT", number, [(n.count(QUEUE), n.api("GET", "/api/queues/%2F/" + QUEUE).get("leader")) for n in nodes]
        )
    found = sorted(body for body, *_ in nodes[0].take_all(QUEUE))
    assert found == sorted(bodies)

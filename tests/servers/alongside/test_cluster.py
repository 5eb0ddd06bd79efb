"""A cluster of three nodes: soon after the death of any node, branches succeed again."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial

import pika
import pytest

from dtx.cli.doctor.broker import check_broker
from dtx.client import XAER_PROTO, Coordinator, XaFlag, XAResource
from dtx.config import Settings
from dtx.xa.xid import Xid
from tests.conftest import ServiceFactory
from tests.support.client import connected, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_install import Kind, chosen, find_rabbitmq
from tests.support.service import DtxService
from tests.support.soak import BROKEN, insist

QUEUE = "cluster-orders"
LONGEST = 15.0
"""The longest time without a commit after the death of a node, seconds."""
PATIENCE = 5.0
"""The time for an answer, seconds. A commit that the failed node had begun is answered later."""
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RabbitNode]]:
    """Three nodes, with a quorum queue on all of them."""
    if find_rabbitmq(chosen()).kind is Kind.DOCKER:
        pytest.skip("containers make no cluster: install rabbitmq-server")
    with ExitStack() as stack:
        # a node that hangs stops declarations of the others until they take it for dead: after 60 seconds by default
        config = {"net_ticktime": "5"}
        first = stack.enter_context(RabbitNode(in_memory=True, config=config))
        others = [stack.enter_context(RabbitNode(in_memory=True, config=config, joins=first)) for _ in range(2)]
        with first.channel() as channel:
            channel.queue_declare(QUEUE, durable=True, arguments=QUORUM)
        yield [first, *others]


@pytest.fixture
def service(dtx_service: ServiceFactory, nodes: list[RabbitNode]) -> DtxService:
    """A dtx that may connect to each node."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return dtx_service("--management", nodes[2].management_url, broker=f"amqp://guest:guest@{hosts}/")


def prepared(service: DtxService, body: bytes, queue: str = QUEUE) -> Xid:
    with connected(service.url()) as connection:
        channel = connection.channel()
        resource, xid = XAResource(channel, timeout=PATIENCE), new_xid()
        resource.start(xid)
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))
        resource.end(xid)
        assert resource.prepare(xid) == XaFlag.OK
    return xid


def committed(service: DtxService, xid: Xid) -> None:
    with connected(service.url()) as connection:
        assert Coordinator(connection, timeout=PATIENCE).commit(xid) == XaFlag.OK


def seconds_until_a_commit(service: DtxService) -> float:
    """The time until a whole branch succeeds without an error, seconds."""
    began = time.monotonic()
    while True:
        try:
            committed(service, prepared(service, b"again"))
        except BROKEN:
            assert time.monotonic() - began < 120
            time.sleep(0.1)
        else:
            return time.monotonic() - began


def in_doubt(service: DtxService, finished: set[Xid]) -> bool:
    """Whether there are branches. Those that were decided are committed, and added to *finished*; others roll back.

    While a quorum queue has no leader, it refuses messages, and the branch is stuck until the next commit.
    """
    with suppress(*BROKEN), connected(service.url()) as connection, Coordinator(connection) as coordinator:
        xids = list(coordinator.recover())
        for xid in xids:
            with suppress(*BROKEN):
                try:
                    coordinator.rollback(xid)
                except XAER_PROTO:
                    coordinator.commit(xid)
                    finished.add(xid)
        return bool(xids)
    return True


def test_doctor_warns_if_a_node_may_hang_for_long(nodes: list[RabbitNode]) -> None:
    settings = Settings.model_validate({"broker": nodes[0].url(), "management": nodes[0].management_url})

    def warned() -> str | None:
        found = (check.sentence for check in check_broker(settings) if check.name == "broker.net-ticktime")
        return next(found, None)

    def set_time(seconds: int) -> None:
        nodes[1].ctl("eval", f"net_kernel:set_net_ticktime({seconds}, 0).")

    assert warned() is None
    set_time(60)
    try:
        wait_until(warned, what="the warning")
        assert "3 nodes" in str(warned())
        assert "75 s" in str(warned())
    finally:
        set_time(5)
    wait_until(lambda: warned() is None, what="the end of the warning")


def test_only_branches_of_the_queues_of_a_dead_node_wait(service: DtxService, nodes: list[RabbitNode]) -> None:
    """A classic queue is at one node: "No branch waits" for that node but those that publish to its queues."""
    queue = "cluster-classic"
    with nodes[1].channel() as channel:
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})
    xid = prepared(service, b"waits", queue)
    nodes[1].kill9()
    assert seconds_until_a_commit(service) < LONGEST
    with pytest.raises(BROKEN):
        committed(service, xid)
    committed(service, prepared(service, b"again"))
    nodes[1].mend()
    insist(partial(committed, service, xid))
    wait_until(lambda: not in_doubt(service, set()), seconds=60, what="the end of all branches")
    assert {body for body, *_ in nodes[0].take_all(queue)} == {b"waits"}
    nodes[0].take_all(QUEUE)


@pytest.mark.parametrize("hangs", [False, True], ids=["dies", "hangs"])
def test_a_node_that_fails_stops_no_branch_for_long(service: DtxService, nodes: list[RabbitNode], hangs: bool) -> None:
    """The first node has the connections, locks and receipts of dtx. A node that hangs still accepts connections."""
    bodies: list[bytes] = []
    for number, node in enumerate(nodes):
        xid = prepared(service, b"prepared %d" % number)
        bodies.append(b"prepared %d" % number)
        node.pause() if hangs else node.kill9()
        assert seconds_until_a_commit(service) < LONGEST
        bodies.append(b"again")
        insist(partial(committed, service, xid))
        node.mend()
    finished: set[Xid] = set()
    wait_until(lambda: not in_doubt(service, finished), seconds=60, what="the end of all branches")
    bodies += [b"again"] * len(finished)
    found = Counter(body for body, *_ in nodes[0].take_all(QUEUE))
    assert set(found) == set(bodies)
    assert found >= Counter(bodies)
    assert hangs or found == Counter(bodies)  # a node that hangs may go on with a commit that was repeated

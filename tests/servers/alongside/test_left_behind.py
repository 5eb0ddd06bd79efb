"""Clients that disconnect and leave branches: their connections to the broker stay open, and count."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from dtx.client import XaFlag, Xid
from dtx.wire.amqp09.methods import DtxEnd, DtxRollback, DtxStart
from dtx.wire.amqp10.performatives import ACCEPTED, Role, TransactionalState
from tests.conftest import ServiceFactory
from tests.servers.amqp10.raw import Raw
from tests.support.client import bodies, fresh_queue, new_xid
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import ConnectionEnded, session
from tests.support.service import DtxService


@pytest.fixture
def queue(rabbitmq: RabbitNode) -> Iterator[str]:
    """A queue with one message."""
    with fresh_queue(rabbitmq) as name:
        with rabbitmq.channel() as channel:
            channel.basic_publish("", name, b"one")
        yield name


def leave_a_branch(service: DtxService, queue: str, xid: Xid) -> None:
    """A client of AMQP 0-9 consumes in a branch and disconnects."""
    with session(service.url()) as leaver:
        leaver.open(1, select=True)
        leaver.ask(1, DtxStart(xid=xid))
        leaver.consume_one(1, queue)
        assert leaver.ask(1, DtxEnd(xid=xid)) is XaFlag.OK


def leave_a_transaction(service: DtxService, queue: str, xid: Xid) -> None:
    """The same with AMQP 1.0."""
    with Raw(service) as leaver:
        session = leaver.opened().begin()
        leaver.receiver(session, queue)
        delivery = leaver.take()
        control = leaver.control(session)
        txn_id = leaver.declare(session, control, xid.to_wire())
        state = TransactionalState(txn_id=txn_id, outcome=ACCEPTED)
        session.dispose(Role.RECEIVER, [delivery.delivery_id], state, settled=True)
        assert leaver.discharge(session, control, txn_id) == ACCEPTED


@pytest.mark.parametrize("leave", [leave_a_branch, leave_a_transaction])
@pytest.mark.parametrize("limit", [("--max-connections", "2"), ("--quota", "user=* connections=2")])
def test_branches_of_closed_connections_count_as_connections(
    dtx_service: ServiceFactory,
    rabbitmq: RabbitNode,
    queue: str,
    limit: tuple[str, str],
    leave: Callable[[DtxService, str, Xid], None],
) -> None:
    """The limits bound the sockets of dtx. A client does not get more of them if it closes its own."""
    service = dtx_service(*limit, "--default-timeout", "0")
    xid = new_xid()
    leave(service, queue, xid)

    def let_in() -> bool:
        with contextlib.suppress(ConnectionEnded, OSError), session(service.url()):
            return True
        return False

    with session(service.url()) as manager:
        manager.open(1)
        for _ in range(3):
            assert not let_in()
        assert manager.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
        wait_until(let_in, what="room for another client")
    assert bodies(rabbitmq, queue) == [b"one"]

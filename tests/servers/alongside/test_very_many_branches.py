"""Alongside a broker, the end of a client with 500 channels of 100 branches each does not hold the event loop."""

from collections.abc import Iterator

import pytest

from dtx.auth.operators import OperatorLog
from dtx.auth.roles import OperatorRole
from dtx.client import Xid
from dtx.wire.amqp09 import methods
from tests.support.loop_watch import WatchedService, not_held, take
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import ADMIN

RM = "dtx-very-many"
CHANNELS = 500
EACH = 100


@pytest.fixture
def service(shared_rabbitmq: RabbitNode, postgres: PostgresServer) -> Iterator[WatchedService]:
    """A service for this test only."""
    database = postgres.create_database()
    options = (*ADMIN, "--rm", RM, "--tombstone-ttl", "1")
    with WatchedService(broker=shared_rabbitmq.url(), database=database, options=options) as running:
        yield running
    postgres.drop_database(database)


def test_a_client_leaves_very_many_branches_of_very_many_channels(service: WatchedService) -> None:
    assert service.database is not None
    token = OperatorLog(service.database, RM).make_token("viewer", OperatorRole.VIEWER, "test")
    operator = Operator(service.admin_url, token=token)
    with RawClient(service.url(), patience=120) as peer:
        peer.log_in()
        for first in range(1, CHANNELS + 1, 100):
            numbers = range(first, first + 100)
            peer.send_raw(*(methods.ChannelOpen().frame(number) for number in numbers))
            take(peer, len(numbers), methods.ChannelOpenOk.KEY)
            peer.send_raw(*(methods.DtxSelect().frame(number) for number in numbers))
            take(peer, len(numbers), methods.DtxSelectOk.KEY)
            for number in numbers:
                for count in range(EACH):
                    xid = Xid(7, b"%d" % number, b"%d" % count)
                    peer.send_raw(
                        methods.DtxStart(xid=xid, join=False, resume=False).frame(number)
                        + methods.DtxEnd(xid=xid, fail=False, suspend=True).frame(number)
                    )
            take(peer, EACH * len(numbers), methods.DtxEndOk.KEY)
        with not_held(service):
            (connection,) = operator.get("/dtx/v1/connections")["connections"]
            assert connection["suspended"] == CHANNELS * EACH
        with not_held(service):
            peer.socket.close()
            wait_until(lambda: operator.get("/dtx/v1/connections")["connections"] == [], what="the client's end")
    wait_until(lambda: operator.get("/dtx/v1/status")["branches"] == {}, what="the end of all", seconds=60)

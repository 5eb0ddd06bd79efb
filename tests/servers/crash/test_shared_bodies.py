"""Standalone mode: bodies that several queues share survive kill -9 of dtx and PostgreSQL."""

import psycopg

from dtx.client import Coordinator, XaFlag, XAResource
from tests.support.client import connected, new_xid, take_all
from tests.support.crash import PERSISTENT
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import DtxService

QUEUES = ("a", "b", "c")
PLAIN, KEPT, UNDONE = (bytes([number]) * 100_000 for number in range(3))


def uses(database: str) -> list[int]:
    """How many messages use each body that is stored."""
    with psycopg.connect(database) as connection:
        return [number for (number,) in connection.execute("SELECT uses FROM dtx.body ORDER BY uses")]


def test_shared_bodies_are_whole_and_leave_with_their_messages(own_postgres: PostgresServer) -> None:
    """Each queue has each message exactly once, and no body remains without a message."""
    database = own_postgres.create_migrated_database()
    with DtxService(database=database) as service:

        def die() -> None:
            service.kill9()
            own_postgres.kill9()
            own_postgres.wait_ready()
            service.start()

        with connected(service.url()) as connection:
            channel = connection.channel()
            channel.exchange_declare("x", "fanout", durable=True)
            for queue in QUEUES:
                channel.queue_declare(queue, durable=True)
                channel.queue_bind(queue, "x")
            selected = connection.channel()
            xa, xids = XAResource(selected), []
            for body in (KEPT, UNDONE):
                xids.append(new_xid())
                xa.start(xids[-1])
                selected.basic_publish("x", "", body, PERSISTENT)
                xa.end(xids[-1])
                assert xa.prepare(xids[-1]) is XaFlag.OK
            channel.confirm_delivery()
            channel.basic_publish("x", "", PLAIN, PERSISTENT)
        assert uses(database) == [3, 3, 3]
        die()
        assert uses(database) == [3, 3, 3]
        with connected(service.url()) as connection:
            coordinator = Coordinator(connection)
            coordinator.commit(xids[0])
            coordinator.rollback(xids[1])
            assert sorted(take_all(connection.channel(), "a")) == [PLAIN, KEPT]
        wait_until(lambda: uses(database) == [2, 2], what="the messages of one queue gone")
        die()
        with connected(service.url()) as connection:
            assert connection.channel().queue_declare("a", passive=True).method.message_count == 0
            connection.channel().queue_delete("b")
            assert sorted(take_all(connection.channel(), "c")) == [PLAIN, KEPT]
        wait_until(lambda: uses(database) == [], what="the end of all bodies")

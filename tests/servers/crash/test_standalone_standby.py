"""Standalone mode: a dtx that was stopped during a takeover confirms nothing afterwards."""

from collections.abc import Iterator

import pytest

from dtx.client import Coordinator, XaFlag
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.methods import DtxCommit, DtxPrepare, DtxRecover, DtxStart
from tests.support.client import connected, new_xid, take_all
from tests.support.crash import PERSISTENT, work
from tests.support.postgres import PostgresServer
from tests.support.raw import ConnectionEnded, RawClient, session
from tests.support.service import DtxService

CONFIRM_SELECT = methods.ConfirmSelect.HEAD + b"\x00"


@pytest.fixture
def both(postgres: PostgresServer) -> Iterator[tuple[DtxService, DtxService]]:
    """The active dtx and the standby."""
    database = postgres.create_migrated_database()
    options = ("--lease-ttl", "2")
    with (
        DtxService(database=database, options=options) as active,
        DtxService(database=database, options=options, start=False) as standby,
    ):
        standby.start(wait=False)
        yield active, standby
    postgres.drop_database(database)


def answers(client: RawClient, channel: int) -> list[bytes]:
    """All methods that arrive on *channel* until the connection ends."""
    found = []
    try:
        while True:
            found.append(client.next_method(channel))
    except (ConnectionEnded, OSError):
        return found


def test_a_resumed_predecessor_answers_nothing_the_successor_has_decided(
    both: tuple[DtxService, DtxService],
) -> None:
    active, standby = both
    with connected(active.url()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("q", durable=True)
        for body in (b"1", b"2"):
            channel.basic_publish("", "q", body, PERSISTENT)
        xa, decided = work(connection.channel(), publish={"q": [b"decided elsewhere"]}, consume={"q": 1})
        assert xa.prepare(decided) is XaFlag.OK
    with session(active.url()) as client:
        for number in range(1, 6):
            client.open(number, select=number in (2, 3))
        client.say(1, CONFIRM_SELECT)
        client.read_method(1, methods.ConfirmSelectOk.KEY)
        idle = client.idle(2, new_xid(), queue="q", body=b"not prepared")
        active.pause()
        client.publish(1, "q", b"too late", properties=b"\x10\x00\x02")
        client.say(2, DtxPrepare(xid=idle).encode())
        client.say(3, DtxStart(xid=new_xid()).encode())
        client.say(4, DtxCommit(xid=decided, one_phase=False).encode())
        client.say(5, DtxRecover(startscan=True, endscan=True).encode())
        standby.wait_ready()
        with connected(standby.url()) as connection, Coordinator(connection) as coordinator:
            assert list(coordinator.recover()) == [decided]
            assert coordinator.rollback(decided) is XaFlag.OK
        active.resume()
        for number in range(1, 6):
            closed = methods.ChannelClose.HEAD + (541).to_bytes(2, "big")
            nack = methods.BasicNack.HEAD
            assert [answer for answer in answers(client, number) if not answer.startswith((closed, nack))] == []
    assert active.wait() == 5
    with connected(standby.url()) as connection, Coordinator(connection) as coordinator:
        assert list(coordinator.recover()) == []
        assert take_all(connection.channel(), "q") == [b"1", b"2"]

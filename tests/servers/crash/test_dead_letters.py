"""dtx dies while it moves dead letters: each message is in exactly one of the two queues."""

from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from dtx.wire.amqp09.methods import DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.xa.codes import XaFlag
from tests.support.client import new_xid
from tests.support.dialogue import Dialogue, Got, unique
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import session
from tests.support.service import DtxService

MESSAGES = 1000
"""dtx moves them in about five records."""


@pytest.fixture(scope="module")
def service(postgres: PostgresServer) -> Iterator[DtxService]:
    database = postgres.create_database()
    with DtxService(database=database) as running:
        yield running
    postgres.drop_database(database)


def fill(service: DtxService, expiration: str | None) -> list[str]:
    """Fill the durable queue ``dying``, first with a message that does not expire; dead letters go to ``dead``."""
    found = ["stopper", *(str(number) for number in range(MESSAGES))]
    with Dialogue(service.url()) as talk:
        talk.channel.queue_declare("dead", durable=True)
        table = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        talk.channel.queue_declare("dying", durable=True, arguments=table)
        publisher = talk.another()
        publisher.tx_select()
        for body in found:
            lasting = pika.BasicProperties(delivery_mode=2, expiration=None if body == "stopper" else expiration)
            publisher.basic_publish("", "dying", body.encode(), lasting)
        publisher.tx_commit()
    return found


def kill_in_the_middle(service: DtxService, talk: Dialogue) -> None:
    """Kill dtx when some messages have been moved, and start it again."""
    wait_until(lambda: talk.count("dead") > 0, what="a dead letter")
    service.restart()


def drained(channel: BlockingChannel, queue: str) -> list[tuple[str, int]]:
    """Take all messages: bodies, with the number of their deaths."""
    found: list[tuple[str, int]] = []
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        deaths = (properties.headers or {}).get("x-death", [])
        found.append((body.decode(), sum(death["count"] for death in deaths)))


def test_messages_that_expire_are_moved_once(service: DtxService) -> None:
    bodies = fill(service, "1")
    with Dialogue(service.url()) as talk:
        talk.channel.basic_ack(talk.take("dying").method.delivery_tag)
        kill_in_the_middle(service, talk)
    with Dialogue(service.url()) as talk:
        # The stopper is back if its acknowledgement came too late.
        assert talk.drain("dying") in ([], ["stopper"])
        wait_until(lambda: talk.count("dead") >= MESSAGES, what="all dead letters")
        assert sorted(drained(talk.channel, "dead")) == sorted((body, 1) for body in bodies[1:])
        assert talk.count("dying") == 0


def test_messages_that_are_rejected_are_moved_or_come_back(
    service: DtxService, left_out: Callable[[str], None]
) -> None:
    bodies = fill(service, None)
    with Dialogue(service.url()) as talk:
        found: list[Got] = []
        talk.collect(found, "dying")
        talk.until(lambda: len(found) == len(bodies), "all deliveries")
        talk.channel.basic_nack(found[-1].method.delivery_tag, multiple=True, requeue=False)
        kill_in_the_middle(service, talk)
    with Dialogue(service.url()) as talk:
        dead, back = drained(talk.channel, "dead"), drained(talk.channel, "dying")
        if not back:
            left_out("rejected messages of which some were not moved when dtx died")
        assert {deaths for _, deaths in dead} == {1}
        assert {deaths for _, deaths in back} <= {0}
        # In order: the first messages are moved, the others remain.
        assert [body for body, _ in (*dead, *back)] == bodies


def test_a_message_of_a_prepared_branch_expires_on_its_return(service: DtxService) -> None:
    """It does not expire before, even if its time is over and dtx dies."""
    queue, xid = unique(), new_xid()
    with Dialogue(service.url()) as talk, session(service.url()) as raw:
        talk.channel.queue_declare("dead", durable=True)
        table = {"x-message-ttl": 3000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        talk.channel.queue_declare(queue, durable=True, arguments=table)
        raw.open(1, select=True)
        raw.ask(1, DtxStart(xid=xid))
        talk.publish(queue, "held", "late", delivery_mode=2)
        raw.consume_one(1, queue)
        assert raw.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        assert raw.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
        service.restart()
    with Dialogue(service.url()) as talk, session(service.url()) as raw:
        raw.open(1, select=True)
        assert [got.body for got in talk.receive("dead")] == ["late"]
        assert (talk.count(queue), talk.count("dead")) == (0, 0)
        assert raw.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
        (got,) = talk.receive("dead")
        assert (got.body, got.deaths[0]["reason"], got.deaths[0]["count"]) == ("held", "expired", 1)

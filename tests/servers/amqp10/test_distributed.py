"""One XA transaction: a client of AMQP 1.0, one of AMQP 0-9, and a PostgreSQL table."""

from collections.abc import Iterator

import psycopg
import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

from dtx.client import Coordinator, XAException, XAResource, XARollback, Xid
from tests.support.client import connected, new_xid, take_all
from tests.support.postgres import PostgresServer
from tests.support.proton import Client, Delivery
from tests.support.service import DtxService


@pytest.fixture
def manager(service: DtxService) -> Iterator[Coordinator]:
    """The transaction manager, which decides the branches of all clients."""
    with connected(service.url()) as connection:
        yield Coordinator(connection)


def test_an_amqp_1_0_client_works_for_the_named_branch(
    client: Client, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"consumed")
    xid = new_xid()
    receiver, sender = client.receiver(queue), client.sender(queue)
    _, delivery = client.take(receiver)
    transaction, outcome = client.declare(xid.to_wire())
    client.send(transaction, sender, "published")
    transaction.update(delivery, Delivery.ACCEPTED)
    assert client.end(transaction, outcome) == "committed"  # its work has ended; nothing is decided
    client.await_settled(delivery)
    assert take_all(channel, queue) == []

    manager.prepare(xid)
    assert xid in manager.recover()
    assert take_all(channel, queue) == []
    manager.commit(xid)
    receiver.close()
    assert take_all(channel, queue, at_least=1) == [b"published"]


def test_rolling_the_branch_back_undoes_work_of_amqp_1_0(
    client: Client, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    channel.basic_publish("", queue, b"consumed")
    for prepared in (False, True):
        xid = new_xid()
        receiver, sender = client.receiver(queue), client.sender(queue)
        _, delivery = client.take(receiver)
        transaction, outcome = client.declare(xid.to_wire())
        client.send(transaction, sender, "published")
        transaction.update(delivery, Delivery.ACCEPTED)
        assert client.end(transaction, outcome) == "committed"
        client.await_settled(delivery)
        receiver.close()
        if prepared:
            manager.prepare(xid)
        manager.rollback(xid)
        assert channel.queue_declare(queue, passive=True).method.message_count == 1


def test_two_protocols_and_a_table_commit_together(
    client: Client, channel: BlockingChannel, queue: str, manager: Coordinator, postgres: PostgresServer
) -> None:
    database = postgres.create_database()
    gtrid = new_xid().gtrid
    mine, name = Xid(1, gtrid, b"amqp"), gtrid.hex()
    sender = client.sender(queue)
    with psycopg.connect(database, autocommit=True) as table:
        table.execute("CREATE TABLE account (owner text, amount int)")
        table.execute("BEGIN")
        table.execute("INSERT INTO account VALUES ('bob', 30)")

        other = XAResource(channel)
        other.start(mine)
        channel.basic_publish("", queue, b"with 0-9")
        transaction, outcome = client.declare(mine.to_wire())  # joins
        client.send(transaction, sender, "with 1.0")
        assert client.end(transaction, outcome) == "committed"
        other.end(mine)

        if table.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            manager.prepare(mine)
            table.execute("COMMIT")  # the last resource
        else:
            table.execute(f"PREPARE TRANSACTION '{name}'")
            manager.prepare(mine)
            table.execute(f"COMMIT PREPARED '{name}'")
        manager.commit(mine)
        assert table.execute("SELECT * FROM account").fetchall() == [("bob", 30)]
    assert take_all(channel.connection.channel(), queue) == [b"with 0-9", b"with 1.0"]
    postgres.drop_database(database)


def test_a_failed_discharge_leaves_a_rollback_only_branch(
    client: Client, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    xid = new_xid()
    transaction, outcome = client.declare(xid.to_wire())
    client.send(transaction, client.sender(queue), "one")
    assert client.end(transaction, outcome, fail=True) == "aborted"
    with pytest.raises(XARollback):
        manager.prepare(xid)
    assert take_all(channel, queue) == []


def test_an_id_that_is_no_xid_is_refused(client: Client) -> None:
    with pytest.raises(AssertionError, match="declare failed"):
        client.declare(b"no xid")


def test_the_branch_of_a_lost_connection_is_rollback_only(
    service: DtxService, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    xid = new_xid()
    client = Client(service)
    transaction, _ = client.declare(xid.to_wire())
    client.send(transaction, client.sender(queue), "one")
    client.blocking.close()
    with pytest.raises(XARollback):
        manager.prepare(xid)
    assert take_all(channel, queue) == []


def test_two_connections_work_for_one_branch(
    service: DtxService, client: Client, channel: BlockingChannel, queue: str, manager: Coordinator
) -> None:
    xid = new_xid()
    with Client(service) as other:
        mine, my_outcome = client.declare(xid.to_wire())
        theirs, their_outcome = other.declare(xid.to_wire())
        client.send(mine, client.sender(queue), "mine")
        other.send(theirs, other.sender(queue), "theirs")
        assert client.end(mine, my_outcome) == "committed"
        with pytest.raises(XAException, match="associated"):
            manager.prepare(xid)
        assert other.end(theirs, their_outcome) == "committed"
    manager.commit(xid, one_phase=True)
    assert take_all(channel, queue) == [b"mine", b"theirs"]


def test_a_branch_that_has_voted_takes_no_more_work(client: Client, queue: str, manager: Coordinator) -> None:
    xid = new_xid()
    transaction, outcome = client.declare(xid.to_wire())
    client.send(transaction, client.sender(queue), "one")
    assert client.end(transaction, outcome) == "committed"
    manager.prepare(xid)
    with pytest.raises(AssertionError, match="declare failed"):
        client.declare(xid.to_wire())
    manager.rollback(xid)


def test_the_branch_survives_the_client_and_dtx(postgres: PostgresServer) -> None:
    """A prepared branch with work over AMQP 1.0 can be committed after its client and dtx have died."""
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database) as service:
        with connected(service.url()) as connection:
            connection.channel().queue_declare("q", durable=True)
            connection.channel().basic_publish("", "q", b"old", BasicProperties(delivery_mode=2))
        client = Client(service)
        _, delivery = client.take(client.receiver("q"))
        transaction, outcome = client.declare(xid.to_wire())
        client.send(transaction, client.sender("q"), "new")
        transaction.update(delivery, Delivery.ACCEPTED)
        assert client.end(transaction, outcome) == "committed"
        with connected(service.url()) as connection:
            Coordinator(connection).prepare(xid)
        service.kill9()
        service.start()
        with connected(service.url()) as connection:
            decider = Coordinator(connection)
            assert list(decider.recover()) == [xid]
            decider.commit(xid)
            assert take_all(connection.channel(), "q") == [b"new"]
    postgres.drop_database(database)

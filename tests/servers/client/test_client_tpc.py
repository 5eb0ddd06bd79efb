"""The two-phase methods of PEP 249 against the real service, compared with psycopg's where they must agree."""

from typing import Any

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, ChannelWrongStateError

from dtx.client import tpc
from dtx.client.tpc import NotSupportedError, OperationalError, ProgrammingError, TwoPhaseConnection
from tests.support.client import bodies, connected, new_xid
from tests.support.rabbitmq import RabbitNode
from tests.support.service import DtxService


@pytest.fixture
def two_phase(channel: BlockingChannel) -> TwoPhaseConnection:
    return TwoPhaseConnection(channel)


def unused() -> tpc.TransactionId:
    return tpc.TransactionId.from_xid(new_xid())


def test_a_prepared_transaction_is_committed(two_phase: TwoPhaseConnection, queue: str, rabbitmq: RabbitNode) -> None:
    two_phase.tpc_begin(two_phase.xid(*unused()))
    two_phase.channel.basic_publish("", queue, b"one")
    two_phase.tpc_prepare()
    assert rabbitmq.count(queue) == 0
    two_phase.tpc_commit()
    assert bodies(rabbitmq, queue) == [b"one"]


@pytest.mark.parametrize("vote", [False, True])
def test_a_transaction_is_rolled_back(
    two_phase: TwoPhaseConnection, queue: str, rabbitmq: RabbitNode, vote: bool
) -> None:
    two_phase.tpc_begin(unused())
    two_phase.channel.basic_publish("", queue, b"one")
    if vote:
        two_phase.tpc_prepare()
    two_phase.tpc_rollback()
    two_phase.tpc_begin(unused())
    two_phase.tpc_rollback()
    assert bodies(rabbitmq, queue) == []


def test_commit_without_prepare_is_one_phase(two_phase: TwoPhaseConnection, queue: str, rabbitmq: RabbitNode) -> None:
    two_phase.tpc_begin(unused())
    two_phase.channel.basic_publish("", queue, b"one")
    two_phase.tpc_commit()
    assert bodies(rabbitmq, queue) == [b"one"]


@pytest.mark.parametrize("finish", ["tpc_commit", "tpc_rollback"])
def test_a_transaction_without_work_is_finished_like_any_other(two_phase: TwoPhaseConnection, finish: str) -> None:
    two_phase.tpc_begin(unused())
    two_phase.tpc_prepare()
    getattr(two_phase, finish)()
    two_phase.commit()
    two_phase.rollback()


@pytest.mark.parametrize("finish", ["tpc_commit", "tpc_rollback"])
def test_another_programs_prepared_transaction_is_found_and_completed(
    service: DtxService, two_phase: TwoPhaseConnection, queue: str, rabbitmq: RabbitNode, finish: str
) -> None:
    xid = unused()
    with connected(service.url()) as gone:
        first = TwoPhaseConnection(gone.channel())
        first.tpc_begin(xid)
        first.channel.basic_publish("", queue, b"one")
        first.tpc_prepare()
    assert xid in two_phase.tpc_recover()
    getattr(two_phase, finish)(xid)
    assert xid not in two_phase.tpc_recover()
    assert bodies(rabbitmq, queue) == ([b"one"] if finish == "tpc_commit" else [])
    with pytest.raises(ProgrammingError) as raised:
        getattr(two_phase, finish)(xid)
    assert raised.value.xa is not None
    assert raised.value.xa.name == "XAER_NOTA"
    two_phase.tpc_begin(unused())
    two_phase.tpc_rollback()
    two_phase.close()


def misuse(connection: Any, refusal: type[Exception], xid: tpc.TransactionId) -> None:
    """The same program for a connection of psycopg and for one of dtx."""
    for call in (connection.tpc_prepare, connection.tpc_commit, connection.tpc_rollback):
        with pytest.raises(refusal):
            call()
    connection.tpc_begin(connection.xid(*xid))
    for call in (connection.commit, connection.rollback):
        with pytest.raises(refusal):
            call()
    for finish in (connection.tpc_commit, connection.tpc_rollback, connection.tpc_begin):
        with pytest.raises(refusal):
            finish(connection.xid(*xid))
    connection.tpc_rollback()
    assert connection.xid(*xid) not in connection.tpc_recover()


def test_misuse_is_refused_by_psycopg(postgres_url: str) -> None:
    """The reference for the next test."""
    with psycopg.connect(postgres_url) as database:
        misuse(database, psycopg.ProgrammingError, tpc.TransactionId(7, "order-17", "queue"))


def test_misuse_is_refused_where_psycopg_refuses_it(two_phase: TwoPhaseConnection) -> None:
    misuse(two_phase, ProgrammingError, unused())


def test_calls_of_psycopg_that_channels_lack_are_refused(two_phase: TwoPhaseConnection) -> None:
    two_phase.tpc_begin(unused())
    with pytest.raises(ProgrammingError):
        two_phase.tpc_recover()
    two_phase.tpc_prepare()
    with pytest.raises(ProgrammingError):
        two_phase.tpc_prepare()
    two_phase.tpc_rollback()


def test_an_xid_in_use_is_a_programming_error(connection: BlockingConnection, two_phase: TwoPhaseConnection) -> None:
    xid = unused()
    two_phase.tpc_begin(xid)
    second = TwoPhaseConnection(connection.channel())
    with pytest.raises(ProgrammingError) as raised:
        second.tpc_begin(xid)
    assert raised.value.xa is not None
    assert raised.value.xa.name == "XAER_DUPID"
    two_phase.tpc_rollback()


def test_a_transaction_without_its_channel_can_only_be_rolled_back(
    connection: BlockingConnection, queue: str, rabbitmq: RabbitNode
) -> None:
    first = TwoPhaseConnection(connection.channel())
    first.tpc_begin(unused())
    first.channel.basic_publish("", queue, b"one")
    first.channel.close()
    with pytest.raises(OperationalError):
        first.tpc_commit()
    second = TwoPhaseConnection(connection.channel())
    second.tpc_begin(unused())
    second.channel.basic_publish("", queue, b"two")
    second.channel.close()
    with pytest.raises(OperationalError):
        second.tpc_prepare()
    second.tpc_rollback()
    assert bodies(rabbitmq, queue) == []


def test_a_channel_closed_within_its_transaction_takes_no_further_work(
    connection: BlockingConnection, queue: str, rabbitmq: RabbitNode
) -> None:
    two_phase = TwoPhaseConnection(connection.channel())
    two_phase.tpc_begin(unused())
    two_phase.channel.basic_publish("", queue, b"one")
    with pytest.raises(ChannelClosedByBroker):
        two_phase.channel.queue_declare("no-such-queue", passive=True)
    with pytest.raises(ChannelWrongStateError):
        two_phase.channel.basic_publish("", queue, b"escaped")
    with pytest.raises(OperationalError):
        two_phase.tpc_prepare()
    two_phase.tpc_rollback()
    assert bodies(rabbitmq, queue) == []


def test_another_broker_supports_no_two_phase_commit(rabbitmq: RabbitNode) -> None:
    """PEP 249: "If the database connection does not support TPC, a NotSupportedError is raised"."""
    with connected(rabbitmq.url()) as connection, pytest.raises(NotSupportedError, match="not dtx"):
        TwoPhaseConnection(connection.channel())

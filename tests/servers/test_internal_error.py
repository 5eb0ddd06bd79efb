"""Rule internalError of each method: the log is unreachable, and the outcome is unknown."""

from collections.abc import Iterator
from typing import cast
from urllib.parse import urlsplit

import pytest

from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxEnd,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxSetTimeout,
    DtxStart,
)
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import MODES, Broker, Mode, StandaloneBroker
from tests.support.client import bodies, fresh_queue, new_xid
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, session
from tests.support.seed import heuristic, seed
from tests.support.service import DtxService


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    """The mode of dtx."""
    return cast("Mode", request.param)


@pytest.fixture
def forgettable() -> Xid:
    """The xid of a heuristic outcome."""
    return new_xid()


@pytest.fixture
def own_service(
    mode: Mode, request: pytest.FixtureRequest, own_postgres: PostgresServer, forgettable: Xid
) -> Iterator[DtxService]:
    """A service whose database the test may stop."""
    node: RabbitNode | None = request.getfixturevalue("rabbitmq") if mode == "alongside" else None
    database = own_postgres.create_database()
    rm = urlsplit(database).path[1:]
    seed(database, [heuristic(forgettable, Heuristic.MIXED, local=node is None)], rm=rm)
    broker = None if node is None else node.url()
    options = ("--lease-ttl", "3", "--rm", rm)
    with DtxService(broker=broker, database=database, options=options) as running:
        yield running


@pytest.fixture
def own_broker(mode: Mode, request: pytest.FixtureRequest, own_service: DtxService) -> Broker:
    """The broker, or the standalone dtx, that has the messages of ``own_service``."""
    return (
        cast("RabbitNode", request.getfixturevalue("rabbitmq"))
        if mode == "alongside"
        else StandaloneBroker(own_service)
    )


@pytest.fixture
def own_queue(own_broker: Broker) -> Iterator[str]:
    """A queue of ``own_broker``."""
    with fresh_queue(own_broker) as name:
        yield name


def test_an_error_is_541_and_the_branch_is_unchanged(
    own_service: DtxService, own_postgres: PostgresServer, own_broker: Broker, own_queue: str, forgettable: Xid
) -> None:
    """Each: "If an error occurs in ... the transaction branch then ... reply code 541 (internal error)"; prepare: "The
    specified Xid may or may not have been prepared".
    """
    prepare, commit, one_phase, rollback, consumed, unknown = (new_xid() for _ in range(6))
    with session(own_service.url()) as client:
        client.open(1, select=True)
        client.publish(1, own_queue, b"consumed")
        client.ask(1, DtxStart(xid=consumed))
        client.consume_one(1, own_queue)
        client.ask(1, DtxEnd(xid=consumed))
        for xid in (prepare, one_phase):
            client.idle(1, xid, queue=own_queue, body=xid.gtrid)
        for xid in (commit, rollback):
            client.prepared(1, xid, queue=own_queue, body=xid.gtrid)
        own_postgres.stop()
        calls: list[tuple[DtxCall, int]] = [
            (DtxPrepare(xid=prepare), 40),
            (DtxPrepare(xid=consumed), 40),
            (DtxCommit(xid=commit), 10),
            (DtxCommit(xid=one_phase, one_phase=True), 10),
            (DtxRollback(xid=rollback), 60),
            (DtxForget(xid=forgettable), 20),
            (DtxGetTimeout(xid=unknown), 30),
            (DtxSetTimeout(xid=unknown, timeout=1), 70),
            (DtxRollback(xid=unknown), 60),
        ]
        for channel, (call, _) in enumerate(calls, 10):
            client.open(channel)
            client.say(channel, call.encode())
        for channel, (call, method) in enumerate(calls, 10):
            refusal = client.refused(channel)
            assert (refusal.code, refusal.class_id, refusal.method_id) == (541, 105, method), call
        # the lease has expired, so this dtx cannot know what another dtx has done
        client.open(2, select=True)
        refusal = client.refusal(2, DtxRecover(startscan=True, endscan=True))
        assert (refusal.code, refusal.class_id, refusal.method_id) == (541, 105, 50)
        refusal = client.refusal(2, DtxStart(xid=new_xid()))
        assert (refusal.code, refusal.class_id, refusal.method_id) == (541, 101, 20)

        own_postgres.start()
        own_postgres.wait_ready()
        retried: list[DtxCall] = [call for call, _ in calls[:6]]
        for call in retried:
            answer = _insist(client, call)
            assert answer in (XaFlag.OK, None, 404), call
        for xid in (prepare, consumed):
            _insist(client, DtxCommit(xid=xid))
        assert client.refusal(2, DtxGetTimeout(xid=unknown)).code == 404
        assert client.ask(2, DtxRecover(startscan=True, endscan=True)) == []
    assert sorted(bodies(own_broker, own_queue)) == sorted(xid.gtrid for xid in (prepare, commit, one_phase))


def _insist(client: RawClient, call: DtxCall) -> object:
    """Repeat while the answer is 541; return the flag, or 404 if the call was done before."""
    while True:
        client.say(2, call.encode())
        payload = client.next_method(2)
        client.unread(2, payload)
        if payload[:4] != b"\x00\x14\x00\x28":
            return client.answer(2, call)
        refusal = client.refused(2)
        if refusal.code != 541:
            assert refusal.code == 503 or "completed" in refusal.text, refusal
            return 404

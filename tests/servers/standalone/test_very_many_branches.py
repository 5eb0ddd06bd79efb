"""The maximum number of branches does not hold the event loop: they are listed, time out and are forgotten."""

from collections.abc import Iterator
from typing import Final

import psycopg
import pytest

from dtx.client import Xid
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.recovery import MAX_XIDS
from tests.support.loop_watch import WatchedService, ask, not_held, take
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import RawClient, session
from tests.support.seed import in_doubt, seed
from tests.support.service import ADMIN

MANY: Final = 100_000
"""The default of --max-branches."""
AT_ONCE: Final = 500
PATIENCE: Final = 120.0
SECONDS: Final = 15


COPIES: Final = """
INSERT INTO dtx.branch SELECT (jsonb_populate_record(b, jsonb_build_object('id', gen_random_uuid(),
    'gtrid', '\\x' || encode(int4send(n), 'hex')))).* FROM dtx.branch b, generate_series(1, %s) n
"""


@pytest.fixture(scope="module")
def xids() -> list[Xid]:
    """Xids numbered from 0."""
    return [Xid(7, number.to_bytes(4, "big"), b"queue") for number in range(MANY)]


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """A database for one service."""
    database = postgres.create_database()
    yield database
    postgres.drop_database(database)


def open_all(peer: RawClient, xids: list[Xid]) -> None:
    """Channel 1 starts and suspends a branch for each xid."""
    for start in range(0, len(xids), AT_ONCE):
        for xid in xids[start : start + AT_ONCE]:
            peer.send_raw(
                methods.DtxStart(xid=xid, join=False, resume=False).frame(1)
                + methods.DtxEnd(xid=xid, fail=False, suspend=True).frame(1)
            )
        take(peer, AT_ONCE, methods.DtxEndOk.KEY)


def states(operator: Operator) -> dict[str, int]:
    """The number of branches in each state."""
    found: dict[str, int] = operator.get("/dtx/v1/status")["branches"]
    return found


def test_very_many_branches_time_out_and_are_forgotten(database: str, xids: list[Xid]) -> None:
    """Each step concerns all branches at about the same time."""
    options = (*ADMIN, "--default-timeout", str(SECONDS), "--tombstone-ttl", "5")
    with (
        WatchedService(database=database, options=options) as service,
        RawClient(service.url(), patience=PATIENCE) as peer,
    ):
        operator = Operator(service.admin_url)
        peer.log_in()
        peer.open(1)
        ask(peer, methods.DtxSelect().encode(), methods.DtxSelectOk.KEY)
        with not_held(service):
            open_all(peer, xids)
            (connection,) = operator.get("/dtx/v1/connections")["connections"]
            assert connection["suspended"] == MANY
            (channel,) = operator.get(f"/dtx/v1/connections/{connection['id']}")["channels"]
            assert len(channel["branches"]) == 1000
            assert len(operator.get("/dtx/v1/associations", limit=1000)["associations"]) == 1000
            with session(service.url()) as coordinator:
                coordinator.open(1)
                assert coordinator.ask(1, methods.DtxRecover(startscan=True, endscan=True)) == []
        with not_held(service):
            wait_until(lambda: states(operator) == {"timed-out": MANY}, what="their time-outs", seconds=PATIENCE)
        with not_held(service):
            peer.socket.close()
            wait_until(lambda: states(operator) == {}, what="the end of all", seconds=PATIENCE)


def test_very_many_branches_in_doubt_are_listed(database: str, xids: list[Xid]) -> None:
    """In frames of 2 MiB; then to a client that starts a new scan with each call."""
    seed(database, [in_doubt(xids[0], local=True)])
    with psycopg.connect(database) as connection:
        connection.execute(COPIES, (MANY - 1,))
    with (
        WatchedService(database=database, options=("--frame-max", "2MiB")) as service,
        not_held(service),
        session(service.url()) as client,
    ):
        client.open(1)
        pages = [*client.recover(1)]
        assert [len(page) for page in pages] == [MAX_XIDS] * (MANY // MAX_XIDS)
        assert {xid for page in pages for xid in page} == set(xids)
        again = [client.ask(1, methods.DtxRecover(startscan=True, endscan=True)) for _ in pages]
        assert again == pages

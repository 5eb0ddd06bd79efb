"""Recovery of 5,000 branches in doubt and of heuristic outcomes."""

import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtx.client import AsyncCoordinator, Coordinator
from dtx.wire.amqp09.methods import (
    DtxCall,
    DtxCommit,
    DtxForget,
    DtxGetTimeout,
    DtxPrepare,
    DtxRecover,
    DtxRollback,
    DtxStart,
)
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.xid import Xid
from tests.support.broker import Mode, StandaloneBroker
from tests.support.client import async_connected, connected, new_xid
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient, session
from tests.support.seed import heuristic, in_doubt, seed
from tests.support.service import DtxService

COUNT = 5000
QUEUE = "of-the-many"
"""The queue to which the branches publish in alongside mode."""
START = DtxRecover(startscan=True, endscan=False)
NEXT = DtxRecover(startscan=False, endscan=False)
END = DtxRecover(startscan=False, endscan=True)
ONCE = DtxRecover(startscan=True, endscan=True)


@pytest.fixture(scope="module")
def many() -> str:
    """The name of a vhost for the many branches."""
    return f"many-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def xids() -> list[Xid]:
    """Xids of maximum length with random bytes."""
    noise = random.Random(20)
    return [Xid(noise.getrandbits(32), noise.randbytes(64), noise.randbytes(64)) for _ in range(COUNT)]


@pytest.fixture(scope="module")
def heuristics() -> dict[Heuristic, Xid]:
    """An xid for each heuristic outcome."""
    return {outcome: new_xid() for outcome in Heuristic}


@pytest.fixture(scope="module")
def seeded(
    mode: Mode,
    request: pytest.FixtureRequest,
    postgres: PostgresServer,
    many: str,
    xids: list[Xid],
    heuristics: dict[Heuristic, Xid],
) -> Iterator[DtxService]:
    """A service on a log with all of them, and with 100 branches of another user."""
    local = mode == "standalone"
    node: RabbitNode | None = None if local else request.getfixturevalue("shared_rabbitmq")
    database = postgres.create_database()
    others = (in_doubt(Xid(1, secrets.token_bytes(64)), many, "somebody else", local=local) for _ in range(100))
    mine = (in_doubt(xid, many, local=local) for xid in xids)
    decided = (heuristic(xid, outcome, local=local) for outcome, xid in heuristics.items())
    seed(database, (*mine, *others, *decided), QUEUE)
    if node is not None:
        node.add_vhost(many)
    with DtxService(broker=None if node is None else node.url(vhost=many), database=database) as running:
        if node is None:
            StandaloneBroker(running).add_vhost(many)
        yield running
    if node is not None:
        node.delete_vhost(many)
    postgres.drop_database(database)


@pytest.fixture
def client(seeded: DtxService, many: str) -> Iterator[RawClient]:
    """A connection to the vhost of the many branches, with channels 1 and 2."""
    with session(seeded.url(vhost=many)) as raw:
        raw.open(1)
        raw.open(2)
        yield raw


def batch(client: RawClient, channel: int, call: DtxCall) -> list[Xid]:
    found = client.ask(channel, call)
    assert isinstance(found, list)
    return found


def everything(client: RawClient, channel: int = 1) -> list[Xid]:
    """A whole scan."""
    return [xid for found in client.recover(channel) for xid in found]


@pytest.mark.parametrize("frame_max", [4096, 131072])
def test_a_scan_lists_each_branch_once_in_frames_that_fit(
    seeded: DtxService, many: str, xids: list[Xid], frame_max: int
) -> None:
    """Recover: "a list of transaction branches that are in a prepared or heuristically completed state"."""
    with session(seeded.url(vhost=many), frame_max) as client:
        client.open(1)
        batches = list(client.recover(1))
        assert frame_max - 135 < client.largest <= frame_max
    found = [xid for batch in batches for xid in batch]
    assert len(found) == COUNT
    assert set(found) == set(xids)


async def test_the_client_s_helpers_iterate_over_the_whole_scan(seeded: DtxService, many: str, xids: list[Xid]) -> None:
    """A scan in batches returns each xid once, also after another scan was dropped half-way."""
    url = seeded.url(vhost=many)
    with connected(url) as connection, Coordinator(connection) as coordinator:
        dropped = coordinator.recover()
        next(dropped)
        found = list(coordinator.recover())
        del dropped
    async with async_connected(url) as callbacks:
        found_too = [xid async for xid in AsyncCoordinator(callbacks).recover()]
    assert len(found) == len(found_too) == COUNT
    assert set(found) == set(found_too) == set(xids)


def test_a_scan_in_one_call_continues_after_a_full_batch(client: RawClient, xids: list[Xid]) -> None:
    """Rule startEnd: "a single call starts and then ends a scan"; repeating this call lists all branches."""
    found: list[Xid] = []
    while len(found) < COUNT:
        page = batch(client, 1, ONCE)
        assert page
        found += page
    assert set(found) == set(xids)
    assert client.refusal(1, NEXT).code == 503


def test_a_scan_that_is_restarted_begins_at_the_beginning(client: RawClient) -> None:
    """Rule recoveryAlreadyOpen: "as if the recovery scan were ended and then restarted"."""
    first = batch(client, 1, START)
    assert batch(client, 1, NEXT) != first
    assert batch(client, 1, START) == first


def test_endscan_returns_a_batch_and_ends(client: RawClient) -> None:
    """Endscan: "the recovery scan should end after returning the Xids"."""
    batch(client, 1, START)
    assert batch(client, 1, END)
    assert client.refusal(1, NEXT).code == 503


def test_endscan_without_a_scan_returns_nothing(client: RawClient) -> None:
    """Rule mustBeStarted concerns only calls with neither bit."""
    assert batch(client, 1, END) == []


def test_a_scan_that_is_through_goes_on_to_be_empty(client: RawClient) -> None:
    everything(client)
    assert batch(client, 1, NEXT) == []
    assert batch(client, 1, END) == []


def test_scans_on_two_channels_know_nothing_of_each_other(client: RawClient, xids: list[Xid]) -> None:
    first, second = client.recover(1), client.recover(2)
    found: tuple[list[Xid], list[Xid]] = ([], [])
    found[0].extend(next(first))
    for one, other in zip(first, second, strict=False):
        found[0].extend(one)
        found[1].extend(other)
    found[1].extend(xid for rest in second for xid in rest)
    assert set(found[0]) == set(found[1]) == set(xids)


def test_scans_that_are_never_ended_cost_nothing_lasting(seeded: DtxService, many: str) -> None:
    def resident() -> int:
        status = Path(f"/proc/{seeded.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0])

    def abandon() -> None:
        with session(seeded.url(vhost=many)) as client:
            for channel in range(1, 101):
                batch(client, client.open(channel), START)
            for channel in range(1, 51):
                client.close_channel(channel)

    for _ in range(2):
        abandon()
    before = resident()
    for _ in range(5):
        abandon()
    # Five hundred snapshots are 20 MB of references alone.
    assert resident() - before < 8 * 1024


def test_branches_are_completed_in_the_middle_of_a_scan(
    mode: Mode, request: pytest.FixtureRequest, client: RawClient, many: str, xids: list[Xid]
) -> None:
    """Grammar: "recovery = C:RECOVER S:RECOVER-OK *recovery-outcome"."""
    node: RabbitNode | None = request.getfixturevalue("rabbitmq") if mode == "alongside" else None
    if node is not None:
        with node.channel(many) as channel:
            channel.queue_declare(QUEUE, durable=True)
    listed = everything(client)
    done = [*listed[:5], *listed[-5:]]
    found = batch(client, 1, START)
    for number, xid in enumerate(done):
        outcome = DtxCommit(xid=xid) if number % 2 else DtxRollback(xid=xid)
        assert client.ask(1 + number % 2, outcome) is XaFlag.OK
    while page := batch(client, 1, NEXT):
        found += page
    assert set(found) == set(xids)
    assert set(everything(client, 2)) == set(xids) - set(done)
    if node is not None:
        assert len(node.take_all(QUEUE, many)) == 5


# -- heuristic outcomes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "flag"),
    [
        (Heuristic.COMMITTED, XaFlag.HEURCOM),
        (Heuristic.ROLLED_BACK, XaFlag.HEURRB),
        (Heuristic.MIXED, XaFlag.HEURMIX),
        (Heuristic.HAZARD, XaFlag.HEURHAZ),
    ],
)
def test_a_heuristic_outcome_is_reported_until_it_is_forgotten(
    seeded: DtxService,
    heuristics: dict[Heuristic, Xid],
    outcome: Heuristic,
    flag: XaFlag,
) -> None:
    """Commit-ok, rollback-ok: "Due to a heuristic decision ..."; "recovery-outcome = ... C:FORGET S:FORGET-OK"."""
    xid = heuristics[outcome]
    with session(seeded.url()) as client:
        client.open(1, select=True)
        assert xid in everything(client)
        calls: list[DtxCall] = [
            DtxCommit(xid=xid),
            DtxRollback(xid=xid),
            DtxCommit(xid=xid, one_phase=True),
            DtxRollback(xid=xid),
        ]
        for call in calls:
            assert client.ask(1, call) is flag
        assert client.refusal(1, DtxPrepare(xid=xid)).code == 503
        assert client.refusal(1, DtxStart(xid=xid)).code == 530
        assert client.refusal(1, DtxStart(xid=xid, join=True)).code == 503
        client.ask(1, DtxGetTimeout(xid=xid))
        assert client.ask(1, DtxForget(xid=xid)) is None
        assert xid not in everything(client)
        calls = [DtxForget(xid=xid), DtxCommit(xid=xid), DtxRollback(xid=xid)]
        for call in calls:
            refusal = client.refusal(1, call)
            assert refusal.code == 404
            assert "completed: forgotten at 20" in refusal.text

"""Standalone mode: kill -9 of dtx, of PostgreSQL and of both at each instant of a write; then exact contents."""

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count, product

import psycopg
import pytest

from dtx.auth.users import AccountEditor
from dtx.client import XAER_DUPID, XAER_NOTA, XAER_RMERR, Coordinator, XaFlag, XAResource, Xid
from dtx.wire.amqp09.methods import DtxCall, DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxStart
from dtx.wire.amqp09.properties import Property, build
from tests.support.client import connected, new_xid, take_all
from tests.support.crash import PERSISTENT, work
from tests.support.database_faults import Lock, commits_that_do_not_return, wait_committed, waits
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.raw import ConnectionEnded, RawClient, session
from tests.support.service import DtxService

DURABLE_MESSAGE = build({Property.DELIVERY_MODE: b"\x02"})
TX_SELECT = struct.pack(">HH", 90, 10)
TX_COMMIT = struct.pack(">HH", 90, 20)
CONFIRM_SELECT = struct.pack(">HHB", 85, 10, 0)
CONFIRMED = struct.pack(">HHQB", 60, 80, 1, 0)
QOS = struct.pack(">HHIHB", 60, 10, 0, 0, 0)
QOS_OK = 60 << 16 | 11
CONFIRMING, SPARE = 100, 101
"""Channel numbers that no case uses."""


class Act(Enum):
    """The operation that is under way at the instant."""

    PREPARE_TO_COMMIT = "prepare, to be committed"
    PREPARE_TO_ROLL_BACK = "prepare, to be rolled back"
    COMMIT = "commit"
    ROLL_BACK = "rollback"
    ONE_PHASE = "one-phase commit"
    TX_COMMIT = "tx.commit"


class Instant(Enum):
    """The progress of the operation."""

    BEFORE_THE_COMMIT = "in the middle of PostgreSQL's transaction"
    BEHIND_THE_COMMIT = "committed by PostgreSQL, and dtx has not heard of it"
    ANSWERED = "answered"


class Victim(Enum):
    """What is killed."""

    DTX = "dtx"
    POSTGRES = "PostgreSQL"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Case:
    """One transaction, with its own channel and queues.

    Args:
        act: the operation at the instant.
        publishes: whether it publishes ``a`` and ``b`` to *target*.
        consumes: whether it takes ``1`` from *source*, which has ``1`` and ``2``.
    """

    number: int
    act: Act
    publishes: bool
    consumes: bool
    xid: Xid

    @property
    def source(self) -> str:
        return f"in-{self.number}"

    @property
    def target(self) -> str:
        return f"out-{self.number}"

    @property
    def queues(self) -> tuple[str, str]:
        """The source and the target."""
        return self.source, self.target

    @property
    def call(self) -> DtxCall:
        match self.act:
            case Act.PREPARE_TO_COMMIT | Act.PREPARE_TO_ROLL_BACK:
                return DtxPrepare(xid=self.xid)
            case Act.ROLL_BACK:
                return DtxRollback(xid=self.xid)
            case _:
                return DtxCommit(xid=self.xid, one_phase=self.act is Act.ONE_PHASE)

    @property
    def rolls_back(self) -> bool:
        """Whether its transaction manager rolls it back."""
        return self.act in (Act.PREPARE_TO_ROLL_BACK, Act.ROLL_BACK)

    def in_doubt(self, happened: bool) -> bool:
        """Whether a scan lists it after a restart of dtx, if the act *happened* or not."""
        if self.act in (Act.PREPARE_TO_COMMIT, Act.PREPARE_TO_ROLL_BACK):
            return happened
        return self.act in (Act.COMMIT, Act.ROLL_BACK) and not happened

    def visible(self, happened: bool) -> bool:
        """Whether it is committed before the recovery by the transaction manager."""
        return happened and self.act in (Act.COMMIT, Act.ONE_PHASE, Act.TX_COMMIT)

    def committed(self, happened: bool) -> bool:
        """Whether it is committed after that recovery."""
        return not self.rolls_back and (happened or self.act is Act.COMMIT)

    def left_in_source(self, happened: bool) -> list[bytes]:
        """The ready messages of *source* before that recovery."""
        taken = self.consumes and (self.in_doubt(happened) or self.visible(happened))
        return [b"2"] if taken else [b"1", b"2"]


def cases() -> list[Case]:
    """All transactions of one test."""
    numbers = count(1)
    contents = ((True, False), (False, True), (True, True))
    return [Case(next(numbers), act, *content, new_xid()) for act, content in product(Act, contents)]


@pytest.fixture(scope="module")
def mortal_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server that tests may kill."""
    with PostgresServer("own") as server:
        yield server


@pytest.fixture
def service(mortal_postgres: PostgresServer) -> Iterator[DtxService]:
    mortal_postgres.wait_ready()
    database = mortal_postgres.create_migrated_database()
    with DtxService(database=database, options=("--lease-ttl", "2", "--coordinator", "carol")) as service:
        yield service
    mortal_postgres.wait_ready()
    mortal_postgres.drop_database(database)


def fill(service: DtxService, *queues: str) -> None:
    """Declare *queues* and put ``1`` and ``2`` into those that are consumed from."""
    with connected(service.url()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for queue in queues:
            channel.queue_declare(queue, durable=True)
            for body in (b"1", b"2") if queue.startswith("in") else ():
                channel.basic_publish("", queue, body, PERSISTENT)


def begin(client: RawClient, case: Case) -> None:
    """Do everything before the act."""
    number = client.open(case.number, select=case.act is not Act.TX_COMMIT)
    if case.act is Act.TX_COMMIT:
        client.say(number, TX_SELECT)
        client.read_method(number)
    else:
        client.ask(number, DtxStart(xid=case.xid))
    if case.publishes:
        for body in (b"a", b"b"):
            client.publish(number, case.target, body, properties=DURABLE_MESSAGE)
    if case.consumes:
        client.consume_one(number, case.source)
    if case.act is not Act.TX_COMMIT:
        assert client.ask(number, DtxEnd(xid=case.xid)) is XaFlag.OK
    if case.act in (Act.COMMIT, Act.ROLL_BACK):
        assert client.ask(number, DtxPrepare(xid=case.xid)) is XaFlag.OK


def ask(client: RawClient, case: Case) -> None:
    """Request the act without waiting for the answer."""
    client.say(case.number, TX_COMMIT if case.act is Act.TX_COMMIT else case.call.encode())


def hear(client: RawClient, case: Case) -> None:
    """Check that dtx confirms the act."""
    if case.act is Act.TX_COMMIT:
        assert client.read_method(case.number) == struct.pack(">HH", 90, 21)
    else:
        assert client.answer(case.number, case.call) is XaFlag.OK


def round_trip(client: RawClient, channel: int) -> None:
    """Wait until dtx has handled everything sent so far and has begun the requested work."""
    for _ in range(2):
        client.say(channel, QOS)
        client.read_method(channel, QOS_OK)


def nothing_heard(client: RawClient, channel: int) -> None:
    """Check that the connection ends without an answer on *channel*."""
    with pytest.raises((ConnectionEnded, OSError)):
        client.next_method(channel)


class Scene:
    """All transactions at one instant: dtx writes together what is requested during an earlier write.

    Args:
        service: the dtx.
        postgres: its server.
        stack: closes what is opened here.
    """

    def __init__(self, service: DtxService, postgres: PostgresServer, stack: contextlib.ExitStack) -> None:
        assert service.database is not None
        self.table = cases()
        self._service = service
        self._postgres = postgres
        self._stack = stack
        fill(service, "in-0", *(queue for case in self.table for queue in case.queues))
        self._branches, self._plain, self._other = (stack.enter_context(session(service.url())) for _ in range(3))
        for case in self.table:
            begin(self._client(case), case)
        for client in (self._branches, self._plain, self._other):
            client.open(SPARE)
        self._plain.open(CONFIRMING)
        self._plain.say(CONFIRMING, CONFIRM_SELECT)
        self._plain.read_method(CONFIRMING)
        self._wait_marked(service.database)
        messages = stack.enter_context(Lock(service.database, "message"))
        self.journal = stack.enter_context(Lock(service.database, "journal"))
        self._other.publish(SPARE, "in-0", b"3", properties=DURABLE_MESSAGE)
        messages.wait_felt()
        self._plain.publish(CONFIRMING, "in-0", b"4", properties=DURABLE_MESSAGE)
        for case in self.table:
            ask(self._client(case), case)
        round_trip(self._branches, SPARE)
        round_trip(self._plain, SPARE)
        messages.release()
        self.journal.wait_felt()

    def _wait_marked(self, database: str) -> None:
        """Wait until dtx has written the marks of deliveries, which takes one or two seconds.

        If the marks were written with the message that waits, a part of the table would be written after the rest.
        """
        consuming = sum(case.consumes for case in self.table)
        with psycopg.connect(database, autocommit=True) as connection:
            marked = "SELECT count(*) = %s FROM dtx.queue WHERE delivered > 0"
            wait_until(lambda: connection.execute(marked, (consuming,)).fetchone() == (True,), what="all marks")

    def _client(self, case: Case) -> RawClient:
        return self._plain if case.act is Act.TX_COMMIT else self._branches

    def reach(self, instant: Instant) -> None:
        """Continue up to *instant*."""
        if instant is Instant.BEHIND_THE_COMMIT:
            self._stack.enter_context(commits_that_do_not_return(self._postgres))
            self.journal.release()
            wait_committed(self._postgres)
        elif instant is Instant.ANSWERED:
            self.journal.release()
            self.hear()

    def hear(self) -> None:
        """Check that dtx confirms everything."""
        for case in self.table:
            hear(self._client(case), case)
        assert self._plain.read_method(CONFIRMING) == CONFIRMED

    def hear_nothing(self) -> None:
        """Check that all connections end without an answer."""
        for case in self.table:
            nothing_heard(self._client(case), case.number)
        nothing_heard(self._plain, CONFIRMING)


DEATHS = [
    *product((Instant.BEFORE_THE_COMMIT, Instant.BEHIND_THE_COMMIT), Victim),
    (Instant.ANSWERED, Victim.BOTH),
]


@pytest.mark.parametrize(("instant", "victim"), DEATHS, ids=lambda value: value.name.lower())
def test_everything_or_nothing(
    mortal_postgres: PostgresServer, service: DtxService, instant: Instant, victim: Victim
) -> None:
    """Nothing is answered before it is durable; what is durable happens, and all other acts have no effect."""
    with contextlib.ExitStack() as stack:
        scene = Scene(service, mortal_postgres, stack)
        scene.reach(instant)
        happened = instant is not Instant.BEFORE_THE_COMMIT or victim is not Victim.BOTH
        if victim is not Victim.POSTGRES:
            service.kill9()
        if victim is not Victim.DTX:
            mortal_postgres.kill9()
            mortal_postgres.wait_ready()
        if victim is Victim.POSTGRES:
            if instant is not Instant.ANSWERED:
                scene.hear()  # dtx runs and completes everything
        elif instant is not Instant.ANSWERED:
            scene.hear_nothing()
        if victim is Victim.DTX and instant is Instant.BEFORE_THE_COMMIT:
            # PostgreSQL has everything and commits without dtx: the next dtx must wait for that.
            service.start(wait=False)
            wait_until(lambda: waits(mortal_postgres, "dtx lease%"), what="a start that waits for its predecessor")
            scene.journal.release()
            service.wait_ready()
    if not service.running:
        service.start()
    check(service, scene.table, happened=happened)


def check(service: DtxService, table: list[Case], *, happened: bool) -> None:
    """Check what is visible, what is in doubt, and the contents when everything has been decided."""
    with connected(service.url()) as connection, Coordinator(connection) as coordinator:
        channel = connection.channel()
        for case in table:
            ready = [channel.queue_declare(name, passive=True).method.message_count for name in case.queues]
            published = 2 if case.publishes and case.visible(happened) else 0
            assert ready == [len(case.left_in_source(happened)), published], case
        assert set(coordinator.recover()) == {case.xid for case in table if case.in_doubt(happened)}
        for case in table:
            complete = coordinator.rollback if case.rolls_back else coordinator.commit
            if case.in_doubt(happened):
                assert complete(case.xid) is XaFlag.OK
            elif case.act is not Act.TX_COMMIT:
                with pytest.raises(XAER_NOTA) as refusal:
                    complete(case.xid)
                assert ("completed: " in str(refusal.value)) is happened
        assert list(coordinator.recover()) == []
        for case in table:
            committed = case.committed(happened)
            taken = case.consumes and committed
            assert take_all(channel, case.source) == ([b"2"] if taken else [b"1", b"2"]), case
            assert take_all(channel, case.target) == ([b"a", b"b"] if case.publishes and committed else []), case
        assert take_all(channel, "in-0") == [b"1", b"2", b"3", *([b"4"] if happened else [])]


# -- owners of branches -----------------------------------------------------------------------------------------------


def test_branches_stay_their_owners_over_a_crash(service: DtxService) -> None:
    """Other users do not see them and get 403; coordinators see all branches, also those of a removed user."""
    assert service.database is not None
    fill(service, "in-0", "out-0")
    editor = AccountEditor(service.database, "dtx")
    for user in ("alice", "bob", "carol"):
        editor.add_user(user, user.encode())
        editor.grant(user, "/", configure=".*", write=".*", read=".*")
    with connected(service.url("alice")) as connection:
        branches = [work(connection.channel(), publish={"out-0": [b"%d" % number]}) for number in range(3)]
        branches.append(work(connection.channel(), consume={"in-0": 1}))
        for xa, xid in branches:
            assert xa.prepare(xid) is XaFlag.OK
    mine, hers, last, consumed = (xid for _, xid in branches)
    service.restart()
    with connected(service.url("bob")) as connection, Coordinator(connection) as bob:
        assert list(bob.recover()) == []
        for complete in (bob.commit, bob.rollback, bob.forget):
            with pytest.raises(XAER_RMERR, match="another user's"):
                complete(mine)
        with pytest.raises(XAER_DUPID):
            XAResource(connection.channel()).start(mine)
    with connected(service.url("alice")) as connection, Coordinator(connection) as alice:
        assert set(alice.recover()) == {mine, hers, last, consumed}
        assert alice.commit(mine) is XaFlag.OK
        assert alice.rollback(consumed) is XaFlag.OK
    with connected(service.url("bob")) as connection, Coordinator(connection) as bob:
        with pytest.raises(XAER_NOTA) as refusal:
            bob.commit(mine)
        assert "completed" not in str(refusal.value)
    assert editor.remove_user("alice") == 2
    service.restart()
    with connected(service.url("carol")) as connection, Coordinator(connection) as carol:
        assert set(carol.recover()) == {hers, last}
        assert carol.rollback(hers) is XaFlag.OK
        assert carol.commit(last) is XaFlag.OK
        assert take_all(connection.channel(), "out-0") == [b"0", b"2"]
        assert take_all(connection.channel(), "in-0") == [b"1", b"2"]

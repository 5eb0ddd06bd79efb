"""Limits of all branches of all clients together. What a branch has used is free again after its end."""

import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial

import psycopg
import pytest

from dtx.client import XaFlag, XAResource, Xid
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import header_frame
from dtx.wire.amqp09.methods import DtxCommit, DtxEnd, DtxPrepare, DtxRollback, DtxSetTimeout, DtxStart
from tests.servers.branches.conftest import MakeScene
from tests.support.broker import Mode, only_alongside
from tests.support.client import new_xid
from tests.support.crash import Scene, Stage, work
from tests.support.raw import NO_PROPERTIES, RawClient, body_frames, session

HELD = 64 * 1024
BRANCHES = 4
CACHE = 2048
KEPT = 16 * 1024
Make = Callable[[], RawClient]


@pytest.fixture(scope="module")
def stage(make_scene: MakeScene) -> Scene:
    """A dtx with low limits."""
    options = ["--max-held-bytes", str(HELD), "--max-branches", str(BRANCHES), "--max-kept-bytes", str(KEPT)]
    options += ["--work-cache-bytes", str(CACHE)]
    return make_scene(*options)


@pytest.fixture
def client(stage: Scene) -> Iterator[Make]:
    """Makes connections with channel 1 selected."""
    with contextlib.ExitStack() as stack:

        def make() -> RawClient:
            made = stack.enter_context(session(stage.service.url(vhost=stage.vhost)))
            made.open(1, select=True)
            return made

        yield make


def fits(client: RawClient, size: int) -> bool:
    """Whether a branch may hold a message of *size* bytes now. The branch is rolled back."""
    xid = new_xid()
    client.ask(1, DtxStart(xid=xid))
    client.publish(1, "out", bytes(size))
    client.say(1, methods.QueueDeclare(b"out", passive=True).encode())  # answered after the publish, or refused with it
    payload = client.next_method(1)
    taken = payload[:4] == struct.pack(">I", methods.QueueDeclareOk.KEY)
    if taken:
        client.ask(1, DtxEnd(xid=xid))
    else:
        client.unread(1, payload)
        refusal = client.refused(1)
        assert (refusal.code, "--max-held-bytes" in refusal.text) == (506, True), refusal
    client.ask(1, DtxRollback(xid=xid))
    return taken


def test_memory_for_the_messages_of_all_branches_has_a_limit(stage: Scene, client: Make) -> None:
    """506 for a client that exceeds it. Others are not affected, and it works again when memory is free again."""
    stage.declare("out")
    first, second, third = client(), client(), client()
    large, refused, small = new_xid(), new_xid(), new_xid()
    first.idle(1, large, queue="out", body=bytes(HELD - 4096))
    second.ask(1, DtxStart(xid=refused))
    second.publish(1, "out", bytes(8192))
    refusal = second.refused(1)
    assert (refusal.code, refusal.class_id, refusal.method_id) == (506, 60, 40)
    assert "--max-held-bytes" in refusal.text
    assert "rolled back" in refusal.text
    third.prepared(1, small, queue="out", body=b"small")
    assert third.ask(1, DtxCommit(xid=small)) is XaFlag.OK
    third.publish(1, "out", b"outside")
    assert second.ask(1, DtxPrepare(xid=refused)) is XaFlag.RBROLLBACK
    assert first.ask(1, DtxPrepare(xid=large)) is XaFlag.OK  # a prepared branch is in the log, and no longer counts
    again = second.prepared(1, new_xid(), queue="out", body=bytes(HELD - 4096))
    assert second.ask(1, DtxRollback(xid=again)) is XaFlag.OK
    assert first.ask(1, DtxRollback(xid=large)) is XaFlag.OK
    stage.wait_for_count("out", 2)
    assert sorted(stage.bodies("out")) == [b"outside", b"small"]


@only_alongside
def test_deliveries_that_are_not_settled_count_as_well(stage: Stage, client: Make) -> None:
    """A delivery that dtx does not keep can be settled only outside a branch."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", bytes(4096))
    first, second = client(), client()
    xid = first.idle(1, new_xid(), queue="out", body=bytes(HELD - 2048))
    tag = second.get(1, "in")
    assert tag is not None
    doomed = new_xid()
    second.ask(1, DtxStart(xid=doomed))
    refusal = second.refusal_of(1, methods.BasicAck(tag).encode())
    assert refusal.code == 506
    assert "--max-held-bytes" in refusal.text
    assert second.ask(1, DtxRollback(xid=doomed)) is XaFlag.OK
    assert first.ask(1, DtxRollback(xid=xid)) is XaFlag.OK
    second.ask(1, DtxStart(xid=doomed))
    second.consume_one(1, "in")
    second.ask(1, DtxEnd(xid=doomed))
    assert second.ask(1, DtxCommit(xid=doomed, one_phase=True)) is XaFlag.OK
    assert stage.bodies("in") == []


@only_alongside
def test_a_delivery_that_was_kept_is_not_counted_twice(stage: Stage, client: Make) -> None:
    """Acknowledged in a branch, it needs no more memory than before."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", bytes(3000))
    first, second = client(), client()
    tag = second.get(1, "in")
    assert tag is not None
    other = first.idle(1, new_xid(), queue="out", body=bytes(HELD - 4000))
    xid = new_xid()
    second.ask(1, DtxStart(xid=xid))
    second.say(1, methods.BasicAck(tag).encode())
    assert second.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
    for each in (xid, other):
        assert second.ask(1, DtxRollback(xid=each)) is XaFlag.OK
    stage.wait_for_count("in", 1)
    assert stage.bodies("in") == [bytes(3000)]


def test_there_is_a_largest_number_of_branches(stage: Scene, client: Make) -> None:
    """506 for one more. The other branches continue, and each end of a branch permits a new one."""
    stage.declare("out")
    first, second = client(), client()
    xids = [first.idle(1, new_xid(), queue="out", body=b"%d" % number) for number in range(BRANCHES)]
    for _ in range(2):
        refusal = second.refusal(1, DtxStart(xid=new_xid()))
        assert (refusal.code, refusal.class_id, refusal.method_id) == (506, 101, 20)
        assert f"{BRANCHES} branches are open or in doubt" in refusal.text
    assert first.ask(1, DtxStart(xid=xids[0], join=True)) is XaFlag.OK
    assert first.ask(1, DtxEnd(xid=xids[0])) is XaFlag.OK
    assert first.ask(1, DtxPrepare(xid=xids[0])) is XaFlag.OK
    assert second.refusal(1, DtxStart(xid=new_xid())).code == 506
    assert first.ask(1, DtxRollback(xid=xids[1])) is XaFlag.OK
    second.idle(1, xids[1], queue="out", body=b"1 again")
    assert second.refusal(1, DtxStart(xid=new_xid())).code == 506
    assert second.ask(1, DtxCommit(xid=xids[0])) is XaFlag.OK
    xids.append(second.idle(1, new_xid(), queue="out", body=b"4"))
    for xid in xids[1:]:
        assert second.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK
    assert sorted(stage.bodies("out")) == [b"0", b"1 again", b"2", b"3", b"4"]


@only_alongside
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_work_evicted_from_memory_is_read_from_the_log(stage: Stage, commit: bool) -> None:
    """--work-cache-bytes: the oldest prepared branches are removed from the cache first."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", *(bytes([number]) * 600 for number in range(3)))
    with stage.connected() as connection:
        channel = connection.channel()
        xa, xids = XAResource(channel), []
        for number in range(3):
            _, xid = work(channel, publish={"out": [bytes([number]) * 600]}, consume={"in": 1})
            assert xa.prepare(xid) is XaFlag.OK
            xids.append(xid)
        rewrite(stage, b"from the log")
        for xid in xids:
            assert (xa.commit if commit else xa.rollback)(xid) is XaFlag.OK
    found = stage.bodies("out" if commit else "in")
    assert found == [b"from the log", b"from the log", b"\x02" * 600]
    assert stage.bodies("in" if commit else "out") == []


def rewrite(stage: Scene, body: bytes) -> None:
    """Change every message in the log without dtx, to show which messages dtx reads from there."""
    with psycopg.connect(stage.database) as connection:
        connection.execute("UPDATE dtx.work SET body = %s", (body,))


# -- a mixed load -----------------------------------------------------------------------------------------------------


class Load:
    """Branches that end in all possible ways, one after the other.

    Args:
        stage: has the queues ``in``, with messages, and ``out``.
        client: makes connections.
        seed: of the random choices.
    """

    def __init__(self, stage: Scene, client: Make, seed: int) -> None:
        self._stage = stage
        self._client = client
        self._random = random.Random(seed)
        self.alive = [client() for _ in range(2)]
        self.left: list[Xid] = []
        self.ways = [
            self.completed, self.failed, self.timed_out, self.dies_active, self.dies_idle, self.dies_in_content,
            self.channel_closed, self.refused_by_the_broker, self.too_much, self.too_many_kept, self.one_phase,
        ]  # fmt: skip

    def run(self, rounds: int) -> None:
        """Run each way *rounds* times, in random order."""
        for way in self._random.sample(self.ways * rounds, len(self.ways) * rounds):
            way()
            self.settle()

    def settle(self) -> None:
        """Roll back the branches that clients have left, as a transaction manager does."""
        for xid in self.left:
            self._stage.wait_for(partial(self.rolled_back, xid), "the end of a branch")
        self.left.clear()

    def rolled_back(self, xid: Xid) -> bool:
        """Roll *xid* back, unless dtx has not noticed yet that its client has died."""
        client = self.alive[0]
        client.say(1, DtxRollback(xid=xid).encode())
        payload = client.next_method(1)
        client.unread(1, payload)
        if payload[:4] == struct.pack(">I", methods.ChannelClose.KEY):
            assert client.refused(1).code == 503
            return False
        return client.answer(1, DtxRollback(xid=xid)) in (XaFlag.OK, XaFlag.RBROLLBACK, XaFlag.RBTIMEOUT)

    def begin(self, client: RawClient) -> Xid:
        """A branch that publishes and consumes."""
        xid = new_xid()
        client.ask(1, DtxStart(xid=xid))
        client.publish(1, "out", bytes(self._random.randrange(4096)))
        client.consume_one(1, "in")
        return xid

    def ended(self, client: RawClient) -> Xid:
        """The same, with its association ended."""
        xid = self.begin(client)
        assert client.ask(1, DtxEnd(xid=xid)) is XaFlag.OK
        return xid

    def any(self) -> RawClient:
        """A client that stays connected."""
        return self._random.choice(self.alive)

    def completed(self) -> None:
        xid = self.ended(client := self.any())
        assert client.ask(1, DtxPrepare(xid=xid)) is XaFlag.OK
        assert client.ask(1, DtxRollback(xid=xid)) is XaFlag.OK

    def one_phase(self) -> None:
        self._stage.fill("in", b"one more")
        xid = self.ended(client := self.any())
        assert client.ask(1, DtxCommit(xid=xid, one_phase=True)) is XaFlag.OK

    def failed(self) -> None:
        xid = self.begin(client := self.any())
        assert client.ask(1, DtxEnd(xid=xid, fail=True)) is XaFlag.RBROLLBACK
        assert client.ask(1, DtxPrepare(xid=xid)) is XaFlag.RBROLLBACK
        self.left.append(xid)

    def timed_out(self) -> None:
        xid = self.begin(client := self.any())
        client.ask(1, DtxSetTimeout(xid=xid, timeout=1))
        self._stage.wait_for(lambda: self._stage.history(xid) == ["timed-out"], "the time-out")
        assert client.ask(1, DtxEnd(xid=xid)) is XaFlag.RBTIMEOUT
        self.left.append(xid)

    def dies_active(self) -> None:
        self.left_by_a_death(self.begin)

    def dies_idle(self) -> None:
        self.left_by_a_death(self.ended)

    def left_by_a_death(self, begin: Callable[[RawClient], Xid]) -> None:
        with self._client() as client:
            self.left.append(begin(client))
            client.get(1, "in")
            client.abort()

    def dies_in_content(self) -> None:
        with self._client() as client:
            self.left.append(self.begin(client))
            body = bytes(3000)
            client.send_raw(
                b"".join(
                    (
                        methods.BasicPublish(b"", b"out", 0).frame(1),
                        header_frame(1, 60, len(body) + 1, b"\x00\x00"),
                        *body_frames(1, body, 4096),
                    )
                )
            )
            client.abort()

    def channel_closed(self) -> None:
        self.left.append(self.begin(client := self.any()))
        client.get(1, "in")
        client.close_channel(1)
        client.open(1, select=True)

    def refused_by_the_broker(self) -> None:
        self.left.append(self.begin(client := self.any()))
        client.publish(1, "out", bytes(1000), exchange="no such exchange")
        assert client.refused(1).code == 404

    def too_much(self) -> None:
        self.left.append(self.begin(client := self.any()))
        client.publish(1, "out", bytes(HELD + 1))
        assert client.refused(1).code == 506

    def too_many_kept(self) -> None:
        client = self.any()
        tags = [client.get(1, "in") for _ in range(KEPT // 2048 + 1)]
        assert tags[-1] is not None
        client.say(1, methods.BasicNack(tags[-1], multiple=True).encode())


@pytest.mark.parametrize("seed", [1])
def test_memory_of_ended_branches_is_free_again(mode: Mode, stage: Scene, client: Make, seed: int) -> None:
    """The count is exact: with a leak dtx would refuse everything one day, and otherwise the limit would be lost."""
    stage.declare("in")
    stage.declare("out")
    stage.fill("in", *(bytes(2048) for _ in range(20)))
    Load(stage, client, seed).run(3)
    observer = client()
    room = HELD if mode == "alongside" else HELD - len(NO_PROPERTIES)  # which count if dtx stores the messages
    stage.wait_for(lambda: fits(observer, room), "room for all that dtx may hold")
    assert not fits(observer, room + 1)
    assert fits(observer, room)

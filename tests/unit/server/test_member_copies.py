"""Copies of a message that several members deliver: consumers of all of them get one, whoever asks first."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from dtx.log.api import LogUnavailable
from dtx.log.membership import Member
from dtx.log.records import DuplicateWrite, LogWrite, SettledCopy, SettlementsWrite, WorkRow
from dtx.server.members import copies as copies_module
from dtx.server.members.client import PeerUnreachable
from dtx.server.members.copies import MemberCopies
from dtx.server.members.forwarding import Answer, Forwarding
from dtx.store.rabbitmq import copies as register_module
from dtx.store.rabbitmq import copy_filter
from dtx.store.rabbitmq import store as store_module
from dtx.store.rabbitmq.copies import CopyPlace, CopyRegister, Key, MovedMessage
from dtx.store.rabbitmq.store import RabbitStore
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import BODY, HEADER
from dtx.wire.amqp09.properties import EMPTY
from tests.support.branches import a_branch, a_commit, a_consume, a_publish, a_replay, a_unit, an_insert
from tests.support.copies import BODY as BODY_OF_MESSAGE
from tests.support.copies import BRANCH, REPLAY, Source, marked
from tests.support.memory_log import MemoryLog


@dataclass(slots=True, eq=False)
class Dtx:
    """One member."""

    member: Member
    register: CopyRegister
    copies: MemberCopies
    is_current: bool = True
    is_silent: bool = False


class Tier:
    """Members with one log. Their requests take a random time; seed 0: none."""

    def __init__(self, seed: int = 0) -> None:
        self.log = MemoryLog()
        self.branch = a_branch(id=BRANCH, units=(a_unit(),))
        self.all: list[Dtx] = []
        self.lookups = 0
        self.asked = 0
        self.loaded = 0
        """Replays that were read."""
        self._random = random.Random(seed)
        self._seed = seed

    async def pause(self) -> None:
        """Wait for a moment."""
        for _ in range(self._random.randrange(20) if self._seed else 1):
            await asyncio.sleep(0)

    def join(self) -> Dtx:
        """A new member."""
        name = f"m{len(self.all)}"
        member = Member(instance=uuid4(), holder=name, address="", expired=False, dead=False)
        register = CopyRegister(self.log.write, lambda: dtx.is_current)
        tier = self

        class Log:
            async def unended(self, branch_ids: Collection[UUID]) -> set[UUID]:
                tier.lookups += bool(branch_ids)
                await tier.pause()
                return await tier.log.unended(branch_ids)

            async def load_copies(self, branch_ids: Collection[UUID] | None = None, position: int | None = None) -> Any:
                await tier.pause()
                found = await tier.log.load_copies(branch_ids, position)
                tier.loaded += len(found.replays)
                await tier.pause()
                return found

        class Others:
            async def ask_others(
                self, request: Mapping[str, Any], seconds: float, but: Collection[UUID] = ()
            ) -> list[tuple[Member, Answer]]:
                _ = seconds
                others = [each for each in tier.all if each is not dtx and each.member.instance not in but]
                answers = await asyncio.gather(*(self.ask(other, request) for other in others))
                return [(other.member, answer) for other, answer in zip(others, answers, strict=True)]

            async def ask(self, other: Dtx, request: Mapping[str, Any]) -> Answer:
                tier.asked += 1
                await tier.pause()
                if other.is_silent:
                    return PeerUnreachable("silent")
                answer = await other.copies.handle(request["copies"])
                await tier.pause()
                return answer

        shared = MemberCopies(cast("Any", Log()), register, cast("Forwarding", Others()))
        dtx = Dtx(member, register, shared)
        register.members = shared
        self.all.append(dtx)
        return dtx

    async def begin(self) -> None:
        """The log has the branch of :data:`BRANCH`."""
        await self.log.write(an_insert(self.branch, a_publish(0)))

    async def replay(self, dtx: Dtx) -> None:
        """A member is about to send the message of the branch again."""
        branch = (await self.log.lookup("/", self.branch.xid)).branch
        assert branch is not None
        replay = a_replay(0, exchange=REPLAY.exchange, routing_key=REPLAY.routing_key, digest=REPLAY.digest)
        await self.log.write(a_commit(branch, unit=a_unit(attempt=branch.units[0].attempt + 1), replays=(replay,)))
        await dtx.register.replay(BRANCH, [replay])

    @property
    def settlements(self) -> list[SettledCopy]:
        """What consumers have settled, as the log has it."""
        return [
            row for record in self.log.written if isinstance(record, SettlementsWrite) for row in record.settlements
        ]

    @property
    def suppressed(self) -> int:
        """The number of suppressed copies."""
        return sum(isinstance(record, DuplicateWrite) for record in self.log.written)


@pytest.fixture
async def tier() -> AsyncIterator[Tier]:
    """A log without members."""
    tier = Tier()
    await tier.log.open()
    yield tier
    await settle_down()


async def settle_down(turns: int = 50) -> None:
    """Let tasks run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def acknowledge(source: Source, tag: int) -> None:
    """The client of a channel settles a delivery."""
    copies = source.filter.to_record([tag], is_final=True)
    if copies:
        assert await source.filter.record(copies)


async def test_a_settlement_is_recorded_while_another_member_has_the_branch(tier: Tier) -> None:
    first, other = tier.join(), tier.join()
    await tier.begin()
    first.register.begin(BRANCH)
    source = Source(other.register)
    assert source.deliver(1, marked()) == source.whole
    await acknowledge(source, 1)
    assert [(row.queue, row.attempt) for row in tier.settlements] == [(b"q", 1)]
    assert tier.lookups == 2, "it waits a moment for the end of the branch"


async def test_one_lookup_shows_that_a_branch_has_ended(tier: Tier) -> None:
    source = Source(tier.join().register)
    for tag in range(1, 4):
        source.deliver(tag, marked())
    await asyncio.gather(*(acknowledge(source, tag) for tag in (1, 2)))
    assert (tier.settlements, tier.lookups) == ([], 1)
    await acknowledge(source, 3)
    assert tier.lookups == 1
    source.deliver(4, marked())
    assert not source.filter.is_busy, "nothing more of this branch is tracked"
    source.deliver(5, EMPTY)
    assert not source.filter.is_busy


async def test_a_settlement_is_recorded_if_no_lookup_answers(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register_module, "_RETRY", 0.01)
    source = Source(tier.join().register)
    source.deliver(1, marked())
    tier.log.reachable = False
    waiting = asyncio.ensure_future(acknowledge(source, 1))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    tier.log.reachable = True
    await waiting
    assert len(tier.settlements) == 1


async def test_a_copy_is_suppressed_at_another_member(tier: Tier) -> None:
    """Neither has sent it again, and a third one had the first copy."""
    members = [tier.join() for _ in range(3)]
    await tier.begin()
    source = Source(members[1].register)
    source.deliver(1, marked())
    await acknowledge(source, 1)
    await tier.replay(members[0])
    source = Source(members[2].register)
    assert source.deliver(1, marked(2)) == 0
    await settle_down()
    assert (source.settled, source.passed, tier.suppressed) == ([(1, False)], [], 1)


async def test_a_copy_waits_for_the_one_of_another_member(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    first, second = tier.join(), tier.join()
    await tier.begin()
    one, two = Source(first.register), Source(second.register)
    one.deliver(1, marked())
    await tier.replay(second)
    two.deliver(1, marked(2))
    await asyncio.sleep(0.1)
    assert (two.passed, two.settled) == ([], [])
    await acknowledge(one, 1)
    await asyncio.sleep(0.1)
    assert two.settled == [(1, True)], "it goes back, and comes again"
    two.deliver(2, marked(2), again=True)
    await settle_down()
    assert (two.settled, two.passed, tier.suppressed) == ([(1, True), (2, False)], [], 1)


async def test_a_copy_comes_when_the_other_one_is_returned(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    first, second = tier.join(), tier.join()
    await tier.begin()
    one, two = Source(first.register), Source(second.register)
    one.deliver(1, marked())
    await tier.replay(first)
    two.deliver(1, marked(2))
    await asyncio.sleep(0.05)
    one.filter.returned([1])
    await asyncio.sleep(0.1)
    assert two.settled == [(1, True)]
    two.deliver(2, marked(2), again=True)
    await settle_down()
    assert len(two.passed) == two.whole


async def test_frames_behind_a_copy_keep_their_order(tier: Tier) -> None:
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    source = Source(first.register)
    source.deliver(1, marked(2))
    source.deliver(2, EMPTY)
    source.deliver(3, marked(), queue=b"other")
    assert source.passed == []
    assert source.filter.is_busy
    assert source.filter in first.register.holding, "all frames come to the filter meanwhile"
    await settle_down()
    assert len(source.passed) == 3 * source.whole
    assert list(source.filter.tracked) == [1, 3]


async def test_tag_zero_returns_a_copy_that_is_undecided(tier: Tier) -> None:
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    source = Source(first.register)
    source.deliver(1, marked(2))
    source.filter.settle_up_to(0)
    await settle_down()
    assert (source.settled, source.passed) == ([(1, True)], [])
    source.deliver(2, marked(2), get=True)
    source.filter.settle_up_to(0)
    await settle_down()
    assert (source.got, source.passed) == (["again q False"], [])


async def test_a_copy_waits_when_much_comes_behind_it(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_MOST_HELD", 8000)
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    monkeypatch.setattr(tier, "pause", lambda: asyncio.sleep(1))
    source = Source(first.register)
    source.deliver(1, marked(2))
    source.deliver(2, EMPTY)
    await asyncio.sleep(0.01)
    assert source.passed == []
    source.deliver(3, EMPTY)
    await asyncio.sleep(0.05)
    assert len(source.passed) == 2 * source.whole
    assert source.filter.owns
    source.filter.end()


async def test_a_channel_that_ends_returns_waiting_frames(tier: Tier) -> None:
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    source = Source(first.register)
    source.deliver(1, marked(2))
    source.deliver(2, EMPTY)
    assert len(source.filter.end()) == source.whole
    await settle_down()
    assert (source.passed, source.settled, first.register.holding) == ([], [], set())


async def test_a_copy_waits_while_a_member_is_silent(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    monkeypatch.setattr(register_module, "_SILENCE", 0.02)
    first, second = tier.join(), tier.join()
    await tier.begin()
    await tier.replay(first)
    second.is_silent = True
    source = Source(first.register)
    source.deliver(1, marked(2))
    source.deliver(2, EMPTY)
    await asyncio.sleep(0.1)
    assert len(source.passed) == source.whole, "the frames behind it pass"
    second.is_silent = False
    await asyncio.sleep(0.1)
    assert source.settled == [(1, True)]


async def test_messages_are_sent_again_when_all_members_know(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tier.join(), tier.join()
    second.is_silent = True
    await tier.begin()
    replaying = asyncio.ensure_future(tier.replay(first))
    await asyncio.sleep(0.3)
    assert not replaying.done()
    second.is_silent = False
    await asyncio.wait_for(replaying, 5)
    assert second.register.filters
    # nobody waits for a member without a lease, nor for ever
    second.is_silent = True
    second.member = Member(instance=uuid4(), holder="m1", address="", expired=True, dead=False)
    await asyncio.wait_for(first.copies.announce([b"x"]), 5)
    second.member = Member(instance=uuid4(), holder="m1", address="", expired=False, dead=False)
    monkeypatch.setattr(copies_module, "_PATIENCE", 0.2)
    await asyncio.wait_for(first.copies.announce([b"x"]), 5)


async def test_a_message_that_another_member_may_put_back_waits(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch has ended, so it is neither tracked nor sent again; a branch of the other member has consumed it."""
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    first, second = tier.join(), tier.join()
    second.copies.ended(str(BRANCH).encode())
    moved = MovedMessage(CopyPlace(Key(str(BRANCH).encode(), 0), "/", b"q"), REPLAY.digest)
    first.register.doubt([moved])
    source = Source(second.register)
    assert source.deliver(1, marked()) == source.whole, "the first delivery is not asked about"
    source.deliver(2, marked(), again=True)
    source.deliver(3, marked(), again=True, queue=b"other")
    await asyncio.sleep(0.1)
    assert (len(source.passed), source.settled) == (2 * source.whole, [])
    await first.register.move([moved])
    await first.register.announce([moved])
    first.register.end_doubt([moved])
    await asyncio.sleep(0.1)
    assert source.settled == [(2, True)]
    source.deliver(4, marked(), again=True)
    await settle_down()
    assert (source.settled, tier.suppressed) == ([(2, True), (4, False)], 1)


async def test_a_message_comes_again_when_no_branch_has_taken_it(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    first, second = tier.join(), tier.join()
    moved = MovedMessage(CopyPlace(Key(str(BRANCH).encode(), 0), "/", b"q"), REPLAY.digest)
    first.register.doubt([moved])
    source = Source(second.register)
    source.deliver(1, marked(), again=True)
    await asyncio.sleep(0.05)
    first.register.end_doubt([moved])
    await asyncio.sleep(0.1)
    assert source.settled == [(1, True)]
    source.deliver(2, marked(), again=True)
    await settle_down()
    assert len(source.passed) == source.whole


@pytest.mark.parametrize("who", [0, 1])
async def test_messages_that_come_again_wait_for_a_takeover(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    """The member that takes over, or this one, does not know yet which messages the dead one has perhaps taken."""
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    members = [tier.join(), tier.join()]
    members[who].copies.is_ready = lambda: False
    source = Source(members[1].register)
    source.deliver(1, marked(), again=True)
    source.deliver(2, marked())
    await asyncio.sleep(0.1)
    assert len(source.passed) == source.whole
    members[who].copies.is_ready = lambda: True
    await asyncio.sleep(0.1)
    assert source.settled == [(1, True)]


async def test_a_message_in_doubt_does_not_wait_for_ever(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_filter, "_HOLD_IN_DOUBT", 0.05)
    first, second = tier.join(), tier.join()
    first.is_silent = True
    source = Source(second.register)
    source.deliver(1, marked(), again=True)
    await asyncio.sleep(0.2)
    assert source.settled == [(1, True)]
    source.deliver(2, marked(), again=True)
    first.is_silent = False
    await settle_down()
    assert len(source.passed) == source.whole


async def test_a_member_without_lease_holds_messages_of_branches(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may have taken over from it, and may have sent the message again."""
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    dtx = tier.join()
    source = Source(dtx.register)
    dtx.is_current = False
    source.deliver(1, marked())
    assert source.deliver(2, EMPTY) == 0
    await settle_down()
    assert len(source.passed) == source.whole, "other messages pass"
    dtx.is_current = True
    await asyncio.sleep(0.1)
    assert source.settled == [(1, True)]
    source.deliver(3, marked(), again=True)
    await settle_down()
    assert len(source.passed) == 2 * source.whole


@pytest.mark.parametrize("request_", [{}, {"load": ["x"]}, {"ask": []}, {"ask": ["x", "y", "/", "zz", 1]}])
async def test_a_malformed_request_has_no_effect(tier: Tier, request_: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        await tier.join().copies.handle(request_)


async def test_a_log_that_cannot_be_read_lets_a_copy_wait(tier: Tier) -> None:
    dtx = tier.join()
    await tier.begin()
    await tier.replay(dtx)
    tier.log.reachable = False
    source = Source(dtx.register)
    source.deliver(1, marked(2))
    await settle_down()
    assert (source.passed, list(source.filter._owned)) == ([], [1])
    source.filter.end()
    tier.log.reachable = True


@pytest.mark.parametrize("seed", range(1, 151))
async def test_consumers_of_all_members_settle_one_copy(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of a message, consumers at three members, which settle, return and lose what they get."""
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.001)
    monkeypatch.setattr(register_module, "_PATIENCE", 0.001)
    chance = random.Random(seed)
    tier = Tier(seed)
    await tier.log.open()
    members = [tier.join() for _ in range(3)]
    await tier.begin()
    queue = deque([1])
    sources = [Source(dtx.register) for dtx in members for _ in range(2)]
    unsettled: dict[tuple[Source, int], int] = {}
    tags, settled, steps, sent = 0, 0, 0, 1
    while queue or unsettled or sent < 3:
        steps += 1
        assert steps < 20_000, (queue, unsettled, sent)
        if sent < 3 and chance.random() < 0.05:
            await tier.replay(chance.choice(members))
            sent += 1
            queue.insert(chance.randrange(len(queue) + 1), sent)
        if queue and chance.random() < 0.5:
            source, attempt = chance.choice(sources), queue.popleft()
            tags += 1
            unsettled[source, tags] = attempt
            source.deliver(tags, marked(attempt), again=chance.random() < 0.5)
        await tier.pause()
        if steps % 20 == 0:
            await asyncio.sleep(0.002)
        for (source, tag), attempt in list(unsettled.items()):
            own = [requeue for settled_tag, requeue in source.settled if settled_tag == tag]
            if own:
                del unsettled[source, tag]
                if own[0]:
                    queue.append(attempt)
            elif tag in source.filter.tracked and chance.random() < 0.1:
                visible = [key for key in unsettled if key[1] in key[0].filter.tracked]
                assert sent == 1 or len(visible) == 1, "two consumers have copies at the same time"
                del unsettled[source, tag]
                if chance.random() < 0.3:
                    source.filter.returned([tag])
                    queue.append(attempt)
                else:
                    await acknowledge(source, tag)
                    settled += 1
    await asyncio.sleep(0.01)
    assert (settled, tier.suppressed) == (1, 2)


async def test_a_reader_that_is_cancelled_leaves_the_branch_unknown(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "pause", lambda: asyncio.sleep(0.1))
    dtx = tier.join()
    branch = str(BRANCH).encode()
    before = asyncio.ensure_future(dtx.copies.unended([str(uuid4()).encode()]))
    await asyncio.sleep(0)
    first = asyncio.ensure_future(dtx.copies.unended([branch]))
    second = asyncio.ensure_future(dtx.copies.unended([branch]))
    await before
    await asyncio.sleep(0.01)
    first.cancel()
    assert await second == [branch]
    assert not dtx.copies.has_ended(branch)
    assert await dtx.copies.unended([branch]) == set()
    assert dtx.copies.has_ended(branch)


def test_the_memory_of_ended_branches_is_bounded(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_MOST_ENDED", 3)
    copies = tier.join().copies
    for number in range(5):
        copies.ended(b"%d" % number)
    assert [number for number in range(5) if copies.has_ended(b"%d" % number)] == [2, 3, 4]


async def test_a_log_that_is_away_is_an_error(tier: Tier) -> None:
    dtx = tier.join()
    tier.log.reachable = False
    with pytest.raises(LogUnavailable):
        await dtx.copies.handle({"load": [str(BRANCH)]})
    tier.log.reachable = True


async def test_a_copy_is_out_from_its_header_on(tier: Tier) -> None:
    """A slow client gets the rest of it later; until then, another member must not deliver another copy."""
    first, second = tier.join(), tier.join()
    await tier.begin()
    one, two = Source(first.register), Source(second.register)
    one.deliver(1, marked(), frames=3)
    await tier.replay(second)
    two.deliver(1, marked(2))
    await settle_down()
    assert (one.passed[1:], two.passed) == ([HEADER, BODY], [])
    one.filter.end()
    two.filter.end()


async def test_a_copy_is_decided_at_its_header(tier: Tier) -> None:
    """Its first frame came before the message was sent again, and passes with the header only."""
    first, second = tier.join(), tier.join()
    await tier.begin()
    one, two = Source(first.register), Source(second.register)
    assert one.deliver(1, marked(), frames=1) == 0
    await tier.replay(second)
    two.deliver(1, marked(2))
    await settle_down()
    assert len(two.passed) == two.whole
    one.deliver(1, marked(), skipped=1)
    await settle_down()
    assert one.passed == []
    for source in (one, two):
        source.filter.end()


@pytest.mark.parametrize("header", ["x_stream_offset", "x_death"])
@pytest.mark.parametrize("reason", ["no lease", "silent"])
async def test_streams_and_dead_letters_never_wait(tier: Tier, header: str, reason: str) -> None:
    """RabbitMQ ends the connection (540) for a return of what a stream delivered."""
    first, second = tier.join(), tier.join()
    await tier.begin()
    await tier.replay(first)
    first.is_current, second.is_silent = reason != "no lease", True
    source = Source(first.register)
    source.deliver(1, marked(2, **{header.replace("_", "-"): b"1"}))
    await settle_down()
    assert len(source.passed) == source.whole
    source.filter.end()


async def test_members_are_not_asked_about_other_bodies(tier: Tier) -> None:
    """A client can write the headers of a message that was sent again: that must not cost a request each."""
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    source, tier.asked = Source(first.register), 0
    for tag in range(1, 6):
        source.deliver(tag, marked(2), body=b"another")
        await settle_down()
    assert (len(source.passed), tier.asked) == (15, 0)


async def test_waiting_copies_are_asked_about_one_by_one(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer without prefetch limit may have very many."""
    monkeypatch.setattr(copy_filter, "_ASK_AGAIN", 0.02)
    first, second = tier.join(), tier.join()
    await tier.begin()
    Source(second.register).deliver(1, marked())
    await tier.replay(first)
    source = Source(first.register)
    for tag in range(1, 51):
        source.deliver(tag, marked(2))
        await settle_down()
    assert len(source.filter._owned) == 50
    assert len(source.filter._tasks) == 1
    source.filter.end()


async def test_no_copy_waits_for_a_member_that_was_silent(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames behind many copies would else wait two seconds for each: among them tx.commit-ok of a vote."""
    monkeypatch.setattr(register_module, "_ANSWER", 0.05)
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    monkeypatch.setattr(tier, "pause", lambda: asyncio.sleep(60))
    source = Source(first.register)
    for tag in range(1, 21):
        source.deliver(tag, marked(2))
    source.deliver(21, EMPTY)
    await asyncio.sleep(0.2)
    assert len(source.passed) == source.whole
    assert list(source.filter._owned) == list(range(1, 21))
    source.filter.end()


async def test_a_failed_channel_gives_its_deliveries_back(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tier.join()
    tier.join()
    await tier.begin()
    await tier.replay(first)
    source = Source(first.register)

    def fails(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(source, "accept", fails)
    source.deliver(1, marked(2))
    await settle_down()
    assert source.abandoned


async def test_one_message_is_read_for_a_copy(tier: Tier) -> None:
    """A branch may have sent 10,000 messages again, and each of them is asked about."""
    first = tier.join()
    tier.join()
    await tier.begin()
    branch = (await tier.log.lookup("/", tier.branch.xid)).branch
    assert branch is not None
    replays = tuple(replace(REPLAY, position=position) for position in range(100))
    await tier.log.write(a_commit(branch, unit=a_unit(attempt=2), replays=replays))
    await first.register.replay(BRANCH, replays)
    source, tier.loaded = Source(first.register), 0
    source.deliver(1, marked(2))
    await settle_down()
    assert (len(source.passed), tier.loaded) == (source.whole, 1)
    source.filter.end()


async def test_a_member_without_lease_does_not_drain_a_queue(tier: Tier) -> None:
    """Getting the next message would take all of them from the consumers of other members."""
    dtx = tier.join()
    source = Source(dtx.register)
    dtx.is_current = False
    source.deliver(1, marked(), get=True)
    await settle_down()
    assert (source.got, source.passed) == ([], [methods.BasicGetEmpty.KEY])
    assert list(source.filter._owned) == [1]
    source.filter.end()


async def test_one_settlement_tries_a_log_that_is_away(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of very many tried it, no time would be left to renew the lease."""
    monkeypatch.setattr(register_module, "_RETRY", 0.02)
    monkeypatch.setattr(register_module, "_PATIENCE", 0.001)
    dtx, tries = tier.join(), 0
    await tier.begin()
    write = tier.log.write

    async def counting(record: LogWrite) -> None:
        nonlocal tries
        tries += 1
        await write(record)

    monkeypatch.setattr(dtx.register, "_write", counting)
    source = Source(dtx.register)
    for tag in range(1, 201):
        source.deliver(tag, marked())
    tier.log.reachable = False
    waiting = [asyncio.ensure_future(acknowledge(source, tag)) for tag in range(1, 201)]
    await asyncio.sleep(0.3)
    assert 200 < tries < 250
    tier.log.reachable = True
    await asyncio.wait_for(asyncio.gather(*waiting), 2)


async def test_settlements_without_acknowledgement_are_bounded(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else limits them: the broker goes on delivering while the log is away."""
    monkeypatch.setattr(copy_filter, "_MOST_LATE", 10)
    dtx = tier.join()
    await tier.begin()
    tier.log.reachable = False
    source = Source(dtx.register, no_ack=True)
    for tag in range(1, 51):
        source.deliver(tag, marked())
    await settle_down()
    assert (len(source.passed), len(source.filter._tasks)) == (50 * source.whole, 10)
    tier.log.reachable = True
    await asyncio.sleep(0.8)
    assert not source.filter._tasks
    assert not dtx.register._out


async def test_members_that_were_given_up_are_not_waited_for(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address may be wrong: then each unit of a takeover would wait a minute, and hold a channel."""
    monkeypatch.setattr(copies_module, "_PATIENCE", 0.3)
    first, second = tier.join(), tier.join()
    second.is_silent = True
    await first.copies.announce([b"x"])
    loop = asyncio.get_running_loop()
    began = loop.time()
    await first.copies.announce([b"y"])
    assert loop.time() - began < 0.2
    second.is_silent = False
    await tier.begin()
    await first.copies.announce([str(BRANCH).encode()])
    assert not first.copies._given_up


async def test_a_wait_for_the_lease_leaves_no_trace(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of it was sent once, and nothing would ever remove it."""
    monkeypatch.setattr(copy_filter, "_HOLD", 0.01)
    dtx = tier.join()
    source = Source(dtx.register)
    dtx.is_current = False
    source.deliver(1, marked())
    await asyncio.sleep(0.05)
    assert source.settled == [(1, True)]
    assert not dtx.register._waited
    source.filter.end()


async def test_a_rollback_waits_until_members_know_its_messages(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with a lease that does not answer is waited for, although the log has answered long ago."""
    monkeypatch.setattr(store_module, "_LOG_PATIENCE", 0.05)
    first, second = tier.join(), tier.join()
    await tier.begin()
    second.is_silent = True
    store = RabbitStore(cast("Any", None), cast("Any", SimpleNamespace(copies=first.register)))
    put_back = asyncio.Event()

    async def puts_back(_: object) -> None:
        put_back.set()

    monkeypatch.setattr(store, "commit_connection", lambda _: SimpleNamespace(put_back=puts_back))
    taken = a_consume(0, exchange=b"e", routing_key=b"key", queue=b"q", properties=marked(), body=BODY_OF_MESSAGE)
    taken = replace(taken, unit=1)

    async def work() -> list[WorkRow]:
        return [taken]

    phase: Any = SimpleNamespace(branch_id=uuid4(), vhost="/", unsure=frozenset({1}), work=work)
    putting = asyncio.ensure_future(store.put_back(phase))
    await asyncio.sleep(0.3)
    assert not put_back.is_set()
    second.is_silent = False
    await asyncio.wait_for(putting, 5)
    assert put_back.is_set()
    source = Source(second.register)
    source.deliver(1, marked())
    await settle_down()
    assert source.settled == [(1, False)]

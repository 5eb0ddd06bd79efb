"""Second copies of a message, without a broker: what is recorded, what is suppressed, and what is never lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from dtx.log.api import LeaseLost, LogConflict, LogUnavailable
from dtx.log.records import DuplicateWrite, LoggedCopies, LogWrite, Replay, SettledCopy, SettlementsWrite
from dtx.store.rabbitmq import copy_filter, messages
from dtx.store.rabbitmq.copies import CopyRegister, Key, MovedMessage, key_of
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.frames import FrameSplitter
from dtx.wire.amqp09.properties import EMPTY, Property, build
from tests.support.branches import a_consume
from tests.support.copies import BODY, BRANCH, REPLAY, Source, marked


@dataclass(slots=True)
class Log:
    """Takes writes, or fails."""

    failures: list[Exception] = field(default_factory=list)
    written: list[LogWrite] = field(default_factory=list)

    async def write(self, record: LogWrite) -> None:
        """See :class:`TransactionLog`."""
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.written.append(record)

    @property
    def settled(self) -> list[tuple[bytes, int]]:
        """Queue and attempt of each settlement."""
        return [
            (row.queue, row.attempt)
            for record in self.written
            if isinstance(record, SettlementsWrite)
            for row in record.settlements
        ]

    @property
    def suppressed(self) -> list[bytes]:
        """The bodies of suppressed copies."""
        return [record.duplicate.body for record in self.written if isinstance(record, DuplicateWrite)]


@pytest.fixture
def log() -> Log:
    """A log."""
    return Log()


@pytest.fixture
async def register(log: Log) -> AsyncIterator[CopyRegister]:
    """A register; the branch is open."""
    register = CopyRegister(log.write, lambda: True)
    register.begin(BRANCH)
    yield register
    await asyncio.sleep(0)


async def replay(register: CopyRegister) -> None:
    """The message of the branch is sent again."""
    await register.replay(BRANCH, [REPLAY])


async def settled(source: Source, *tags: int) -> None:
    """The client acknowledges deliveries."""
    copies = source.filter.settled(tags)
    if source.filter.register.must_record(copies):
        await source.filter.register.settle(copies)
    else:
        source.filter.register.release(copies)


async def until_idle() -> None:
    """Let tasks run."""
    for _ in range(10):
        await asyncio.sleep(0)


# -- headers


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (EMPTY, None),
        (build({}, {b"x-dtx-id": b"no uuid/0"}), None),
        (build({}, {b"x-dtx-id": b"\xff" * 36 + b"/0"}), None),
        (build({}, {b"x-dtx-id": str(BRANCH).encode()}), None),
        (build({}, {b"x-dtx-id": f"{BRANCH}/-1".encode()}), None),
        (build({}, {b"x-dtx-id": f"{BRANCH}/9999999999".encode()}), None),
        (build({}, {b"x-dtx-id": f"{BRANCH}/7".encode()}), Key(str(BRANCH).encode(), 7)),
        (
            build({}, {b"x-dtx-id": f"{BRANCH}/7".encode(), b"x-dtx-put-back": f"{BRANCH}/3".encode()}),
            Key(str(BRANCH).encode(), 3),
        ),
        (build({Property.MESSAGE_ID: b"x-dtx-id"}), None),
    ],
)
def test_the_key_of_a_message_is_read_from_its_header(raw: bytes, key: Key | None) -> None:
    assert key_of(raw) == key


@pytest.mark.parametrize("value", [b"", b"0", b"-1", b"abc", b"9" * 30])
def test_an_attempt_of_a_client_is_a_small_number(value: bytes) -> None:
    assert messages.attempt_of(build({}, {b"x-dtx-attempt": value})) == 1


# -- what is recorded


async def test_a_settlement_of_an_ended_branch_is_not_recorded(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    assert source.deliver(1, marked()) == source.whole
    register.end(BRANCH)
    await settled(source, 1)
    assert log.written == []


async def test_a_settlement_waits_for_the_end_of_its_branch(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    source.deliver(1, marked())
    asyncio.get_running_loop().call_later(0.01, register.end, BRANCH)
    await settled(source, 1)
    assert log.written == []


async def test_a_settlement_of_an_open_branch_is_recorded(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    assert log.settled == [(b"q", 1)]


async def test_messages_of_others_are_neither_tracked_nor_held(register: CopyRegister) -> None:
    await replay(register)
    source = Source(register)
    assert source.deliver(1, EMPTY) == source.whole
    assert source.deliver(2, build({}, {b"x-dtx-id": b"garbage"})) == source.whole
    assert source.deliver(3, marked(), queue=b"unknown") == source.whole
    assert not source.filter.is_busy
    assert not register.holding


async def test_a_settlement_waits_while_the_log_is_away(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    source.deliver(1, marked())
    log.failures = [LogUnavailable("away")]
    await settled(source, 1)
    assert log.settled == [(b"q", 1)]


async def test_a_settlement_fails_when_another_dtx_has_the_lease(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    source.deliver(1, marked())
    log.failures = [LeaseLost("another one")]
    with pytest.raises(LeaseLost):
        await settled(source, 1)


async def test_a_value_that_the_log_refuses_blocks_nothing(register: CopyRegister, log: Log) -> None:
    source = Source(register)
    source.deliver(1, marked())
    log.failures = [LogConflict("no such number")]
    await settled(source, 1)
    assert log.settled == []


async def test_without_the_lease_any_branch_may_be_open(log: Log) -> None:
    register = CopyRegister(log.write, lambda: False)
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    assert log.settled == [(b"q", 1)]


# -- what is suppressed


@pytest.mark.parametrize("first", [1, 2])
async def test_the_second_copy_is_suppressed_and_kept(register: CopyRegister, log: Log, first: int) -> None:
    await replay(register)
    source = Source(register)
    assert source.deliver(1, marked(first)) == source.whole
    await settled(source, 1)
    assert source.deliver(2, marked(3 - first)) == 0
    assert source.settled == []
    await until_idle()
    assert (source.settled, log.suppressed) == ([(2, False)], [BODY])


async def test_a_copy_settled_before_the_replay_counts(register: CopyRegister) -> None:
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    await replay(register)
    register.end(BRANCH)
    assert source.deliver(2, marked(2)) == 0
    await until_idle()
    assert source.settled == [(2, False)]


async def test_the_register_of_a_successor_knows_the_same(log: Log) -> None:
    digest = messages.digest_of(b"e", b"key", BODY)
    register = CopyRegister(log.write, lambda: True)
    row = SettledCopy(branch_id=BRANCH, position=0, vhost="/", queue=b"q", attempt=1, digest=digest)
    replayed = Replay(position=0, exchange=b"e", routing_key=b"key", digest=digest)
    register.load(LoggedCopies(replays=((BRANCH, replayed),), settlements=(row,)))
    source = Source(register)
    assert source.deliver(1, marked(2)) == 0
    assert source.deliver(2, marked(1)) == source.whole


async def test_the_same_copy_comes_again(register: CopyRegister) -> None:
    """Its acknowledgement was lost with the connection: that is a redelivery, and no second copy."""
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    assert source.deliver(2, marked(), again=True) == source.whole


async def test_a_suppressed_copy_that_comes_again_is_suppressed_again(register: CopyRegister, log: Log) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    assert source.deliver(2, marked(2)) == 0
    await until_idle()
    assert source.deliver(3, marked(2), again=True) == 0
    assert source.deliver(4, marked(2)) == source.whole, "an application has published it"
    source.filter.returned([4])
    assert source.deliver(5, marked(2), again=True) == source.whole, "no consumer has settled that"


@pytest.mark.parametrize(
    ("raw", "body", "queue"),
    [
        (marked(2), b"another", b"q"),
        (marked(2), BODY, b"another"),
        (marked(2, **{"x-death": b"1"}), BODY, b"q"),
        (marked(2, **{"x-stream-offset": b"1"}), BODY, b"q"),
    ],
    ids=["other content", "other queue", "dead letter", "stream"],
)
async def test_other_messages_with_the_id_are_delivered(
    register: CopyRegister, raw: bytes, body: bytes, queue: bytes
) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    assert source.deliver(2, raw, body, queue=queue) > 0


async def test_a_forged_copy_hides_no_message(register: CopyRegister) -> None:
    """It has the id of an open branch, and is settled first."""
    source = Source(register)
    source.deliver(1, marked(7), b"forged")
    await settled(source, 1)
    await replay(register)
    assert source.deliver(2, marked(2)) == source.whole


async def test_a_returned_copy_does_not_count(register: CopyRegister) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    source.filter.returned([1])
    assert source.deliver(2, marked(2)) == source.whole


async def test_nothing_is_suppressed_without_the_setting(log: Log) -> None:
    register = CopyRegister(log.write, lambda: True, enabled=False)
    register.begin(BRANCH)
    await replay(register)
    source = Source(register)
    for tag, attempt in ((1, 1), (2, 2)):
        assert source.deliver(tag, marked(attempt)) == source.whole
        await settled(source, tag)
    assert log.written == []


# -- copies that wait


async def test_a_copy_waits_while_another_one_is_unsettled(register: CopyRegister) -> None:
    await replay(register)
    first, second = Source(register), Source(register)
    first.deliver(1, marked())
    assert second.deliver(5, marked(2)) == 0
    assert second.settled == []
    await settled(first, 1)
    assert second.settled == [(5, True)]
    assert second.deliver(6, marked(2), again=True) == 0
    await until_idle()
    assert second.settled == [(5, True), (6, False)]


@pytest.mark.parametrize("how", ["returned", "lost"])
async def test_a_waiting_copy_comes_when_the_other_one_is_back(register: CopyRegister, how: str) -> None:
    await replay(register)
    first, second = Source(register), Source(register)
    first.deliver(1, marked())
    assert second.deliver(5, marked(2)) == 0
    if how == "returned":
        first.filter.returned([1])
    else:
        first.filter.end()
    assert second.settled == [(5, True)]
    assert second.deliver(6, marked(2), again=True) == second.whole


async def test_a_copy_whose_settlement_is_being_written_still_counts(register: CopyRegister) -> None:
    """Its channel ends before the log has it."""
    await replay(register)
    first, second = Source(register), Source(register)
    first.deliver(1, marked())
    copies = first.filter.settled([1])
    assert register.must_record(copies)
    first.filter.end()
    assert second.deliver(5, marked(2)) == 0
    await register.settle(copies)
    assert second.settled == [(5, True)]
    assert second.deliver(6, marked(2), again=True) == 0


@pytest.mark.parametrize("tag", [0, 9])
async def test_a_settlement_up_to_a_tag_spares_copies_that_wait(register: CopyRegister, tag: int) -> None:
    await replay(register)
    first, second = Source(register), Source(register)
    first.deliver(1, marked())
    second.deliver(5, marked(2))
    second.filter.settle_up_to(4)
    assert second.settled == []
    second.filter.settle_up_to(tag)
    assert second.settled == [(5, True)]
    assert not second.filter.owns


async def test_nothing_is_settled_on_a_channel_that_has_ended(register: CopyRegister) -> None:
    await replay(register)
    first, second = Source(register), Source(register)
    first.deliver(1, marked())
    second.deliver(5, marked(2))
    second.filter.end()
    await settled(first, 1)
    assert second.settled == []


async def test_a_recovered_channel_settles_none_of_its_deliveries(register: CopyRegister) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    source.deliver(2, marked(2))
    source.filter.recovered()
    assert not source.filter.is_busy
    assert source.deliver(3, marked(2), again=True) == source.whole


# -- basic.get, and no acknowledgements


async def test_a_get_gets_the_next_message_instead(register: CopyRegister) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked(), get=True)
    await settled(source, 1)
    assert source.deliver(2, marked(2), get=True) == 0
    assert source.got == ["again q False"]


async def test_a_get_of_a_waiting_copy_gets_the_next_message(register: CopyRegister) -> None:
    await replay(register)
    source = Source(register)
    source.deliver(1, marked(), get=True)
    assert source.deliver(2, marked(2), get=True) == 0
    assert (source.got, source.settled) == (["again q False"], [])
    await settled(source, 1)
    assert source.settled == [(2, True)]


@pytest.mark.parametrize(("may_settle", "gets"), [(False, 1), (True, 2)], ids=["tx", "pipelined"])
async def test_a_get_that_has_no_replacement_gets_the_copy(register: CopyRegister, may_settle: bool, gets: int) -> None:
    await replay(register)
    source = Source(register)
    source.may_settle, source.gets = may_settle, gets
    source.deliver(1, marked(), get=True)
    await settled(source, 1)
    assert source.deliver(2, marked(2), get=True) == source.whole


async def test_a_copy_without_acknowledgement_is_suppressed_at_once(register: CopyRegister, log: Log) -> None:
    await replay(register)
    source = Source(register, no_ack=True)
    assert source.deliver(1, marked()) == source.whole
    assert source.deliver(2, marked(2)) == 0
    await until_idle()
    assert (source.settled, log.suppressed, log.settled) == ([], [BODY], [(b"q", 1)])


# -- messages that a branch has perhaps taken


def perhaps_taken(register: CopyRegister) -> MovedMessage:
    """Message 0 of the branch, which another branch has consumed from queue q."""
    found = register.movable(
        "/", a_consume(queue=b"q", exchange=b"e", routing_key=b"key", properties=marked(), body=BODY)
    )
    assert found is not None
    register.doubt([found])
    return found


@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_message_that_was_perhaps_taken_waits(register: CopyRegister, log: Log, is_moved: bool) -> None:
    moved = perhaps_taken(register)
    source = Source(register)
    assert source.deliver(1, marked(), again=True) == 0
    assert source.settled == []
    if is_moved:
        await register.move([moved])
    register.end_doubt([moved])
    assert source.settled == [(1, True)], "it goes back to its queue, and comes again"
    assert source.deliver(2, marked(), again=True) == (0 if is_moved else source.whole)
    await until_idle()
    assert log.suppressed == ([BODY] if is_moved else [])


async def test_a_message_in_doubt_is_delivered_after_a_while(
    register: CopyRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_filter, "_HOLD", 0.01)
    perhaps_taken(register)
    source = Source(register)
    assert source.deliver(1, marked(), again=True) == 0
    await asyncio.sleep(0.05)
    assert source.settled == [(1, True)]
    assert source.deliver(2, marked(), again=True) == source.whole


async def test_other_messages_are_not_in_doubt(register: CopyRegister) -> None:
    moved = perhaps_taken(register)
    source = Source(register)
    assert source.deliver(1, marked(), b"other" * 1000) > 0
    assert source.deliver(2, marked(), queue=b"another") == source.whole
    register.end_doubt([moved])
    assert not register.filters


# -- the end of what is known


async def test_a_delivery_held_at_the_end_of_the_window_passes(log: Log) -> None:
    register = CopyRegister(log.write, lambda: True, window=0.01)
    await replay(register)
    source = Source(register)
    buffer, frames = FrameSplitter(0).feed(
        content.message(methods.BasicDeliver(b"q", 1, False, b"e", b"key").frame(1), 1, EMPTY, BODY, 1000)
    )
    source.filter.frame(frames[0][0], buffer, *frames[0][2:])
    await asyncio.sleep(0.05)
    assert register.holding, "the delivery is held"
    for key, _, start, end in frames[1:]:
        source.filter.frame(key, buffer, start, end)
    assert len(source.passed) == source.whole
    assert not register.holding
    assert not register.filters


async def test_copies_are_delivered_after_the_window(log: Log) -> None:
    register = CopyRegister(log.write, lambda: True, window=0.01)
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    await settled(source, 1)
    await asyncio.sleep(0.05)
    assert source.deliver(2, marked(2)) == source.whole


async def test_copies_of_channels_hold_no_memory_when_settled(register: CopyRegister) -> None:
    source = Source(register)
    for tag in range(1, 100):
        source.deliver(tag, marked())
    register.end(BRANCH)
    await settled(source, *range(1, 100))
    assert not register._out
    assert not source.filter.tracked


async def test_a_copy_that_has_waited_long_is_delivered(
    register: CopyRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer may be the one that has the other copy, and waits for more messages before it settles any."""
    monkeypatch.setattr(copy_filter, "_HOLD", 0.01)
    await replay(register)
    source = Source(register)
    source.deliver(1, marked())
    assert source.deliver(2, marked(2)) == 0
    await asyncio.sleep(0.05)
    assert source.settled == [(2, True)]
    assert not register._waiting
    assert source.deliver(3, marked(2), again=True) == source.whole


async def test_a_large_message_is_tracked_over_several_reads(register: CopyRegister, log: Log) -> None:
    """The header asks for the rest of it."""
    source = Source(register)
    buffer, frames = FrameSplitter(0).feed(
        content.message(methods.BasicDeliver(b"q", 1, False, b"e", b"key").frame(1), 1, marked(), BODY, 1000)
    )
    for number, (key, _, start, end) in enumerate(frames):
        source.filter.frame(key, buffer, start, end)
        assert (source.filter in register.holding) is (number < len(frames) - 1)
    await settled(source, 1)
    assert log.settled == [(b"q", 1)]


async def test_a_delivery_settled_before_its_content_is_not_tracked(register: CopyRegister) -> None:
    source = Source(register)
    buffer, frames = FrameSplitter(0).feed(
        content.message(methods.BasicDeliver(b"q", 1, False, b"e", b"key").frame(1), 1, marked(), BODY, 1000)
    )
    for key, _, start, end in frames[:2]:
        source.filter.frame(key, buffer, start, end)
    assert source.filter.is_busy
    source.filter.drop_arriving(1, multiple=False)
    for key, _, start, end in frames[2:]:
        source.filter.frame(key, buffer, start, end)
    assert (source.filter.tracked, len(source.passed), register.holding) == ({}, source.whole, set())


async def test_a_content_behind_a_delivery_is_not_its_own(register: CopyRegister) -> None:
    """basic.return has a content, too."""
    source = Source(register)
    deliver = methods.BasicDeliver(b"q", 1, False, b"e", b"key").frame(1)
    returned = content.message(methods.BasicReturn(312, b"", b"e", b"key").frame(1), 1, marked(), BODY, 1000)
    buffer, frames = FrameSplitter(0).feed(deliver + returned)
    for key, _, start, end in frames:
        source.filter.frame(key, buffer, start, end)
    assert not source.filter.tracked


async def test_without_a_window_copies_are_known_for_ever(log: Log) -> None:
    register = CopyRegister(log.write, lambda: True, window=0)
    await replay(register)
    await asyncio.sleep(0.01)
    assert register.filters


async def test_a_message_that_was_perhaps_put_back_is_suppressed(register: CopyRegister, log: Log) -> None:
    """It is not known whether a branch has taken it: the message that is put back replaces it."""
    register.end(BRANCH)
    source = Source(register)
    row = a_consume(exchange=b"e", routing_key=b"key", queue=b"q", properties=marked(), body=BODY)
    moved = register.movable("/", row)
    assert moved is not None
    await register.move([moved])
    assert source.deliver(1, marked(), again=True) == 0
    assert source.deliver(2, marked(), queue=b"another") == source.whole
    await until_idle()
    assert (source.settled, log.suppressed) == ([(1, False)], [BODY])


async def test_a_message_perhaps_put_back_stays_suppressed_after_a_restart(register: CopyRegister, log: Log) -> None:
    await register.move([perhaps_taken(register)])
    ((row,),) = (record.settlements for record in log.written if isinstance(record, SettlementsWrite))
    restarted = CopyRegister(log.write, lambda: True)
    restarted.load(LoggedCopies(settlements=(row,)))
    source = Source(restarted)
    assert source.deliver(1, marked(), again=True) == 0
    assert source.deliver(2, marked(), queue=b"another") == source.whole

"""The contract of the log for messages and topology, for PostgreSQL and its in-memory twin."""

import asyncio
from dataclasses import replace

import pytest

from dtx.log.api import LogConflict, LogError, MessageLog
from dtx.log.changes import Change, Define, Definitions, DestinationKind, ExchangeKey, QueueContents, Slot, Store
from dtx.log.records import JournalEvent, LogState, NoteWrite
from tests.contract.conftest import OpenLog
from tests.support.branches import a_branch, a_completion, a_line, all_of, an_insert
from tests.support.stored import QUEUE, a_binding, a_message, a_queue, an_exchange, drops, puts


async def contents_of(log: MessageLog, queue: int = QUEUE, *, detailed: bool = False) -> QueueContents:
    (contents,) = [found async for found in log.load_queues([queue], detailed={queue} if detailed else ())]
    return contents


async def positions_in(log: MessageLog, queue: int = QUEUE) -> list[int]:
    return (await contents_of(log, queue)).positions.tolist()


async def test_a_stored_message_reads_back_byte_by_byte(log: MessageLog) -> None:
    """Bytes stay bytes."""
    plain = a_message(body=bytes(range(256)) * 64, properties=b"")
    transient = a_message(flags=-(2**31), expires_at=1_800_000_000.123456, body=b"", exchange=b"", routing_key=b"")
    await log.write(Store(change=puts(plain, transient)))
    gone = a_message()
    assert await log.read_messages([gone.slot, transient.slot, plain.slot]) == {
        plain.slot: plain,
        transient.slot: transient,
    }
    assert await log.which_exist([gone.slot, plain.slot]) == {plain.slot}
    assert await log.read_messages([]) == {}
    assert await log.which_exist([]) == set()


async def test_bodies_are_read_up_to_a_number_of_bytes(log: MessageLog) -> None:
    """Every buffer has a limit; at least one message is returned, whatever its size."""
    messages = [a_message(body=bytes(size)) for size in (5000, 0, 3000, 1, 9)]
    slots = [message.slot for message in messages]
    await log.write(Store(change=puts(*messages)))
    for octets, expected in ((1, 1), (5000, 1), (5001, 3), (8001, 4), (10**9, 5)):
        assert list(await log.read_messages([a_message().slot, *slots], octets)) == slots[:expected]
    assert list(await log.read_messages(slots[::-1])) == slots[::-1]


async def test_a_shared_body_lasts_as_long_as_its_last_message(log: MessageLog) -> None:
    body = bytes(range(256)) * 64
    messages = [a_message(queue=QUEUE - number, body=body, shared=1) for number in range(3)]
    other = a_message(body=body[::-1], shared=2)
    await log.write(Store(change=puts(*messages, other)))
    for left in range(3):
        slots = [message.slot for message in messages]
        assert await log.read_messages(slots) == {message.slot: message for message in messages[left:]}
        await log.write(Store(change=drops(messages[left])))
    assert await log.read_messages([other.slot]) == {other.slot: other}


async def test_a_shared_body_counts_in_full_for_each_message(log: MessageLog) -> None:
    messages = [a_message(queue=QUEUE - number, body=bytes(3000), shared=1) for number in range(3)]
    await log.write(Store(change=puts(*messages)))
    assert list((await contents_of(log, QUEUE - 1, detailed=True)).sizes or ()) == [3000]
    slots = [message.slot for message in messages]
    assert list(await log.read_messages(slots, 3001)) == slots[:2]


async def test_messages_of_one_change_come_together_or_not_at_all(log: MessageLog) -> None:
    """A record that puts a message into an occupied slot is refused."""
    taken = a_message()
    await log.write(Store(change=puts(taken)))
    other = a_message()
    with pytest.raises(LogConflict):
        await log.write(Store(change=Change(puts=[other, taken], drops=[taken.slot])))
    with pytest.raises(LogConflict):
        await log.write(Store(change=puts(other, other)))
    assert await positions_in(log) == [taken.position]


async def test_a_refused_change_does_not_fail_others(log: MessageLog) -> None:
    taken = a_message()
    await log.write(Store(change=puts(taken)))
    good = [a_message() for _ in range(20)]
    results = await asyncio.gather(
        *(log.write(Store(change=puts(message))) for message in (*good[:10], taken, *good[10:])), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None)] * 10 + [LogConflict] + [type(None)] * 10
    assert await positions_in(log) == [taken.position, *(message.position for message in good)]


async def test_a_missing_message_may_be_dropped_again(log: MessageLog) -> None:
    """Dropping a message that does not exist is no error."""
    message = a_message()
    await log.write(Store(change=puts(message)))
    await log.write(Store(change=drops(message, a_message())))
    await log.write(Store(change=drops(message, message)))
    assert await positions_in(log) == []


async def test_a_slot_put_and_dropped_in_one_group_is_gone(log: MessageLog) -> None:
    """Statements run by kind, not in order: puts come first, then drops."""
    first, second, third = a_message(), a_message(), a_message()
    await asyncio.gather(
        log.write(Store(change=puts(first))),
        log.write(Store(change=drops(first))),
        log.write(Store(change=Change(puts=[second, third], drops=[third.slot]))),
    )
    assert await positions_in(log) == [second.position]


async def test_submitted_records_are_written_in_order(log: MessageLog) -> None:
    messages = [a_message() for _ in range(10)]
    told: list[LogError | None] = []
    for message in messages:
        log.post(Store(change=puts(message)), told.append)
    for message in messages[::2]:
        log.post(Store(change=drops(message)), told.append, urgent=False)
    assert not told, "no callback runs before the call has returned"
    done: asyncio.Future[LogError | None] = asyncio.get_running_loop().create_future()
    log.post(Store(change=Change()), done.set_result)
    await done
    assert told == [None] * 15
    assert await positions_in(log) == [message.position for message in messages[1::2]]
    await log.settled()
    assert not log.congested


async def test_an_expiry_is_changed_only_where_the_message_is(log: MessageLog) -> None:
    message, gone = a_message(), a_message()
    await log.write(Store(change=puts(message)))
    await log.write(Store(change=Change(expiries=[(message.slot, 1_900_000_000.5), (gone.slot, 1.0)])))
    assert await log.read_messages([message.slot, gone.slot]) == {
        message.slot: message._replace(expires_at=1_900_000_000.5)
    }


async def test_properties_are_changed_only_where_the_message_is(log: MessageLog) -> None:
    message, other, gone = a_message(), a_message(), a_message()
    await log.write(Store(change=puts(message, other)))
    await log.write(Store(change=Change(revisions=[(message.slot, b"\x00\x00"), (gone.slot, b"\x00\x00")])))
    await log.write(Store(change=Change(revisions=[(other.slot, b"\x00\x00")], drops=[other.slot])))
    assert await log.read_messages([message.slot, other.slot, gone.slot]) == {
        message.slot: message._replace(properties=b"\x00\x00")
    }


async def test_a_start_learns_of_a_queue_without_reading_bodies(log: MessageLog) -> None:
    """Recovery loads positions of messages; bodies are read when needed."""
    first = a_message(flags=1 | 9 << 8)
    second = a_message(flags=0, expires_at=1_800_000_000.25, body=b"abc")
    third = a_message(flags=1, body=b"")
    elsewhere = a_message(queue=7)
    await log.write(Store(change=puts(third, elsewhere, first, second)))
    contents = await contents_of(log, detailed=True)
    assert contents.positions.tolist() == [first.position, second.position, third.position]
    assert contents.transient.tolist() == [second.position]
    assert list(contents.expiries) == [(second.position, 1_800_000_000.25)]
    assert contents.flags is not None
    assert contents.flags.tolist() == [first.flags, 0, 1]
    assert contents.sizes is not None
    assert contents.sizes.tolist() == [5, 3, 0]
    several = [found async for found in log.load_queues([7, 8, QUEUE], detailed={8})]
    assert [(found.queue, len(found.positions), found.flags is None) for found in several] == [
        (7, 1, True),
        (8, 0, False),
        (QUEUE, 3, True),
    ]


async def test_many_queues_are_loaded_in_their_order(log: MessageLog) -> None:
    messages = [a_message(queue=queue) for queue in range(1, 131)]
    await log.write(Store(change=puts(*messages)))
    wanted = [message.queue for message in reversed(messages)]
    assert [found.queue async for found in log.load_queues(wanted)] == wanted


async def test_a_branch_that_has_voted_keeps_its_slots_and_messages(log: MessageLog) -> None:
    """The published messages of a prepared branch are in the log; the branch has their slots."""
    held, message = a_message(), a_message()
    await log.write(Store(change=puts(held)))
    branch = a_branch(published=(message.slot,), consumed=(held.slot, Slot(2**62, 2**63 - 1)))
    await log.write(replace(an_insert(branch), work=(), change=puts(message)))
    assert await all_of(log.load()) == {branch.id: branch}
    assert (await log.lookup("/", branch.xid)).branch == branch
    assert await positions_in(log) == [held.position, message.position]


async def test_a_branch_of_the_other_mode_has_no_slots(log: MessageLog) -> None:
    """The slots are None in alongside mode, and an empty tuple in standalone mode without messages."""
    alongside, standalone = a_branch(), a_branch(published=(), consumed=())
    for branch in (alongside, standalone):
        await log.write(an_insert(branch))
    assert await all_of(log.load()) == {alongside.id: alongside, standalone.id: standalone}


async def test_a_branch_ends_with_its_change_or_not_at_all(log: MessageLog) -> None:
    """Commit is one database transaction that deletes consumed rows and the branch, and writes the journal."""
    held, message = a_message(), a_message()
    branch = a_branch(published=(message.slot,), consumed=(held.slot,))
    await log.write(Store(change=puts(held)))
    await log.write(replace(an_insert(branch), work=(), change=puts(message)))
    with pytest.raises(LogConflict):
        await log.write(replace(a_completion(branch, version=7), change=drops(held)))
    assert len(await positions_in(log)) == 2
    await log.write(replace(a_completion(branch), change=drops(held)))
    assert await positions_in(log) == [message.position]
    assert await all_of(log.load()) == {}


async def test_a_refused_branch_stores_no_message(log: MessageLog) -> None:
    branch, message = a_branch(), a_message()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(replace(an_insert(a_branch(xid=branch.xid)), work=(), change=puts(message)))
    assert await positions_in(log) == []
    await log.write(Store(change=puts(message)))
    again = a_branch()
    with pytest.raises(LogConflict):
        await log.write(replace(an_insert(again), work=(), change=puts(message)))
    assert (await log.lookup("/", again.xid)).branch is None


async def test_a_one_phase_commit_is_a_note_with_its_branch(log: MessageLog) -> None:
    """The branch id of the ending decides an unknown outcome afterwards."""
    held, message = a_message(), a_message()
    await log.write(Store(change=puts(held)))
    line = a_line(a_branch(state=LogState.PREPARED), JournalEvent.COMMITTED, one_phase=True)
    await log.write(NoteWrite(journal=line, change=Change(puts=[message], drops=[held.slot])))
    assert await positions_in(log) == [message.position]
    ending = (await log.lookup("/", line.xid)).ending
    assert ending is not None
    assert ending.branch_id == line.branch_id


TOPOLOGY = Define(
    exchanges=[an_exchange(), an_exchange(name=b"other", type="x-\xfc", internal=True, auto_delete=True)],
    queues=[a_queue(), a_queue(id=9, vhost="v", auto_delete=True, arguments=b"\x01x" * 3000)],
    bindings=[
        a_binding(),
        a_binding(arguments=b"\x00" * 5000),
        a_binding(destination_kind=DestinationKind.EXCHANGE, destination=b"other"),
    ],
)


def as_sets(found: Definitions) -> tuple[set[object], set[object], set[object]]:
    return set(found.exchanges), set(found.queues), set(found.bindings)


ALL = (set(TOPOLOGY.exchanges), set(TOPOLOGY.queues), set(TOPOLOGY.bindings))


async def test_topology_is_kept_and_may_be_written_again(log: MessageLog) -> None:
    for _ in range(2):
        await log.write(TOPOLOGY)
        assert as_sets(await log.load_definitions()) == ALL


async def test_topology_goes_piece_by_piece(log: MessageLog) -> None:
    await log.write(TOPOLOGY)
    gone = Define(
        removed_exchanges=[TOPOLOGY.exchanges[0].key, ExchangeKey("/", b"never there")],
        removed_queues=[9, 10],
        removed_bindings=[TOPOLOGY.bindings[1], a_binding(routing_key=b"never there")],
    )
    for _ in range(2):
        await log.write(gone)
        assert as_sets(await log.load_definitions()) == (
            {TOPOLOGY.exchanges[1]},
            {TOPOLOGY.queues[0]},
            {TOPOLOGY.bindings[0], TOPOLOGY.bindings[2]},
        )


async def test_one_record_or_group_may_delete_and_declare_a_name(log: MessageLog) -> None:
    """In a record, deletions come before additions; records of topology are written in order."""
    await log.write(TOPOLOGY)
    second, third = a_queue(id=20), a_queue(id=21)
    await asyncio.gather(
        log.write(Define(queues=[second], removed_queues=[QUEUE])),
        log.write(Define(removed_queues=[second.id])),
        log.write(Define(queues=[third], exchanges=[an_exchange(type="fanout")])),
    )
    found = await log.load_definitions()
    assert set(found.queues) == {third, TOPOLOGY.queues[1]}
    assert an_exchange(type="fanout") in found.exchanges


async def test_two_queues_do_not_share_a_name(log: MessageLog) -> None:
    await log.write(TOPOLOGY)
    with pytest.raises(LogConflict):
        await log.write(Define(queues=[a_queue(id=30)], exchanges=[an_exchange(name=b"new")]))
    assert as_sets(await log.load_definitions()) == ALL


async def test_the_mark_of_delivered_messages_only_grows(log: MessageLog) -> None:
    await log.write(Define(queues=[a_queue()]))
    for marks in ([(QUEUE, 5), (QUEUE, 9), (QUEUE, 7)], [(QUEUE, 3), (99, 4)]):
        await log.write(Store(change=Change(delivered=marks)))
        assert (await log.load_definitions()).queues == (a_queue(delivered=9),)


async def test_messages_of_unknown_queues_are_found(log: MessageLog) -> None:
    """The store drops messages of missing queues in the background."""
    await log.write(Define(queues=[a_queue()]))
    await log.write(Store(change=puts(*(a_message(queue=queue) for queue in (QUEUE, 3, 4, 4, 5)))))
    assert sorted(await log.stray_queues([QUEUE, 4])) == [3, 5]
    assert await log.stray_queues([3, 4, 5, QUEUE]) == []
    assert len(await log.stray_queues([])) == 4


async def test_resource_managers_keep_their_messages_apart(open_log: OpenLog) -> None:
    mine, other = await open_log("mine"), await open_log("other")
    message = a_message()
    await mine.write(Store(change=puts(message)))
    await mine.write(TOPOLOGY)
    await other.write(
        Store(
            change=Change(
                drops=[message.slot],
                expiries=[(message.slot, 1.0)],
                revisions=[(message.slot, b"")],
                delivered=[(QUEUE, 5)],
            )
        )
    )
    await other.write(
        Define(
            removed_queues=[QUEUE],
            removed_exchanges=[row.key for row in TOPOLOGY.exchanges],
            removed_bindings=TOPOLOGY.bindings,
        )
    )
    assert as_sets(await mine.load_definitions()) == ALL
    assert await other.load_definitions() == Definitions()
    assert await mine.read_messages([message.slot]) == {message.slot: message}
    assert await other.stray_queues([]) == []


async def test_a_later_log_finds_messages_and_topology(open_log: OpenLog) -> None:
    first = await open_log()
    message = a_message()
    await first.write(Store(change=puts(message)))
    await first.write(TOPOLOGY)
    await first.close()
    second = await open_log()
    assert as_sets(await second.load_definitions()) == ALL
    assert await positions_in(second) == [message.position]


@pytest.mark.parametrize("slot", [{"queue": 0}, {"queue": -1}, {"position": -1}], ids=["zero", "negative", "position"])
async def test_a_slot_that_is_none_is_refused(log: MessageLog, slot: dict[str, int]) -> None:
    with pytest.raises(LogConflict):
        await log.write(Store(change=puts(a_message(**slot))))

"""The contract of the log about copies: replays, settlements and duplicates, for PostgreSQL and its in-memory twin."""

import asyncio
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from dtx.log import queries
from dtx.log.api import LeaseLost, LogConflict, MessageLog
from dtx.log.records import (
    MOVED,
    DuplicateWrite,
    LoggedCopies,
    LogState,
    LogWrite,
    SettledCopy,
    SettlementsWrite,
)
from tests.contract.conftest import OpenLog
from tests.support.branches import (
    a_branch,
    a_commit,
    a_completion,
    a_duplicate,
    a_publish,
    a_replay,
    a_settlement,
    a_unit,
    all_of,
    an_insert,
)
from tests.support.memory_log import Fault, MemoryLog


def settled(*settlements: SettledCopy) -> SettlementsWrite:
    return SettlementsWrite(settlements=settlements)


async def test_a_unit_has_the_number_of_its_attempt(log: MessageLog) -> None:
    branch = a_branch(units=(a_unit(),))
    await log.write(an_insert(branch))
    again = a_unit(attempt=2)
    await log.write(a_commit(branch, unit=again))
    (loaded,) = (await all_of(log.load())).values()
    assert (branch.units[0].attempt, loaded.units) == (1, (again,))
    assert (await log.lookup("/", branch.xid)).branch == loaded


async def test_replays_are_written_with_the_advance(log: MessageLog) -> None:
    branch = a_branch(publishes=2)
    await log.write(an_insert(branch, a_publish(0), a_publish(1)))
    replays = a_replay(0), a_replay(1, exchange=b"", routing_key=b"q\xff", digest=b"")
    await log.write(a_commit(branch, unit=a_unit(attempt=2), replays=replays))
    assert await log.load_copies() == LoggedCopies(replays=tuple((branch.id, replay) for replay in replays))


@pytest.mark.parametrize(
    "changes",
    [{"version": 7}, {"expect": LogState.TAKING}, {"units_done": (7,)}, {"replays": (a_replay(), a_replay())}],
    ids=["version", "state", "unit", "position"],
)
async def test_a_refused_advance_writes_no_replay(log: MessageLog, changes: dict[str, Any]) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    with pytest.raises(LogConflict):
        await log.write(a_commit(branch, **({"replays": (a_replay(),)} | changes)))
    assert await log.load_copies() == LoggedCopies()
    assert (await log.lookup("/", branch.xid)).branch == branch


async def test_the_first_replay_of_a_message_stays(log: MessageLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    await log.write(a_commit(branch, replays=(a_replay(),)))
    later = a_replay(exchange=b"elsewhere"), a_replay(1)
    await log.write(a_commit(branch, expect=LogState.COMMITTING, version=2, replays=later))
    assert (await log.load_copies()).replays == ((branch.id, a_replay()), (branch.id, later[1]))


async def test_the_first_settlement_of_a_message_in_a_queue_stays(log: MessageLog) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    first, elsewhere = a_settlement(branch, attempt=2), a_settlement(branch, queue=b"other")
    await log.write(settled(first, elsewhere, a_settlement(branch, attempt=3)))
    await log.write(settled(a_settlement(branch), a_settlement(branch, 1)))
    assert (await log.load_copies()).settlements == (first, elsewhere, a_settlement(branch, 1))


async def test_of_settlements_that_come_together_the_first_one_stays(log: MessageLog) -> None:
    """They are written in one group, in their order."""
    branch = a_branch()
    await log.write(an_insert(branch))
    records = [settled(a_settlement(branch, attempt=attempt)) for attempt in range(2, 30)]
    await asyncio.gather(*(log.write(record, urgent=attempt % 2 == 0) for attempt, record in enumerate(records)))
    assert (await log.load_copies()).settlements == (a_settlement(branch, attempt=2),)


async def test_settlements_are_loaded_while_a_second_copy_is_possible(log: MessageLog) -> None:
    replayed, normal = a_branch(), a_branch()
    for branch in (replayed, normal):
        await log.write(an_insert(branch))
    await log.write(settled(*(a_settlement(branch, position) for branch in (replayed, normal) for position in (0, 1))))
    assert len((await log.load_copies()).settlements) == 4
    await log.write(a_commit(replayed, replays=(a_replay(1),)))
    await log.write(a_completion(replayed, expect=LogState.COMMITTING, version=2))
    await log.write(a_completion(normal))
    assert await log.load_copies() == LoggedCopies(
        replays=((replayed.id, a_replay(1)),), settlements=(a_settlement(replayed, 1),)
    )


async def test_a_message_that_was_moved_stays_known(log: MessageLog) -> None:
    """The branch that has published it may have ended long before."""
    branch = a_branch()
    moved = a_settlement(branch, attempt=MOVED)
    await log.write(settled(moved, a_settlement(branch, 1)))
    assert (await log.load_copies()).settlements == (moved,)


async def test_a_moved_message_replaces_an_earlier_settlement(log: MessageLog) -> None:
    """A client has settled a copy, the broker has delivered it again, and a branch has perhaps taken it."""
    branch = a_branch()
    await log.write(an_insert(branch))
    await log.write(settled(a_settlement(branch)))
    moved = a_settlement(branch, attempt=MOVED)
    records = [settled(moved, moved), settled(a_settlement(branch)), settled(moved)]
    await asyncio.gather(*(log.write(record) for record in records))
    assert (await log.load_copies()).settlements == (moved,)


async def test_a_duplicate_is_kept_once_with_its_contents(log: MessageLog) -> None:
    branch, other = a_branch(), a_branch()
    duplicate, third = a_duplicate(branch), a_duplicate(branch, attempt=3, properties=b"", body=b"")
    for record in (duplicate, third, a_duplicate(branch, body=b"changed"), a_duplicate(other)):
        await log.write(DuplicateWrite(duplicate=record))
    assert await log.read_duplicates([branch.id]) == [duplicate, third]
    assert await log.read_duplicates([]) == []
    assert len(await log.read_duplicates({branch.id, other.id})) == 3
    suppressed = (await log.load_copies()).suppressed
    assert set(suppressed) == {
        a_settlement(branch, attempt=2), a_settlement(branch, attempt=3), a_settlement(other, attempt=2),
    }  # fmt: skip


async def test_copies_are_there_after_a_restart(open_log: OpenLog) -> None:
    log, other = await open_log(), await open_log("other")
    branch = a_branch()
    await log.write(an_insert(branch))
    await log.write(a_commit(branch, replays=(a_replay(),)))
    await log.write(settled(a_settlement(branch)))
    await log.write(DuplicateWrite(duplicate=a_duplicate(branch)))
    before = await log.load_copies()
    assert before == LoggedCopies(
        replays=((branch.id, a_replay()),),
        settlements=(a_settlement(branch),),
        suppressed=(a_settlement(branch, attempt=2),),
    )
    await log.close()
    successor = await open_log()
    assert await successor.load_copies() == before
    assert await other.load_copies() == LoggedCopies()
    assert await other.read_duplicates([branch.id]) == []


@pytest.mark.parametrize("at_once", [3, 20, 100])
async def test_many_copies_are_loaded(log: MessageLog, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read page by page: none is left out or read twice."""
    monkeypatch.setattr(queries, "COPIES_AT_ONCE", at_once)
    branches = sorted([a_branch(publishes=4) for _ in range(5)], key=lambda branch: branch.id)
    keys = [(branch, position) for branch in branches for position in range(4)]
    for branch in branches:
        await log.write(an_insert(branch))
        await log.write(a_commit(branch, replays=tuple(map(a_replay, range(4)))))
    settlements = [a_settlement(*key, queue=queue) for key in keys for queue in (b"a", b"b")]
    await log.write(settled(*reversed(settlements)))
    for key in reversed(keys):
        await log.write(DuplicateWrite(duplicate=a_duplicate(*key)))
    assert await log.load_copies() == LoggedCopies(
        replays=tuple((branch.id, a_replay(position)) for branch, position in keys),
        settlements=tuple(settlements),
        suppressed=tuple(a_settlement(*key, attempt=2) for key in keys),
    )


@pytest.mark.parametrize("wrong", [{"attempt": 0}, {"position": -1}], ids=["attempt", "position"])
async def test_numbers_of_copies_are_checked(log: MessageLog, wrong: dict[str, Any]) -> None:
    branch = a_branch()
    await log.write(an_insert(branch))
    for record in (
        settled(a_settlement(branch, 5), a_settlement(branch, **wrong)),
        DuplicateWrite(duplicate=a_duplicate(branch, **wrong)),
    ):
        with pytest.raises(LogConflict):
            await log.write(record)
    assert await log.load_copies() == LoggedCopies()


@pytest.mark.parametrize("kind", ["advance", "settlements", "duplicate"])
async def test_without_the_lease_nothing_is_written(
    open_log: OpenLog, kind: str, request: pytest.FixtureRequest
) -> None:
    log = await open_log()
    branch = a_branch()
    await log.write(an_insert(branch))
    records: dict[str, LogWrite] = {
        "advance": a_commit(branch, replays=(a_replay(),)),
        "settlements": settled(a_settlement(branch)),
        "duplicate": DuplicateWrite(duplicate=a_duplicate(branch)),
    }
    if isinstance(log, MemoryLog):
        log.faults.append(Fault.LEASE_LOST)
    else:
        with psycopg.connect(request.getfixturevalue("migrated_postgres_url")) as connection:
            connection.execute("UPDATE dtx.lease SET epoch = epoch + 1, instance = gen_random_uuid()")
    with pytest.raises(LeaseLost):
        await log.write(records[kind])
    assert await log.load_copies() == LoggedCopies()


async def test_the_copies_of_some_branches_are_read_alone(log: MessageLog) -> None:
    branch, other = a_branch(), a_branch()
    for each in (branch, other):
        await log.write(an_insert(each))
        await log.write(a_commit(each, unit=a_unit(attempt=2), replays=(a_replay(),)))
        await log.write(settled(a_settlement(each)))
        await log.write(DuplicateWrite(duplicate=a_duplicate(each)))
    found = await log.load_copies([branch.id, uuid4()])
    assert found.replays == ((branch.id, a_replay()),)
    assert found.settlements == (a_settlement(branch),)
    assert [row.branch_id for row in found.suppressed] == [branch.id]
    assert await log.load_copies([branch.id], 0) == found
    assert await log.load_copies([branch.id], 1) == LoggedCopies()
    assert await log.load_copies([]) == LoggedCopies()


async def test_the_log_knows_which_branches_have_not_ended(log: MessageLog) -> None:
    branch, other = a_branch(), a_branch()
    for each in (branch, other):
        await log.write(an_insert(each))
    await log.write(a_completion(other))
    assert await log.unended([branch.id, other.id, uuid4()]) == {branch.id}
    assert await log.unended([]) == set()

"""Several active dtx of one resource manager: each writes its own branches, and takes those of one that is gone."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from uuid import UUID, uuid4

import psycopg
import pytest

from dtx.log import statements
from dtx.log.api import DuplicateXid, LeaseHeld, LeaseLost, LogUnavailable
from dtx.log.membership import _IS_MEMBER, _ONE_AT_A_TIME, Member, Membership
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import Insert
from tests.servers.log.conftest import OpenLog
from tests.servers.log.test_lease import stop_renewing
from tests.support.branches import a_branch, a_completion, all_of, an_insert

ADDRESS = "amqp://127.0.0.1:5672"
TTL = 1.0


def membership(log: PostgresTransactionLog) -> Membership:
    """The lease of a member."""
    assert log.membership is not None
    return log.membership


async def branch_of(log: PostgresTransactionLog) -> UUID:
    """A branch that *log* has written."""
    branch = a_branch()
    await log.write(an_insert(branch))
    return branch.id


async def until_gone(log: PostgresTransactionLog, other: PostgresTransactionLog) -> None:
    """Wait until *log* sees that the lease of *other* has run out."""
    while True:
        found = {member.instance: member for member in await membership(log).read()}
        if found[other.instance].expired:
            return
        await asyncio.sleep(0.05)


async def test_members_write_at_the_same_time(open_log: OpenLog) -> None:
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    mine, theirs = await branch_of(first), await branch_of(second)
    assert first.lease_valid
    assert second.lease_valid
    assert first.id == second.id
    assert set(await all_of(first.load(first.member))) == {mine}
    assert set(await all_of(first.load(second.member))) == {theirs}
    assert set(await all_of(second.load())) == {mine, theirs}
    (member,) = await membership(first).read()
    assert (member.instance, member.address, member.expired, member.dead) == (second.instance, ADDRESS, False, False)


async def test_branches_of_a_member_without_lease_are_taken(open_log: OpenLog) -> None:
    first, second = [await open_log(address=ADDRESS, lease_ttl=TTL) for _ in range(2)]
    theirs, mine = await branch_of(first), await branch_of(second)
    gone = frozenset({first.instance})
    assert await membership(second).adopt(gone) == 0  # its lease is valid
    await stop_renewing(first)
    await until_gone(second, first)
    assert await membership(second).adopt(gone) == 1
    assert set(await all_of(second.load(second.member))) == {mine, theirs}
    with pytest.raises(LeaseLost):
        await branch_of(first)
    assert membership(first).lost.is_set()
    assert set(await all_of(second.load())) == {mine, theirs}


async def test_a_member_that_renews_late_keeps_its_branches(open_log: OpenLog) -> None:
    first, second = [await open_log(address=ADDRESS, lease_ttl=TTL) for _ in range(2)]
    theirs = await branch_of(first)
    await stop_renewing(first)
    await until_gone(second, first)
    await membership(first).renew()
    assert await membership(second).adopt(frozenset({first.instance})) == 0
    assert first.lease_valid
    assert set(await all_of(first.load(first.member))) == {theirs}


async def test_a_member_that_leaves_hands_its_branches_over(open_log: OpenLog) -> None:
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    theirs = await branch_of(first)
    adopted = asyncio.Event()

    async def note() -> None:
        adopted.set()

    await membership(second).read()
    membership(second).watch(note)
    await first.close()
    await asyncio.wait_for(adopted.wait(), 5)
    assert set(await all_of(second.load(second.member))) == {theirs}


async def test_the_first_of_new_members_gets_all_branches(open_log: OpenLog) -> None:
    """Those of a dtx that was alone, and those of members that have left."""
    alone = await open_log()
    branches = {await branch_of(alone)}
    await alone.close()
    for _ in range(2):
        member = await open_log(address=ADDRESS)
        assert set(await all_of(member.load(member.member))) == branches
        branches.add(await branch_of(member))
        await member.close()
    alone = await open_log()
    assert set(await all_of(alone.load())) == branches


async def test_a_silent_member_takes_nothing_after_an_outage(open_log: OpenLog) -> None:
    """Leases that ran out while the database was away are renewed, not taken."""
    first, second = [await open_log(address=ADDRESS, lease_ttl=TTL) for _ in range(2)]
    lease = membership(second)
    await asyncio.sleep(TTL)
    await lease.renew()
    seen = [lease._may_take]
    await stop_renewing(first)
    await until_gone(second, first)
    await lease._disconnect()  # as after a failed renewal
    await lease.renew()
    seen.append(lease._may_take)
    await asyncio.sleep(TTL)
    await lease.renew()
    assert [*seen, lease._may_take] == [True, False, True]


async def test_a_member_and_a_lone_dtx_exclude_each_other(open_log: OpenLog, migrated_postgres_url: str) -> None:
    member = await open_log(address=ADDRESS, lease_ttl=TTL)
    alone = PostgresTransactionLog(migrated_postgres_url, "rm", lease_ttl=TTL)
    with pytest.raises(LeaseHeld, match="members"):
        await alone.open(wait=False)
    await stop_renewing(member)
    await asyncio.wait_for(alone.open(), 5 * TTL)  # as an older version would, which knows no members
    with pytest.raises(LeaseLost):
        await branch_of(member)
    with pytest.raises(LeaseHeld):
        await PostgresTransactionLog(migrated_postgres_url, "rm", address=ADDRESS).open(wait=False)
    await alone.close()


async def test_a_reconnected_member_has_a_new_epoch(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """A group that its lost session sent can still come: it must not prove its epoch."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    await branch_of(first)
    before = first.epoch
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
            [f"dtx writer {first.instance}"],
        )
    await branch_of(first)
    assert first.epoch > before
    assert first.epoch != second.epoch
    await branch_of(second)


async def test_two_members_never_take_the_same_branches(open_log: OpenLog) -> None:
    gone, *rest = [await open_log(address=ADDRESS, lease_ttl=TTL) for _ in range(4)]
    theirs = {await branch_of(gone) for _ in range(20)}
    await stop_renewing(gone)
    await until_gone(rest[0], gone)
    counts = await asyncio.gather(*(membership(log).adopt(frozenset({gone.instance})) for log in rest))
    assert [count for count in counts if count] == [len(theirs)]
    found = [set(await all_of(log.load(log.member))) for log in rest]
    assert sorted(map(len, found)) == [0, 0, len(theirs)]


async def until_a_writer_waits(url: str) -> None:
    """Wait until a writer waits for a lock."""
    waiting = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'dtx writer %' AND wait_event_type = 'Lock'"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, asyncio.timeout(10):
        while await (await connection.execute(waiting)).fetchone() is None:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("age", [0.0, 3 * 86_400.0], ids=["young", "old"])
async def test_a_vote_after_an_ending_elsewhere_is_refused(open_log: OpenLog, age: float) -> None:
    """One xid, two outcomes: the ending is later than the beginning of the branch that votes."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    before = first.moment
    ended = a_branch(started_at=time.time() - age)
    await second.write(an_insert(ended))
    await second.write(a_completion(ended))

    def a_vote(since: str | None) -> Insert:
        return an_insert(ended._replace(id=uuid4()), since=since)

    others = [an_insert(a_branch(), since=before) for _ in range(5)]
    votes = await asyncio.gather(first.write(a_vote(before)), *map(first.write, others), return_exceptions=True)
    assert [type(error) for error in votes] == [DuplicateXid, *[type(None)] * 5]
    await first.write(a_vote(None))
    mine = a_branch(started_at=time.time())
    for _ in range(2):  # its own endings are known before the next branch begins
        mine = mine._replace(id=uuid4())
        await first.write(an_insert(mine, since=before))
        await first.write(a_completion(mine))
    await membership(first).read()
    with pytest.raises(DuplicateXid):  # it began before
        await second.write(an_insert(mine, since=before))
    await second.write(an_insert(mine, since=first.moment))


async def test_a_vote_waits_for_an_ending_under_way(open_log: OpenLog, migrated_postgres_url: str) -> None:
    """The other branch leaves the log while this one enters it."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    ended = a_branch(started_at=time.time())
    await second.write(an_insert(ended))
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url) as slow:
        await slow.execute("DELETE FROM dtx.branch WHERE id = %s", [ended.id])
        vote = asyncio.ensure_future(first.write(an_insert(ended._replace(id=uuid4()), since=first.moment)))
        await until_a_writer_waits(migrated_postgres_url)
        line = (
            "INSERT INTO dtx.journal (rm, id, at, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, "
            "one_phase, publishes, consumes, bytes) "
            "SELECT rm, gen_random_uuid(), clock_timestamp(), 'committed', branch_id, vhost, format_id, gtrid, bqual, "
            "owner, actor, one_phase, publishes, consumes, bytes FROM dtx.journal WHERE branch_id = %s"
        )
        await slow.execute(line, [ended.id])
        await slow.commit()
    with pytest.raises(DuplicateXid):
        await vote


@pytest.mark.parametrize("order", [(0, 100_000), (100_000, 0)], ids=["first", "second"])
async def test_the_member_with_fewest_branches_takes_over(open_log: OpenLog, order: tuple[int, int]) -> None:
    counts: list[tuple[int, int, int]] = []

    def counting(load: int) -> Callable[[int, int], None]:
        def taken(members: int, branches: int) -> None:
            if branches:
                counts.append((load, members, branches))

        return taken

    logs = [await open_log(address=ADDRESS, on_adopted=counting(load)) for load in order]
    gone = await open_log(address=ADDRESS)
    await branch_of(gone)
    adopted = asyncio.Event()

    async def note() -> None:
        if counts:
            adopted.set()

    for log, load in zip(logs, order, strict=True):
        membership(log).watch(note, partial(int, load))
    await asyncio.sleep(1.5)  # both have looked
    await gone.close()
    await asyncio.wait_for(adopted.wait(), 2)
    assert counts == [(0, 0, 1)]


async def test_a_takeover_that_was_stopped_delays_others_for_one_lease(open_log: OpenLog) -> None:
    first, second = [await open_log(address=ADDRESS, lease_ttl=TTL) for _ in range(2)]
    stopped = await membership(first)._session()
    await stopped.execute("BEGIN")
    await stopped.execute(_ONE_AT_A_TIME, {"rm": "rm"})
    assert await membership(second).adopt() is None
    async with asyncio.timeout(10 * TTL):
        while await membership(second).adopt() is None:
            await asyncio.sleep(0.05)
    await stopped.close()


async def test_a_look_of_a_request_hides_no_handover(open_log: OpenLog) -> None:
    """The watch compares with its own last look: requests read the members as well."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    await branch_of(first)
    adopted = asyncio.Event()

    async def note() -> None:
        adopted.set()

    membership(second).watch(note)
    await asyncio.sleep(0.7)
    adopted.clear()
    await first.close()
    await membership(second).read()
    await asyncio.wait_for(adopted.wait(), 5)


@pytest.mark.parametrize("failure", ["adoption", "loading"])
async def test_branches_are_loaded_after_a_failure(
    open_log: OpenLog, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """The commit of an adoption may have happened although its answer was lost."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    await branch_of(first)
    lease, adopt, taken, loaded = membership(second), Membership.adopt, list[int | None](), asyncio.Event()

    async def failing(self: Membership, *given: frozenset[UUID]) -> int | None:
        count = await adopt(self, *given)
        if count:
            taken.append(count)
            if failure == "adoption":
                raise psycopg.OperationalError("server closed the connection")
        return count

    async def load() -> None:
        if taken == [1]:
            taken.append(None)
            if failure == "loading":
                raise LogUnavailable("the database is away")
        if taken:
            loaded.set()

    monkeypatch.setattr(Membership, "adopt", failing)
    lease.watch(load)
    await first.close()
    await asyncio.wait_for(loaded.wait(), 5)
    await asyncio.sleep(0.1)
    assert not lease.is_adopting


@pytest.mark.parametrize("what", ["group", "adoption"])
async def test_no_member_delays_the_renewals_of_others(
    open_log: OpenLog, migrated_postgres_url: str, what: str
) -> None:
    """A group that was stopped halfway, or a long adoption, locks the row of its member."""
    first, second = [await open_log(address=ADDRESS) for _ in range(2)]
    await branch_of(first)
    proof = statements.PROVE_LEASE.sql if what == "group" else _IS_MEMBER
    async with await psycopg.AsyncConnection.connect(migrated_postgres_url) as stopped:
        cursor = psycopg.AsyncRawCursor(stopped) if what == "group" else stopped.cursor()
        await cursor.execute(proof, ["rm", first.epoch] if what == "group" else {"instance": first.instance})
        for log in (first, second):
            await asyncio.wait_for(membership(log).renew(), 2)
        # but the row cannot go, and its epoch cannot change
        async with await psycopg.AsyncConnection.connect(migrated_postgres_url) as other:
            await other.execute("SET lock_timeout = 100")
            for change in ("DELETE FROM dtx.member", "UPDATE dtx.member SET epoch = epoch + 100"):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    await other.execute(f"{change} WHERE instance = %s", [first.instance])
                await other.rollback()
                await other.execute("SET lock_timeout = 100")
        await stopped.rollback()


async def test_callers_share_a_read_of_the_members(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await open_log(address=ADDRESS)
    lease, reads, read = membership(log), list[int](), Membership._read

    async def counting(self: Membership, session: psycopg.AsyncConnection) -> tuple[Member, ...]:
        reads.append(1)
        return await read(self, session)

    monkeypatch.setattr(Membership, "_read", counting)
    await asyncio.gather(*(lease.read() for _ in range(50)))
    assert len(reads) <= 2


async def test_callers_share_the_failure_of_a_read(open_log: OpenLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read before may not have the newest member."""
    lease = membership(await open_log(address=ADDRESS))
    read, begun = Membership._read, asyncio.Event()

    async def failing(self: Membership, session: psycopg.AsyncConnection) -> tuple[Member, ...]:
        begun.set()
        await asyncio.sleep(0.1)
        raise psycopg.OperationalError("server closed the connection")

    monkeypatch.setattr(Membership, "_read", failing)
    first = asyncio.ensure_future(lease.read())
    await begun.wait()
    others = [asyncio.ensure_future(lease.read()) for _ in range(3)]
    found = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(each) for each in found] == [LogUnavailable] * 4
    begun.clear()
    first = asyncio.ensure_future(lease.read())
    await begun.wait()
    reads = asyncio.ensure_future(lease.read())
    monkeypatch.setattr(Membership, "_read", read)
    joined = await open_log(address=ADDRESS)
    first.cancel()
    assert [member.instance for member in await reads] == [joined.instance]


async def test_a_member_that_was_there_all_the_time_stays_current(open_log: OpenLog) -> None:
    """It need not load the copies again, which may be very many, when it looks for branches."""
    lease, seen = membership(await open_log(address=ADDRESS)), list[bool]()

    async def adopted() -> None:
        seen.append(lease.is_current)

    lease.watch(adopted)
    while not seen:
        await asyncio.sleep(0.05)
    assert seen == [True]
    lease._valid_until = float("-inf")
    await lease.renew()
    assert not lease.is_current
    while len(seen) < 2:
        await asyncio.sleep(0.05)
    assert not seen[1]
    await asyncio.sleep(0.1)
    assert lease.is_current

"""Usage of users and virtual hosts, and their quotas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest

from dtx.config.rules import Quota, QuotaResource, parse_quotas
from dtx.manager import BranchManager, Limits, Requester
from dtx.manager.limits import _MOST_EMPTY
from dtx.store.work import HeldPublish
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.memory_log import Fault, MemoryDatabase, MemoryLog
from tests.unit.manager.test_fast_path import Preparing

WHO, OTHER = Requester("alice", "/"), Requester("bob", "/other")
BODY = bytes(1000)


@asynccontextmanager
async def a_manager(
    *quotas: str, branches: int = 100, database: MemoryDatabase | None = None, store: Preparing | None = None
) -> AsyncIterator[BranchManager]:
    log = MemoryLog("rm", database)
    await log.open()
    limits = Limits(branches=branches, quotas=parse_quotas(quotas))
    manager = BranchManager(log, store or Preparing(), limits, Metrics())
    await manager.start()
    yield manager
    await manager.close()
    await log.close()


def begin(manager: BranchManager, who: Requester = WHO) -> Xid:
    """Make an idle branch with one message."""
    xid = Xid(1, uuid4().bytes, b"")
    channel = object()
    started = manager.demarcate(who, xid, Operation.START, channel)
    assert started is not None
    work = started[1].work
    assert work is not None
    if not work.fits(len(BODY)):
        raise XaError(ReplyCode.RESOURCE_ERROR, work.excess(len(BODY)))
    work.add_publish(HeldPublish(b"x", b"key", False, b"", BODY))
    manager.demarcate(who, xid, Operation.END, channel)
    return xid


async def ask(manager: BranchManager, xid: Xid, operation: Operation, who: Requester = WHO) -> XaFlag | XaError:
    answered: asyncio.Future[XaFlag | XaError] = asyncio.get_running_loop().create_future()
    manager.ask(who, xid, operation, answered.set_result)
    async with asyncio.timeout(30):
        return await answered


def usage(manager: BranchManager) -> dict[str, dict[str, int]]:
    return {
        f"{found.scope} {found.name}": {name: number for name, number in found.used.items() if number}
        for found in manager.quotas
    }


async def test_prepared_branches_count_as_branches() -> None:
    """--max-branches bounds all branches that dtx keeps, including prepared and heuristic ones."""
    async with a_manager(branches=2) as manager:
        first, _ = [begin(manager) for _ in range(2)]
        assert await ask(manager, first, Operation.PREPARE) is XaFlag.OK
        with pytest.raises(XaError) as caught:
            begin(manager)
        assert caught.value.code is ReplyCode.RESOURCE_ERROR
        assert await ask(manager, first, Operation.COMMIT) is XaFlag.OK
        assert await manager.drain(30)
        manager.draining = False
        begin(manager)


@pytest.mark.parametrize("quota", ["user=alice branches=2", "vhost=/ branches=2", "user=* branches=2"])
async def test_a_user_at_the_quota_does_not_affect_others(quota: str) -> None:
    async with a_manager(quota) as manager:
        first, _ = [begin(manager) for _ in range(2)]
        with pytest.raises(XaError) as caught:
            begin(manager)
        assert caught.value.code is ReplyCode.RESOURCE_ERROR
        assert "has 2 branches, its quota is 2" in caught.value.reason
        begin(manager, OTHER)
        assert await ask(manager, first, Operation.ROLLBACK) is XaFlag.OK
        begin(manager)


async def test_a_prepare_beyond_the_quota_is_answered_with_a_rollback() -> None:
    async with a_manager("user=alice in-doubt=2") as manager:
        xids = [begin(manager) for _ in range(4)]
        answers = await asyncio.gather(*(ask(manager, xid, Operation.PREPARE) for xid in xids))
        assert answers == [XaFlag.OK, XaFlag.OK, XaFlag.RBROLLBACK, XaFlag.RBROLLBACK]
        with pytest.raises(XaError):
            begin(manager)
        assert await ask(manager, xids[0], Operation.COMMIT) is XaFlag.OK
        assert await manager.drain(30)
        manager.draining = False
        assert await ask(manager, begin(manager), Operation.PREPARE) is XaFlag.OK


async def test_bytes_are_counted_from_publish_to_commit() -> None:
    async with a_manager("user=alice bytes=2500") as manager:
        first, second = [begin(manager) for _ in range(2)]
        assert await ask(manager, first, Operation.PREPARE) is XaFlag.OK
        assert (usage(manager)["user alice"]["bytes"], manager.budget.used) == (2000, 1000)
        with pytest.raises(XaError, match="user 'alice' may hold 2500 bytes"):
            begin(manager)
        assert await ask(manager, first, Operation.COMMIT) is XaFlag.OK
        assert await ask(manager, second, Operation.ROLLBACK) is XaFlag.OK
        assert await manager.drain(30)
        assert usage(manager) == {"user alice": {"branches": 1}, "vhost /": {"branches": 1}}, "the refused branch stays"
        assert manager.budget.used == 0


@pytest.mark.parametrize("faults", [(), (Fault.ANSWER_LOST,)])
async def test_a_branch_counts_once_while_its_xid_starts_again(faults: tuple[Fault, ...]) -> None:
    """After the answer and before the end is durable, the branch does not count, and a start waits."""
    store = Preparing()
    async with a_manager("user=alice in-doubt=1", store=store) as manager:
        log, xid, channel = manager.log, begin(manager), object()
        assert isinstance(log, MemoryLog)
        assert await ask(manager, xid, Operation.PREPARE) is XaFlag.OK
        store.answering.clear()
        commit = asyncio.create_task(ask(manager, xid, Operation.COMMIT))
        while len(log.written) < 2:
            await asyncio.sleep(0)
        log.running.clear()
        log.faults.extend(faults)
        store.answering.set()
        assert await commit is XaFlag.OK
        assert usage(manager) == {}
        assert manager.demarcate(WHO, xid, Operation.START, channel) is None
        log.running.set()
        while manager.demarcate(WHO, xid, Operation.START, channel) is None:
            assert usage(manager) == {}
            await manager.settle(WHO, xid, Operation.START)
        assert usage(manager)["user alice"] == {"branches": 1}
        manager.demarcate(WHO, xid, Operation.END, channel)
        assert await ask(manager, xid, Operation.ROLLBACK) is XaFlag.OK
        assert usage(manager) == {}


async def test_branches_found_at_restart_are_counted_and_not_refused() -> None:
    database = MemoryDatabase()
    async with a_manager(database=database) as manager:
        xids = [begin(manager) for _ in range(3)]
        for xid in xids:
            assert await ask(manager, xid, Operation.PREPARE) is XaFlag.OK
    async with a_manager("user=alice branches=2 in-doubt=2 bytes=100", branches=1, database=database) as manager:
        assert usage(manager)["user alice"] == {"branches": 3, "in-doubt": 3, "bytes": 3000}
        for xid in xids:
            assert await ask(manager, xid, Operation.COMMIT) is XaFlag.OK
        assert await manager.drain(30)
        assert usage(manager) == {}


async def test_repeated_users_leave_no_memory() -> None:
    """The number of names is bounded, and holdings in use are kept."""
    async with a_manager("user=* branches=1") as manager:
        kept = begin(manager)
        for number in range(10_000):
            held = manager.quotas.of(f"user {number}", "/")
            held.add(QuotaResource.CONNECTIONS)
            held.remove(QuotaResource.CONNECTIONS)
        assert len(manager.quotas._holdings) <= _MOST_EMPTY
        assert len(manager.quotas._usages) <= 2 * _MOST_EMPTY
        with pytest.raises(XaError, match="user 'alice' has 1 branches, its quota is 1"):
            begin(manager)
        assert await ask(manager, kept, Operation.ROLLBACK) is XaFlag.OK
        begin(manager)


def test_quotas_are_read_and_written() -> None:
    text = "'user=a b' branches=5 bytes=1048576; vhost=* in-doubt=2 connections=3 channels=4"
    quotas = parse_quotas(text)
    assert quotas == (
        Quota(scope="user", name="a b", limits=(("branches", 5), ("bytes", 1 << 20))),
        Quota(scope="vhost", name="*", limits=(("in-doubt", 2), ("connections", 3), ("channels", 4))),
    )
    assert parse_quotas([str(quota) for quota in quotas]) == parse_quotas(quotas) == quotas


@pytest.mark.parametrize(
    "text",
    [
        "user=a",
        "branches=5",
        "user= branches=5",
        "group=a branches=5",
        "user=a branches",
        "user=a branches=many",
        "user=a branches=1 branches=2",
        "user=a cats=5",
        "user=a branches=1; user=a bytes=2",
    ],
)
def test_an_invalid_quota_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="quota"):
        parse_quotas(text)

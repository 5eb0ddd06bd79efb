"""How long dtx remembers branches that were rolled back on their own, and the answers after a branch has ended."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dtx.manager import BranchManager, Limits, Requester, branches, effects, maintenance, manager
from dtx.store.work import HeldPublish
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.memory_log import Fault, MemoryDatabase, MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_local import Ledger

WHO = Requester("guest", "/")
XID = Xid(1, b"gtrid", b"bqual")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock of managers that are made later. They look at it all the time."""
    seconds = [100.0]
    clock = SimpleNamespace(monotonic=lambda: seconds[0], time=time.time)
    for module in (branches, effects, manager, maintenance):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(maintenance, "_TICK", 0)
    return lambda later: seconds.__setitem__(0, 100.0 + later)


async def doomed() -> BranchManager:
    """A manager with a branch that failed."""
    log = MemoryLog("rm", MemoryDatabase())
    found = BranchManager(log, Ledger(), Limits(tombstone_ttl=60), Metrics())
    await log.open()
    await found.start()
    found.demarcate(WHO, XID, Operation.START, 1)
    found.demarcate(WHO, XID, Operation.FAIL, 1)
    return found


async def looks() -> None:
    """Let the manager look at its clock several times."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("seconds", "answer"), [(59, XaFlag.RBROLLBACK), (66, ReplyCode.NOT_FOUND)])
async def test_a_tombstone_answers_one_rollback_until_it_expires(
    now: Callable[[float], None], seconds: float, answer: XaFlag | ReplyCode
) -> None:
    """--tombstone-ttl: "how long a branch that was rolled back … still answers one rollback with the reason"."""
    asked = await doomed()
    assert await answer_of(asked, WHO, XID, Operation.PREPARE) is XaFlag.RBROLLBACK
    now(seconds)
    await looks()
    assert await answer_of(asked, WHO, XID, Operation.ROLLBACK) is answer
    await asked.close()


async def test_a_tombstone_that_has_expired_answers_nothing(
    now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer does not depend on when it is removed."""
    monkeypatch.setattr(maintenance, "_REVIVE", 3600)
    asked = await doomed()
    assert await answer_of(asked, WHO, XID, Operation.PREPARE) is XaFlag.RBROLLBACK
    now(60)
    assert await answer_of(asked, WHO, XID, Operation.ROLLBACK) is ReplyCode.NOT_FOUND
    await asked.close()


@pytest.mark.parametrize(("seconds", "answer"), [(59, XaFlag.OK), (66, ReplyCode.NOT_FOUND)])
async def test_a_failed_branch_is_kept_for_the_same_time(
    now: Callable[[float], None], seconds: float, answer: XaFlag | ReplyCode
) -> None:
    """Event `expire`: no request arrived in time."""
    asked = await doomed()
    await looks()  # the time starts here
    now(seconds)
    await looks()
    assert await answer_of(asked, WHO, XID, Operation.ROLLBACK) is answer
    await asked.close()


async def test_of_too_many_tombstones_the_oldest_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can roll back branches at any rate, and each tombstone stays for ten minutes."""
    monkeypatch.setattr(branches, "MOST_TOMBSTONES", 3, raising=False)
    asked = await doomed()
    assert await answer_of(asked, WHO, XID, Operation.PREPARE) is XaFlag.RBROLLBACK
    xids = [Xid(1, b"%d" % number, b"") for number in range(4)]
    for xid in xids:
        asked.demarcate(WHO, xid, Operation.START, 1)
        asked.demarcate(WHO, xid, Operation.FAIL, 1)
        assert await answer_of(asked, WHO, xid, Operation.PREPARE) is XaFlag.RBROLLBACK
    answers = [await answer_of(asked, WHO, xid, Operation.ROLLBACK) for xid in (XID, *xids)]
    assert answers == [ReplyCode.NOT_FOUND] * 2 + [XaFlag.RBROLLBACK] * 3


async def ended(messages: int) -> tuple[BranchManager, MemoryLog]:
    """A manager with a branch that has ended on its channel, and has published *messages*."""
    log = MemoryLog("rm", MemoryDatabase())
    asked = BranchManager(log, Ledger(), Limits(), Metrics())
    await log.open()
    await asked.start()
    found = asked.demarcate(WHO, XID, Operation.START, 1)
    assert found is not None
    work = found[1].work
    assert work is not None
    for _ in range(messages):
        work.add_publish(HeldPublish(b"", b"q", False, b"", b"body", None, (7,)))
    asked.demarcate(WHO, XID, Operation.END, 1)
    return asked, log


@pytest.mark.parametrize(
    ("operation", "messages", "answer"),
    [(Operation.ONE_PHASE, 0, XaFlag.OK), (Operation.ONE_PHASE, 1, XaFlag.OK), (Operation.PREPARE, 0, XaFlag.RDONLY)],
)
async def test_concurrent_requests_that_end_a_branch_are_all_answered(
    operation: Operation, messages: int, answer: XaFlag
) -> None:
    """As the table says, "a repeated commit waits for the first". This includes branches without work."""
    asked, _ = await ended(messages)
    answers = [answer_of(asked, WHO, XID, operation) for _ in range(2)]
    assert await asyncio.gather(*answers) == [answer, answer]
    assert await answer_of(asked, WHO, XID, operation) is ReplyCode.NOT_FOUND
    await asked.close()


ENDS = [(Operation.ONE_PHASE, XaFlag.OK), (Operation.PREPARE, XaFlag.RDONLY)]


@pytest.mark.parametrize(("operation", "answer"), ENDS)
@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ANSWER_LOST])
async def test_an_end_without_work_is_repeated_after_a_failed_write(
    operation: Operation, answer: XaFlag, fault: Fault
) -> None:
    asked, log = await ended(0)
    log.faults.append(fault)
    assert await answer_of(asked, WHO, XID, operation) is ReplyCode.INTERNAL_ERROR
    assert await answer_of(asked, WHO, XID, operation) is answer
    assert len(log.database.journal) == 1
    await asked.close()


@pytest.mark.parametrize("operation", [operation for operation, _ in ENDS])
@pytest.mark.parametrize(("fault", "answer"), [(Fault.REFUSED, XaFlag.OK), (Fault.ANSWER_LOST, ReplyCode.NOT_FOUND)])
async def test_a_rollback_after_a_failed_write_follows_the_log(
    operation: Operation, fault: Fault, answer: XaFlag | ReplyCode
) -> None:
    """X/Open XA, xa_rollback: "XAER_NOTA: the specified XID is not known", if the log has the end of the branch."""
    asked, log = await ended(0)
    log.faults.append(fault)
    assert await answer_of(asked, WHO, XID, operation) is ReplyCode.INTERNAL_ERROR
    assert await answer_of(asked, WHO, XID, Operation.ROLLBACK) is answer
    assert await answer_of(asked, WHO, XID, Operation.ROLLBACK) is ReplyCode.NOT_FOUND
    await asked.close()

"""A request for an unknown xid, while the log is queried for it."""

import asyncio
from uuid import UUID

import pytest

from dtx.log.records import Lookup
from dtx.manager import BranchManager, Limits, Requester
from dtx.telemetry import Metrics
from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid
from tests.support.memory_log import MemoryLog
from tests.unit.manager.requests import answer_of
from tests.unit.manager.test_local import Ledger

WHO = Requester("guest", "/")
XID = Xid(1, b"gtrid", b"bqual")


class SlowLog(MemoryLog):
    """A log whose lookup waits until the test lets it answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def lookup(self, vhost: str, xid: Xid, branch_id: UUID | None = None) -> Lookup:
        found = await super().lookup(vhost, xid, branch_id)
        self.asked.set()
        await self.answers.wait()
        return found


@pytest.mark.parametrize("operation", [Operation.PREPARE, Operation.ONE_PHASE, Operation.ROLLBACK])
async def test_a_request_does_not_concern_a_branch_started_later(operation: Operation) -> None:
    """The client may have closed the channel and started the branch of its request on another channel."""
    log = SlowLog()
    manager = BranchManager(log, Ledger(), Limits(), Metrics())
    await log.open()
    await manager.start()
    asking = asyncio.ensure_future(answer_of(manager, WHO, XID, operation))
    await log.asked.wait()
    manager.demarcate(WHO, XID, Operation.START, 1)
    manager.demarcate(WHO, XID, Operation.FAIL, 1)
    log.answers.set()
    assert await asking is ReplyCode.NOT_FOUND
    assert await answer_of(manager, WHO, XID, Operation.PREPARE) is XaFlag.RBROLLBACK
    await manager.close()

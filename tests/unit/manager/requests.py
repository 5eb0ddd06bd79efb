"""Requests to a manager as a channel makes them, with a check whether a task was started."""

import asyncio

from dtx.manager import BranchManager, Requester
from dtx.manager.effects import Reply
from dtx.xa.codes import ReplyCode, XaError, XaFlag
from dtx.xa.model import Operation
from dtx.xa.xid import Xid


def took_a_task(manager: BranchManager, who: Requester, xid: Xid, operation: Operation, reply: Reply) -> bool:
    """Ask, and return whether a task was started."""
    before = len(manager._tasks)
    manager.ask(who, xid, operation, reply)
    return len(manager._tasks) != before


async def answer_of(manager: BranchManager, who: Requester, xid: Xid, operation: Operation) -> XaFlag | ReplyCode:
    """Ask, and wait for the answer."""
    answered: asyncio.Future[XaFlag | XaError] = asyncio.get_running_loop().create_future()
    # A request whose phase two takes too long is answered twice. The second answer is ignored.
    manager.ask(who, xid, operation, lambda answer: None if answered.done() else answered.set_result(answer))
    async with asyncio.timeout(30):
        answer = await answered
    return answer.code if isinstance(answer, XaError) else answer

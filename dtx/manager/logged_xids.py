"""Whether the log has the xids of new branches, many in one query.

Only a dtx with other members asks. A start waits for the answer, so the branches that begin during a query share the
next one. The answer is for the client: it gets 530 at once. What the log does not show yet, it refuses at the vote.
"""

import asyncio
from typing import Final

from dtx.log.api import LogError, TransactionLog
from dtx.xa.xid import Xid

_PATIENCE: Final = 1.0
"""Seconds after which a start no longer waits for a log that is away."""
_AT_ONCE: Final = 1_000
"""Xids in one query."""


class LoggedXids:
    """Looks xids up.

    Args:
        log: the transaction log.
    """

    def __init__(self, log: TransactionLog) -> None:
        self._log = log
        self._waiting: list[tuple[tuple[str, Xid], asyncio.Future[bool]]] = []
        self._running: asyncio.Task[None] | None = None

    async def is_logged(self, vhost: str, xid: Xid) -> bool:
        """Whether the log has a branch with *xid*; ``False`` if it does not answer within a second."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((vhost, xid), answer))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="dtx-xids")
        try:
            async with asyncio.timeout(_PATIENCE):
                return await answer
        except (TimeoutError, LogError):
            return False

    async def _run(self) -> None:
        try:
            while batch := self._waiting[:_AT_ONCE]:
                del self._waiting[: len(batch)]
                logged = await self._logged([key for key, _ in batch])
                for key, answer in batch:
                    if not answer.done():  # else its start waits no longer
                        answer.set_result(key in logged)
        finally:
            self._running = None

    async def _logged(self, keys: list[tuple[str, Xid]]) -> set[tuple[str, Xid]]:
        try:
            return await self._log.which_logged(keys)
        except LogError:
            return set()

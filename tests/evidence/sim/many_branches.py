"""A transaction manager with more branches in doubt than a page of recover holds, while others are added and completed.

"If startscan is specified … a new recovery scan is started … an empty xids sequence ends the scan": each branch that
is in doubt during the whole scan is listed exactly once, whatever is prepared and completed between two pages.
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from dtx.log.records import LogState
from dtx.wire.amqp09.frames import MIN_FRAME
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.applications import Asker
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.ledger import Branch, Ledger
from tests.evidence.sim.scheduler import current

_PILE: Final = 70
"""Number of branches in doubt; the smallest frame has room for 30 xids of the greatest length."""
_AT_ONCE: Final = 8
"""Limit of branches that it prepares between two scans, while there are too few."""
_LONGEST: Final = 64
"""Length of each gtrid and bqual in bytes."""
_MOST_CALLS: Final = 20
"""Limit of calls, each of which starts and ends a scan, until all branches in doubt were listed."""


class ManyBranches(Asker):
    """Prepares branches, scans, and completes a few.

    Args:
        database: of dtx; read from outside.
        ledger: the decisions.
        random: source of random choices.
        hosts: addresses of the dtx instances.
        queues: names.
        until: returns true when it must stop.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, hosts: list[str], queues: list[bytes],
        until: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(database, ledger, random)
        self._queues = queues
        self._until = until
        self._worker = Client(hosts)
        self._scanner = Client(hosts, frame_max=MIN_FRAME)
        self._pile: list[Branch] = []

    async def run(self) -> None:
        """Work until it must stop; the recovery completes the remaining branches."""
        clients = self._worker, self._scanner
        while not self._until():
            try:
                for client in clients:
                    if not client.is_open:
                        await client.open(select=client is self._worker)
                for _ in range(min(_PILE - len(self._pile), 1 + self.random.randrange(_AT_ONCE))):
                    await self._one_more()
                if len(self._pile) > _PILE / 2:
                    await self.random.choice((self._scan, self._scan, self._call_by_call))()
            except GONE:
                for client in clients:
                    if self.random.random() < 0.5:
                        client.close()
                await asyncio.sleep(0.05 + self.random.random() * 0.3)
        for branch in self._pile:
            branch.working = False
        for client in clients:
            client.close()

    # -- others come and go

    async def _one_more(self) -> None:
        """Prepare a branch.

        Raises:
            GONE: it may be prepared or not; the recovery completes it.
        """
        gtrid = b"hoard-%d" % len(self.ledger.branches)
        xid = Xid(1, gtrid.ljust(_LONGEST, b"."), b"b" * _LONGEST)
        branch = self.ledger.branches[xid] = Branch(xid, current())
        try:
            if await self._worker.start(xid) is XaFlag.OK:
                queue = self.random.choice(self._queues)
                branch.publishes.append((gtrid, queue))
                self._worker.publish(queue, gtrid)
                if (
                    await self._worker.end(xid) is XaFlag.OK
                    and await self.prepare(self._worker, branch) is XaFlag.OK
                ):  # fmt: skip
                    self._pile.append(branch)
        finally:
            branch.working = branch in self._pile

    async def _one_less(self) -> None:
        """Complete a branch.

        Raises:
            GONE: the recovery completes it.
        """
        branch = self._pile.pop(self.random.randrange(len(self._pile)))
        branch.decision = self.random.choice(("commit", "rollback"))
        try:
            await self.complete(self._worker, branch)
        finally:
            branch.working = False

    async def _come_and_go(self) -> None:
        """Prepare and complete some branches between two pages."""
        for _ in range(self.random.randrange(4)):
            await (self._one_more() if self.random.random() < 0.5 else self._one_less())

    # -- scans

    async def _scan(self) -> None:
        """Scan once, page by page."""
        before = self.in_doubt()
        listed: list[Xid] = []
        pages = 0
        batch = await self._scanner.recover(end=False)
        while batch:
            listed += batch
            pages += 1
            await self._come_and_go()
            batch = await self._scanner.recover(start=False, end=False)
        await self._scanner.recover(start=False)
        self.judge_scan(before, listed)
        self.ledger.answers[f"recover in {'several pages' if pages > 1 else 'one page'}"] += 1

    async def _call_by_call(self) -> None:
        """Check that a client that starts and ends a scan with each call gets all branches after some calls."""
        before = self.in_doubt()
        seen: set[Xid] = set()
        left = list(before)
        calls = 0
        while left and calls < _MOST_CALLS:
            seen.update(await self._scanner.recover())
            left = [xid for xid, state in before.items() if self._stays(xid, state) and xid not in seen]
            calls += 1
        self.ledger.answers["recover call by call"] += 1
        if left:
            self.ledger.wrong(f"{_MOST_CALLS} calls of recover do not list {left[0]}, which is in doubt all the time")

    def _stays(self, xid: Xid, state: LogState) -> bool:
        """Whether the branch has the same state as before, and its completion has not begun."""
        return state in (LogState.PREPARED, LogState.HEURISTIC) and self.state(xid) is state

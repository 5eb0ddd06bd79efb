"""A transaction manager that has more branches in doubt than a page of recover holds, while others come and go.

"If startscan is specified … a new recovery scan is started … an empty xids sequence ends the scan": the branches that
were in doubt all the time are in its pages, each of them once, whatever is prepared and completed between two pages.
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
"""Branches in doubt; of those with the longest names 30 fit the smallest frame."""
_AT_ONCE: Final = 8
"""How many it prepares between two scans, at most, while there are not that many yet."""
_LONGEST: Final = 64
"""Octets of a gtrid, and of a bqual."""
_MOST_CALLS: Final = 20
"""Calls that start and end a scan each, until all that is in doubt has been seen."""


class Hoarder(Asker):
    """Prepares, scans, and completes a few.

    Args:
        database: of dtx; looked into from outside.
        ledger: of what was decided.
        random: chance.
        hosts: where dtx may be.
        queues: names.
        until: when it shall stop.
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
        """Work until it is told to stop; what is in doubt then is the recovery's."""
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
            GONE: it may be prepared, or not: that is for the recovery to find out.
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
            GONE: the recovery goes on with it.
        """
        branch = self._pile.pop(self.random.randrange(len(self._pile)))
        branch.decision = self.random.choice(("commit", "rollback"))
        try:
            await self.complete(self._worker, branch)
        finally:
            branch.working = False

    async def _come_and_go(self) -> None:
        """What others do between two pages."""
        for _ in range(self.random.randrange(4)):
            await (self._one_more() if self.random.random() < 0.5 else self._one_less())

    # -- scans

    async def _scan(self) -> None:
        """One scan, page by page."""
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
        """A client that starts and ends a scan with each call: it sees all of what is in doubt, with patience."""
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
        """Whether it is in doubt as it was, and nobody has begun to complete it."""
        return state in (LogState.PREPARED, LogState.HEURISTIC) and self.state(xid) is state

"""Who uses dtx in the simulation: applications that move messages, and the transaction manager that recovers.

An application works on one branch at a time: it consumes, publishes, votes and decides; all that it must not forget is
in the ledger. What it leaves behind (it died, its connection broke, an answer was lost) the transaction manager
finishes: what was decided as it was decided, what was not is rolled back (presumed abort).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from dtx.log.records import WITH_OUTCOME, LogState
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.ledger import Branch, Ledger
from tests.evidence.sim.scheduler import current

_RB: Final = frozenset({XaFlag.RBROLLBACK, XaFlag.RBTIMEOUT})
_DONE: Final = frozenset({XaFlag.OK})
_DOUBT: Final = frozenset({LogState.PREPARED, LogState.COMMITTING, LogState.ROLLING_BACK}) | WITH_OUTCOME
_BRIEF: Final = 0.03
"""How many branches have a timeout of a second."""
_STAYS: Final = frozenset({LogState.PREPARED, LogState.HEURISTIC})
"""Nobody but a transaction manager or an operator ends these."""
_HEURISTIC: Final = {
    "commit": XaFlag.HEURCOM,
    "rollback": XaFlag.HEURRB,
}
"""What an operator has ordered, and what the transaction manager is told of it."""


class Asker:
    """Asks dtx to finish branches, and judges what it says by what the database has.

    Args:
        database: of dtx; looked into from outside.
        ledger: what was decided.
        random: chance.
    """

    def __init__(self, database: SimDatabase, ledger: Ledger, random: Random) -> None:
        self.database = database
        self.ledger = ledger
        self.random = random

    def state(self, xid: Xid) -> LogState | None:
        """What the log has of *xid* at this moment."""
        record = self.database.tables.look("/", xid)
        return None if record is None else record.state

    def unknown(self, branch: Branch, before: LogState | None, error: UpstreamChannelClosed) -> None:
        """404 was said: not of what was in doubt before the question and still is."""
        now = self.state(branch.xid)
        if before in _DOUBT and now in _DOUBT:
            self.ledger.wrong(f"404 of {branch.xid}, which is {now}: {error}")

    async def prepare(self, client: Client, branch: Branch) -> XaFlag:
        """Ask for the vote.

        Raises:
            GONE: there was no answer, or an error.
        """
        flag = await client.prepare(branch.xid)
        self.ledger.answers[f"prepare {flag.wire_name}"] += 1
        if flag is XaFlag.OK:
            if self.state(branch.xid) is not LogState.PREPARED and not branch.ordered:
                self.ledger.wrong(f"prepare of {branch.xid} is answered, and the log has {self.state(branch.xid)}")
            branch.prepared = True
            return flag
        if flag is XaFlag.RDONLY and (branch.publishes or branch.consumes):
            self.ledger.wrong(f"xa-rdonly for {branch.xid}, which has work")
        branch.decision = "rollback"
        branch.finished = True
        return flag

    async def complete(self, client: Client, branch: Branch) -> None:
        """Commit or roll back, as it was decided.

        Raises:
            GONE: there was no answer, or an error that says to ask again.
        """
        before = self.state(branch.xid)
        commit = branch.decision == "commit"
        try:
            flag = await (client.commit(branch.xid) if commit else client.rollback(branch.xid))
        except UpstreamChannelClosed as error:
            self._refused(branch, before, commit, error)
            raise
        self.ledger.answers[f"{branch.decision} {flag.wire_name}"] += 1
        if flag in {outcome.flag for outcome in Heuristic}:
            await self._told(client, branch, flag)
            return
        if flag not in (_DONE if commit else _DONE | _RB):
            self.ledger.wrong(f"{branch.decision} of {branch.xid} is answered {flag.wire_name}")
        if commit and self.state(branch.xid) is LogState.PREPARED:
            self.ledger.wrong(f"commit of {branch.xid} is answered, and the log has it prepared")
        if not commit and self.state(branch.xid) is not None:
            self.ledger.wrong(f"rollback of {branch.xid} is answered, and the log has {self.state(branch.xid)}")
        branch.answered = branch.finished = True

    async def _told(self, client: Client, branch: Branch, flag: XaFlag) -> None:
        """An operator has decided: that stays in the log until somebody asks to forget it.

        Raises:
            GONE: there was no answer to that.
        """
        wanted = {_HEURISTIC[action] for action in branch.ordered if action in _HEURISTIC}
        if not branch.ordered or (flag not in wanted and not branch.given_up):
            self.ledger.wrong(f"{branch.xid} is {flag.wire_name}, and operators have ordered {branch.ordered}")
        record = self.database.tables.look("/", branch.xid)
        if record is None:
            if not branch.may_be_forgotten:
                self.ledger.wrong(f"{branch.xid} is {flag.wire_name}, and the log has forgotten it")
        elif record.outcome is None or record.outcome.flag is not flag:
            self.ledger.wrong(f"{branch.xid} is {flag.wire_name}, and the log has {record.state} {record.outcome}")
        branch.forgets = True
        try:
            await client.forget(branch.xid)
        except UpstreamChannelClosed as error:
            branch.finished = error.close.reply_code == 404
            raise
        if self.state(branch.xid) is not None:
            self.ledger.wrong(f"forget of {branch.xid} is answered, and the log has {self.state(branch.xid)}")
        branch.finished = True

    def in_doubt(self) -> dict[Xid, LogState]:
        """What the log has in doubt, where the vote was answered: only of that it is certain that dtx knows it."""
        rows = (row.branch for row in self.database.tables.database.rows.values())
        return {row.xid: row.state for row in rows if row.state in _DOUBT and self.ledger.branches[row.xid].prepared}

    def judge_scan(self, before: Mapping[Xid, LogState], listed: Sequence[Xid]) -> None:
        """A scan lists exactly what is in doubt, once; what changes meanwhile may be there or not.

        Args:
            before: what was in doubt when it began.
            listed: all of its batches.
        """
        rows = {row.branch.xid: row.branch.state for row in self.database.tables.database.rows.values()}
        for xid, state in before.items():
            # Committing is left out when its end was answered and is about to be written.
            if state in _STAYS and rows.get(xid) is state and xid not in listed:
                self.ledger.wrong(f"recover does not list {xid}, which is {state}")
        journal = {line.xid for _, line in self.database.tables.database.journal}
        for xid in listed:
            if rows.get(xid) not in _DOUBT and xid not in journal:
                self.ledger.wrong(f"recover lists {xid}, which never voted")
        for xid, times in Counter(listed).items():
            if times > 1:
                self.ledger.wrong(f"recover lists {xid} {times} times in a scan")

    def _refused(self, branch: Branch, before: LogState | None, commit: bool, error: UpstreamChannelClosed) -> None:
        code, text = error.close.reply_code, error.close.reply_text.decode()
        self.ledger.answers[f"{branch.decision} {code}"] += 1
        if code == 404:
            self.unknown(branch, before, error)
            branch.finished = True
        elif (code == 503 and ("rolling-back" in text if commit else "committing" in text)) or code not in {503, 541}:
            self.ledger.wrong(f"{branch.decision} of {branch.xid} is refused: {text}")


class Application(Asker):
    """Moves messages between queues, one branch after the other.

    Args:
        number: of the application, a part of its xids.
        hosts: where dtx may be.
        queues: names.
        until: when it shall stop.
        hesitates: it takes a while now and then to say what it has decided.
        joins: how often a second connection of its joins a branch.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, number: int, hosts: list[str], queues: list[bytes],
        until: Callable[[], bool], *, hesitates: bool = False, joins: float = 0.15,
    ) -> None:  # fmt: skip
        super().__init__(database, ledger, random)
        self._number = number
        self._hosts = hosts
        self._queues = queues
        self._until = until
        self._hesitates = hesitates
        self._joins = joins

    async def run(self) -> None:
        """Work until it is told to stop, on one connection as long as it lasts."""
        client, other = Client(self._hosts), Client(self._hosts)
        while not self._until():
            try:
                if not client.is_open:
                    await client.open()
                    if self.random.random() < 0.3:
                        await client.consume(self.random.choice(self._queues), 4)
                await self._branch(client, other)
            except GONE:
                if self.random.random() < 0.3 or not client.is_connected:
                    client.close()
                    other.close()
                await asyncio.sleep(0.05 + self.random.random() * 0.3)
        client.close()
        other.close()

    async def _branch(self, client: Client, other: Client) -> None:
        xid = Xid(1, f"{self._number}-{len(self.ledger.branches)}".encode(), b"")
        branch = self.ledger.branches[xid] = Branch(xid, current())
        try:
            if not await self._work(client, other, branch):
                return
            if branch.one_phase:
                await self._one_phase(client, branch)
            elif self.random.random() < 0.1 or await self.prepare(client, branch) is XaFlag.OK:
                commit = branch.prepared and self.random.random() < 0.75
                branch.decision = "commit" if commit else "rollback"
                longest = 3.0 if self._hesitates and self.random.random() < 0.2 else 0.1
                await asyncio.sleep(longest * self.random.random() ** 4)
                await self._dawdle(branch)  # its timeout has stopped for good
                await self.complete(client, branch)
        finally:
            branch.working = False

    async def _work(self, client: Client, other: Client, branch: Branch) -> bool:
        random, xid = self.random, branch.xid
        if await client.start(xid) is not XaFlag.OK:
            return False
        branch.brief = random.random() < _BRIEF
        if branch.brief:
            await client.set_timeout(xid, 1)
        joined = random.random() < self._joins
        if joined:
            await other.open()
            joined = await other.start(xid, join=True) is XaFlag.OK
        for _ in range(random.choice((0, 1, 1, 2))):
            await self._consume(client, branch)
        for index in range(random.choice((0, 1, 1, 2, 3))):
            body = b"%b.%d" % (xid.gtrid, index)
            queue = random.choice(self._queues)
            branch.publishes.append((body, queue))
            (other if joined and random.random() < 0.5 else client).publish(queue, body)
        if joined:
            await self._consume(other, branch)
            if await other.end(xid) is not XaFlag.OK:
                branch.decision = "rollback"
        branch.one_phase = branch.decision is None and random.random() < 0.15
        await self._dawdle(branch)
        flag = await client.end(xid)
        self.ledger.answers[f"end {flag.wire_name}"] += 1
        await self._dawdle(branch)
        return flag is XaFlag.OK

    async def _dawdle(self, branch: Branch) -> None:
        """Let the timeout of a branch that has a short one go by, now and then."""
        if branch.brief and self.random.random() < 0.3:
            await asyncio.sleep(0.5 + 2.5 * self.random.random())

    async def _consume(self, client: Client, branch: Branch) -> None:
        if client.channel.on_delivery is not None:
            if not client.deliveries:
                await client.delivered(0.05)
            if client.deliveries:
                tag, body, queue = client.deliveries.pop(0)
                branch.consumes.append((body, queue))
                client.ack(tag)
            return
        queue = self.random.choice(self._queues)
        got = await client.get(queue)
        if got is not None:
            branch.consumes.append((got[1], queue))
            client.ack(got[0])

    async def _one_phase(self, client: Client, branch: Branch) -> None:
        flag = await client.commit(branch.xid, one_phase=True)
        self.ledger.answers[f"one-phase {flag.wire_name}"] += 1
        branch.decision = "commit" if flag is XaFlag.OK else "rollback"
        branch.answered = branch.finished = True


class Recovery(Asker):
    """The transaction manager after a failure, all the time.

    Args:
        hosts: where dtx may be.
        pause: seconds between two scans.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, hosts: list[str], pause: float = 2.0
    ) -> None:
        super().__init__(database, ledger, random)
        self._client = Client(hosts)
        self._pause = pause
        self.scans = 0

    async def run(self) -> None:
        """Scan, and finish what is found, for ever."""
        while True:
            await asyncio.sleep(self._pause * self.random.random())
            try:
                if not self._client.is_connected:
                    await self._client.open(select=False)
                elif not self._client.is_open:
                    await self._client.reopen(select=False)
                await self._scan()
            except GONE:
                if self.random.random() < 0.2:
                    self._client.close()

    async def _scan(self) -> None:
        before = self.in_doubt()
        listed = await self._client.recover()
        self.judge_scan(before, listed)
        self.scans += 1
        # What is not listed is not in doubt; it may be open, and is asked about for that reason.
        known = dict.fromkeys(listed)
        known |= {branch.xid: None for branch in self.ledger.unfinished if branch.is_abandoned}
        for xid in known:
            branch = self.ledger.branches[xid]
            if not branch.is_abandoned:
                continue
            try:
                if branch.one_phase and branch.decision is None:
                    await self._settle_one_phase(branch)
                else:
                    branch.decision = branch.decision or "rollback"
                    await self.complete(self._client, branch)
            except UpstreamChannelClosed:
                await self._client.reopen(select=False)

    async def _settle_one_phase(self, branch: Branch) -> None:
        """What dtx has decided stays; where it has never heard of the commit, there is something to roll back."""
        if self.state(branch.xid) is LogState.COMMITTING:
            # Where it is stuck, somebody has to ask again.
            await self._client.commit(branch.xid, one_phase=True)
            branch.decision = "commit"
            branch.answered = branch.finished = True
            return
        try:
            await self._client.rollback(branch.xid)
        except UpstreamChannelClosed as error:
            branch.finished = error.close.reply_code == 404
            raise
        branch.decision = "rollback"
        branch.answered = branch.finished = True

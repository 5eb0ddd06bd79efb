"""The clients of dtx in the simulation: applications that move messages, and the transaction manager that recovers.

An application works on one branch at a time: it consumes, publishes, votes and decides. Everything that must survive a
crash is in the ledger. If the application dies, its connection breaks or an answer is lost, the transaction manager
completes the branch: as decided, or by rollback if there is no decision (presumed abort).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final
from uuid import UUID

from dtx.log.records import WITH_OUTCOME, JournalEvent, LogState
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed
from dtx.xa.codes import Heuristic, XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.instance import DEFAULT_TIMEOUT
from tests.evidence.sim.ledger import Branch, Ledger
from tests.evidence.sim.scheduler import current

_RB: Final = frozenset({XaFlag.RBROLLBACK, XaFlag.RBTIMEOUT})
_DONE: Final = frozenset({XaFlag.OK})
_DOUBT: Final = frozenset({LogState.PREPARED, LogState.COMMITTING, LogState.ROLLING_BACK}) | WITH_OUTCOME
_BRIEF: Final = 0.03
"""Share of branches with a timeout of one second."""
_STAYS: Final = frozenset({LogState.PREPARED, LogState.HEURISTIC})
"""Only a transaction manager or an operator ends these."""
_HEURISTIC: Final = {
    "commit": XaFlag.HEURCOM,
    "rollback": XaFlag.HEURRB,
}
"""The answer to the transaction manager, by the order of the operator."""


Holders = Callable[[Xid], frozenset[UUID]]


class Asker:
    """Asks dtx to complete branches, and compares each answer with the database.

    Args:
        database: of dtx; read from outside.
        ledger: the decisions.
        random: source of random choices.
        holders: the members that have a branch in memory; ``None``: there are no members.
    """

    def __init__(self, database: SimDatabase, ledger: Ledger, random: Random, holders: Holders | None = None) -> None:
        self.database = database
        self.ledger = ledger
        self.random = random
        self.members = holders is not None
        self.holders: Holders = holders or (lambda _: frozenset())

    def state(self, xid: Xid) -> LogState | None:
        """Return the state of *xid* in the log at this moment."""
        record = self.database.tables.look("/", xid)
        return None if record is None else record.state

    def unknown(self, branch: Branch, before: LogState | None, error: UpstreamChannelClosed) -> None:
        """Check an answer 404: it is wrong for a branch that was in doubt before the request and still is."""
        now = self.state(branch.xid)
        if before in _DOUBT and now in _DOUBT:
            self.ledger.wrong(f"404 of {branch.xid}, which is {now}: {error}")

    @contextmanager
    def known(self, branch: Branch, what: str) -> Iterator[None]:
        """Check that an answer 404 is right: no member has the branch in memory, before and after the request."""
        before = self.holders(branch.xid)
        try:
            yield
        except UpstreamChannelClosed as error:
            if self.members:
                self.ledger.answers[f"{what} {error.close.reply_code:d}"] += 1
            if error.close.reply_code == 404:
                self._unknown_to_all(branch, what, before, error)
            raise

    def _unknown_to_all(self, branch: Branch, what: str, before: frozenset[UUID], error: UpstreamChannelClosed) -> None:
        if before & self.holders(branch.xid):
            self.ledger.wrong(f"404 to {what} of {branch.xid}, which is in the memory of a member")
        journal = self.database.tables.database.journal
        ended = any(line.xid == branch.xid and line.event is JournalEvent.COMMITTED for _, line in journal)
        if before and ended and b"completed: committed" not in error.close.reply_text:
            self.ledger.wrong(f"404 to {what} of {branch.xid}, which was committed meanwhile")

    async def prepare(self, client: Client, branch: Branch) -> XaFlag:
        """Send prepare, and check the vote.

        Raises:
            GONE: there was no answer, or an error.
        """
        with self.known(branch, "prepare"):
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
        """Commit or roll back, as decided.

        Raises:
            GONE: there was no answer, or an error after which the request must be repeated.
        """
        before = self.state(branch.xid)
        commit = branch.decision == "commit"
        branch.requests += 1
        try:
            with self.known(branch, str(branch.decision)):
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
        """Check the heuristic outcome, which stays in the log until it is forgotten; then forget it.

        Raises:
            GONE: there was no answer to forget.
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
        """Return the branches in doubt whose vote was answered: only these does dtx know with certainty."""
        rows = (row.branch for row in self.database.tables.database.rows.values())
        return {row.xid: row.state for row in rows if row.state in _DOUBT and self.ledger.branches[row.xid].prepared}

    def judge_scan(self, before: Mapping[Xid, LogState], listed: Sequence[Xid]) -> None:
        """Check that a scan lists each branch in doubt exactly once; branches that change meanwhile may be missing.

        Args:
            before: branches in doubt at the start of the scan.
            listed: the xids of all batches.
        """
        rows = {row.branch.xid: row.branch.state for row in self.database.tables.database.rows.values()}
        for xid, state in before.items():
            # A committing branch may be missing: its end was answered, and is written soon.
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
            if self.members and branch.requests == 1 and before is LogState.PREPARED and not branch.ordered:
                self.ledger.wrong(f"404 to the only {branch.decision} of {branch.xid}, which was prepared")
        elif (code == 503 and ("rolling-back" in text if commit else "committing" in text)) or code not in {503, 541}:
            self.ledger.wrong(f"{branch.decision} of {branch.xid} is refused: {text}")


class Application(Asker):
    """Moves messages between queues, one branch after the other.

    Args:
        number: of the application, a part of its xids.
        hosts: addresses of the dtx instances.
        queues: names.
        until: returns true when the application must stop.
        hesitates: some decisions are sent after a pause of up to three seconds.
        joins: share of branches that a second connection of the application joins.
        holders: see :class:`Asker`. With members, votes and outcomes go to any of them.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, number: int, hosts: list[str], queues: list[bytes],
        until: Callable[[], bool], *, hesitates: bool = False, joins: float = 0.15, holders: Holders | None = None,
    ) -> None:  # fmt: skip
        super().__init__(database, ledger, random, holders)
        self._number = number
        self._hosts = hosts
        self._queues = queues
        self._until = until
        self._hesitates = hesitates
        self._joins = joins

    async def run(self) -> None:
        """Do branches until it must stop, on one connection as long as it lasts."""
        client, other = Client(self._mixed()), Client(self._mixed())
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

    def _mixed(self) -> list[str]:
        """The hosts; of members, in a random order."""
        return self.random.sample(self._hosts, len(self._hosts)) if self.members else self._hosts

    async def _any_member(self, client: Client, other: Client) -> Client:
        """A connection for the next request of the transaction manager."""
        if not self.members or self.random.random() < 0.3:
            return client
        if not other.is_open or self.random.random() < 0.1:
            await other.open()
        return other

    async def _branch(self, client: Client, other: Client) -> None:
        xid = Xid(1, f"{self._number}-{len(self.ledger.branches)}".encode(), b"")
        branch = self.ledger.branches[xid] = Branch(xid, current())
        try:
            if not await self._work(client, other, branch):
                return
            asked = await self._any_member(client, other)
            if branch.one_phase:
                await self._one_phase(asked, branch)
            elif self.random.random() < 0.1 or await self.prepare(asked, branch) is XaFlag.OK:
                commit = branch.prepared and self.random.random() < 0.75
                branch.decision = "commit" if commit else "rollback"
                longest = 3.0 if self._hesitates and self.random.random() < 0.2 else 0.1
                await asyncio.sleep(longest * self.random.random() ** 4)
                await self._dawdle(branch)  # the timeout does not apply after the vote
                await self.complete(await self._any_member(client, other), branch)
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
            with self.known(branch, "start(join)"):
                joined = await other.start(xid, join=True) is XaFlag.OK
        if self.members and not joined and random.random() < 0.1:
            await self._timeout_elsewhere(await self._any_member(client, other), branch)
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

    async def _timeout_elsewhere(self, client: Client, branch: Branch) -> None:
        """Ask any member for the timeout of a branch that has not voted."""
        with self.known(branch, "get-timeout"):
            seconds = await client.get_timeout(branch.xid)
        if seconds != (1 if branch.brief else DEFAULT_TIMEOUT):
            self.ledger.wrong(f"the timeout of {branch.xid} is {seconds} s")

    async def _dawdle(self, branch: Branch) -> None:
        """Sometimes wait longer than the timeout of a branch with a short one."""
        if branch.brief and self.random.random() < 0.3:
            await asyncio.sleep(0.5 + 2.5 * self.random.random())

    async def _consume(self, client: Client, branch: Branch) -> None:
        if client.channel.on_delivery is not None:
            if not client.deliveries:
                await client.delivered(0.05)
            if client.deliveries:
                delivered = client.deliveries.pop(0)
                branch.consume(delivered)
                client.ack(delivered.tag)
            return
        queue = self.random.choice(self._queues)
        got = await client.get(queue)
        if got is not None:
            branch.consume(got)
            client.ack(got.tag)

    async def _one_phase(self, client: Client, branch: Branch) -> None:
        with self.known(branch, "one-phase"):
            flag = await client.commit(branch.xid, one_phase=True)
        self.ledger.answers[f"one-phase {flag.wire_name}"] += 1
        branch.decision = "commit" if flag is XaFlag.OK else "rollback"
        branch.answered = branch.finished = True


class Recovery(Asker):
    """The transaction manager after a failure; it scans during the whole run.

    Args:
        hosts: addresses of the dtx instances.
        pause: limit of the seconds between two scans.
        holders: see :class:`Asker`.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, hosts: list[str], pause: float = 2.0,
        holders: Holders | None = None,
    ) -> None:  # fmt: skip
        super().__init__(database, ledger, random, holders)
        self._client = Client(hosts)
        self._pause = pause
        self.scans = 0

    async def run(self) -> None:
        """Scan repeatedly, and complete each listed branch."""
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
        # A branch that is not listed is not in doubt. It may be open, so it is rolled back or completed as well.
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
        """Keep the decision of dtx. If dtx has not received the commit, roll back."""
        if self.state(branch.xid) is LogState.COMMITTING:
            # A stuck branch needs another request.
            await self._client.commit(branch.xid, one_phase=True)
            branch.decision = "commit"
            branch.answered = branch.finished = True
            return
        try:
            with self.known(branch, "rollback"):
                await self._client.rollback(branch.xid)
        except UpstreamChannelClosed as error:
            branch.finished = error.close.reply_code == 404
            raise
        branch.decision = "rollback"
        branch.answered = branch.finished = True

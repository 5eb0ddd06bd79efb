"""An application that uses all operations of dtx-demarcation on branches, and some that are forbidden.

Other applications start, work, end and vote. This one fails branches, suspends and resumes them, and works on others
meanwhile. It joins them by a second connection that fails or dies, sets timeouts and waits for them, and repeats
requests that have only one answer. It compares answers with the transition table. Its messages are in the ledger, like
those of other applications.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

from dtx.log.records import LogState
from dtx.store.rabbitmq.upstream import UpstreamChannelClosed
from dtx.xa.codes import ReplyCode, XaFlag
from dtx.xa.xid import Xid
from tests.evidence.sim.applications import Asker
from tests.evidence.sim.client import GONE, Client
from tests.evidence.sim.database import SimDatabase
from tests.evidence.sim.instance import DEFAULT_TIMEOUT, MAX_TIMEOUT
from tests.evidence.sim.ledger import Branch, Ledger
from tests.evidence.sim.scheduler import current

_RB: Final = frozenset({XaFlag.RBROLLBACK, XaFlag.RBTIMEOUT})
_NOT_KNOWN: Final = frozenset({ReplyCode.INTERNAL_ERROR, ReplyCode.RESOURCE_ERROR})
"""Codes that say nothing about the branch: the request must be repeated."""
_TICK: Final = 3.0
"""Seconds within which dtx notices a timeout, in the absence of faults."""


class Explorer(Asker):
    """Plays one episode after the other.

    Args:
        database: of dtx; read from outside.
        ledger: the decisions.
        random: source of random choices.
        number: of the explorer, a part of its xids.
        hosts: addresses of the dtx instances.
        queues: names.
        until: returns true when the explorer must stop.
        is_calm: whether no fault has an effect at this moment.
    """

    def __init__(
        self, database: SimDatabase, ledger: Ledger, random: Random, number: int, hosts: list[str], queues: list[bytes],
        until: Callable[[], bool], is_calm: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(database, ledger, random)
        self._number = number
        self._queues = queues
        self._until = until
        self._is_calm = is_calm
        self._client, self._other = Client(hosts), Client(hosts)
        self._epoch = 0
        self._episodes = (
            self._fails,
            self._is_suspended,
            self._is_suspended,
            self._is_joined,
            self._is_joined_by_one_that_fails,
            self._is_joined_by_one_that_dies,
            self._lets_time_go_by,
            self._has_another_timeout,
            self._asks_of_nothing,
        )

    async def run(self) -> None:
        """Play episodes until it must stop."""
        clients = self._client, self._other
        while not self._until():
            try:
                for client in clients:
                    if not client.is_open:
                        await client.open()
                await self.random.choice(self._episodes)()
            except GONE:
                for client in clients:
                    if self.random.random() < 0.5:
                        client.close()
                await asyncio.sleep(0.05 + self.random.random() * 0.3)
                for client in clients:
                    client.close()  # it may still be in a branch, and can start no other one there
        for client in clients:
            client.close()

    # -- what episodes are made of

    @contextmanager
    def _branch(self) -> Iterator[Branch]:
        """Make a branch for one episode; afterwards the transaction manager may complete it."""
        xid = Xid(1, b"x%d-%d" % (self._number, len(self.ledger.branches)), b"")
        branch = self.ledger.branches[xid] = Branch(xid, current())
        self._epoch = self._active
        try:
            yield branch
        finally:
            branch.working = False

    @property
    def _active(self) -> int:
        """The epoch of the serving dtx; it changes with each start and each takeover."""
        return 0 if self.database.lease is None else self.database.lease.epoch

    @property
    def _same(self) -> bool:
        """Whether the same dtx has served since the start of the episode, so that its memory is intact."""
        return self._active == self._epoch

    def _expect(self, what: str, branch: Branch, answer: int, *wanted: int) -> None:
        self.ledger.answers[f"{what}: {_words(answer)}"] += 1
        if answer not in wanted:
            self.ledger.wrong(f"{what} of {branch.xid}: {_words(answer)}, and not {' or '.join(map(_words, wanted))}")

    async def _hear(self, client: Client, asked: Awaitable[int]) -> int:
        """Return the flag or the reply code; a reply code has closed the channel, so open another one.

        Raises:
            GONE: there is no answer, or none about the branch.
        """
        try:
            return await asked
        except UpstreamChannelClosed as error:
            if error.close.reply_code in _NOT_KNOWN:
                raise
            await client.reopen()
            return error.close.reply_code

    async def _ask(self, client: Client, what: str, branch: Branch, asked: Awaitable[int], *wanted: int) -> int:
        """Send a request, and check that the answer is one of *wanted*.

        Raises:
            GONE: there is no answer, or none about the branch.
        """
        answer = await self._hear(client, asked)
        self._expect(what, branch, answer, *wanted)
        return answer

    async def _begin(self, client: Client, branch: Branch) -> None:
        """Start a branch, and work in it.

        Raises:
            GONE: it could not be started.
        """
        await self._ask(client, "start", branch, client.start(branch.xid), XaFlag.OK)
        await self._work(client, branch)

    async def _work(self, client: Client, branch: Branch) -> None:
        if self.random.random() < 0.4:
            queue = self.random.choice(self._queues)
            got = await client.get(queue)
            if got is not None:
                branch.consume(got)
                client.ack(got.tag)
        body = b"%b.%d" % (branch.xid.gtrid, len(branch.publishes))
        queue = self.random.choice(self._queues)
        branch.publishes.append((body, queue))
        client.publish(queue, body)

    async def _finish(self, client: Client, branch: Branch) -> None:
        """Vote and decide; if the vote is no, check the answers after it."""
        flag = await self.prepare(client, branch)
        if flag is XaFlag.OK:
            branch.decision = self.random.choice(("commit", "rollback"))
            await self.complete(client, branch)
        elif flag in _RB:
            await self._is_told_once(client, branch, flag)

    async def _is_told_once(self, client: Client, branch: Branch, flag: int) -> None:
        """Check that a branch which voted no repeats its vote once, for a rollback, and does not block its xid."""
        xid = branch.xid
        again = self.random.random() < 0.3
        if not again:
            await self._ask(client, "rollback behind a vote of no", branch, client.rollback(xid), flag)
            again = self.random.random() < 0.5
        if again:
            await self._ask(client, "start of an xid that has ended", branch, client.start(xid), XaFlag.OK)
            await self._ask(client, "end of an xid begun again", branch, client.end(xid), XaFlag.OK, *_RB)
            await self._ask(client, "rollback of an xid begun again", branch, client.rollback(xid), XaFlag.OK, *_RB)
        await self._ask(client, "one rollback too many", branch, client.rollback(xid), ReplyCode.NOT_FOUND)

    # -- branches that fail

    async def _fails(self) -> None:
        """Clause dtx-demarcation.end.fail: "the transaction should be marked as rollback-only"."""
        client = self._client
        with self._branch() as branch:
            await self._begin(client, branch)
            branch.decision = "rollback"
            await self._ask(client, "end(fail)", branch, client.end(branch.xid, fail=True), *_RB)
            await self._is_doomed(client, branch)

    async def _is_doomed(self, client: Client, branch: Branch) -> None:
        """Check that a rollback-only branch cannot be joined, and that its vote is no."""
        branch.decision = "rollback"
        if self.random.random() < 0.4:
            other = self._client if client is self._other else self._other
            answer = await self._hear(other, other.start(branch.xid, join=True))
            if self._same:
                self._expect("start(join) of a doomed branch", branch, answer, *_RB)
            elif answer == XaFlag.OK:
                other.close()
        if self.random.random() < 0.5:
            asked = client.rollback(branch.xid)
            await self._ask(client, "rollback of a doomed branch", branch, asked, XaFlag.OK, *_RB)
            branch.answered = branch.finished = True
            asked = client.rollback(branch.xid)
            await self._ask(client, "one rollback too many", branch, asked, ReplyCode.NOT_FOUND)
            return
        answer = await self._ask(client, "prepare of a doomed branch", branch, client.prepare(branch.xid), *_RB)
        if answer in _RB:
            branch.finished = True
            await self._is_told_once(client, branch, answer)

    # -- suspend and resume

    async def _is_suspended(self) -> None:
        """Check that work between suspend and resume is not part of the branch, and work after resume is."""
        client = self._client
        with self._branch() as branch, self._branch() as second:
            second.finished = True  # until it is started
            await self._begin(client, branch)
            asked = client.end(branch.xid, suspend=True)
            flag = await self._ask(client, "end(suspend)", branch, asked, XaFlag.OK, *_RB)
            if flag != XaFlag.OK:
                await self._is_doomed(client, branch)
                return
            await self._stray(client)
            if self.random.random() < 0.5:
                await self._is_refused_while_suspended(branch)
            if self.random.random() < 0.6:
                second.finished = False
                await self._begin(client, second)
                await self._ask(client, "end", second, client.end(second.xid), XaFlag.OK, *_RB)
            if self.random.random() < 0.8:
                asked = client.start(branch.xid, resume=True)
                flag = await self._ask(client, "start(resume)", branch, asked, XaFlag.OK, *_RB)
                if flag == XaFlag.OK:
                    await self._work(client, branch)
            if flag == XaFlag.OK:
                asked = client.end(branch.xid)
                await self._ask(client, "end of what was suspended", branch, asked, XaFlag.OK, *_RB)
            both = [branch, second]
            self.random.shuffle(both)
            for one in both:
                if not one.finished:
                    await self._finish(client, one)

    async def _stray(self, client: Client) -> None:
        """Publish outside of any branch: the message must arrive, whatever the outcome of the branches."""
        body = b"stray-%d.%d" % (self._number, len(self.ledger.strays) + len(self.ledger.seeds))
        queue = self.random.choice(self._queues)
        self.ledger.strays.add(body)
        client.publish(queue, body)
        if self._is_calm():
            await asyncio.sleep(_TICK)
            if self._is_calm() and client.is_open:
                self.ledger.strays.discard(body)
                self.ledger.seeds[body] = queue

    async def _is_refused_while_suspended(self, branch: Branch) -> None:
        """Check that a suspended branch cannot vote, and that no other channel can resume it."""
        other, xid = self._other, branch.xid
        resumes = self.random.random() < 0.5
        what = "start(resume) on another channel" if resumes else "prepare of a suspended branch"
        answer = await self._hear(other, other.start(xid, resume=True) if resumes else other.prepare(xid))
        # This fails if the channel has died without an error here; then the answer proves nothing.
        await self._client.get_timeout(xid)
        if self._same:
            self._expect(what, branch, answer, ReplyCode.COMMAND_INVALID)

    # -- join

    async def _is_joined(self) -> None:
        """Check that start of a known branch without join, and join of a prepared branch, are refused."""
        client, other = self._client, self._other
        with self._branch() as branch:
            xid = branch.xid
            await self._begin(client, branch)
            answer: int = ReplyCode.NOT_ALLOWED
            if self.random.random() < 0.5:
                answer = await self._hear(other, other.start(xid))
                if self._same:
                    self._expect("start of a known branch", branch, answer, ReplyCode.NOT_ALLOWED)
            if answer == ReplyCode.NOT_ALLOWED:
                answer = await self._hear(other, other.start(xid, join=True))
                if self._same:
                    self._expect("start(join)", branch, answer, XaFlag.OK, *_RB)
            if answer != XaFlag.OK or not self._same:
                client.close()
                other.close()
                return
            await self._work(other, branch)
            ends = [client, other]
            self.random.shuffle(ends)
            for end in ends:
                await self._ask(end, "end of a joined branch", branch, end.end(xid), XaFlag.OK, *_RB)
            if await self.prepare(client, branch) is not XaFlag.OK:
                return
            answer = await self._hear(other, other.start(xid, join=True))
            if self.state(xid) is LogState.PREPARED and not branch.ordered:
                self._expect("start(join) of a branch that has voted", branch, answer, ReplyCode.COMMAND_INVALID)
            branch.decision = self.random.choice(("commit", "rollback"))
            await self.complete(client, branch)

    async def _joins(self, branch: Branch) -> bool:
        """Join by the other connection, and work; return whether the join succeeded."""
        other = self._other
        await self._begin(self._client, branch)
        answer = await self._hear(other, other.start(branch.xid, join=True))
        if answer != XaFlag.OK:
            self._client.close()
            return False
        await self._work(other, branch)
        branch.decision = "rollback"
        return True

    async def _is_joined_by_one_that_fails(self) -> None:
        """Check that the failure of one association dooms the branch for all."""
        client, other = self._client, self._other
        with self._branch() as branch:
            if not await self._joins(branch):
                return
            await self._ask(other, "end(fail)", branch, other.end(branch.xid, fail=True), *_RB)
            asked = client.end(branch.xid)
            await self._ask(client, "end of a branch that another one has failed", branch, asked, *_RB)
            await self._is_doomed(client, branch)

    async def _is_joined_by_one_that_dies(self) -> None:
        """Check that the vote is no after the death of a channel: a part of the work is lost."""
        client, other = self._client, self._other
        with self._branch() as branch:
            if not await self._joins(branch):
                return
            other.close()
            asked = client.end(branch.xid)
            await self._ask(client, "end of a branch with a dead channel", branch, asked, XaFlag.OK, *_RB)
            answer: int = ReplyCode.COMMAND_INVALID
            while answer == ReplyCode.COMMAND_INVALID:  # dtx has not noticed the death yet
                await asyncio.sleep(0.1)
                answer = await self._hear(client, client.prepare(branch.xid))
            self._expect("prepare of a branch with a dead channel", branch, answer, *_RB)
            if answer in _RB:
                branch.finished = True
                await self._is_told_once(client, branch, answer)

    # -- timeouts

    async def _lets_time_go_by(self) -> None:
        """Check that a timeout ends a branch, not too early, and with the right flag."""
        client = self._client
        with self._branch() as branch:
            await self._begin(client, branch)
            calm, since = self._is_calm(), _now()
            seconds = await self._set(client, branch, self.random.choice((1, 2)))
            ends_before = self.random.random() < 0.5
            flag: int = XaFlag.OK
            if ends_before:
                flag = await self._ask(client, "end", branch, client.end(branch.xid), XaFlag.OK, *_RB)
            await asyncio.sleep(seconds + (_TICK if calm else self.random.random() - 0.2))
            if not ends_before:
                flag = await self._ask(client, "end", branch, client.end(branch.xid), XaFlag.OK, *_RB)
                self._strikes(branch, flag, since, seconds, calm=calm)
            if flag != XaFlag.OK:
                await self._is_doomed(client, branch)
                return
            flag = await self.prepare(client, branch)
            self._strikes(branch, flag, since, seconds, calm=calm)
            if flag in _RB:
                await self._is_told_once(client, branch, flag)
                return
            branch.decision = "commit"
            await self.complete(client, branch)

    def _strikes(self, branch: Branch, flag: int, since: float, seconds: int, *, calm: bool) -> None:
        """Check *flag*, the answer of a branch whose timeout of *seconds* was set after *since*."""
        passed = _now() - since
        if flag == XaFlag.RBTIMEOUT and passed < seconds:
            self.ledger.wrong(f"{branch.xid} has timed out after {passed:.3f} s of {seconds}")
        if flag != XaFlag.RBTIMEOUT and calm and self._is_calm() and passed >= seconds + _TICK:
            self.ledger.wrong(
                f"{branch.xid} has a timeout of {seconds} s, and says {_words(flag)} after {passed:.1f} s"
            )

    async def _set(self, client: Client, branch: Branch, seconds: int) -> int:
        """Set a timeout, check the value that dtx returns, and return it."""
        await client.set_timeout(branch.xid, seconds)
        has = min(seconds, MAX_TIMEOUT) or DEFAULT_TIMEOUT
        await self._ask(client, f"get-timeout behind {seconds}", branch, client.get_timeout(branch.xid), has)
        return has

    async def _has_another_timeout(self) -> None:
        """Check that the last timeout applies, 0 is the default, there is a maximum, and none counts after the vote."""
        client = self._client
        with self._branch() as branch:
            await self._begin(client, branch)
            since = _now()
            await self._set(client, branch, 1)
            earliest = since + 1.0
            if self.random.random() < 0.7:
                earliest = _now() + await self._set(client, branch, self.random.choice((0, 20, 10 * MAX_TIMEOUT)))
            await asyncio.sleep(2 * self.random.random())
            flag = await self._ask(client, "end", branch, client.end(branch.xid), XaFlag.OK, *_RB)
            if flag == XaFlag.OK:
                flag = await self.prepare(client, branch)
            if flag == XaFlag.RBTIMEOUT and _now() < earliest:
                self.ledger.wrong(f"{branch.xid} has timed out though it was given more time")
            if flag != XaFlag.OK:
                branch.decision = "rollback"
                return
            await self._set(client, branch, 1)
            await asyncio.sleep(3 * self.random.random())
            branch.decision = self.random.choice(("commit", "rollback"))
            await self.complete(client, branch)

    # -- what is not there

    async def _asks_of_nothing(self) -> None:
        """Check that every request for an unknown xid is answered with 404."""
        client = self._client
        with self._branch() as branch:
            branch.finished = True
            xid = branch.xid
            questions: tuple[tuple[str, Callable[[], Awaitable[int]]], ...] = (
                ("start(join)", lambda: client.start(xid, join=True)),
                ("start(resume)", lambda: client.start(xid, resume=True)),
                ("end", lambda: client.end(xid)),
                ("prepare", lambda: client.prepare(xid)),
                ("commit", lambda: client.commit(xid)),
                ("rollback", lambda: client.rollback(xid)),
                ("get-timeout", lambda: client.get_timeout(xid)),
            )
            for name, ask in questions:
                if self.random.random() < 0.4:
                    await self._ask(client, f"{name} of nothing", branch, ask(), ReplyCode.NOT_FOUND)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _words(answer: int) -> str:
    return answer.wire_name if isinstance(answer, XaFlag) else str(int(answer))

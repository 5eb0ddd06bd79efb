"""Connections are cut at any byte, in either direction: every write gets the same answer as without a cut.

Records are posted without waiting for answers, so the records of one branch are in consecutive groups. The answer to
each is known beforehand: order is kept, good records are written once, bad ones are refused.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from dtx.log.api import DuplicateXid, LogConflict, LogError
from dtx.log.changes import Change, Define, Slot, Store
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, JournalEvent, Line, LogState, LogWrite, NoteWrite
from dtx.xa.xid import Xid
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_commit, a_completion, a_line, a_publish, an_insert
from tests.support.proxy import Direction, Proxy
from tests.support.stored import QUEUE, a_message, a_queue, drops, puts

ROUNDS: Final = 8
"""Each cuts all connections."""
_CHAINS: Final = 60
"""Sequences of records in one round, enough for consecutive groups of many records."""
_LONGEST: Final = 120_000
"""The most bytes after which a round's connections are cut: about as many as a round sends."""

Expected = type[LogError] | None


@dataclass(slots=True)
class Model:
    """The expected rows of the tables, and the expected answer to each write."""

    occupied: Xid
    told: list[tuple[LogWrite, Expected, list[LogError | None]]] = field(default_factory=list)
    branches: dict[UUID, tuple[LogState, int]] = field(default_factory=dict)
    messages: set[Slot] = field(default_factory=set)
    queues: set[int] = field(default_factory=set)
    lines: defaultdict[UUID, list[str]] = field(default_factory=lambda: defaultdict(list))

    def expect(self, record: LogWrite, expected: Expected = None) -> tuple[LogWrite, list[LogError | None]]:
        """Note the expected answer to *record*; returns the record with the list that takes its answers."""
        answers: list[LogError | None] = []
        self.told.append((record, expected, answers))
        return record, answers


Posts = list[tuple[LogWrite, list[LogError | None]]]


class Chains:
    """Sequences of records that depend on each other, drawn at random."""

    def __init__(self, random: Random, model: Model) -> None:
        self._random = random
        self._model = model
        self._kinds: Sequence[Callable[[], Posts]] = (
            self._life, self._life, self._life, self._halfway, self._refused, self._stale, self._again, self._messages,
            self._one_phase, self._queue,
        )  # fmt: skip

    def draw(self) -> Posts:
        """Draw a sequence."""
        return self._random.choice(self._kinds)()

    def _entry(self, branch: BranchRecord) -> LogWrite:
        """Insert the branch, without a line in the journal or with a line in one of its forms."""
        body = self._random.randbytes(self._random.choice((5, 5, 5, 3000)))
        record = an_insert(branch, a_publish(body=body))
        match self._random.randrange(3):
            case 0:
                return type(record)(branch=branch, work=record.work)
            case 1:
                self._model.lines[branch.id].append("prepared")
                assert branch.prepared_at is not None
                line = Line(JournalEvent.PREPARED, branch.prepared_at, "guest")  # the vote's time, as the row has it
                return type(record)(branch=branch, work=record.work, journal=line)
            case _:
                self._model.lines[branch.id].append("prepared")
                return record

    def _decision(self, branch: BranchRecord) -> LogWrite:
        if self._random.random() < 0.5:
            return a_commit(branch)
        self._model.lines[branch.id].append("repeated")
        return a_commit(branch, journal=a_line(branch, JournalEvent.REPEATED))

    def _life(self, **changes: Any) -> Posts:
        """A branch is inserted, decided and completed."""
        branch = a_branch(**changes)
        posts = [self._model.expect(record) for record in (self._entry(branch), self._decision(branch))]
        posts.append(self._model.expect(a_completion(branch, expect=LogState.COMMITTING, version=2)))
        self._model.lines[branch.id].append("committed")
        return posts

    def _halfway(self) -> Posts:
        """A branch that is not completed."""
        branch = a_branch()
        posts = [self._model.expect(self._entry(branch))]
        self._model.branches[branch.id] = LogState.PREPARED, 1
        for version in range(1, self._random.randrange(4)):
            more: dict[str, Any] = {} if version == 1 else {"expect": LogState.COMMITTING, "version": version}
            posts.append(self._model.expect(a_commit(branch, **more)))
            self._model.branches[branch.id] = LogState.COMMITTING, version + 1
        return posts

    def _refused(self) -> Posts:
        """The xid exists already: no record of the branch is written."""
        branch = a_branch(xid=self._model.occupied)
        later = (a_commit(branch), a_completion(branch, expect=LogState.COMMITTING, version=2))
        first = self._model.expect(an_insert(branch), DuplicateXid)
        return [first, *(self._model.expect(record, LogConflict) for record in later)]

    def _stale(self) -> Posts:
        """A record of a branch fails, and a later one does not."""
        branch = a_branch()
        posts = [self._model.expect(self._entry(branch))]
        posts.append(self._model.expect(a_commit(branch, version=7), LogConflict))
        posts.append(self._model.expect(self._decision(branch)))
        posts.append(self._model.expect(a_completion(branch), LogConflict))
        self._model.branches[branch.id] = LogState.COMMITTING, 2
        return posts

    def _again(self) -> Posts:
        """An xid is used again after its branch has ended."""
        branch = a_branch()
        return self._life(xid=branch.xid) + self._life(xid=branch.xid)

    def _messages(self) -> Posts:
        """Messages are put and dropped; some records leave no trace."""
        here, gone, later = a_message(), a_message(), a_message()
        self._model.messages |= {here.slot, later.slot}
        changes = [puts(here, gone), drops(gone), drops(gone), puts(later), Change(delivered=[(QUEUE, later.position)])]
        return [self._model.expect(Store(change=change)) for change in changes]

    def _one_phase(self) -> Posts:
        """A message and the journal's line in one record."""
        message, branch = a_message(), a_branch()
        self._model.messages.add(message.slot)
        self._model.lines[branch.id].append("committed")
        return [self._model.expect(NoteWrite(journal=a_line(branch, JournalEvent.COMMITTED), change=puts(message)))]

    def _queue(self) -> Posts:
        """A queue is defined, and removed or kept."""
        queue = a_queue(id=self._random.randrange(1, 2**62), name=uuid4().bytes)
        posts = [self._model.expect(Define(queues=[queue]))]
        if self._random.random() < 0.5:
            posts.append(self._model.expect(Define(removed_queues=[queue.id])))
        else:
            self._model.queues.add(queue.id)
        return posts


class Run:
    """Rounds of writes under cuts, and the check of their results.

    Args:
        log: it connects through *proxy*.
        proxy: it cuts the connections.
        url: the database without the proxy.
        seed: for all random choices.
    """

    def __init__(self, log: PostgresTransactionLog, proxy: Proxy, url: str, seed: int) -> None:
        self._log = log
        self._proxy = proxy
        self._url = url
        self._random = Random(seed)
        self._model = Model(a_branch().xid)
        self._chains = Chains(self._random, self._model)
        self._open = 0
        self._idle = asyncio.Event()
        self.most_under_way = 0

    async def rounds(self, number: int) -> None:
        """Run that many rounds, each with a cut of every connection."""
        first = a_branch(xid=self._model.occupied)
        self._model.branches[first.id] = LogState.PREPARED, 1
        await self._log.write(self._model.expect(an_insert(first))[0])
        self._model.told[0][2].append(None)
        self._model.lines[first.id].append("prepared")
        for _ in range(number):
            await self._round()

    async def _round(self) -> None:
        direction: Direction = self._random.choice(("up", "down"))
        octets = int(self._random.random() ** 2 * _LONGEST)
        waiting = [self._chains.draw() for _ in range(_CHAINS)]
        self._proxy.cut_after(direction, octets)
        while waiting:
            for chain in [chain for chain in waiting if self._random.random() < 0.5]:
                for record, answers in chain[: self._random.randrange(1, 4)]:
                    self._post(record, answers)
                    chain.pop(0)
                if not chain:
                    waiting.remove(chain)
            await asyncio.sleep(self._random.choice((0, 0, 0.001)))
            assert self._log._writer is not None
            self.most_under_way = max(self.most_under_way, len(self._log._writer._under_way))
        await self._all_told()
        self._proxy.resume()

    def _post(self, record: LogWrite, answers: list[LogError | None]) -> None:
        def told(error: LogError | None) -> None:
            answers.append(error)
            self._open -= 1
            if not self._open:
                self._idle.set()

        self._open += 1
        self._idle.clear()
        # a caller that posts a record of a branch as not urgent may post no other record of that branch meanwhile
        self._log.post(record, told, urgent=not isinstance(record, Store | NoteWrite) or self._random.random() < 0.8)

    async def _all_told(self) -> None:
        if self._open:
            async with asyncio.timeout(120):
                await self._idle.wait()

    async def check(self) -> None:
        """Compare every answer and the tables with the model."""
        wrong = [
            (record, expected, answers)
            for record, expected, answers in self._model.told
            if [None if answer is None else type(answer) for answer in answers] != [expected]
        ]
        assert wrong == []
        model = self._model
        async with await psycopg.AsyncConnection.connect(self._url) as connection:

            async def rows(query: str) -> list[Any]:
                return await (await connection.execute(query.encode())).fetchall()

            branches = await rows("SELECT id, state, version FROM dtx.branch")
            assert {row[0]: (row[1], row[2]) for row in branches} == model.branches
            work = Counter(row[0] for row in await rows("SELECT branch_id FROM dtx.work"))
            assert work == Counter(dict.fromkeys(model.branches, 1))
            assert {Slot(*row) for row in await rows("SELECT queue, position FROM dtx.message")} == model.messages
            assert {row[0] for row in await rows("SELECT id FROM dtx.queue")} == model.queues
            lines: defaultdict[UUID, list[str]] = defaultdict(list)
            for branch, event in await rows("SELECT branch_id, event FROM dtx.journal ORDER BY xid8"):
                lines[branch].append(event)
            assert lines == {branch: events for branch, events in model.lines.items() if events}


@pytest.fixture
def cutting(migrated_postgres_url: str) -> Iterator[Proxy]:
    """A proxy between the log and PostgreSQL."""
    values = conninfo_to_dict(migrated_postgres_url)
    with Proxy(str(values["host"]), int(values["port"] or 5432)) as proxy:
        yield proxy


async def test_no_cut_changes_a_write_or_its_outcome(
    open_log: OpenLog, migrated_postgres_url: str, cutting: Proxy
) -> None:
    seed = time.time_ns() & 0xFFFFFF
    print(f"seed {seed}")
    values = conninfo_to_dict(migrated_postgres_url)
    log = await open_log(
        url=f"postgresql://{values['user']}:{values['password']}@127.0.0.1:{cutting.port}/{values['dbname']}",
        lease_ttl=60.0,
        retry_window=60.0,
        answer_timeout=30.0,
    )
    run = Run(log, cutting, migrated_postgres_url, seed)
    await run.rounds(ROUNDS)
    await run.check()
    assert run.most_under_way == 2, "no group was sent behind another one"
    assert cutting.accepted >= ROUNDS, "too few connections were cut"

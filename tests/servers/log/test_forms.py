"""Every frequent statement has a form for many rows and a form for one row: both write the same."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from dtx.db.connections import Dsn
from dtx.db.pipeline import CONFLICT, PipelineSession, StatementRefused
from dtx.log import statements
from dtx.log.changes import Change, Define, Slot, Store, StoredMessage
from dtx.log.records import (
    MOVED,
    Advance,
    BranchRecord,
    CloseWrite,
    CompleteWrite,
    DuplicateWrite,
    Fate,
    Insert,
    JournalEvent,
    Line,
    LogState,
    LogWrite,
    NoteWrite,
    Redirect,
    SettlementsWrite,
    WorkKind,
)
from dtx.log.statements import LEASE_LOST
from dtx.log.writer import WRITER_SETTINGS
from dtx.xa.codes import Heuristic
from tests.support.branches import (
    a_branch,
    a_commit,
    a_completion,
    a_consume,
    a_duplicate,
    a_line,
    a_publish,
    a_replay,
    a_settlement,
    a_unit,
)
from tests.support.stored import QUEUE, a_binding, a_message, a_queue, an_exchange

History = list[list[LogWrite]]
"""Steps; each has the records of two branches."""
AT = 1_800_000_002.5
QUEUES = [a_queue(), a_queue(id=QUEUE + 1, name=b"another")]
TABLES = (
    "branch", "work", "unit", "heuristic_outcome", "journal", "archive", "exchange", "queue", "binding", "message",
    "body", "replay", "settlement", "duplicate",
)  # fmt: skip
TIMED = ("replay", "settlement", "duplicate")
"""Tables whose rows have the time of the database."""

PROVING = {form.proving: form.of_one for form in statements.STATEMENTS if form.proving and form.of_one}


@pytest.fixture
async def session(migrated_postgres_url: str) -> AsyncIterator[PipelineSession]:
    """A writer's session under epoch 1."""
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(
            "INSERT INTO dtx.lease (rm, epoch, holder, instance, taken_at, expires_at, retention_days) "
            "VALUES ('rm', 1, 'test', %s, now(), now(), 30)",
            [uuid4()],
        )
    session = await PipelineSession.connect(
        Dsn(migrated_postgres_url),
        statements.PREPARED,
        settings=WRITER_SETTINGS,
        timeout=5,
        answer_timeout=30,
        durable=True,
    )
    yield session
    await session.close()


def in_a_broker(state: LogState, outcome: Heuristic) -> History:
    """Two branches that take messages, are stuck, are decided by an operator, and are forgotten."""
    branches = [
        a_branch(state=LogState.TAKING, prepared_at=None, consumes=1, units=(a_unit(1), a_unit(0))) for _ in range(2)
    ]

    def each(make: Any) -> list[LogWrite]:
        return [make(branch) for branch in branches]

    def decided(branch: BranchRecord) -> Advance:
        return Advance(
            id=branch.id,
            expect=state,
            version=3,
            to=LogState.HEURISTIC,
            decided_at=AT,
            outcome=outcome,
            fates=((0, Fate.DISCARDED),),
            redirects=(Redirect(position=0, exchange=b"elsewhere", routing_key=b"k"),),
            close=CloseWrite(publishes=Fate.DROPPED, consumes=Fate.PUT_BACK),
            journal=a_line(branch, JournalEvent.HEURISTIC, outcome=outcome, reason="by hand", at=AT),
        )

    return [
        each(lambda branch: Insert(branch=branch, work=(a_publish(), a_publish(1), a_consume(2)))),
        each(
            lambda branch: Advance(
                id=branch.id,
                expect=LogState.TAKING,
                version=1,
                to=LogState.PREPARED,
                prepared_at=AT,
                units_done=(1,),
                journal=a_line(branch, at=AT),
            )
        ),
        each(
            lambda branch: Advance(
                id=branch.id,
                expect=LogState.PREPARED,
                version=2,
                to=state,
                decided_at=AT,
                stuck="no such exchange",
                settled=(1,),
                unit=a_unit(0, attempt=2),
                replays=(a_replay(),),
            )
        ),
        each(decided),
        each(
            lambda branch: CompleteWrite(
                id=branch.id,
                expect=LogState.HEURISTIC,
                version=4,
                journal=Line(JournalEvent.FORGOTTEN, AT, "guest"),
                archive=True,
            )
        ),
    ]


def without_a_broker(position: int) -> History:
    """Two branches, each of which votes with one write and ends with one write."""
    slots = [Slot(queue.id, position) for queue in QUEUES]
    branches = [a_branch(published=(slot,), consumed=()) for slot in slots]
    puts = [_stored(slot) for slot in slots]
    return [
        [
            Insert(branch=branch, journal=Line(JournalEvent.PREPARED, AT, "guest"), change=Change(puts=[put]))
            for branch, put in zip(branches, puts, strict=True)
        ],
        [
            Advance(
                id=branch.id,
                expect=LogState.PREPARED,
                version=1,
                to=LogState.PREPARED,
                released=frozenset({WorkKind.CONSUME}),
            )
            for branch in branches
        ],
        [
            CompleteWrite(
                id=branch.id,
                expect=LogState.PREPARED,
                version=2,
                journal=Line(JournalEvent.COMMITTED, AT, "guest"),
                change=Change(
                    expiries=[(slot, AT)],
                    delivered=[(slot.queue, slot.position)],
                    revisions=[(slot, b"\x08\x00\x03")],
                ),
            )
            for branch, slot in zip(branches, slots, strict=True)
        ],
        [Store(change=Change(drops=[slot])) for slot in slots],
    ]


def others() -> History:
    """Branches with work, whose last lines in the journal are given whole or made from their rows; and messages."""
    branches = [a_branch() for _ in range(4)]
    whole, short = branches[:2], [branch._replace(started_at=1.0) for branch in branches[2:]]
    return [
        [
            Insert(branch=branch, work=(a_publish(),), journal=Line(JournalEvent.PREPARED, AT, "a"), since="1:1:")
            for branch in whole
        ],
        [
            Insert(branch=branch, work=(a_publish(),), journal=Line(JournalEvent.PREPARED, AT, "a"), since="1:1:")
            for branch in short
        ],
        [_end(branch, a_line(branch, JournalEvent.COMMITTED, reason="repeated", at=AT)) for branch in whole],
        [_end(branch, Line(JournalEvent.ROLLED_BACK, AT, "a")) for branch in short],
        [NoteWrite(journal=a_line(branch, JournalEvent.TIMED_OUT, at=AT)) for branch in whole],
        [Store(change=Change(puts=[_stored(Slot(QUEUE, position))])) for position in (1, 2)],
        [Store(change=Change(puts=[_stored(Slot(QUEUE, body))._replace(shared=body)])) for body in (3, 4)],
        [Store(change=Change(drops=[Slot(QUEUE, body)])) for body in (3, 4)],
        [SettlementsWrite(settlements=(a_settlement(branch),)) for branch in whole],
        [SettlementsWrite(settlements=(a_settlement(branch, attempt=MOVED),)) for branch in whole],
        [DuplicateWrite(duplicate=a_duplicate(branch)) for branch in whole],
    ]


def topology() -> list[Define]:
    """Two rows of each kind are defined and removed."""
    queues = [a_queue(id=QUEUE - number, name=b"q%d" % number) for number in (1, 2)]
    exchanges = [an_exchange(name=b"x%d" % number) for number in range(2)]
    bindings = [a_binding(destination=queue.name) for queue in queues]
    return [
        Define(exchanges=exchanges),
        Define(queues=queues),
        Define(bindings=bindings),
        Define(removed_bindings=bindings),
        Define(removed_queues=[queue.id for queue in queues]),
        Define(removed_exchanges=[exchange.key for exchange in exchanges]),
    ]


def one_by_one(define: Define) -> list[Define]:
    """One record for each row of *define*, whose rows are all of one kind."""
    kinds = ("exchanges", "removed_exchanges", "queues", "removed_queues", "bindings", "removed_bindings")
    return [Define(**{kind: [row]}) for kind in kinds for row in getattr(define, kind)]


def _end(branch: BranchRecord, journal: Any) -> CompleteWrite:
    return CompleteWrite(id=branch.id, expect=LogState.PREPARED, version=1, journal=journal)


def _stored(slot: Slot) -> StoredMessage:
    return a_message()._replace(queue=slot.queue, position=slot.position)


class Player:
    """Writes groups as the writer does.

    Args:
        session: has the prepared statements.
        url: its database.
    """

    def __init__(self, session: PipelineSession, url: str) -> None:
        self.session = session
        self.url = url
        self.names: set[bytes] = set()

    async def play(self, groups: Iterable[Sequence[LogWrite]], *, proved_apart: bool = False) -> list[Any]:
        """Write *groups*, with two queues defined before, and empty the tables; returns their rows after each group.

        Args:
            groups: groups of records.
            proved_apart: a separate statement proves the lease, not the first statement of the group.
        """
        numbers = count()
        seen = []
        await self.session.send(statements.bind_group(b"rm", 1, [(Define(queues=QUEUES), bytes(16))]))
        for group in groups:
            bound = statements.bind_group(b"rm", 1, [(record, next(numbers).to_bytes(16)) for record in group])
            if proved_apart and bound[0][0] in PROVING:
                (first, (_, _, *cells)), *rest = bound
                one, eight = PROVING[first], (1).to_bytes(8)
                bound = [(statements.PROVE_LEASE, [b"rm", eight]), (one, [b"rm", eight, *cells]), *rest]
            self.names |= {statement.name for statement, _ in bound}
            await self.session.send(bound)
            seen.append(self._tables())
        with psycopg.connect(self.url) as connection:
            connection.execute(f"TRUNCATE {', '.join(f'dtx.{table}' for table in TABLES)}")
        return seen

    def _tables(self) -> dict[str, list[Any]]:
        with psycopg.connect(self.url) as connection:
            rows = "SELECT to_jsonb(t) - {} FROM dtx.{} t ORDER BY 1"
            return {
                table: [
                    row
                    for (row,) in connection.execute(
                        sql.SQL(rows).format("at" if table in TIMED else "xid8", sql.Identifier(table))
                    )
                ]
                for table in TABLES
            }


async def test_one_row_is_written_as_many_are(session: PipelineSession, migrated_postgres_url: str) -> None:
    player = Player(session, migrated_postgres_url)
    for history in (
        in_a_broker(LogState.COMMITTING, Heuristic.HAZARD),
        in_a_broker(LogState.ROLLING_BACK, Heuristic.MIXED),
        without_a_broker(1),
        others(),
    ):
        together = await player.play(history)
        apart = await player.play([record] for step in history for record in step)
        assert together == apart[1::2]
        assert apart == await player.play(([record] for step in history for record in step), proved_apart=True)
    defines = topology()
    together = await player.play([define] for define in defines)
    assert together == (await player.play([one] for define in defines for one in one_by_one(define)))[1::2]
    known = {statement.name for statement in statements.PREPARED}
    # release never has more than one row, because the other kind of work must stay; prove_turn proves the order of
    # groups
    assert player.names == known - {b"release", b"prove_sequence"}


@pytest.mark.parametrize("seen", [False, True], ids=["new", "seen by autovacuum"])
def test_every_row_is_found_by_key_in_formerly_empty_tables(migrated_postgres_url: str, seen: bool) -> None:
    """Plans made for empty tables are kept: one that uses only the resource manager would read all its rows."""
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        if seen:
            connection.execute("VACUUM ANALYZE")
        for name, value in WRITER_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", [name, value])
        for statement in statements.PREPARED:
            name = statement.name.decode()
            connection.execute(f"PREPARE {name} AS {statement.sql}".encode())
            nulls = ", ".join(["NULL"] * (4 if statement is statements.PROVE_SEQUENCE else 2 + len(statement.columns)))
            plan = "\n".join([row for (row,) in connection.execute(f"EXPLAIN EXECUTE {name}({nulls})".encode())])
            # the lease has one row
            plan = re.sub(r"Scan on lease_pkey .*\n *Index Cond: \(rm = \$1\)", "", plan)
            assert not re.search(r"Index Cond: \(\w*\.?rm = \$1\)", plan), plan
            assert not re.search(r"Seq Scan on|Index Scan .*\n(?! *Index Cond:)", plan), plan


def beginnings() -> list[LogWrite]:
    """Records whose only or first statement has a form that also proves the lease."""
    branch = a_branch()
    return [
        Insert(branch=branch),
        Insert(branch=branch, journal=Line(JournalEvent.PREPARED, AT, "a")),
        a_commit(branch),
        _end(branch, Line(JournalEvent.COMMITTED, AT, "a")),
        replace(_end(branch, Line(JournalEvent.COMMITTED, AT, "a")), change=Change()),
        Store(change=Change(puts=[_stored(Slot(QUEUE, 1))])),
        SettlementsWrite(settlements=(a_settlement(branch),)),
        DuplicateWrite(duplicate=a_duplicate(branch)),
    ]


async def test_a_lone_first_statement_proves_the_lease(session: PipelineSession, migrated_postgres_url: str) -> None:
    """The lock is the proof, not the read: it waits for a successor that is taking the lease, and fails."""
    names = set()
    with psycopg.connect(migrated_postgres_url) as successor:
        for number, record in enumerate(beginnings(), 1):
            bound = statements.bind_group(b"rm", number, [(record, uuid4().bytes)])
            names.add(bound[0][0].name)
            successor.execute("UPDATE dtx.lease SET epoch = epoch + 1")
            writing = session.send(bound)
            while not successor.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", [session.backend_pid]
            ).fetchall():
                assert not writing.done()
                await asyncio.sleep(0.01)
            successor.commit()
            with pytest.raises(StatementRefused) as refused:
                await writing
            assert refused.value.sqlstate == LEASE_LOST, record
    assert names == {statement.name for statement in PROVING}


async def test_either_form_refuses_unexpected_states(session: PipelineSession) -> None:
    good, bad = a_branch(), a_branch()

    async def write(*group: LogWrite) -> None:
        await session.send(statements.bind_group(b"rm", 1, [(record, uuid4().bytes) for record in group]))

    await write(*(Insert(branch=branch, work=(a_publish(),)) for branch in (good, bad)))
    for version in (0, 2):
        for record in (
            a_commit(bad, version=version),
            a_completion(bad, version=version),
            a_completion(bad, version=version, journal=Line(JournalEvent.COMMITTED, AT, "a")),
            a_commit(bad, settled=(7,)),
            a_commit(bad, units_done=(7,)),
            a_commit(bad, fates=((7, Fate.DROPPED),)),
            a_commit(bad, redirects=(Redirect(position=7),)),
        ):
            for group in ([record], [a_like(record, good), record]):
                with pytest.raises(StatementRefused) as refused:
                    await write(*group)
                assert refused.value.sqlstate == CONFLICT, group
    with pytest.raises(StatementRefused) as refused:
        await write(Insert(branch=a_branch(xid=bad.xid)))
    assert refused.value.sqlstate == "23505"
    await write(a_completion(good), a_completion(bad))


def a_like(record: Advance | CompleteWrite, branch: BranchRecord) -> Advance | CompleteWrite:
    """*record* for *branch*, changed so that it succeeds."""
    plain = replace(record, id=branch.id, version=1)
    if isinstance(plain, CompleteWrite):
        return plain
    settled = (0,) if plain.settled else ()
    fates = ((0, Fate.DROPPED),) if plain.fates else ()
    redirects = (Redirect(position=0),) if plain.redirects else ()
    return replace(plain, settled=settled, units_done=(), fates=fates, redirects=redirects)

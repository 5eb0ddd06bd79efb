"""Pages of branches by queue and by exchange, in both modes."""

from dataclasses import replace

import psycopg
import pytest

from dtx.db import migrate
from dtx.log.pages import BranchFilter, branch_page
from dtx.log.reader import LogReader
from dtx.log.records import Insert, JournalEvent, Line
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_consume, a_line, a_publish, an_insert
from tests.support.stored import a_message, puts

LOCAL = """
INSERT INTO dtx.queue (id, rm, vhost, name, auto_delete, arguments, delivered) VALUES
    (1, 'rm', '/', 'one', false, '', 0), (2, 'rm', '/', 'two', false, '', 0), (3, 'rm', 'other', 'one', false, '', 0);
INSERT INTO dtx.message (queue, position, rm, exchange, routing_key, flags, properties, body)
VALUES (1, 7, 'rm', 'orders', 'k', 1, '', ''), (2, 1, 'rm', 'jobs', 'k', 1, '', '');
INSERT INTO dtx.branch (id, rm, vhost, format_id, gtrid, bqual, state, owner, version, timeout, started_at, prepared_at,
    one_phase, publishes, consumes, bytes, published, consumed)
VALUES ('00000000-0000-0000-0000-000000000001', 'rm', '/', 1, 'a', '', 'prepared', 'guest', 1, 60, now(), now(),
    false, 1, 1, 0, int8send(1) || int8send(7), int8send(2) || int8send(1)),
    ('00000000-0000-0000-0000-000000000002', 'rm', '/', 1, 'b', '', 'prepared', 'guest', 1, 60, now(), now(),
    false, 1, 2, 0, int8send(2) || int8send(1), int8send(2) || int8send(9) || int8send(1) || int8send(8)),
    ('00000000-0000-0000-0000-000000000003', 'rm', '/', 1, 'c', '', 'prepared', 'guest', 1, 60, now(), now(),
    false, 1, 1, 0, '', int8send(2) || int8send(1))
"""


def found(url: str, wanted: BranchFilter) -> list[bytes]:
    """Global transaction ids of the branches on the page."""
    with LogReader(url) as reader:
        return [item.branch.xid.gtrid for item in branch_page(reader, replace(wanted, rm="rm"))]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (BranchFilter(exchange=b"orders"), [b"a"]),
        (BranchFilter(exchange=b"jobs"), [b"b"]),
        (BranchFilter(exchange=b"nothing"), []),
        # The third branch has the bytes of queue 1 in its slot as a position, which must not match as the queue.
        (BranchFilter(queue=b"one"), [b"a", b"b"]),
        (BranchFilter(queue=b"two"), [b"a", b"b", b"c"]),
        (BranchFilter(queue=b"nothing"), []),
        (BranchFilter(queue=b"two", exchange=b"jobs"), [b"b"]),
    ],
)
def test_branches_whose_messages_are_in_the_database(
    migrated_postgres_url: str, wanted: BranchFilter, expected: list[bytes]
) -> None:
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(LOCAL)
    assert found(migrated_postgres_url, wanted) == expected


async def test_branches_whose_messages_are_in_a_broker(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    one, other, done = (a_branch() for _ in range(3))
    await log.write(an_insert(one, a_publish(0, exchange=b"orders"), a_consume(1, queue=b"in")))
    await log.write(an_insert(other, a_publish(0, exchange=b"jobs"), a_consume(1, queue=b"orders")))
    await log.write(an_insert(done, a_publish(0, exchange=b"orders")))
    to_queue = a_branch()
    await log.write(an_insert(to_queue, a_publish(0, exchange=b"", routing_key=b"payments")))
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("UPDATE dtx.work SET fate = 'published' WHERE branch_id = %s", [done.id])
    for wanted, expected in (
        (BranchFilter(exchange=b"orders"), [one]),
        (BranchFilter(exchange=b"jobs"), [other]),
        (BranchFilter(queue=b"in"), [one]),
        (BranchFilter(queue=b"orders"), [other]),
        (BranchFilter(exchange=b"in"), []),
        (BranchFilter(queue=b"nothing"), []),
        (BranchFilter(queue=b"payments"), [to_queue]),
        (BranchFilter(exchange=b"jobs", queue=b"orders"), [other]),
        (BranchFilter(exchange=b"jobs", queue=b"in"), []),
    ):
        assert found(migrated_postgres_url, wanted) == [branch.xid.gtrid for branch in expected], wanted


@pytest.mark.parametrize("by", ["line", "entry"])
async def test_exchanges_are_found_by_the_marks_of_a_row(
    open_log: OpenLog, migrated_postgres_url: str, by: str
) -> None:
    log = await open_log()
    messages = {name: [a_message(exchange=exchange) for exchange in exchanges] for name, exchanges in (
        ("one", [b"orders"]), ("both", [b"jobs", b"orders", b"jobs"]), ("none", []), ("default", [b""]),
    )}  # fmt: skip
    for held in messages.values():
        branch = a_branch(published=tuple(message.slot for message in held), consumed=(), publishes=len(held))
        line = Line(JournalEvent.PREPARED, branch.started_at, "guest") if by == "line" else a_line(branch)
        await log.write(Insert(branch=branch, journal=line, change=puts(*held)))
    with psycopg.connect(migrated_postgres_url) as connection:
        rows = connection.execute("SELECT octet_length(exchange_marks) FROM dtx.branch ORDER BY id").fetchall()
        # A branch with another mark is not found, which shows that the filter uses the marks.
        connection.execute(LOCAL + ", ('00000000-0000-0000-0000-000000000004', 'rm', '/', 1, 'd', '', 'prepared', "
            "'guest', 1, 60, now(), now(), false, 1, 1, 0, int8send(1) || int8send(7), '')")  # fmt: skip
        connection.execute("UPDATE dtx.branch SET exchange_marks = 'else' WHERE gtrid = 'd'")
    assert sorted(octets for (octets,) in rows) == [0, 4, 4, 8]
    with LogReader(migrated_postgres_url) as reader:
        names = {
            name: sorted(
                (set(item.exchanges) for item in branch_page(reader, BranchFilter(rm="rm", exchange=name))), key=len
            )
            for name in (b"orders", b"jobs", b"", b"nothing")
        }
    assert names == {
        b"orders": [{b"orders"}, {b"orders"}, {b"orders", b"jobs"}],  # the first is an old row without marks
        b"jobs": [{b"jobs"}, {b"orders", b"jobs"}],
        b"": [{b""}],
        b"nothing": [],
    }


def test_branches_of_before_the_marks_are_found_as_ever(postgres_url: str) -> None:
    migrate.upgrade(postgres_url, "0008")
    with psycopg.connect(postgres_url) as connection:
        connection.execute(LOCAL)
    migrate.upgrade(postgres_url)
    assert found(postgres_url, BranchFilter(exchange=b"orders")) == [b"a"]
    migrate.downgrade(postgres_url, "0008")
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM dtx.branch").fetchone() == (3,)

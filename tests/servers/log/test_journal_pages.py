"""Pages of the journal and of the archive, read while a dtx writes them."""

import math
import time
from datetime import UTC, datetime
from uuid import UUID, uuid4

import psycopg
import pytest

from dtx.log import pages
from dtx.log.pages import (
    JOURNAL_CURSORS,
    OUTCOMES,
    JournalFilter,
    JournalRow,
    archive_page,
    journal_page,
    message_of_archive,
)
from dtx.log.reader import LogReader
from dtx.log.records import Fate, JournalEvent
from tests.servers.log.conftest import OpenLog
from tests.support.branches import a_branch, a_completion, an_insert

_ARCHIVE = """
INSERT INTO dtx.archive (branch_id, position, rm, vhost, format_id, gtrid, bqual, owner, kind, exchange, routing_key,
    properties, body, fate, at)
SELECT %(branch)s, n, 'rm', '/', 1, 'g', 'b', 'guest', 'publish', 'e', 'k', 'p', convert_to('body ' || n, 'UTF8'),
    'dropped', '2026-01-01T00:00:00Z'::timestamptz + n / 2 * interval '1 microsecond' FROM generate_series(0, 4) n
"""


def all_pages(url: str, asked: JournalFilter, *, latest_first: bool = False) -> list[JournalRow]:
    """All lines, read in pages of three."""
    found: list[JournalRow] = []
    with LogReader(url) as reader:
        while page := journal_page(
            reader, asked, after=found[-1].cursor if found else None, latest_first=latest_first, limit=3
        ):
            found += page
            assert len(found) < 1_000
    return found


async def test_journal_pages_have_each_line_once_in_either_order(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    branches = [a_branch() for _ in range(5)]
    for branch in branches:
        await log.write(an_insert(branch))
        await log.write(a_completion(branch))
    told = all_pages(migrated_postgres_url, JournalFilter(rm="rm"))
    assert len(told) == 10
    assert [found.entry.at for found in told] == sorted(found.entry.at for found in told)
    assert all_pages(migrated_postgres_url, JournalFilter(rm="rm"), latest_first=True) == told[::-1]
    endings = all_pages(migrated_postgres_url, JournalFilter(rm="rm", events=OUTCOMES), latest_first=True)
    assert [found.entry.xid for found in endings] == [branch.xid for branch in branches[::-1]]
    one = branches[2]
    for asked in (
        JournalFilter(rm="rm", xid=one.xid),
        JournalFilter(rm="rm", gtrid=one.xid.gtrid),
        JournalFilter(rm="rm", xid=one.xid, vhost="/", owner="guest"),
    ):
        assert [found.entry.event for found in all_pages(migrated_postgres_url, asked)] == ["prepared", "committed"]
    for asked in (
        JournalFilter(rm="rm", vhost="elsewhere"),
        JournalFilter(rm="rm", owner="nobody"),
        JournalFilter(rm="rm", gtrid=b"?"),
        JournalFilter(rm="rm", since=time.time() + 60),
    ):
        assert all_pages(migrated_postgres_url, asked) == []
    with LogReader(migrated_postgres_url) as reader:
        assert journal_page(reader, JournalFilter(rm="another")) == []


async def test_lines_of_one_microsecond_are_distinct(open_log: OpenLog, migrated_postgres_url: str) -> None:
    log = await open_log()
    await log.write(an_insert(a_branch()))
    since = math.floor(time.time()) - 60 + 0.789012  # within the retention, so that it is not dropped
    with psycopg.connect(migrated_postgres_url) as connection:
        at = datetime.fromtimestamp(since, UTC).isoformat()
        copied = f"SELECT '{at}'::timestamptz, md5(n::text)::uuid, rm, event, branch_id, vhost, "
        copied += "format_id, gtrid, bqual, owner, actor, one_phase, publishes, consumes, bytes FROM dtx.journal, "
        connection.execute(
            "INSERT INTO dtx.journal (at, id, rm, event, branch_id, vhost, format_id, gtrid, bqual, owner, actor, "
            f"one_phase, publishes, consumes, bytes) {copied} generate_series(1, 7) n"
        )
    for latest_first in (False, True):
        told = all_pages(migrated_postgres_url, JournalFilter(rm="rm"), latest_first=latest_first)
        assert len({found.cursor.values[1] for found in told}) == len(told) == 8
    assert len(all_pages(migrated_postgres_url, JournalFilter(rm="rm", since=since, until=since + 0.000001))) == 7


async def test_archive_pages_have_each_message_once_without_its_content(
    open_log: OpenLog, migrated_postgres_url: str
) -> None:
    await open_log()
    branch = uuid4()
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute(_ARCHIVE, {"branch": branch})
    with LogReader(migrated_postgres_url) as reader:
        found = archive_page(reader, JournalFilter(rm="rm"), limit=2)
        found += archive_page(reader, JournalFilter(rm="rm"), after=found[-1].cursor, limit=10)
        assert [(kept.message.position, kept.bytes, kept.message.body) for kept in found] == [
            (position, 6, b"") for position in (4, 3, 2, 1, 0)
        ]
        assert archive_page(reader, JournalFilter(rm="rm", gtrid=b"other")) == []
        assert archive_page(reader, JournalFilter(rm="another")) == []
        whole = message_of_archive(reader, "rm", branch, 3)
        assert whole is not None
        assert (whole.body, whole.properties, whole.fate) == (b"body 3", b"p", Fate.DROPPED)
        assert message_of_archive(reader, "rm", branch, 9) is None


def test_a_cursor_converts_to_text_and_back() -> None:
    cursor = pages._past_cursor(1770091506.789012, uuid4(), 7)
    assert JOURNAL_CURSORS.parse(str(cursor)) == cursor
    assert pages._moment(cursor.values[0]).microsecond == 789012


_HEX = "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    "text", ["", "1", "1-2-3", "x-00000000000000000000000000000000-0", f"1-{_HEX}", f"-1-{_HEX}-0",
             f"{'9' * 30}-{_HEX}-0", f"1-{_HEX}-{1 << 31}", f"1-{UUID(_HEX)}-0", f"٣-{_HEX}-0"],
)  # fmt: skip
def test_an_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cursor|UUID|invalid"):
        JOURNAL_CURSORS.parse(text)


def test_every_outcome_ends_a_branch() -> None:
    assert set(OUTCOMES) < set(JournalEvent)

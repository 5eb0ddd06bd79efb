"""Results of the pipeline in a browser."""

import json
from collections.abc import Iterator

import psycopg
import pytest
from playwright.sync_api import expect

from dtx.log.pages import VERDICT_CURSORS, last_reconciliation, verdict_page
from dtx.log.reader import LogReader
from tests.support.crash import StandaloneStage
from tests.support.tour import Tour

TOTALS = {
    "mixed": {"transactions": 70, "branches": 140, "sentence": "One branch was committed and another rolled back."},
    "orphan": {"transactions": 2, "branches": 2, "sentence": "Nobody knows it."},
    "committed": {"transactions": 1_234_567, "branches": 2_000_000, "sentence": "As it should be."},
}
SOURCES = [
    {"source": "db1", "part": "journal", "read_at": "2026-01-01T23:00:00+00:00", "is_missing": False},
    {"source": "ledger", "part": "branches in doubt", "read_at": None, "is_missing": True},
]
NASTY = "<script>alert(1)</script>\u202e"
PUT = """
INSERT INTO dtx.verdict VALUES (
    %(format_id)s, %(gtrid)s, %(verdict)s, %(findings)s, %(since)s, '2026-01-01Z', %(last_at)s, %(rms)s, %(owners)s, 2,
    %(decision)s, %(tm)s, decode(md5(%(gtrid)s::text), 'hex'), %(evidence)s, %(known_at)s
)
"""


def put(connection: psycopg.Connection, gtrid: bytes, **more: object) -> None:
    line = {
        "source": "db1", "rm": "rm-1", "vhost": NASTY, "bqual": "6231", "event": "committed", "outcome": None,
        "at": "2026-01-01 00:00:00.000000Z", "actor": "ann", "id": "1",
    }  # fmt: skip
    told = {
        "format_id": 1, "gtrid": gtrid, "verdict": "mixed", "findings": ["mixed", "unfinished"], "since": None,
        "last_at": "2026-01-02Z", "rms": ["rm-1", NASTY], "owners": ["ann"], "decision": None, "tm": None,
        "evidence": json.dumps([line]), "known_at": None,
    }  # fmt: skip
    connection.execute(PUT, told | more)


@pytest.fixture
def published(site: StandaloneStage) -> Iterator[StandaloneStage]:
    """A run with 73 verdicts that are shown."""
    with psycopg.connect(site.database) as connection:
        connection.execute(
            "INSERT INTO dtx.reconciliation (number, as_of, lines, fingerprint, totals, shown, sources)"
            " VALUES (7, '2026-01-02Z', 5000000, -1, %s, 73, %s)",
            (json.dumps(TOTALS), json.dumps(SOURCES)),
        )
        for number in range(70):
            put(connection, b"mixed-%02d" % number)
        put(
            connection,
            b"orphan",
            verdict="orphan",
            findings=["orphan"],
            since="2026-01-01Z",
            owners=["bob"],
            known_at="2026-01-02 03:04Z",
        )
        # the gtrid "orphan" has two verdicts, one without a format id
        # the null fields of a line may be missing
        few = json.dumps([{"source": "bank", "rm": "bank", "bqual": "", "event": "observed: prepared"}])
        put(connection, b"seen", verdict="in-doubt", findings=["in-doubt"], rms=["bank"], evidence=few)
        put(connection, b"orphan", format_id=None, verdict="orphan", findings=["orphan"], decision="commit", tm="tm1")
    yield site
    with psycopg.connect(site.database) as connection:
        connection.execute("TRUNCATE dtx.reconciliation, dtx.verdict")


def test_nothing_has_been_reconciled(tour: Tour) -> None:
    carla = tour.visitor("carla", "reconciliation")
    assert "There are no results yet" in carla.text()


def test_totals_are_shown_and_verdicts_are_found(tour: Tour, published: StandaloneStage) -> None:
    vera = tour.visitor("vera", "reconciliation")
    text = vera.text()
    assert "1\u202f234\u202f567" in text
    assert "Nobody knows it." in text
    sources = vera.page.locator("section[aria-labelledby=sources] tbody tr").all_inner_texts()
    assert [source.replace("\xa0", " ").split("\t") for source in sources] == [
        ["db1", "journal", "2026-01-01 23:00:00 UTC", "read"],
        ["ledger", "branches in doubt", "never", "not read"],
    ]
    rows = vera.page.locator("section[aria-labelledby=found] tbody tr")
    assert rows.count() == 50
    vera.follow("Next page")
    assert rows.count() == 23
    assert vera.page.get_by_role("link", name="Next page").count() == 0
    vera.follow("First page")
    assert rows.count() == 50
    for query, count in (
        ("verdict=orphan", 2),
        ("verdict=committed", 0),
        ("gtrid=mixed-03", 1),
        ("gtrid=" + b"mixed-03".hex(), 1),
        ("owner=bob", 1),
        ("rm=rm-1&verdict=mixed", 50),
        ("rm=rm-2", 0),
    ):
        vera.open(f"reconciliation?{query}")
        assert rows.count() == count, query
    vera.open("reconciliation?gtrid=mixed-03")
    vera.page.locator("summary").click()
    assert "committed in rm-1 <script>alert(1)</script>" in vera.text().replace("\n", " ")
    assert "\u202e" not in vera.text()
    vera.open("reconciliation")
    vera.press_keys(("#owner", "bob"), ("main form .primary", "Enter"))
    expect(rows).to_have_count(1)
    assert "known at 2026-01-02 03:04:00 UTC" in rows.inner_text().replace("\xa0", " ")
    vera.open("reconciliation?gtrid=seen")
    vera.page.locator("summary").click()
    assert "observed: prepared in bank of bank, branch (empty)" in vera.text().replace("\n", " ")
    assert vera.open("reconciliation?cursor=nonsense").status == 400
    vera.require_peace()


def test_every_verdict_is_on_one_page(published: StandaloneStage) -> None:
    """Also if a page ends between two verdicts of one gtrid, one of which has no format id."""
    seen = []
    with LogReader(published.database) as log:
        run = last_reconciliation(log)
        assert run is not None
        assert (run.number, run.lines, run.shown, list(run.totals)) == (7, 5_000_000, 73, list(TOTALS))
        after = None
        while page := verdict_page(log, after=after, limit=1):
            (one,) = page
            seen.append((one.gtrid, one.format_id))
            after = VERDICT_CURSORS.parse(str(one.cursor))
    assert len(seen) == len(set(seen)) == 73
    assert seen[-3:] == [(b"orphan", None), (b"orphan", 1), (b"seen", 1)]

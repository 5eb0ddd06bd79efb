"""The report: the page loads nothing else, and names that clients chose do no harm."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.reconcile import SourcePart, SourceRead
from dtx.pipeline.report.figures import AGES, Figures
from dtx.pipeline.report.page import render, write_report
from dtx.pipeline.report.plots import GROUPS, names
from dtx.pipeline.verdicts import PLAIN, Verdict
from dtx.xa.xid import Xid
from tests.support.browser import Browser

NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)
NASTY = "<script>alert(1)</script>$x_1$\"'&é"
FAR = "注文データベース-東京-주문-🚀🚀"
EMPTY = Figures(
    as_of=NOW,
    verdicts=dict.fromkeys(map(str, Verdict), 0),
    days=[],
    ages=[],
    latency=[],
    heuristics=[],
    owners=[],
    queues=None,
    attention=[],
    attention_total=0,
)


def evidence(*lines: dict[str, Any]) -> str:
    usual = {
        "source": "bank-a", "rm": "orders", "vhost": "/", "bqual": b"b1".hex(), "event": "prepared", "outcome": None,
        "at": "2026-03-01 10:00:00.123456Z", "actor": "ann", "id": "line-1",
    }  # fmt: skip
    return json.dumps([usual | line for line in lines])


def journal(source: str, read_at: datetime | None) -> SourceRead:
    return SourceRead(source, SourcePart.JOURNAL, read_at, is_missing=read_at is None)


def transaction(**changed: Any) -> dict[str, Any]:
    return {
        "verdict": "mixed",
        "findings": ["mixed", "in-doubt"],
        "format_id": 1,
        "gtrid": b"order-1".hex(),
        "since": NOW - timedelta(days=2),
        "first_at": NOW,
        "last_at": NOW,
        "known_at": NOW - timedelta(days=1),
        "branches": 2,
        "decision": "commit",
        "tm": NASTY,
        "rms": [NASTY],
        "owners": [NASTY],
        "evidence": evidence({"source": NASTY, "actor": NASTY}),
        **changed,
    }


FULL = replace(
    EMPTY,
    verdicts={**EMPTY.verdicts, "mixed": 2, "in-doubt": 3, "committed": 12_345},
    days=[(date(2026, 3, day), verdict, day) for day in (1, 2, 4) for verdict in ("mixed", "in-doubt", "committed")],
    ages=[(AGES[0][0], "in-doubt", 2), (AGES[-1][0], "mixed", 1)],
    latency=[(NASTY, 12, 0.004, 0.3, 400.0), ("b", 1, 0.0, 0.0, 0.0)],
    heuristics=[("a", NASTY, "carol", 3)],
    owners=[(NASTY, 5, 2), ("=1+1", 1, 0)],
    queues=[("a", "publish", NASTY, 7)],
    attention=[transaction(), transaction(gtrid="00ff", since=None, decision=None, evidence="[]")],
    attention_total=5,
    quarantine=[Quarantined(source="bank-z", item="database", reason=NASTY, count=None)],
    oldest=NOW - timedelta(days=2),
)


class Outside(HTMLParser):
    """Collects the addresses that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in {"link", "img", "iframe", "object", "image"}:
            self.found.append(tag)
        self.found += [
            str(named[name]) for name in ("src", "href", "xlink:href") if not (named.get(name) or "#").startswith("#")
        ]
        if named.get("id"):
            self.ids.append(str(named["id"]))


@pytest.mark.parametrize("figures", [EMPTY, FULL], ids=["nothing", "everything"])
def test_the_page_needs_nothing_else(figures: Figures) -> None:
    page = Outside()
    page.feed(render(figures))
    assert page.found == []
    assert len(page.ids) == len(set(page.ids)), "ids of all drawings differ"


def test_foreign_names_are_only_text() -> None:
    page = render(FULL)
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    assert "<script" not in render(EMPTY)


def test_a_page_is_the_same_for_the_same_figures() -> None:
    assert render(FULL) == render(FULL)


def test_colours_of_plots_are_those_of_the_page() -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", render(FULL), re.DOTALL))
    assert "var(--bad)" in drawn
    assert not re.findall(r"(?:fill|stroke): ?#(?!000000)[0-9a-f]{6}", drawn), "a colour without a dark variant"


def test_every_verdict_that_needs_attention_has_a_colour() -> None:
    assert {verdict for _, verdicts in GROUPS.values() for verdict in verdicts} == set(Verdict) - PLAIN


def test_the_page_lists_findings_and_unread_sources() -> None:
    page = render(FULL)
    for words in (
        "12,350</b>transactions",
        "2</b>went wrong",
        "3</b>open",
        "2 days</b>oldest open",
        "order-1",
        "bank-z",
    ):
        assert words in page
    assert "The first 2 of 5;" in page
    assert "Nothing needs attention: every transaction ended the same way everywhere." in render(EMPTY)


def test_findings_without_a_time_are_only_in_the_tables(tmp_path: Path) -> None:
    """Atomikos's log has no times, and a decision in it can be about a transaction without known branches."""
    days: list[tuple[date | None, str, int]] = [(None, "unfinished", 3), (None, "committed", 1)]
    alone = replace(EMPTY, days=days, attention_total=3)
    assert "No transaction that needs attention has a time." in render(alone)
    page = write_report(replace(FULL, days=[*days, *FULL.days]), tmp_path)
    assert "by day of the last event</figcaption><svg" in page.read_text()
    assert (page.parent / "days.csv").read_text().splitlines()[1:3] == [",unfinished,3", ",committed,1"]


def test_tables_accompany_the_page_and_contain_no_formula(tmp_path: Path) -> None:
    page = write_report(FULL, tmp_path / "new" / "report")
    assert page.read_text() == render(FULL)
    found = {
        path.stem: list(csv.reader(io.StringIO(path.read_text(), newline=""))) for path in page.parent.glob("*.csv")
    }
    assert found["owners"][1:] == [[NASTY, "5", "2"], ["'=1+1", "1", "0"]]
    assert found["verdicts"][0] == ["verdict", "transactions"]
    assert ["committed", "12345"] in found["verdicts"]
    assert found["quarantine"][1] == ["bank-z", "database", NASTY, "", ""]
    assert found["attention"][1][:5] == [
        "mixed",
        "mixed in-doubt",
        "1",
        b"order-1".hex(),
        "2026-03-02T12:00:00.000000+00:00",
    ]
    write_report(EMPTY, page.parent)
    assert not [path for path in page.parent.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def test_each_line_of_evidence_is_a_row_with_its_xid(browser: Browser, tmp_path: Path) -> None:
    """A branch of dtx has an xid that ``dtx show`` takes. Decisions and other resource managers have none."""
    lines = evidence(
        {"outcome": "heuristic-mixed"},
        {"source": "bank-b", "event": "observed: prepared", "bqual": "00ff", "id": None, "at": None},
        {"source": "postgres", "event": "observed: prepared", "bqual": "", "id": None, "actor": None},
        {"source": "bank-b", "event": "decided: commit", "vhost": "", "bqual": "", "id": None},
    )
    figures = replace(FULL, attention=[transaction(evidence=lines)], sources=[journal("bank-b", NOW)])
    page = browser.visitor(write_report(figures, tmp_path).as_uri(), scripts=False).page
    page.goto((tmp_path / "report.html").as_uri())
    page.get_by_text("Evidence: 4 lines").click()
    table = page.locator("details table")
    assert table.locator("thead th").all_inner_texts() == [
        "Time", "Event", "Outcome", "Source", "Resource manager", "Vhost", "Bqual", "Actor", "Xid",
    ]  # fmt: skip
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    own, other = (Xid(1, b"order-1", bqual) for bqual in (b"b1", b"\x00\xff"))
    assert rows[0] == [
        "2026-03-01 10:00:00.123", "prepared", "heuristic-mixed", "bank-a", "orders", "/", "b1", "ann", str(own),
    ]  # fmt: skip
    assert [row[-1] for row in rows] == [str(own), str(other), "", ""]
    table.locator("tbody tr").first.locator("code").last.click()
    assert page.evaluate("getSelection().toString()") == str(own), "a click selects the whole xid"


def test_long_evidence_states_how_much_is_omitted() -> None:
    figures = replace(FULL, attention=[transaction(evidence=evidence(*({"id": str(n)} for n in range(1000))))])
    page = render(figures)
    assert "Evidence: the first 50 of 1,000 lines" in page
    assert page.count("<tr><td>2026-03-01 10:00:00.123</td>") == 50


def test_transactions_are_filtered_by_verdict_source_owner_and_age(browser: Browser, tmp_path: Path) -> None:
    times = {"last_at": NOW - timedelta(hours=2)}
    rows = [
        transaction(gtrid=b"one".hex(), owners=[NASTY, ""], evidence=evidence({"source": FAR})),
        transaction(gtrid=b"two".hex(), owners=["bob"], evidence=evidence({}, {"source": FAR}), since=None, **times),
        transaction(gtrid=b"three".hex(), owners=["bob"], verdict="in-doubt", since=NOW, evidence=evidence({})),
        transaction(gtrid=b"four".hex(), owners=[], verdict="in-doubt", since=None, last_at=None, evidence="[]"),
    ]
    page = write_report(replace(FULL, attention=rows, attention_total=4), tmp_path)
    visitor = browser.visitor(page.as_uri())
    visitor.page.goto(page.as_uri())

    def shown(**wanted: str) -> list[str]:
        for name in ("verdict", "source", "owner", "age"):
            visitor.page.locator(f"select[name={name}]").select_option(label=wanted.get(name, "any"))
        found = visitor.page.locator("#attention > tbody:visible td[data-label=Transaction]").all_inner_texts()
        expect(visitor.page.locator("output")).to_have_text(f"{len(found)} of 4 shown")
        return [text.splitlines()[0] for text in found]

    assert shown() == ["one", "two", "three", "four"]
    assert shown(verdict="in-doubt") == ["three", "four"]
    assert shown(source=FAR) == ["one", "two"]
    assert shown(source="bank-a") == ["two", "three"]
    assert shown(owner=NASTY) == ["one"]
    assert shown(age="over 1 hour") == ["one", "two"]
    assert shown(age="over 1 day") == ["one"]
    assert shown(owner="bob", source=FAR, age="over 1 minute") == ["two"]
    assert shown(owner="bob", verdict="mixed", age="over 1 day") == []
    visitor.require_peace()


def test_without_scripts_every_transaction_is_shown(browser: Browser, tmp_path: Path) -> None:
    page = browser.visitor(write_report(FULL, tmp_path).as_uri(), scripts=False).page
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("#attention > tbody:visible").count() == 2
    assert page.locator("select:visible").count() == 0


def test_sources_state_their_age_the_oldest_first() -> None:
    sources = [
        journal("lately", NOW - timedelta(hours=1)),
        journal("long ago", NOW - timedelta(days=3)),
        journal("never", None),
        journal("down", NOW - timedelta(minutes=1)),
        journal("cut line", NOW - timedelta(hours=24)),
        SourceRead("down", SourcePart.BRANCHES, NOW, is_missing=False),
        SourceRead("ledger", SourcePart.BRANCHES, NOW - timedelta(hours=2), is_missing=True),
        SourceRead("down", SourcePart.DECISIONS, None, is_missing=True),
    ]
    unread = [
        Quarantined(source="down", item="journal", reason="away", count=None),
        Quarantined(source="cut line", item="journal", reason="no xid"),
    ]
    page = render(replace(EMPTY, sources=sources, quarantine=unread))
    row = r'<tr><td>(.*?)</td><td>(.*?)</td><td class="verdict (\w+)">(\w+)</td><td>.*?</td><td>(.*?)</td></tr>'
    assert re.findall(row, page) == [
        ("down", "decisions", "bad", "unread", ""),
        ("never", "journal", "bad", "unread", ""),
        ("long ago", "journal", "warn", "stale", "3 days"),
        ("cut line", "journal", "good", "fresh", "1 day"),
        ("ledger", "branches in doubt", "bad", "unread", "2 hours"),
        ("lately", "journal", "good", "fresh", "1 hour"),
        ("down", "journal", "bad", "unread", "1 minute"),
        ("down", "branches in doubt", "good", "fresh", "0 seconds"),
    ]


def test_letters_of_any_script_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """The browser has fonts that Matplotlib lacks. Warnings are errors in tests."""
    labels = {FAR: 3, "注" * 99: 2, "שלום": 2, "a\nb\tc\x01": 1}
    drawing = names("Names", labels)
    for text in (FAR, f"{'注' * 15}…", "שלום", "a b c"):
        assert f">{text}" in drawing
    figures = replace(
        FULL,
        latency=[(name, 1, 0.1, 0.2, 0.3) for name in labels],
        owners=[(name, count, 0) for name, count in labels.items()],
    )
    page = browser.visitor(write_report(figures, tmp_path).as_uri()).page
    page.goto((tmp_path / "report.html").as_uri())
    cut = """text => text.getBoundingClientRect().left < text.ownerSVGElement.getBoundingClientRect().left - 1"""
    drawn = page.locator("figure svg text").filter(has_text=re.compile("注|שלום|a b c"))
    assert drawn.count() == 2 * len(labels)
    assert not [text.text_content() for text in drawn.all() if text.evaluate(cut)]


def test_a_browser_shows_it_light_dark_and_on_phones(browser: Browser, tmp_path: Path) -> None:
    page = write_report(replace(FULL, sources=[journal(FAR, NOW), journal(NASTY, None)]), tmp_path)
    grounds, colours = set(), set()
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
        visitor = browser.visitor(page.as_uri(), width=width, scheme="dark" if scheme == "dark" else "light")
        visitor.page.goto(page.as_uri())
        visitor.page.locator("summary").first.click()
        grounds.add(visitor.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width
        text = visitor.page.locator("figure svg text").first.evaluate("node => getComputedStyle(node).fill")
        colours.add(text)
        visitor.require_peace()
    assert len(grounds) == len(colours) == 2, "plots are dark where the page is dark"

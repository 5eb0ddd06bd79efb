"""The report: what stands on it, that it needs nothing else, and that names of others do no harm."""

import csv
import io
import re
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from dtx.pipeline.quarantine import Quarantined
from dtx.pipeline.report.figures import AGES, Figures
from dtx.pipeline.report.page import render, write_report
from dtx.pipeline.report.plots import GROUPS
from dtx.pipeline.verdicts import PLAIN, Verdict
from tests.support.browser import find_chromium

NOW = datetime(2026, 3, 4, 12, tzinfo=UTC)
NASTY = "<script>alert(1)</script>$x_1$\"'&é"
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
        "evidence": '[{"source":"a","event":"prepared","outcome":null}]',
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
    attention=[transaction(), transaction(gtrid="00ff", since=None, decision=None, evidence=None)],
    attention_total=5,
    quarantine=[Quarantined(source="bank-z", item="database", reason=NASTY, count=None)],
    oldest=NOW - timedelta(days=2),
)


class Outside(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in {"script", "link", "img", "iframe", "object", "image"}:
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
    assert len(page.ids) == len(set(page.ids)), "several drawings on one page keep their ids to themselves"


def test_what_others_named_is_text_and_nothing_else() -> None:
    page = render(FULL)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6


def test_a_page_is_the_same_for_the_same_figures() -> None:
    assert render(FULL) == render(FULL)


def test_colours_of_plots_are_those_of_the_page() -> None:
    drawn = "".join(re.findall(r"<svg.*?</svg>", render(FULL), re.DOTALL))
    assert "var(--bad)" in drawn
    assert not re.findall(r"(?:fill|stroke): ?#(?!000000)[0-9a-f]{6}", drawn), "a colour that stays light in the dark"


def test_every_verdict_that_needs_attention_has_a_colour() -> None:
    assert {verdict for _, verdicts in GROUPS.values() for verdict in verdicts} == set(Verdict) - PLAIN


def test_the_page_says_what_is_wrong_and_what_was_not_read() -> None:
    page = render(FULL)
    for words in ("12,350</b>transactions", "2</b>went wrong", "3</b>open", "2 d</b>oldest open", "order-1", "bank-z"):
        assert words in page
    assert "The first 2 of 5, the worst first" in page
    assert "Nothing needs attention: every transaction ended the same way everywhere." in render(EMPTY)


def test_what_has_no_time_is_no_bar_and_in_the_tables_all_the_same(tmp_path: Path) -> None:
    """The log of Atomikos has no times, and what it has decided may be about no branch that is known."""
    days: list[tuple[date | None, str, int]] = [(None, "unfinished", 3), (None, "committed", 1)]
    alone = replace(EMPTY, days=days, attention_total=3)
    assert "Nothing of what needs attention has a time." in render(alone)
    page = write_report(replace(FULL, days=[*days, *FULL.days]), tmp_path)
    assert "by day of the last event</figcaption><svg" in page.read_text()
    assert (page.parent / "days.csv").read_text().splitlines()[1:3] == [",unfinished,3", ",committed,1"]


def test_tables_are_beside_the_page_and_no_cell_is_a_formula(tmp_path: Path) -> None:
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


def test_a_browser_shows_it_light_and_dark_and_on_a_telephone(tmp_path: Path) -> None:
    page = write_report(FULL, tmp_path)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        words = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=str(find_chromium()), args=words)
        grounds, colours = set(), set()
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
            window = browser.new_page(
                color_scheme="dark" if scheme == "dark" else "light", viewport={"width": width, "height": 800}
            )
            window.on("console", lambda message: complaints.append(message.text))
            window.on("pageerror", lambda error: complaints.append(str(error)))
            window.goto(page.as_uri())
            grounds.add(window.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert window.evaluate("document.documentElement.scrollWidth") <= width
            text = window.locator("figure svg text").first.evaluate("node => getComputedStyle(node).fill")
            colours.add(text)
            window.close()
        browser.close()
    assert len(grounds) == len(colours) == 2, "plots are dark where the page is"
    assert complaints == []

"""Generated blocks of the documentation are up to date, links to files work, and the README is short."""

import re
from pathlib import Path

import pytest

from dtx.xa.codes import ReplyCode
from tests.support.errors import Source
from tests.support.pages import BLOCKS, DOCS, embed
from tests.support.reader import QUESTIONS, Question, clicks
from tests.support.scenarios import SCENARIOS, Scenario
from tests.support.sentences import sentences, too_long, words

BEGIN, END = "<!-- name -->", "<!-- /name -->"


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_blocks_are_up_to_date(name: str) -> None:
    """``python -m tests.support.pages`` writes them."""
    page, content = BLOCKS[name]
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == embed(text, name, content()), "run `python -m tests.support.pages`"


def test_no_page_has_marks_of_a_merge_conflict() -> None:
    pages = [*DOCS.parent.glob("*.md"), *DOCS.rglob("*.md")]
    assert [page.name for page in pages if "\n<<<<<<< " in page.read_text(encoding="utf-8")] == []


def test_readme_has_at_most_150_lines() -> None:
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_a_reader_finds_the_answer_with_two_clicks(question: Question) -> None:
    assert clicks(question) <= 2


def test_sentences_have_at_most_25_words() -> None:
    assert too_long() == [], "run `python -m tests.support.sentences`"


def test_the_sentences_of_a_page_are_found() -> None:
    text = (
        "# A heading\n\nOne `x. Y` two. dtx is\nthree: four.\n\n```\nno. No.\n```\n- an item\n\n| cell | other cell |\n"
    )
    assert list(sentences(text)) == [
        "# A heading",
        "One code two.",
        "dtx is three: four.",
        "an item",
        "cell",
        "other cell",
    ]
    assert words("No [link](a.md), and x-dtx-id; 1,000 times.") == 7


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_to_files_lead_somewhere(page: str) -> None:
    """``make docs`` checks the links between pages of the documentation."""
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("http")]
    assert [link for link in links if not Path(DOCS.parent, link).exists()] == []


def test_a_block_is_replaced_and_the_text_around_it_kept() -> None:
    block = f"{BEGIN}\n\nnew\n\n{END}"
    assert embed(f"before\n{BEGIN}\nold\n{END}\nafter\n", "name", "new") == f"before\n{block}\nafter\n"
    assert embed(block, "name", "new") == block


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_text_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no block between"):
        embed(text, "name", "new")


MODULE = """
def refused(reason: str, xid: Xid) -> XaError:
    return XaError(ReplyCode.NOT_ALLOWED, f"{reason} (xid {xid})")

def begin(self, xids):
    reason = self._limit(len(xids))
    if reason is None and xids[0] in self.known:
        raise refused(f"known, in state {self.state.value}", xids[0])
    code = self.refusal()
    if code is ReplyCode.NOT_FOUND:
        raise XaError(code, "unknown xid" if xids else self.text)
    raise XaError(ReplyCode.RESOURCE_ERROR, reason)

def _limit(self, count: int) -> str | None:
    return f"{len(xids)} branches are too many" if count > 1 else None
"""


def test_texts_of_errors_are_found_behind_variables_parameters_and_functions() -> None:
    assert Source({"module": MODULE}).errors()["ReplyCode"] == {
        ReplyCode.NOT_FOUND: ["unknown xid"],
        ReplyCode.RESOURCE_ERROR: ["{length} branches are too many"],
        ReplyCode.NOT_ALLOWED: ["known, in state {state} (xid {xid})"],
    }


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_tests_of_a_scenario_exist(scenario: Scenario) -> None:
    """The page Scenarios names them."""
    for test in scenario.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (DOCS.parent / file).read_text(encoding="utf-8"), test

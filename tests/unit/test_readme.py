"""README shows what the code says: states, answers, settings and metrics; and how its blocks are replaced."""

import pytest

from tests.support.readme import BLOCKS, README, embed

BEGIN, END = "<!-- name -->", "<!-- /name -->"


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_in_readme_say_what_the_code_says(name: str) -> None:
    """Generated, never edited: ``python -m tests.support.readme`` brings them up to date."""
    text = README.read_text(encoding="utf-8")
    assert text == embed(text, name, BLOCKS[name]()), "run `python -m tests.support.readme`"


def test_a_block_is_replaced_and_the_text_around_it_kept() -> None:
    block = f"{BEGIN}\n\nnew\n\n{END}"
    assert embed(f"before\n{BEGIN}\nold\n{END}\nafter\n", "name", "new") == f"before\n{block}\nafter\n"
    assert embed(block, "name", "new") == block


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END} {BEGIN}"])
def test_a_text_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no block between"):
        embed(text, "name", "new")

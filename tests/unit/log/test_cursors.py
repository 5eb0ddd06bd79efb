"""Cursors come back from clients: what is none is refused in plain words, before the database sees it."""

from uuid import UUID

import pytest

from dtx.log.listing import Cursor, Sort
from dtx.log.past import Mark

KEY = UUID("12345678-1234-1234-1234-123456789012")


@pytest.mark.parametrize(
    ("cursor", "by"),
    [
        (Cursor(KEY), Sort.STARTED),
        (Cursor(KEY, (1 << 63) - 1), Sort.BYTES),
        (Cursor(KEY, 0), Sort.MESSAGES),
        (Cursor(KEY, ""), Sort.OWNER),
        (Cursor(KEY, "a.b"), Sort.OWNER),
        (Cursor(KEY, "prepared"), Sort.STATE),
    ],
)
def test_a_cursor_of_branches_is_read_back(cursor: Cursor, by: Sort) -> None:
    assert Cursor.parse(str(cursor), by) == cursor


@pytest.mark.parametrize(
    ("text", "by"),
    [
        ("", Sort.STARTED),
        ("x", Sort.STARTED),
        (f"{KEY}.1", Sort.STARTED),
        (str(KEY), Sort.BYTES),
        (f"{KEY}.", Sort.BYTES),
        (f"{KEY}.x", Sort.MESSAGES),
        (f"{KEY}.-1", Sort.MESSAGES),
        (f"{KEY}.{1 << 63}", Sort.BYTES),
        (f"{KEY}.{'9' * 500}", Sort.BYTES),
        (str(KEY), Sort.OWNER),
        ("x.alice", Sort.OWNER),
        (f"{KEY}.a\0", Sort.OWNER),
    ],
)
def test_what_is_no_cursor_of_branches_is_refused(text: str, by: Sort) -> None:
    with pytest.raises(ValueError, match=rf"^.{{0,90}} is no cursor of pages by {by}$"):
        Cursor.parse(text, by)


def test_a_mark_is_read_back() -> None:
    mark = Mark((1 << 57) - 1, KEY, (1 << 31) - 1)
    assert Mark.parse(str(mark)) == mark


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "a-b-c", f"1-{KEY.hex}", f"1-{KEY.hex}-x", f"x-{KEY.hex}-1", f"1-{KEY.hex[1:]}-1", f"-1-{KEY.hex}-1",
        f"{1 << 57}-{KEY.hex}-1", f"1-{KEY.hex}-{1 << 31}", f"{'9' * 99}-{KEY.hex}-1",
        f"\N{ARABIC-INDIC DIGIT ONE}-{KEY.hex}-1",
    ],
)  # fmt: skip
def test_what_is_no_mark_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.{2,90} is no cursor$"):
        Mark.parse(text)

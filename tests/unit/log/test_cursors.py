"""Cursors come back from clients: an invalid one is refused with a clear message before any query."""

from uuid import UUID

import pytest

from dtx.log.pages import BRANCH_CURSORS, JOURNAL_CURSORS, VERDICT_CURSORS, Cursor, Sort

KEY = UUID("12345678-1234-1234-1234-123456789012")


@pytest.mark.parametrize(
    ("values", "by"),
    [
        ((KEY,), Sort.STARTED),
        ((KEY, (1 << 63) - 1), Sort.BYTES),
        ((KEY, 0), Sort.MESSAGES),
        ((KEY, ""), Sort.OWNER),
        ((KEY, "a.b"), Sort.OWNER),
        ((KEY, "two\nlines"), Sort.OWNER),
        ((KEY, "prepared"), Sort.STATE),
    ],
)
def test_a_cursor_of_branches_is_read_back(values: tuple[object, ...], by: Sort) -> None:
    form = BRANCH_CURSORS[by]
    assert form.parse(str(Cursor(form, values))) == Cursor(form, values)


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
def test_an_invalid_cursor_of_branches_is_refused(text: str, by: Sort) -> None:
    with pytest.raises(ValueError, match=rf"^.{{0,90}} is no cursor of pages by {by}$"):
        BRANCH_CURSORS[by].parse(text)


def test_a_cursor_of_the_journal_is_read_back() -> None:
    cursor = Cursor(JOURNAL_CURSORS, ((1 << 57) - 1, KEY, (1 << 31) - 1))
    assert JOURNAL_CURSORS.parse(str(cursor)) == cursor


@pytest.mark.parametrize("format_id", [None, 0, (1 << 32) - 1])
def test_a_cursor_of_verdicts_is_read_back(format_id: int | None) -> None:
    """Names of PostgreSQL's own prepared transactions can be longer than a gtrid: up to 200 bytes."""
    cursor = Cursor(VERDICT_CURSORS, (1, b"g" * 200, format_id))
    assert VERDICT_CURSORS.parse(str(cursor)) == cursor


def test_cursors_look_as_they_did_before() -> None:
    """Clients that follow pages while dtx is upgraded can continue."""
    assert str(Cursor(BRANCH_CURSORS[Sort.STARTED], (KEY,))) == str(KEY)
    assert str(Cursor(BRANCH_CURSORS[Sort.BYTES], (KEY, 7))) == f"{KEY}.7"
    assert str(Cursor(JOURNAL_CURSORS, (5, KEY, 0))) == f"5-{KEY.hex}-0"
    assert str(Cursor(VERDICT_CURSORS, (5, b"g", None))) == "5-67-"


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "a-b-c", f"1-{KEY.hex}", f"1-{KEY.hex}-x", f"x-{KEY.hex}-1", f"1-{KEY.hex[1:]}-1", f"-1-{KEY.hex}-1",
        f"{1 << 57}-{KEY.hex}-1", f"1-{KEY.hex}-{1 << 31}", f"{'9' * 99}-{KEY.hex}-1",
        f"\N{ARABIC-INDIC DIGIT ONE}-{KEY.hex}-1",
    ],
)  # fmt: skip
def test_an_invalid_cursor_of_the_journal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.{2,90} is no cursor$"):
        JOURNAL_CURSORS.parse(text)

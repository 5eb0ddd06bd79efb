"""Lists of the command line: formats, order, and the same list again and again."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dtx.cli.branches import xid_text
from dtx.cli.output import MOST_ROWS, Column, Listing, Row, name_columns, yaml_lines
from dtx.xa.xid import Xid

ROWS: list[Row] = [
    {"name": "b", "messages": 2, "owner": {"name": "x"}, "arguments": {}},
    {"name": "a", "messages": 10, "owner": {"name": None}, "arguments": {"x-max-length": 5}},
    {"name": "c\x1b[2J", "messages": None, "owner": None, "arguments": {}},
]
COLUMNS = (
    Column("queue", "name"),
    Column("messages", number=True),
    Column("owner", "owner.name"),
    Column("arguments", wide=True),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["no", "1e3", "~", "a: b", "- c", "#"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


class _Window(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def _times(count: int) -> Callable[[float], None]:
    """A replacement of ``time.sleep`` that Ctrl-C ends after *count* calls."""
    left = iter(range(count - 1))

    def sleep(_: float) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return sleep


@given(_JSON)
def test_yaml_is_the_value_again(value: object) -> None:
    assert yaml.safe_load("\n".join(yaml_lines(value))) == value


@pytest.mark.parametrize("char", ["\u0085", "\x01", "\x7f", "a", "\U0001f600"], ids=ascii)
@pytest.mark.parametrize("value", [1, {}, {"a": 1}, [1], {"\x01" * 255: [{"\x01" * 255: "x"}]}])
def test_yaml_has_keys_of_any_length(char: str, value: object) -> None:
    """A key before ``:`` has at most 1,024 characters; U+0085 is written as ten."""
    for size in (255, 1022, 1023, 1024, 1025):
        given = {char * size: value, "b": [{char * size: value, "c": value}]}
        assert yaml.safe_load("\n".join(yaml_lines(given))) == given


def test_yaml_of_a_list_is_in_blocks() -> None:
    assert list(yaml_lines(ROWS[1:2])) == [
        "- name: a",
        "  messages: 10",
        "  owner:",
        "    name: null",
        "  arguments:",
        "    x-max-length: 5",
    ]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        (None, "bac"),
        ("queue", "abc"),
        ("-name", "cba"),
        ("messages", "cba"),
        ("-messages", "abc"),
        ("-owner.name", "bac"),
        ("-owner", "bac"),
    ],
)
def test_a_list_is_sorted_by_heading_or_field(
    capsys: pytest.CaptureFixture[str], sort: str | None, expected: str
) -> None:
    Listing(form="json", sort=sort).show(lambda: ROWS, COLUMNS, "")
    assert "".join(json.loads(line)["name"][0] for line in capsys.readouterr().out.splitlines()) == expected


def test_an_unknown_column_to_sort_by_is_refused() -> None:
    with pytest.raises(click.BadParameter, match="no column nothing: the columns are queue, messages"):
        Listing(sort="-nothing").show(lambda: ROWS, COLUMNS, "")


def test_the_limit_counts_after_sorting(capsys: pytest.CaptureFixture[str]) -> None:
    Listing(sort="-messages").show(lambda: ROWS, COLUMNS, "", limit=1)
    assert capsys.readouterr().out.split() == ["queue", "messages", "owner", "a", "10"]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("table", "queue messages owner b 2 x a 10 c\\x1b[2J"),
        ("wide", 'queue messages owner arguments b 2 x a 10 {"x-max-length": 5} c\\x1b[2J'),
    ],
)
def test_a_table_is_escaped_and_wide_has_more(capsys: pytest.CaptureFixture[str], form: Any, expected: str) -> None:
    Listing(form=form).show(lambda: ROWS, COLUMNS, "")
    assert " ".join(capsys.readouterr().out.split()) == expected


def test_a_long_table_is_cut_and_has_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": number} for number in range(MOST_ROWS + 2)]
    Listing().show(lambda: rows, COLUMNS[:1], "")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_ROWS + 2
    assert lines[-1] == "the first 1000 of 1002 are shown; --output json has all"


@pytest.mark.parametrize(("form", "expected"), [("table", "there is none\n"), ("json", ""), ("yaml", "[]\n")])
def test_an_empty_list_has_its_form(capsys: pytest.CaptureFixture[str], form: Any, expected: str) -> None:
    Listing(form=form).show(list, COLUMNS, "there is none")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("table", "queue\n1\n\nqueue\n2\n\nqueue\n3\n"),
        ("json", '{"name": 1}\n{"name": 2}\n{"name": 3}\n'),
        ("yaml", "- name: 1\n---\n- name: 2\n---\n- name: 3\n"),
    ],
)
def test_a_watched_list_is_appended_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: Any, expected: str
) -> None:
    numbers: Iterator[int] = iter(range(1, 10))
    monkeypatch.setattr("time.sleep", _times(3))
    Listing(form=form, every=2).show(lambda: [{"name": next(numbers)}], COLUMNS[:1], "")
    assert capsys.readouterr().out == expected


def test_a_watched_list_is_redrawn_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    window = _Window()
    monkeypatch.setattr(sys, "stdout", window)
    monkeypatch.setenv("LINES", "4")
    monkeypatch.setattr("time.sleep", _times(2))
    Listing(every=5).show(lambda: ROWS, COLUMNS[:1], "")
    _, first, second = window.getvalue().split("\x1b[H\x1b[J")
    head, *rows = map(str.strip, click.unstyle(first).splitlines())
    assert head.startswith("every 5s, at ")
    assert rows == ["queue", "b"]
    assert first.splitlines()[1:] == second.splitlines()[1:]


@pytest.mark.parametrize(("form", "shown"), [("table", f"{'a' * 38}…{'b' * 37}"), ("wide", "a" * 50 + "b" * 50)])
def test_a_long_name_is_cut_unless_it_is_wide(capsys: pytest.CaptureFixture[str], form: Any, shown: str) -> None:
    names = [{"queue": "a" * 50 + "b" * 50}, {"queue": "c" * 76}]
    Listing(form=form).show(lambda: names, tuple(name_columns("queue")), "")
    assert capsys.readouterr().out.split() == ["queue", shown, "c" * 76]


def test_a_long_xid_is_cut_unless_it_is_wide() -> None:
    """The end stays: it is different for each branch of a transaction. An xid of two UUIDs is not long."""
    xid = Xid(131077, b"\x00" * 28 + b"\x01" * 8, b"\x02" * 36)
    assert str(xid_text(xid, whole=False)) == f"131077:{'0' * 31}\u20262{'02' * 18}"
    assert str(xid_text(xid, whole=True)) == str(xid)
    uuids = Xid(0xFFFFFFFF, b"\xff" * 16, b"\xff" * 16)
    assert str(xid_text(uuids, whole=False)) == str(uuids)

"""The state diagram and the table of answers."""

import re

import pytest

from dtx.xa.model import REQUESTS, State
from dtx.xa.table import TRANSITIONS
from tests.support.diagram import answers_table, arrows, state_diagram


def test_every_change_of_state_is_drawn_and_nothing_else() -> None:
    changes = {(key[0], rule.to) for key, rule in TRANSITIONS.items() if rule.to is not key[0]}
    assert set(arrows()) == changes
    assert state_diagram().count("<path ") == len(changes)


def test_an_arrow_names_its_operations_and_conditions() -> None:
    found = arrows()
    assert found[State.UNKNOWN, State.ACTIVE] == ["start"]
    assert found[State.ACTIVE, State.IDLE] == ["end [last channel]"]
    assert found[State.IDLE, State.PREPARED] == ["prepare [published only or local]"]
    assert found[State.PREPARED, State.UNKNOWN] == [
        "commit [nothing published or local]",
        "rollback [nothing consumed or local]",
    ]


def test_every_state_has_a_name_to_show() -> None:
    for state in State:
        assert (f">{state}</text></g>" in state_diagram()) == (state is not State.UNKNOWN)


def test_no_box_and_no_label_is_outside_of_the_picture() -> None:
    for x, y, text in re.findall(r'<text x="(-?[0-9]+)" y="(-?[0-9]+)">([^<]+)<', state_diagram()):
        assert 4 * len(text) <= int(x) <= 1000 - 4 * len(text)
        assert 14 <= int(y) <= 950


def _answer(operation: str, state: State) -> str:
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in answers_table().splitlines())
    for names, *cells in rows:
        if operation in names.split(", "):
            return cells[head.index(state) - 1]
    raise AssertionError(operation)


def test_every_request_has_an_answer_in_every_state() -> None:
    for operation in REQUESTS:
        for state in State:
            assert _answer(operation, state)


@pytest.mark.parametrize(
    ("operation", "state", "answer"),
    [
        ("start", State.UNKNOWN, "ok"),
        ("start", State.PREPARED, "530"),
        ("commit", State.UNKNOWN, "404"),
        ("commit", State.IDLE, "503"),
        ("commit", State.PREPARED, "ok, 541"),
        ("prepare", State.IDLE, "ok, rdonly, rbrollback"),
        ("commit-one-phase", State.IDLE, "ok, rbrollback, 541"),
        ("rollback", State.TIMED_OUT, "rbtimeout"),
        ("rollback", State.PREPARED, "ok, 541"),
        ("rollback", State.HEURISTIC, "heur…"),
        ("set-timeout", State.COMMITTING, "ok"),
    ],
)
def test_an_answer_is_the_one_that_comes_in_the_end(operation: str, state: State, answer: str) -> None:
    assert _answer(operation, state) == answer

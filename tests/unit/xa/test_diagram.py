"""The state diagram and the table of answers."""

import re

import pytest

from dtx.xa.model import REQUESTS, State
from dtx.xa.table import TRANSITIONS
from tests.support.diagram import answers_table, state_diagram

ARROW = re.compile(r"    (\S+) --> (\S+) : ([^:;]+)")


def _arrows() -> dict[tuple[str, str], str]:
    found = {}
    for line in state_diagram().splitlines():
        if (match := ARROW.fullmatch(line)) is not None:
            assert (match[1], match[2]) not in found, "one arrow for each pair of states"
            found[match[1], match[2]] = match[3]
    return found


def test_every_change_of_state_is_drawn_and_nothing_else() -> None:
    def name(state: State) -> str:
        return "[*]" if state is State.UNKNOWN else state.replace("-", "_")

    changes = {(name(key[0]), name(rule.to)) for key, rule in TRANSITIONS.items() if rule.to is not key[0]}
    assert set(_arrows()) == changes


def test_an_arrow_names_its_operations_and_what_they_depend_on() -> None:
    arrows = _arrows()
    assert arrows["[*]", "active"] == "start"
    assert arrows["active", "idle"] == "end [last channel]"
    assert arrows["idle", "prepared"] == "prepare [published only or local]"
    assert arrows["prepared", "[*]"] == "commit [nothing published or local], rollback [nothing consumed or local]"


def test_every_state_has_a_name_to_show() -> None:
    for state in State:
        shown = f'state "{state}" as ' in state_diagram()
        assert shown == (state is not State.UNKNOWN)


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

"""The list of failpoints matches the code, and every effect and every write has failpoints.

The kill matrix is only as complete as its list of points. Therefore these tests walk the closed unions of the core's
effects and of the log's writes.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import dtx
from dtx.failpoint import Point
from dtx.log.records import Advance, Insert, LogState, LogWrite
from dtx.log.write_queue import points_around
from dtx.manager import effects
from dtx.server.failpoints import _AROUND
from dtx.wire.amqp09.methods import METHODS, DtxCall
from dtx.xa.model import (
    Answer,
    Apply,
    Complete,
    Effect,
    Note,
    NoteStuck,
    Persist,
    PutBack,
    Refuse,
    Release,
    Remember,
    Take,
)
from tests.unit.failpoint.records import every_record

PACKAGE = Path(dtx.__file__).parent
POINTS = "dtx.failpoint.points"

IN_PLACE = {
    Take: (Point.TAKE_BEFORE, Point.TAKE_AFTER),
    Apply: (Point.APPLY_BEFORE, Point.APPLY_AFTER),
    PutBack: (Point.PUT_BACK_BEFORE, Point.PUT_BACK_AFTER),
    Remember: (Point.REMEMBER_BEFORE, Point.REMEMBER_AFTER),
    Refuse: (Point.REFUSE_BEFORE, Point.REFUSE_AFTER),
}
"""Effects with points in the place where they run."""
BY_FUNCTION = {
    Release: ("release", Point.RELEASE_BEFORE, Point.RELEASE_AFTER),
    Answer: ("give", Point.ANSWER_BEFORE, Point.ANSWER_AFTER),
}
"""Effects that run in several places, through a function that has their points."""
WRITES = {
    Persist: "writing",
    Complete: "writing",
    Note: "writing",
    NoteStuck: "note_stuck",
}
"""Effects that write to the log. The method makes the record, and the points are those of the record."""


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text(encoding="utf-8"))


def _mentions(tree: ast.AST) -> list[str]:
    """Names of the points that *tree* mentions, in the order of its text."""
    found = [
        (node.lineno, node.col_offset, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Point"
        and node.attr in Point.__members__
    ]  # fmt: skip
    return [name for _, _, name in sorted(found)]


def test_numbers_names_and_texts_of_points_are_unique() -> None:
    assert len({point.number for point in Point}) == len(Point) == len({point.label for point in Point})
    assert [point.number for point in Point] == sorted(point.number for point in Point)
    for point in Point:
        assert Point.named(point.label) is Point.named(str(point.number)) is Point.named(point.name) is point
        assert point.sentence
        assert not point.sentence.endswith(".")


def test_every_point_is_once_in_its_listed_module() -> None:
    placed = {module: Counter(_mentions(tree)) for module, tree in _modules() if module != POINTS}
    placed["dtx.server.failpoints"].update(point.name for points in _AROUND.values() for point in points)
    found = {name: [module for module in placed if placed[module][name]] for name in Point.__members__}
    assert {name: modules for name, modules in found.items() if modules != [Point[name].module]} == {}
    twice = {name for counts in placed.values() for name, count in counts.items() if count > 1}
    assert twice == set(), "a test cannot choose between two places with one name"


def test_modules_with_points_ask_the_module_and_keep_no_copy() -> None:
    """A copy made with ``from dtx.failpoint import armed`` would stay False."""
    for module, tree in _modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "dtx.failpoint" and module != "dtx.failpoint.action":
                assert [alias.name for alias in node.names] == ["Point"], module


def test_every_effect_of_the_core_is_known_here() -> None:
    assert {*IN_PLACE, *BY_FUNCTION, *WRITES} == set(get_args(Effect))


def _cases(source: str) -> dict[str, list[list[ast.stmt]]]:
    """The bodies of ``case X():`` in the methods of ``Effects``, by effect."""
    found: dict[str, list[list[ast.stmt]]] = {}
    (runner,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Effects")
    for node in ast.walk(runner):
        if isinstance(node, ast.match_case):
            for pattern in node.pattern.patterns if isinstance(node.pattern, ast.MatchOr) else [node.pattern]:
                if isinstance(pattern, ast.MatchClass):
                    assert isinstance(pattern.cls, ast.Name)
                    found.setdefault(pattern.cls.id, []).append(node.body)
    return found


def _unguarded(source: str) -> list[str]:
    """Effects that run without points around them."""
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    cases = _cases(source)
    wrong = []
    for effect in get_args(Effect):
        bodies = cases.get(effect.__name__, [])
        if len(bodies) != 1:
            wrong.append(f"{effect.__name__} is run in {len(bodies)} places")
            continue
        (body,) = bodies
        called = {ast.unparse(node.func).rpartition(".")[2] for node in _calls(body)}
        if effect in IN_PLACE:
            first, last = _mentions(body[0]), _mentions(body[-1])
            right = (first, last) == tuple([point.name] for point in IN_PLACE[effect]) and len(body) > 2
        elif effect in BY_FUNCTION:
            name, *points = BY_FUNCTION[effect]
            right = name in called and name in functions
            right = right and _mentions(functions[name]) == [point.name for point in points]
        else:
            right = WRITES[effect] in called
        if not right:
            wrong.append(f"{effect.__name__} has no points around it")
    return wrong


def _calls(body: list[ast.stmt]) -> Iterator[ast.Call]:
    for statement in body:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))


SOURCE = Path(effects.__file__).read_text(encoding="utf-8")


def test_every_effect_of_the_core_is_run_between_two_points() -> None:
    assert _unguarded(SOURCE) == []


@pytest.mark.parametrize(
    ("line", "effect"),
    [
        ("failpoint.at(Point.APPLY_BEFORE)", "Apply"),
        ("failpoint.at(Point.PUT_BACK_AFTER)", "PutBack"),
        ("failpoint.at(Point.ANSWER_AFTER)", "Answer"),
        ("failpoint.at(Point.RELEASE_BEFORE)", "Release"),
    ],
)
def test_a_point_that_is_taken_away_is_missed(line: str, effect: str) -> None:
    """This shows that the check above can fail."""
    assert SOURCE.count(line) == 1
    assert _unguarded(SOURCE.replace(line, "pass")) == [f"{effect} has no points around it"]


def test_an_effect_without_a_handler_is_detected() -> None:
    assert _unguarded(SOURCE.replace("case Take():", "case Steal():")) == ["Take is run in 0 places"]


def test_every_write_to_the_log_has_points_around_it() -> None:
    """Each member of the union, with each of its states and endings."""
    records = list(every_record())
    assert {type(record) for record in records} == set(get_args(LogWrite))
    assert {record.branch.state for record in records if isinstance(record, Insert)} | {
        record.to for record in records if isinstance(record, Advance)
    } == set(LogState)
    for record in records:
        before, after = points_around(record)
        assert before.label.endswith("-before")
        assert after.label == before.label.removesuffix("before") + "after"


def test_the_points_of_the_log_are_those_of_its_writes() -> None:
    """The list has no point of the log without a write."""
    reached = {point for record in every_record() for point in points_around(record)}
    assert reached == {point for point in Point if point.module == "dtx.log.write_queue"}


def test_every_answer_to_a_dtx_method_has_points() -> None:
    assert set(_AROUND) == {row.ANSWER.KEY for row in get_args(DtxCall) if row.ANSWER}
    for key, (before, sent) in _AROUND.items():
        name = METHODS[key].NAME.partition(".")[2].removesuffix("-ok").replace("-", "_").upper()
        assert (before.name, sent.name) == (f"REPLY_{name}_BEFORE", f"REPLY_{name}_SENT")

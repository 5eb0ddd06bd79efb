"""Names follow the rules of CONTRIBUTING.md: tests are short plain sentences, and a class name occurs once."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MOST_WORDS: Final = 10
RIDDLES: Final = frozenset(
    {
        *("nobody", "somebody", "who", "whoever", "whom", "what", "whatever", "besides", "octet", "octets"),
        *("tell", "tells", "told", "hear", "hears", "heard", "say", "says", "said"),
        *("stand", "stands", "stood", "become", "becomes"),
    }
)
"""Words for which there is a plainer one, such as *reports*, *is notified*, *bytes*."""
GIVEN: Final = frozenset({"Coordinator", "Error"})
"""Types of AMQP 1.0 and PEP 249 have these names, and so have classes that programs import."""


def definitions(folder: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield str(path.relative_to(ROOT)), node


def test_names_of_tests_are_short_plain_sentences() -> None:
    tests = [(path, node.name) for path, node in definitions("tests") if node.name.startswith("test_")]
    assert len(tests) > 3000
    wrong = {
        f"{path}::{name}"
        for path, name in tests
        if len(words := name.split("_")[1:]) > MOST_WORDS or RIDDLES.intersection(words)
    }
    assert wrong == set()


def test_public_class_names_are_unique() -> None:
    places = defaultdict(set)
    for path, node in definitions("dtx"):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].add(f"{path}:{node.lineno}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert set(repeated) == GIVEN, repeated

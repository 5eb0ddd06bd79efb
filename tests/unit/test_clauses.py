"""Every clause in the table of AMQP 1.0 clauses names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TABLE = TESTS / "servers" / "amqp10" / "CLAUSES.md"
PARTS = ("4.1", "4.2", "4.3", "4.4", "4.4.1", "4.4.2", "4.4.3", "4.4.4.1", "4.4.4.2", "4.4.4.3")
TYPES = ("4.5.1", "4.5.2", "4.5.3", "4.5.4", "4.5.7", "4.5.8")


def rows() -> dict[str, str]:
    """Maps each clause or row to its last column."""
    found: dict[str, str] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("clause", "row", "---"):
            continue
        name, _, proof = cells
        assert name not in found, f"{name} occurs twice"
        found[name] = proof
    return found


def known_in(path: Path) -> set[str]:
    """Names of the tests of a file."""
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in tree.body if isinstance(node, kinds) and node.name.startswith("test_")}


@pytest.mark.parametrize(("clause", "proof"), rows().items())
def test_a_clause_is_shown_by_tests_that_there_are(clause: str, proof: str) -> None:
    named = re.findall(r"`([^`]+)`", proof)
    if proof == "Controller":
        return
    assert named, f"no test is named for {clause}"
    assert proof == ", ".join(f"`{name}`" for name in named)
    for name in named:
        file, _, test = name.partition("::")
        path = TESTS / file if "/" in file else TABLE.parent / file
        assert path.is_file(), name
        assert test in known_in(path), name


def test_every_section_with_demands_has_its_clauses() -> None:
    found = {clause.split(" ")[0] for clause in rows()}
    assert set(PARTS) | set(TYPES) <= found


def test_only_obligations_of_the_client_have_no_test() -> None:
    assert [clause for clause, proof in rows().items() if proof == "Controller"] == ["4.2 i", "4.4.3 b", "4.4.4.1 f"]

"""``python -m benchmarks.record`` writes the tables of a benchmark to a result file."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import record
from benchmarks.support import report
from benchmarks.support.report import Table


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark with the name ``quick``, without tables."""
    tables: list[Table] = []
    for module in (record, report):
        monkeypatch.setattr(module, "TABLES", tables)
    made = ModuleType("benchmarks.quick")
    monkeypatch.setitem(sys.modules, "benchmarks.quick", made)
    return made


def test_the_tables_of_a_benchmark_are_recorded(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> None:
        assert sys.argv[1:] == ["--size", "2"]
        Table(("size", 8), ["per s  ", "p99"]).row("2", ["1,000", "0.5"])

    benchmark.main = main  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "quick", "--size", "2"])
    record.main()
    (file,) = tmp_path.iterdir()
    assert file.name == "quick-size-2.json"
    found = json.loads(file.read_text())
    assert found["tables"] == [{"head": ["size", "per s", "p99"], "rows": [["2", "1,000", "0.5"]]}]
    assert (found["benchmark"], found["arguments"]) == ("quick", ["--size", "2"])
    assert found["machine"] == report.machine()


def test_a_benchmark_without_a_table_is_an_error(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark.main = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "argv", ["record", str(tmp_path), "quick"])
    with pytest.raises(SystemExit, match="quick has no table to record"):
        record.main()
    assert list(tmp_path.iterdir()) == []

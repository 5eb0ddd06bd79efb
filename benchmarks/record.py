"""Runs a benchmark, and writes its tables to a result file: JSON, with date, commit and machine.

    python -m benchmarks.record docs/evidence/speed branches --standalone

The file has the name of the benchmark and its arguments. ``python -m tests.support.pages`` shows it on the page Speed.
"""

import importlib
import json
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.support.report import TABLES, machine
from tests.support.results import commit


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m benchmarks.record DIRECTORY BENCHMARK [ARGUMENT...]")
    directory, name, *words = sys.argv[1:]
    benchmark = importlib.import_module(f"benchmarks.{name}")
    sys.argv = [f"benchmarks/{name}.py", *words]
    began = time.monotonic()
    benchmark.main()
    if not TABLES:
        raise SystemExit(f"{name} has no table to record")
    result = {
        "benchmark": name,
        "arguments": words,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(__file__).parents[1], Path(directory)),
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
        "tables": [{"head": table.head, "rows": table.rows} for table in TABLES],
    }
    file = Path(directory, f"{re.sub('[^a-z0-9]+', '-', ' '.join([name, *words]))}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"recorded in {file}")


if __name__ == "__main__":
    main()

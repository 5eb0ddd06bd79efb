"""Small example tables of a lake and of results, in the form that other programs than the pipeline read."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import write_deltalake

from dtx.pipeline.lake import SCHEMA as JOURNAL
from dtx.pipeline.reconcile.state import HISTORY, VERDICTS
from dtx.pipeline.steps import METRICS

SERIES: Final = {
    "dtx_pipeline_reconciled_timestamp_seconds": None,
    "dtx_pipeline_lines": None,
    "dtx_pipeline_archived_timestamp_seconds": "source",
    "dtx_pipeline_asked_timestamp_seconds": "source",
    "dtx_pipeline_decisions_timestamp_seconds": "source",
    "dtx_pipeline_transactions": "verdict",
    "dtx_pipeline_unread": "source",
}
"""The metrics of a run and their labels."""


def write(lake: Path, results: Path, now: datetime) -> None:
    """Write two runs of three transactions: committed, mixed, and an orphan of the user ``shop`` for two hours.

    Args:
        lake: the directory of the journals.
        results: the directory of verdicts, their history and the metrics.
        now: the time of the second run.
    """
    opened, before = now - timedelta(hours=2), now - timedelta(days=1)
    common = {
        "format_id": 1,
        "first_at": opened,
        "last_at": now,
        "branches": 2,
        "fingerprint": bytes(16),
        "run": 2,
        "evidence": [],
        "lines": 4,
    }
    verdicts: list[dict[str, Any]] = [
        {"gtrid": b"a", "findings": ["committed"], "rms": ["bank-a"], "owners": ["bank"]},
        {"gtrid": b"b", "findings": ["mixed"], "rms": ["bank-a", "bank-b"], "owners": ["bank"], "decision": "commit"},
        {"gtrid": b"c", "findings": ["orphan", "in-doubt"], "rms": ["bank-a"], "owners": ["shop"], "since": opened}
        | {"known_at": now, "settled": "open"},
    ]
    rows = [common | {"verdict": row["findings"][0], "settled": f"{now:%Y-%m}"} | row for row in verdicts]
    write_deltalake(results / "verdicts", pa.Table.from_pylist(rows, VERDICTS), partition_by=["settled"])
    changes = [
        {"run": 1, "as_of": before, "format_id": 1, "gtrid": b"b", "verdict": "in-doubt", "findings": ["in-doubt"]},
        {"run": 2, "as_of": now, "format_id": 1, "gtrid": b"b", "was": "in-doubt", "verdict": "mixed"}
        | {"findings": ["mixed"]},
    ]
    rows = [row | {"month": f"{now:%Y-%m}"} for row in changes]
    write_deltalake(results / "history", pa.Table.from_pylist(rows, HISTORY), partition_by=["month"])
    lines = [
        {"id": str(number), "at": at, "rm": "bank-a", "event": event, "gtrid": b"a", "bqual": b"1", "format_id": 1}
        | {"prepared_at": opened, "source": "bank-a", "batch": 1, "month": f"{at:%Y-%m}"}
        for number, (event, at) in enumerate([("prepared", opened), ("committed", opened + timedelta(seconds=3))])
    ]
    write_deltalake(lake, pa.Table.from_pylist(lines, JOURNAL), partition_by=["month"])
    (results / METRICS).write_text(
        f"dtx_pipeline_reconciled_timestamp_seconds {now.timestamp()}\n"
        "dtx_pipeline_lines 12.0\n"
        f'dtx_pipeline_archived_timestamp_seconds{{source="bank-a"}} {now.timestamp()}\n'
        'dtx_pipeline_archived_timestamp_seconds{source="bank-b"} 0.0\n'
        'dtx_pipeline_transactions{verdict="mixed"} 1.0\n'
        'dtx_pipeline_unread{source="bank-b"} 1.0\n'
    )

"""The columns of the pipeline's Delta tables for the reference: names and types from the code, texts from here."""

from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa

_LAKE: Final = {
    "id": "the id of the line: a UUID",
    "at": "the time of the event",
    "rm": "the resource manager (`--rm`)",
    "event": "the event, for example `prepared` or `committed`",
    "branch_id": "the id of the branch: a UUID",
    "vhost": "the virtual host",
    "format_id": "the format id of the xid",
    "gtrid": "the gtrid",
    "bqual": "the bqual",
    "owner": "the user that started the branch",
    "actor": "the user, operator or policy that caused the event",
    "reason": "the reason of an operator, or the cause of the event; null if none",
    "outcome": "the heuristic outcome: `committed`, `rolled-back`, `mixed`, `hazard`; null if none",
    "one_phase": "whether the branch was committed in one phase",
    "publishes": "the number of messages that the branch publishes",
    "consumes": "the number of messages that the branch consumes",
    "bytes": "the size of all these messages in bytes",
    "started_at": "the time of the start; null if it is not known",
    "prepared_at": "the time of the vote; null before",
    "decided_at": "the time of the decision; null before",
    "xid8": "the id of PostgreSQL's transaction that wrote the line",
    "source": "the name of the database in `pipeline.toml`",
    "batch": "the number of the commit that added the line",
    "month": "the partition: the month of `at`, for example `2026-02`",
}
_VERDICTS: Final = {
    "format_id": "the format id; null if it is not known",
    "gtrid": "the gtrid",
    "verdict": "the verdict",
    "findings": "the verdict, then the other findings that match",
    "since": "the time since which it is open",
    "first_at": "the first time",
    "last_at": "the last time",
    "rms": "the resource managers",
    "owners": "the owners",
    "branches": "the number of branches",
    "decision": "`commit`, `rollback`, or `conflict` if there are both; null if none is known",
    "tm": "the transaction managers with a decision, separated by commas",
    "fingerprint": "a hash of the row",
    "known_at": "the time at which its branches were last known",
    "run": "the run that gave the verdict",
    "evidence": "of findings: the oldest 1,000 lines, see below",
    "lines": "the number of journal lines",
    "facts": "internal; it may change with each version",
    "settled": "the partition: `open`, `undated`, or the month of `last_at`",
}
_EVIDENCE: Final = {
    "source": "the name of the database, participant or decision log",
    "rm": "the resource manager; of a decision: the transaction manager",
    "vhost": "the virtual host; empty for a decision",
    "bqual": "the bqual; empty for a decision",
    "event": "the event; `observed: ` and the state of a branch in doubt; or `decided: ` and the decision",
    "outcome": "the heuristic outcome, or `finished` or `not finished` of a decision; null if none",
    "at": "the time",
    "actor": "the actor of the event, the owner of the branch in doubt, or the transaction manager",
    "journal_id": "the `id` of the line in the lake; null if the line is not from a journal",
}
_HISTORY: Final = {
    "run": "the run that changed the verdict",
    "as_of": "the time of that run",
    "format_id": "the format id of the transaction",
    "gtrid": "its gtrid",
    "was": "the earlier verdict; null for a new transaction",
    "verdict": "the new verdict; null if the transaction is no longer known",
    "findings": "as in `verdicts`, after the change",
    "month": "the partition: the month of `as_of`",
}
_TYPES: Final = {"int64": "long", "int32": "integer", "bool": "boolean", "timestamp[us, tz=UTC]": "timestamp"}


def lake_table() -> str:
    """The columns of the lake."""
    from dtx.pipeline.lake import SCHEMA

    return _table(SCHEMA, _LAKE)


def verdict_table() -> str:
    """The columns of the verdicts."""
    from dtx.pipeline.reconcile.state import VERDICTS

    return _table(VERDICTS, _VERDICTS)


def evidence_table() -> str:
    """The fields of a line of evidence."""
    from dtx.pipeline.reconcile.state import VERDICTS

    return _table(VERDICTS.field("evidence").type.value_type, _EVIDENCE)


def history_table() -> str:
    """The columns of the history of verdicts."""
    from dtx.pipeline.reconcile.state import HISTORY

    return _table(HISTORY, _HISTORY)


def _table(fields: Iterable[pa.Field], texts: Mapping[str, str]) -> str:
    """The table; each column must have a text, and each text a column."""
    found = {field.name: _kind(field.type) for field in fields}
    assert found.keys() == texts.keys(), found.keys() ^ texts.keys()
    rows = (f"| `{name}` | {kind} | {texts[name]} |" for name, kind in found.items())
    return "\n".join(["| column | type | |", "| --- | --- | --- |", *rows])


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array of {_kind(kind.value_type)}"
    return "struct" if pa.types.is_struct(kind) else _TYPES.get(str(kind), str(kind))

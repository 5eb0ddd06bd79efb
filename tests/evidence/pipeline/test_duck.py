"""The benchmark's SQL for DuckDB gives the verdicts of the reference, on random fleets."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtx.pipeline.verdicts import Rules
from tests.support.reference import reconcile

duckdb = pytest.importorskip("duckdb")
pytest.importorskip("pyspark")


@pytest.mark.parametrize("seed", range(3))
def test_duckdb_and_the_reference_agree(seed: int, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from benchmarks.support.duck import question
    from tests.support.fleets import decisions_table, events_table, fleet_of, observations_table

    fleet = fleet_of(seed, 2_000)
    rules = Rules(as_of=3_000_000_000, orphan_after=500_000_000, skew=300_000_000 * (seed % 2))
    rules = replace(rules, asked=frozenset(("db1", "db2")[:seed]))
    for name, table in (
        ("events", events_table(fleet.events)),
        ("observations", observations_table(fleet.observations)),
        ("decisions", decisions_table(fleet.decisions)),
    ):
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "part.parquet")
    out = tmp_path / "out.parquet"
    with duckdb.connect() as database:
        database.execute("SET TimeZone = 'UTC'")
        database.execute(question(str(tmp_path), str(out), rules))
        rows = database.execute(
            f"SELECT format_id, gtrid, verdict, rms, owners, branches, epoch_us(since) FROM '{out}'"
        ).fetchall()
    told = {
        (format_id, bytes(gtrid)): (verdict, tuple(rms or ()), tuple(owners or ()), branches, since)
        for format_id, gtrid, verdict, rms, owners, branches, since in rows
    }
    found = reconcile(fleet.events, fleet.observations, fleet.decisions, rules)
    assert told == {
        key: (str(each.verdict), each.rms, each.owners, each.branches, each.since) for key, each in found.items()
    }

"""A fleet whose journals are in the Delta table, by the commands that people use."""

import sys
from pathlib import Path

from tests.servers.pipeline.test_archive import journal, write
from tests.servers.pipeline.test_delta import lines
from tests.support.processes import spawn


def test_a_fleet_may_have_its_journals_in_the_table(database: str, tmp_path: Path) -> None:
    """``form = "delta"``: run writes the table where no flag says otherwise, and reads it."""
    (tmp_path / "pipeline.toml").write_text(
        f'lake = "lake"\nresults = "results"\nform = "delta"\n[[database]]\nname = "bank"\nurl = "{database}"\n'
    )

    def call(*command: str) -> str:
        quick = "spark.driver.defaultJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        words = ["pipeline", *command, "--master", "local[2]", "--memory", "1GB", "--set", quick]
        with (tmp_path / "output").open("w+b") as output:
            process = spawn([sys.executable, "-m", "dtx", *words], output=output.fileno(), cwd=tmp_path)
            status = process.wait(800)
            output.seek(0)
            said = output.read().decode()
        assert status == 0, said
        return said

    write(database, 5)
    assert "reconciled 5 transactions from 5 lines, 5 of them new" in call("run", "--no-publish")
    assert lines(tmp_path / "lake") == journal(database)
    write(database, 7, rm="other")
    assert "reconciled 7 transactions from 12 lines, 7 of them new" in call("run", "--no-publish")
    assert not list((tmp_path / "lake").glob("rm=*"))
    assert "archived 12 lines" in call("archive", "--format", "parquet")
    assert sorted(path.name for path in (tmp_path / "lake").glob("rm=*")) == ["rm=other", "rm=rm"]

"""A newer dtx migrates the tables while the older one serves, and then takes over."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from dtx.client import XaFlag
from tests.servers.log.test_migrations import HEAD
from tests.support.crash import work
from tests.support.standby_pair import Crowd, Pair, Transfer

ROOT: Final = Path(__file__).parents[3]
STANDS_BY: Final = b"another dtx is active, standing by"
WRITTEN: Final = ("lease", "branch", "work", "unit", "journal", "message", "queue", "body", "audit", "settlement")
MIGRATION: Final = f"""
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{HEAD}", None, None


def upgrade() -> None:
    for table in {WRITTEN}:
        op.execute(f"ALTER TABLE dtx.{{table}} ADD COLUMN newer integer")
    op.execute("SELECT pg_sleep(0.2)")
"""
"""Expand first: the statements of the older dtx still work. All tables are locked until it ends."""


@pytest.fixture
def newer(tmp_path: Path) -> str:
    """``PYTHONPATH`` of this dtx with one more version of the tables."""
    (tmp_path / "dtx").symlink_to(ROOT / "dtx")
    shutil.copytree(ROOT / "migrations", tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "migrations/versions/9999_newer.py").write_text(MIGRATION)
    return str(tmp_path)


def test_a_newer_dtx_takes_over_after_it_migrated(pair_with: Callable[..., Pair], newer: str) -> None:
    """docs/operations/upgrade, "Two dtx": clients of the older dtx are not disturbed by the migration."""
    pair = pair_with("--lease-ttl", "15")
    scene = pair.scene
    scene._env = {"PYTHONPATH": newer}
    successor = scene.another_service(start=False)
    successor._fresh = True  # a copy of a process has the modules of this dtx
    with Crowd(pair) as crowd:
        with scene.connected() as connection:
            xa, prepared = work(connection.channel(), publish={"out": [b"prepared before"]})
            assert xa.prepare(prepared) is XaFlag.OK
            crowd.wait_for(10)
            before = pair.active.log_path.stat().st_size
            assert successor.run("migrate").stdout == "9999 (the newest)\n"
            crowd.wait_for(30)
            pair.standby.stop()
            successor.start(wait=False)
            scene.wait_for(lambda: STANDS_BY in successor.log_path.read_bytes(), "the newer dtx stands by")
            crowd.wait_for(30)
            log = pair.active.log_path.read_bytes()[before:]
            assert not re.search(rb'"level": "(?:warning|error|critical)"|connection (?:opened|closed)', log), log
            assert pair.active.stop() == 0
        successor.wait_ready()
        pair.go_on_with(successor)
        crowd.wait_for(30)
        with scene.coordinator() as coordinator:
            assert coordinator.commit(prepared) is XaFlag.OK
        crowd.books[prepared] = Transfer(b"prepared before", commits=True)
        crowd.settle()

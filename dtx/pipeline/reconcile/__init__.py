"""Verdicts about all global transactions of a fleet, on Spark: :mod:`dtx.pipeline.verdicts` has the rules.

- :mod:`~dtx.pipeline.reconcile.folding`: what is known, as rows of one shape; the rows of one branch folded into one.
- :mod:`~dtx.pipeline.reconcile.judging`: the branches of one transaction together, the rules, the verdict, and the
  lines that it rests on.
- :mod:`~dtx.pipeline.reconcile.running`: from run to run, reading what has changed; ``state`` keeps it.
- :mod:`~dtx.pipeline.reconcile.publishing`: into PostgreSQL, where the admin pages show it.
"""

from dtx.pipeline.reconcile.judging import verdicts_of
from dtx.pipeline.reconcile.publishing import PublishingFailed, publish
from dtx.pipeline.reconcile.running import Lines, current, run, runs
from dtx.pipeline.reconcile.state import Run, State, StateDamaged, Total

__all__ = [
    "Lines", "PublishingFailed", "Run", "State", "StateDamaged", "Total", "current", "publish", "run", "runs",
    "verdicts_of",
]  # fmt: skip

"""Verdicts about all global transactions of a fleet, on Spark: :mod:`dtx.pipeline.verdicts` has the rules.

- :mod:`~dtx.pipeline.reconcile.folded_rows`: facts as rows of one form, and the rows of one branch as one.
- :mod:`~dtx.pipeline.reconcile.judged_rows`: the branches of one transaction together, the rules, the verdict, and the
  lines that it rests on.
- :mod:`~dtx.pipeline.reconcile.incremental`: from run to run, reading what has changed; ``state`` keeps it.
- :mod:`~dtx.pipeline.reconcile.publication`: into PostgreSQL, where the admin pages show it.
"""

from dtx.pipeline.reconcile.incremental import Lines, current, run, runs
from dtx.pipeline.reconcile.judged_rows import verdicts_of
from dtx.pipeline.reconcile.publication import PublishingFailed, publish
from dtx.pipeline.reconcile.state import Results, Run, StateDamaged, Total

__all__ = [
    "Lines",
    "PublishingFailed",
    "Results",
    "Run",
    "StateDamaged",
    "Total",
    "current",
    "publish",
    "run",
    "runs",
    "verdicts_of",
]  # fmt: skip

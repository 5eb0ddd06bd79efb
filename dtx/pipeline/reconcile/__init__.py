"""Verdicts on all global transactions of a fleet, with Spark: :mod:`dtx.pipeline.verdicts` has the rules.

- :mod:`~dtx.pipeline.reconcile.folded_rows`: makes rows of one schema of all facts, and folds the rows of each branch.
- :mod:`~dtx.pipeline.reconcile.judged_rows`: applies the rules to the branches of a transaction, and collects evidence.
- :mod:`~dtx.pipeline.reconcile.incremental`: runs over what has changed since the last run, stored by ``state``.
- :mod:`~dtx.pipeline.reconcile.publication`: writes verdicts into PostgreSQL, for the admin pages.
"""

from dtx.pipeline.reconcile.incremental import Lines, current, run
from dtx.pipeline.reconcile.publication import PublishingFailed, publish
from dtx.pipeline.reconcile.state import Results, Run, SourcePart, SourceRead, StateDamaged, Total

__all__ = [
    "Lines", "PublishingFailed", "Results", "Run", "SourcePart", "SourceRead", "StateDamaged", "Total", "current",
    "publish", "run",
]  # fmt: skip

"""Verdicts about all global transactions of a fleet, on Spark: :mod:`dtx.pipeline.verdicts` has the rules.

- :mod:`~dtx.pipeline.reconcile.folding`: what is known, as rows of one shape; the rows of one branch folded into one.
- :mod:`~dtx.pipeline.reconcile.judging`: the branches of one transaction together, the rules, and the verdict.
- :mod:`~dtx.pipeline.reconcile.evidence`: the lines that a verdict rests on.
"""

from dtx.pipeline.reconcile.judging import Evidence, verdicts_of

__all__ = ["Evidence", "verdicts_of"]

"""A fleet that never was: journals, observations and decision logs with anomalies that are known, at any scale."""

from dtx.pipeline.generate.fleet import Fleet, Plan, generate, write

__all__ = ["Fleet", "Plan", "generate", "write"]

"""Tests that run Spark."""

from tests.support.spark import database, spark

__all__ = ["database", "spark"]

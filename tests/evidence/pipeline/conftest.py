"""A Spark session for the pipeline."""

import pytest
from pyspark.sql import SparkSession

from tests.support.spark import database, shared_spark

__all__ = ["database"]


@pytest.fixture(scope="session")
def spark() -> SparkSession:
    """Return a session with the pipeline's own settings."""
    return shared_spark(quick=False)

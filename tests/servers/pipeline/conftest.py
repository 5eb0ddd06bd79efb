"""Tests that run Spark."""

from collections.abc import Iterator

import pytest

from tests.support.postgres import PostgresServer
from tests.support.spark import spark

__all__ = ["spark"]


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """A database with dtx's tables, for one test."""
    url = postgres.create_migrated_database()
    yield url
    postgres.drop_database(url)

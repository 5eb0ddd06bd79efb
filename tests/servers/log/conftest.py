"""Logs on a database, opened by the test and closed after it."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from dtx.log.postgres import PostgresTransactionLog

OpenLog = Callable[..., Coroutine[Any, Any, PostgresTransactionLog]]


@pytest.fixture
async def open_log(migrated_postgres_url: str) -> AsyncIterator[OpenLog]:
    """Opens a log with short times on a fresh database."""
    opened: list[PostgresTransactionLog] = []

    async def make(**options: Any) -> PostgresTransactionLog:
        settings: dict[str, Any] = {"url": migrated_postgres_url, "rm": "rm", "lease_ttl": 5.0, "retry_window": 5.0}
        log = PostgresTransactionLog(**(settings | options))
        opened.append(log)
        await log.open()
        return log

    yield make
    for log in opened:
        await log.close()

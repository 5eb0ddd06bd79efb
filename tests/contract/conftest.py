"""Logs of both kinds, for contracts that both must obey."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from dtx.log.api import MessageLog
from dtx.log.memory import MemoryDatabase, MemoryLog
from dtx.log.postgres import PostgresLog

OpenLog = Callable[..., Coroutine[Any, Any, MessageLog]]


@pytest.fixture(params=["postgres", "memory"])
async def open_log(request: pytest.FixtureRequest) -> AsyncIterator[OpenLog]:
    """Opens logs on one database; they are closed with the test."""
    opened: list[MessageLog] = []
    database = MemoryDatabase()
    url = request.getfixturevalue("migrated_postgres_url") if request.param == "postgres" else None

    async def make(rm: str = "rm") -> MessageLog:
        log: MessageLog = MemoryLog(rm, database) if url is None else PostgresLog(url, rm, lease_ttl=5)
        opened.append(log)
        await log.open()
        return log

    yield make
    for log in opened:
        await log.close()


@pytest.fixture
async def log(open_log: OpenLog) -> MessageLog:
    return await open_log()

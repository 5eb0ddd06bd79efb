"""The log on the service's own event loop."""

import asyncio
import os
import signal
from pathlib import Path

import psycopg
import uvloop

from dtx.log.postgres import PostgresTransactionLog
from tests.support.branches import a_branch, an_insert
from tests.support.processes import wait_until


def test_a_session_that_ends_with_unread_requests_is_noticed_immediately(migrated_postgres_url: str) -> None:
    """The socket is readable and in error at the same time, and uvloop reports it once."""

    async def write_while_the_session_ends() -> None:
        log = PostgresTransactionLog(migrated_postgres_url, "rm", lease_ttl=30, retry_window=20, answer_timeout=10)
        await log.open()
        try:
            with psycopg.connect(migrated_postgres_url, autocommit=True) as other:
                row = other.execute(
                    "SELECT pid FROM pg_stat_activity "
                    "WHERE datname = current_database() AND application_name LIKE 'dtx writer%'"
                ).fetchone()
                assert row is not None
                os.kill(row[0], signal.SIGSTOP)
                other.execute("SELECT pg_terminate_backend(%s)", row)
            writing = asyncio.create_task(log.write(an_insert(a_branch())))
            for _ in range(20):
                await asyncio.sleep(0)  # the request is sent, and PostgreSQL does not read it
            os.kill(row[0], signal.SIGCONT)
            # The loop is blocked meanwhile: PostgreSQL's last message, the error and the end come together.
            wait_until(lambda: not Path(f"/proc/{row[0]}").exists(), what="the end of the session")
            async with asyncio.timeout(5):
                await writing
        finally:
            await log.close()

    uvloop.run(write_while_the_session_ends())

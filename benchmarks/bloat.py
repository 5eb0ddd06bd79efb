"""Growth of the database while queues keep their length: messages that come and go, and the sizes of the tables.

The log writes messages as a service does, some hundred in each record. Each record drops as many earlier messages, so
the queues keep their length while they move through the table. Some messages go through branches that are prepared and
committed. Every second, the delivered position of each queue is written. This program starts PostgreSQL.
"""

import argparse
import asyncio
import os
import time
from collections import deque
from typing import Final

import psycopg
import uvloop

from benchmarks.support.amqp import PERSISTENT
from benchmarks.support.report import Table, machine
from benchmarks.support.servers import Servers
from dtx.client import Xid
from dtx.db import migrate
from dtx.log.changes import Change, Define, MessageFlag, QueueRow, Slot, Store, StoredMessage
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, CompleteWrite, Insert, JournalEntry, JournalEvent, LogState
from dtx.manager.branch_runtime import new_branch_id

_AT_ONCE: Final = 250
"""Messages in one record."""
_WRITERS: Final = 4
"""Records that are written at the same time, as some connections would."""
_ROW: Final = 90
"""Approximate bytes of a row and its index entry, without the body."""
_TABLES: Final = ("message", "branch", "queue")
_SIZES: Final = """
SELECT pg_table_size(c.oid) - coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0),
       pg_indexes_size(c.oid), coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0),
       coalesce(s.n_dead_tup, 0), coalesce(s.autovacuum_count, 0)
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid = %s::regclass
"""
_HOT: Final = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = %s::regclass"


class Traffic:
    """Writes and drops messages.

    Args:
        log: an open log.
        options: of the command line.
    """

    def __init__(self, log: PostgresTransactionLog, options: argparse.Namespace) -> None:
        self.written = 0
        self._log = log
        self._options = options
        self._queues = [number + 1 for number in range(options.queues)]
        self._position = int(time.time() * 1_000_000)
        self._there: deque[list[Slot]] = deque()
        self._records = 0
        self._body = os.urandom(options.size)

    async def run(self) -> None:
        """Write all messages, and drop the remaining ones at the end."""
        await self._log.write(
            Define(queues=[QueueRow(vhost="/", id=queue, name=b"bloat-%d" % queue) for queue in self._queues])
        )
        marking = asyncio.ensure_future(self._mark())
        await asyncio.gather(*(self._write() for _ in range(_WRITERS)))
        marking.cancel()
        while self._there:
            await self._log.write(Store(change=Change(drops=self._there.popleft())))

    async def _write(self) -> None:
        options = self._options
        while self.written < options.messages:
            self.written += _AT_ONCE
            self._records += 1
            puts = [self._message() for _ in range(_AT_ONCE)]
            slots = [message.slot for message in puts]
            drops = self._there.popleft() if len(self._there) * _AT_ONCE >= options.depth else []
            if options.branches and self._records % options.branches == 0:
                await self._branch(puts, drops)
            else:
                await self._log.write(Store(change=Change(puts=puts, drops=drops)))
            self._there.append(slots)

    async def _branch(self, puts: list[StoredMessage], drops: list[Slot]) -> None:
        now = time.time()
        xid = Xid(1, os.urandom(16), b"")
        branch = BranchRecord(
            id=new_branch_id(),
            vhost="/",
            xid=xid,
            state=LogState.PREPARED,
            owner="guest",
            started_at=now,
            prepared_at=now,
            publishes=len(puts),
            consumes=len(drops),
            bytes=len(puts) * len(self._body),
            published=tuple([message.slot for message in puts]),
            consumed=tuple(drops),
        )

        def line(event: JournalEvent) -> JournalEntry:
            return JournalEntry(
                event=event, branch_id=branch.id, vhost="/", xid=xid, owner="guest", at=time.time(), actor="guest"
            )

        await self._log.write(Insert(branch=branch, change=Change(puts=puts), journal=line(JournalEvent.PREPARED)))
        completion = CompleteWrite(
            id=branch.id,
            expect=branch.state,
            version=branch.version,
            journal=line(JournalEvent.COMMITTED),
            change=Change(drops=drops),
        )
        await self._log.write(completion)

    def _message(self) -> StoredMessage:
        self._position += 1
        queue = self._queues[self._position % len(self._queues)]
        key = b"bloat-%d" % queue
        return StoredMessage(queue, self._position, b"", key, int(MessageFlag.PERSISTENT), PERSISTENT, self._body, None)

    async def _mark(self) -> None:
        while True:
            await asyncio.sleep(1)
            marks = [(queue, self._position) for queue in self._queues]
            await self._log.write(Store(change=Change(delivered=marks)), urgent=False)


class Watch:
    """Prints sizes of the tables.

    Args:
        url: of the database.
        traffic: the messages.
        live: bytes of the messages in the queues.
    """

    def __init__(self, url: str, traffic: Traffic, live: int) -> None:
        self.most = 0
        self._traffic = traffic
        self._live = live
        self._connection = psycopg.connect(url, autocommit=True)
        heads = ["seconds", "a second", "rows MiB", "indexes MiB", "TOAST MiB", "dead rows", "vacuums", "times live"]
        self._table = Table(("messages", 14), [*heads, "branch MiB", "queue KiB"])
        self._began = time.monotonic()

    async def run(self, every: float) -> None:
        """Print a row every *every* seconds."""
        while True:
            await asyncio.sleep(every)
            await asyncio.to_thread(self.row)

    def row(self) -> None:
        """Print one row."""
        found = {name: self._sizes(name) for name in _TABLES}
        rows, indexes, toast, dead, vacuums = found["message"]
        self.most = max(self.most, rows + indexes + toast)
        seconds = time.monotonic() - self._began
        written = self._traffic.written
        self._table.row(
            f"{written:,}",
            [
                f"{seconds:.0f}",
                f"{written / seconds:,.0f}",
                *(f"{size / 2**20:.1f}" for size in (rows, indexes, toast)),
                f"{dead:,}",
                f"{vacuums}",
                f"{(rows + indexes + toast) / self._live:.1f}",
                f"{sum(found['branch'][:3]) / 2**20:.1f}",
                f"{sum(found['queue'][:3]) / 2**10:.0f}",
            ],
        )

    def _sizes(self, name: str) -> tuple[int, ...]:
        row = self._connection.execute(_SIZES, [f"dtx.{name}"]).fetchone()
        assert row is not None
        return tuple(map(int, row))

    def hot(self, name: str) -> str:
        """Return how many updates of a table needed no index entry."""
        row = self._connection.execute(_HOT, [f"dtx.{name}"]).fetchone()
        assert row is not None
        return f"{row[1]:,} of {row[0]:,} updates of {name} were HOT"

    def plain_sizes(self) -> str:
        """Return the sizes of the indexes of the message table."""
        rows = self._connection.execute(
            "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index "
            "WHERE indrelid = 'dtx.message'::regclass"
        ).fetchall()
        return ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in rows)


async def measure(url: str, options: argparse.Namespace) -> None:
    log = PostgresTransactionLog(url, "bloat")
    await log.open()
    traffic = Traffic(log, options)
    live = options.depth * (options.size + _ROW)
    print(f"the steady queue has {options.depth:,} messages: {live / 2**20:.1f} MiB\n")
    watch = Watch(url, traffic, live)
    watching = asyncio.ensure_future(watch.run(options.every))
    await traffic.run()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    watch.row()
    print(f"\nat most {watch.most / 2**20:.0f} MiB, {watch.most / live:.0f} times what is live; {watch.plain_sizes()}")
    print(watch.hot("queue"))
    await log.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bloat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--messages", type=int, default=5_000_000, help="number of messages in all (default 5,000,000)")
    add("--size", type=int, default=100, help="bytes of each body (default 100)")
    add("--depth", type=int, default=20_000, help="number of messages in the queues at any time (default 20,000)")
    add("--queues", type=int, default=10, help="number of queues (default 10)")
    add("--branches", type=int, default=10, metavar="N", help="each Nth record is a branch; 0 for none (default 10)")
    add("--every", type=float, default=10.0, help="seconds between two rows (default 10)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    print(f"{options.messages:,} messages of {options.size} bytes; {machine()}")
    with Servers(standalone=True) as servers:
        url = servers.postgres("pg").create_database()
        migrate.upgrade(url)
        uvloop.run(measure(url, options))


if __name__ == "__main__":
    main()

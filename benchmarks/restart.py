"""The time until dtx serves with many branches in doubt, and the memory of each branch.

The log's own writer fills the log with prepared branches, each with one published message. Then dtx starts on an empty
log and on this one. A client recovers all branches page by page and commits some. dtx is killed and started again. This
program starts RabbitMQ, PostgreSQL and dtx.

With ``--standalone`` dtx has no broker, and starts also with a backlog in many queues: each branch has published a
message and holds another. Clients then count the queues, compare the first message of each, and commit and roll back
some branches.
"""

import argparse
import asyncio
import secrets
import time
from contextlib import closing
from typing import Final

import pika

from benchmarks.support import backlog, processor
from benchmarks.support.amqp import PERSISTENT, RawConnection
from benchmarks.support.processor import resident
from benchmarks.support.report import Table, machine
from benchmarks.support.servers import Servers
from dtx.client import Coordinator, Xid
from dtx.db import migrate
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, Insert, JournalEntry, JournalEvent, LogState, WorkKind, WorkRow
from dtx.manager.branch_runtime import new_branch_id
from tests.support.raw import Address
from tests.support.service import DtxService

AIM_SECONDS: Final = 5.0
COMMITTED: Final = 200
QUEUE: Final = b"bench-restart"
_AT_ONCE: Final = 512
_FORMAT_ID: Final = 0x72657374


def new_xids(count: int) -> list[Xid]:
    """Return xids of the usual size: gtrids of 32 bytes, bquals of 16 bytes."""
    run = secrets.token_bytes(24)
    return [Xid(_FORMAT_ID, run + number.to_bytes(8, "big"), b"restart-branch-1") for number in range(count)]


async def fill(url: str, xids: list[Xid], size: int) -> None:
    """Write a prepared branch for each xid, each with a message of *size* bytes."""
    log = PostgresTransactionLog(url, "dtx")
    await log.open()
    left = iter(xids)

    async def write() -> None:
        for xid in left:
            now = time.time()
            branch = BranchRecord(
                id=new_branch_id(),
                vhost="/",
                xid=xid,
                state=LogState.PREPARED,
                owner="guest",
                timeout=60,
                started_at=now,
                prepared_at=now,
                publishes=1,
                bytes=size,
            )
            work = WorkRow(
                position=0,
                kind=WorkKind.PUBLISH,
                exchange=b"",
                routing_key=QUEUE,
                properties=PERSISTENT,
                body=secrets.token_bytes(size),
            )
            line = JournalEntry(
                event=JournalEvent.PREPARED,
                branch_id=branch.id,
                vhost="/",
                xid=xid,
                owner="guest",
                at=now,
                actor="guest",
                publishes=1,
                bytes=size,
                started_at=now,
                prepared_at=now,
            )
            await log.write(Insert(branch=branch, work=(work,), journal=line))

    try:
        await asyncio.gather(*(write() for _ in range(_AT_ONCE)))
    finally:
        await log.close()


def start(service: DtxService) -> list[str]:
    """Start dtx, and return seconds, processor seconds and resident MiB as cells."""
    began = time.monotonic()
    service.start()
    ready = time.monotonic() - began
    used = processor.seconds(service.pid)
    return [f"{ready:.2f}", f"{used:.2f}", f"{resident(service.pid) / 2**20:.0f}"]


def recover(service: DtxService, xids: list[Xid]) -> None:
    """Recover through the client helpers, and commit a few.

    Raises:
        SystemExit: recovery lists other branches than the log has.
    """
    with closing(pika.BlockingConnection(pika.URLParameters(service.url()))) as connection:
        coordinator = Coordinator(connection)
        began = time.monotonic()
        found = set(coordinator.recover())
        seconds = time.monotonic() - began
        if found != set(xids):
            raise SystemExit(f"{len(xids)} branches are in doubt and recovery lists {len(found)}")
        print(
            f"recover: all {len(found):,} xids in {seconds:.2f} s through dtx.client, "
            f"{seconds / len(found) * 1e6:.0f} µs each"
        )
        chosen = xids[:COMMITTED]
        began = time.monotonic()
        for xid in chosen:
            coordinator.commit(xid)
        each = (time.monotonic() - began) / len(chosen)
        print(f"commit: {len(chosen)} of them one by one, {each * 1e3:.2f} ms each, their messages read from the log")


def check_backlog(service: DtxService, written: backlog.Backlog, xids: list[Xid], size: int) -> None:
    """Compare the queues and branches that clients see with the written ones.

    Raises:
        SystemExit: a queue has another number of messages or another first one, or a branch had another effect.
    """
    queues = len(written.names)
    branches = [len(xids) // queues + (queue < len(xids) % queues) for queue in range(queues)]
    with (
        RawConnection(Address.of(service.url())) as connection,
        closing(pika.BlockingConnection(pika.URLParameters(service.url()))) as other,
    ):
        depths = [connection.depth(name) for name in written.names]
        if depths != [written.depth - held for held in branches]:
            raise SystemExit(f"other numbers of messages are ready than were written: {depths}")
        channel = other.channel()
        began = time.monotonic()
        some = list(zip(written.names, branches, strict=True))[:COMMITTED]
        for name, held in some:
            frame, _, found = channel.basic_get(name.decode())
            if found != backlog.body(held, size):
                raise SystemExit(f"the first message of {name.decode()} is not number {held}")
            channel.basic_nack(frame.delivery_tag)
        each = (time.monotonic() - began) / len(some)
        print(f"get: the first message of each of {len(some)} queues, read from the database, {each * 1e3:.2f} ms each")
        coordinator = Coordinator(other)
        began = time.monotonic()
        for number in range(COMMITTED):
            (coordinator.rollback if number % 2 else coordinator.commit)(xids[number])
        each = (time.monotonic() - began) / COMMITTED
        print(f"commit and rollback: {COMMITTED} branches one by one, {each * 1e3:.2f} ms each")
        # a commit makes the published message visible, a rollback puts the held message back: one more either way
        for number in range(COMMITTED):
            depths[number % queues] += 1
        if depths != [connection.depth(name) for name in written.names]:
            raise SystemExit("the branches that ended have not changed their queues as they should have")


def standalone(options: argparse.Namespace) -> None:
    """Run the benchmark without a broker."""
    print(
        f"{options.messages:,} messages of {options.size} bytes in {options.queues} queues, "
        f"{options.branches:,} prepared branches; {machine()}"
    )
    with Servers(standalone=True) as servers:
        postgres = servers.postgres("pg")
        empty, full = (servers.dtx(postgres) for _ in range(2))
        assert full.database is not None
        empty.stop()
        names = [b"bench-restart-%d" % number for number in range(options.queues)]
        full.stop()
        began = time.monotonic()
        written = backlog.write_messages(full.database, names, options.messages, options.size)
        xids = new_xids(options.branches)
        asyncio.run(backlog.write_branches(full.database, xids, written, options.size))
        print(f"log filled in {time.monotonic() - began:.1f} s")

        table = Table(("start of dtx", 40), ["to READY s", "processor s", "resident MiB"])
        table.row("empty log", start(empty))
        nothing = resident(empty.pid)
        empty.stop()
        first = start(full)
        label = f"{options.messages:,} messages, {options.branches:,} in doubt"
        table.row(label, first)
        held = resident(full.pid)
        print(f"\nmemory: {(held - nothing) / options.messages:.0f} octets for each message, branches included")
        check_backlog(full, written, xids, options.size)
        full.kill9()
        print("\nkilled, and started again:")
        table.row(label, start(full))
        verdict = "reached" if float(first[0]) < AIM_SECONDS else "MISSED"
        print(f"\nserving {first[0]} s after the start, aim {AIM_SECONDS:g} s: {verdict}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--standalone", action="store_true", help="no broker, and a backlog of messages")
    add("--branches", type=int, help="number of branches in doubt (default 100,000, or 10,000 with --standalone)")
    add("--size", type=int, default=1024, help="bytes of each message (default 1024)")
    add("--messages", type=int, default=1_000_000, help="messages in queues, with --standalone (default 1,000,000)")
    add("--queues", type=int, default=100, help="number of queues, with --standalone (default 100)")
    options = parser.parse_args()
    if options.branches is None:
        options.branches = 10_000 if options.standalone else 100_000
    if options.branches < COMMITTED:
        parser.error(f"--branches must be at least {COMMITTED}")
    if options.standalone and options.messages <= options.branches + options.queues:
        parser.error("--messages must be more than what branches hold, and one for each queue")
    return options


def main() -> None:
    options = arguments()
    if options.standalone:
        standalone(options)
        return
    print(f"{options.branches:,} prepared branches with a message of {options.size} bytes each; {machine()}")
    with Servers() as servers:
        postgres = servers.postgres("pg")
        with RawConnection(servers.broker) as connection:
            connection.declare(QUEUE)
        empty = servers.dtx(postgres, start=False)
        full = servers.dtx(postgres, start=False)
        assert full.database is not None
        migrate.upgrade(full.database)
        xids = new_xids(options.branches)
        began = time.monotonic()
        asyncio.run(fill(full.database, xids, options.size))
        seconds = time.monotonic() - began
        print(f"log filled in {seconds:.1f} s, {options.branches / seconds:,.0f} prepares a second")

        table = Table(("start of dtx", 28), ["to READY s", "processor s", "resident MiB"])
        start(empty)  # makes the tables; the measured start has existing tables
        empty.stop()
        table.row("empty log", start(empty))
        nothing = resident(empty.pid)
        empty.stop()
        first = start(full)
        table.row(f"{options.branches:,} in doubt", first)
        held = resident(full.pid)
        print(f"\nmemory: {(held - nothing) / options.branches:.0f} octets for each branch in doubt")
        recover(full, xids)
        with RawConnection(servers.broker) as connection:
            delivered = connection.depth(QUEUE)
        if delivered != COMMITTED:
            raise SystemExit(f"{COMMITTED} branches were committed and {delivered} messages are in the queue")
        full.kill9()
        print("\nkilled, and started again:")
        table.row(f"{options.branches - COMMITTED:,} in doubt", start(full))
        verdict = "reached" if float(first[0]) < AIM_SECONDS else "MISSED"
        print(f"\nserving {first[0]} s after the start, aim {AIM_SECONDS:g} s: {verdict}")


if __name__ == "__main__":
    main()

"""Writes queues with a backlog, and branches in doubt on them, into the log, as dtx itself would."""

import asyncio
import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.support.amqp import PERSISTENT
from dtx.client import Xid
from dtx.log.changes import Change, MessageFlag, Slot, StoredMessage
from dtx.log.postgres import PostgresTransactionLog
from dtx.log.records import BranchRecord, Insert, JournalEntry, JournalEvent, LogState
from dtx.manager.branch_runtime import new_branch_id

OWNER: Final = "guest"
RM: Final = "dtx"
STAMP: Final = struct.Struct(">Q")
"""The start of a body: the number of the message in its queue."""
_AT_ONCE: Final = 512
_AGE: Final = 3600
"""Age of the messages in seconds: positions come from a counter that begins at the clock's microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """The written queues.

    Args:
        names: of the queues.
        ids: of the queues.
        base: the position before the first message.
        depth: number of messages in each queue, including those that branches hold.
    """

    names: Sequence[bytes]
    ids: Sequence[int]
    base: int
    depth: int

    def slot(self, queue: int, number: int) -> Slot:
        """Return the slot of a message by its number and that of its queue: queues got their messages in turn."""
        return Slot(self.ids[queue], self.base + number * len(self.ids) + queue + 1)


def body(number: int, size: int) -> bytes:
    """Return the body of the message *number* in its queue."""
    return STAMP.pack(number) + bytes(size - STAMP.size)


def declare(url: str, names: Sequence[bytes]) -> list[int]:
    """Write durable queues, and return their ids. A client would wait for a commit for each of them."""
    ids = [secrets.randbits(62) | 1 for _ in names]
    with (
        psycopg.connect(url) as connection,
        connection.cursor() as cursor,
        cursor.copy(
            "COPY dtx.queue (id, rm, vhost, name, auto_delete, arguments, delivered) FROM STDIN (FORMAT BINARY)"
        ) as copy,
    ):
        copy.set_types(["int8", "text", "text", "bytea", "bool", "bytea", "int8"])
        for number, name in zip(ids, names, strict=True):
            copy.write_row((number, RM, "/", name, False, b"", 0))
    return ids


def write_messages(url: str, names: Sequence[bytes], count: int, size: int) -> Backlog:
    """Write queues and *count* persistent messages, which the queues get in turn from the default exchange."""
    backlog = Backlog(
        names=names,
        ids=declare(url, names),
        base=int((time.time() - _AGE) * 1_000_000),
        depth=count // len(names),
    )
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        columns = "queue, position, rm, exchange, routing_key, flags, properties, body, expires_at"
        with cursor.copy(f"COPY dtx.message ({columns}) FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["int8", "int8", "text", "bytea", "bytea", "int4", "bytea", "bytea", "timestamptz"])
            for number in range(backlog.depth):
                content = body(number, size)
                for queue, name in enumerate(names):
                    slot = backlog.slot(queue, number)
                    copy.write_row((*slot, RM, b"", name, int(MessageFlag.PERSISTENT), PERSISTENT, content, None))
    return backlog


async def write_branches(url: str, xids: Sequence[Xid], backlog: Backlog, size: int) -> None:
    """Write a prepared branch for each xid, which has published a message to a queue and holds one of its backlog.

    Branch *n* uses queue *n* modulo the number of queues, and holds the next message from the head.
    """
    log = PostgresTransactionLog(url, RM)
    await log.open()
    left = iter(enumerate(xids))
    count = len(backlog.names)
    first = backlog.base + backlog.depth * count

    async def write() -> None:
        for number, xid in left:
            queue = number % count
            message = StoredMessage(
                backlog.ids[queue],
                first + number + 1,
                b"",
                backlog.names[queue],
                int(MessageFlag.PERSISTENT),
                PERSISTENT,
                secrets.token_bytes(size),
            )
            await log.write(_insert(xid, message, backlog.slot(queue, number // count)))

    try:
        await asyncio.gather(*(write() for _ in range(_AT_ONCE)))
    finally:
        await log.close()


def _insert(xid: Xid, message: StoredMessage, held: Slot) -> Insert:
    now = time.time()
    branch = BranchRecord(
        id=new_branch_id(),
        vhost="/",
        xid=xid,
        state=LogState.PREPARED,
        owner=OWNER,
        timeout=60,
        started_at=now,
        prepared_at=now,
        publishes=1,
        consumes=1,
        bytes=len(message.body),
        published=(message.slot,),
        consumed=(held,),
    )
    line = JournalEntry(
        event=JournalEvent.PREPARED,
        branch_id=branch.id,
        vhost="/",
        xid=xid,
        owner=OWNER,
        at=now,
        actor=OWNER,
        publishes=1,
        consumes=1,
        bytes=branch.bytes,
        started_at=now,
        prepared_at=now,
    )
    return Insert(branch=branch, change=Change(puts=(message,)), journal=line)

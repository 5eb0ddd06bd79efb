"""Branches, work and journal lines to write into a log."""

import time
from collections.abc import AsyncIterator
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from dtx.log.records import (
    Advance,
    BranchRecord,
    CompleteWrite,
    Duplicate,
    Insert,
    JournalEntry,
    JournalEvent,
    LogState,
    Replay,
    SettledCopy,
    Unit,
    WorkKind,
    WorkRow,
)
from dtx.store.rabbitmq.identity import BrokerIdentity
from dtx.xa.xid import Xid

_numbers = count(1)


def a_xid() -> Xid:
    """A unique xid."""
    return Xid(4660, b"\x00global\xff" + uuid4().bytes, b"%d" % next(_numbers))


def a_branch(**changes: Any) -> BranchRecord:
    """A prepared branch that has published one message."""
    values: dict[str, Any] = {
        "id": uuid4(),
        "vhost": "/",
        "xid": a_xid(),
        "state": LogState.PREPARED,
        "owner": "guest",
        "timeout": 60,
        "started_at": 1_800_000_000.123456,
        "prepared_at": 1_800_000_001.654321,
        "publishes": 1,
        "bytes": 5,
    }
    return BranchRecord(**(values | changes))


def a_publish(position: int = 0, **changes: Any) -> WorkRow:
    """A publish to the exchange ``orders``."""
    values: dict[str, Any] = {
        "position": position,
        "kind": WorkKind.PUBLISH,
        "exchange": b"orders",
        "routing_key": b"key\x00\xff",
        "flags": 1,
        "properties": b"\x80\x00\x0atext/plain",
        "body": b"hello",
    }
    return WorkRow(**(values | changes))


def a_consume(position: int = 0, **changes: Any) -> WorkRow:
    """A message taken from the queue ``incoming`` by unit 1."""
    values: dict[str, Any] = {"kind": WorkKind.CONSUME, "queue": b"incoming\xfe", "unit": 1}
    return a_publish(position, **(values | changes))


def a_unit(number: int = 0, **changes: Any) -> Unit:
    """A pending unit."""
    values: dict[str, Any] = {"number": number, "lock": "dtx.lock.1", "nonce": uuid4()}
    return Unit(**(values | changes))


def a_replay(position: int = 0, **changes: Any) -> Replay:
    """A message that is sent again to the exchange ``orders``."""
    values: dict[str, Any] = {"exchange": b"orders", "routing_key": b"key\x00\xff", "digest": bytes(range(32))}
    return Replay(position=position, **(values | changes))


def a_settlement(branch: BranchRecord, position: int = 0, **changes: Any) -> SettledCopy:
    """The settlement of the first copy of a message of *branch*, from the queue ``incoming``."""
    values: dict[str, Any] = {"vhost": branch.vhost, "queue": b"incoming\xfe", "attempt": 1}
    return SettledCopy(branch_id=branch.id, position=position, **(values | changes))


def a_duplicate(branch: BranchRecord, position: int = 0, **changes: Any) -> Duplicate:
    """The second copy of that message."""
    values: dict[str, Any] = {
        "vhost": branch.vhost,
        "queue": b"incoming\xfe",
        "attempt": 2,
        "exchange": b"orders",
        "routing_key": b"key\x00\xff",
        "properties": b"\x80\x00\x0atext/plain",
        "body": bytes(range(256)),
    }
    return Duplicate(branch_id=branch.id, position=position, **(values | changes))


def a_line(branch: BranchRecord, event: JournalEvent = JournalEvent.PREPARED, **changes: Any) -> JournalEntry:
    """A line of the journal about *branch*, now."""
    values: dict[str, Any] = {
        "event": event,
        "branch_id": branch.id,
        "vhost": branch.vhost,
        "xid": branch.xid,
        "owner": branch.owner,
        "at": round(time.time(), 6),
        "actor": branch.owner,
        "publishes": branch.publishes,
        "bytes": branch.bytes,
        "started_at": branch.started_at,
        "prepared_at": branch.prepared_at,
    }
    return JournalEntry(**(values | changes))


def an_insert(branch: BranchRecord, *work: WorkRow, since: str | None = None) -> Insert:
    """The prepare record of *branch*, with *work* or one publish."""
    return Insert(branch=branch, work=work or (a_publish(),), journal=a_line(branch), since=since)


def a_commit(branch: BranchRecord, **changes: Any) -> Advance:
    """The decision to commit *branch*."""
    values: dict[str, Any] = {
        "id": branch.id,
        "expect": branch.state,
        "version": branch.version,
        "to": LogState.COMMITTING,
        "decided_at": 1_800_000_002.5,
    }
    return Advance(**(values | changes))


def a_completion(branch: BranchRecord, event: JournalEvent = JournalEvent.COMMITTED, **changes: Any) -> CompleteWrite:
    """The completion of *branch*, which has not changed since its insert."""
    values: dict[str, Any] = {
        "id": branch.id,
        "expect": branch.state,
        "version": branch.version,
        "journal": a_line(branch, event),
    }
    return CompleteWrite(**(values | changes))


async def all_of(records: AsyncIterator[BranchRecord]) -> dict[UUID, BranchRecord]:
    """The loaded records, by id."""
    return {record.id: record async for record in records}


def new_identity(rm: str) -> BrokerIdentity:
    """The identity of a dtx with a unique log."""
    return BrokerIdentity(rm=f"{rm}-{uuid4()}", log=uuid4(), instance=uuid4())

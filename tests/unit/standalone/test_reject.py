"""Rejecting in a branch while the dead letter is read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dtx.log.api import LogError
from dtx.server.standalone.connection import StandaloneConnection
from dtx.store.postgres.store import PostgresStore
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import method_frame
from dtx.wire.amqp09.methods import DtxCall, DtxEnd, DtxEndOk, DtxPrepare, DtxPrepareOk, DtxSelect, DtxStart
from dtx.wire.amqp09.tables import entry
from dtx.xa.codes import XaFlag
from dtx.xa.xid import Xid
from tests.evidence.fuzz.server import (
    ENTER,
    START_OK,
    TWO_CHANNELS,
    Wire,
    check_nothing_is_left,
    hear,
    leave,
    whole,
)
from tests.support.raw import message

XID = Xid(1, b"gtrid", b"bqual")
LETTERS = entry(b"x-dead-letter-exchange", b"S", b"") + entry(b"x-dead-letter-routing-key", b"S", b"grave")


class Rig:
    """A client with a delivery on channel 1, which is associated with a branch."""

    def __init__(self, connection: StandaloneConnection, wire: Wire, store: PostgresStore) -> None:
        self.connection = connection
        self.wire = wire
        self.store = store

    async def say(self, *payloads: bytes) -> bytes:
        """Send methods on channel 1, and return the server's answer."""
        before = len(self.wire.sent)
        await hear(self.connection, self.wire, b"".join(method_frame(1, payload) for payload in payloads))
        return bytes(self.wire.sent[before:])

    async def call(self, *calls: DtxCall) -> bytes:
        """Send dtx methods, and return the server's answer."""
        return await self.say(*(call.encode() for call in calls))

    def ready(self, queue: bytes) -> int:
        """The number of ready messages."""
        return self.store.virtual_host("/").queues[queue].index.ready


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with whole() as (parts, store):
        wire = Wire()
        connection = StandaloneConnection(parts, wire)
        await connection.connect()
        for data in (START_OK, ENTER, TWO_CHANNELS):
            await hear(connection, wire, data)
        found = Rig(connection, wire, store)
        await found.say(
            methods.QueueDeclare(b"grave").encode(), methods.QueueDeclare(b"dying", arguments=LETTERS).encode()
        )
        await hear(connection, wire, message(1, b"dying", b"rejected"))
        await found.call(DtxSelect(), DtxStart(xid=XID))
        await found.say(methods.BasicGet(b"dying").encode())
        assert found.ready(b"dying") == 0
        yield found
        await leave(connection, parts.manager, lambda: connection.writes)
        check_nothing_is_left(connection, parts.manager, store)


@pytest.fixture
def may(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Messages can be read once this event is set."""
    read, event = rig.store.dead_letters, asyncio.Event()

    async def late(*arguments: Any) -> Any:
        await event.wait()
        return await read(*arguments)

    monkeypatch.setattr(rig.store, "dead_letters", late)
    return event


async def test_the_end_of_the_branch_waits_for_its_dead_letter(rig: Rig, may: asyncio.Event) -> None:
    assert await rig.say(methods.BasicReject(1, requeue=False).encode()) == b""
    assert await rig.call(DtxEnd(xid=XID), DtxPrepare(xid=XID)) == b""
    may.set()
    assert await rig.say() == DtxEndOk(XaFlag.OK).frame(1) + DtxPrepareOk(XaFlag.OK).frame(1)
    assert (rig.ready(b"dying"), rig.ready(b"grave")) == (0, 0)


async def test_an_unreadable_dead_letter_dooms_the_branch(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit would lose the message."""

    async def fail(*_: Any) -> Any:
        raise LogError("the database is away")

    monkeypatch.setattr(rig.store, "dead_letters", fail)
    await rig.say(methods.BasicReject(1, requeue=False).encode())
    assert await rig.call(DtxEnd(xid=XID)) == DtxEndOk(XaFlag.RBROLLBACK).frame(1)
    assert (rig.ready(b"dying"), rig.ready(b"grave")) == (1, 0)


async def test_a_client_lost_meanwhile_leaves_the_message(rig: Rig, may: asyncio.Event) -> None:
    await rig.say(methods.BasicReject(1, requeue=False).encode())
    rig.connection.client_disconnected()
    assert (rig.ready(b"dying"), rig.ready(b"grave")) == (1, 0)
    may.set()
    await rig.say()
    assert (rig.ready(b"dying"), rig.ready(b"grave")) == (1, 0)


async def test_a_branch_that_is_rolled_back_rejects_nothing(rig: Rig) -> None:
    manager = rig.connection.manager
    entry = manager.known("/", XID)
    assert entry is not None
    manager.doom(entry, "part of its work is lost")
    await rig.say(methods.BasicReject(1, requeue=False).encode())
    assert (rig.ready(b"dying"), rig.ready(b"grave")) == (1, 0)

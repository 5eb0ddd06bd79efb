"""A whole dtx without a broker in this process, for clients with any input: no sockets, no database.

It consists of the service's code, with three replacements: the in-memory twin of the log, a list as the socket, and
passwords without a slow hash. After each conversation, the invariants are checked.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import structlog
from pika import frame as pika_frame

from dtx.auth.accounts import Account, Accounts, LoginRefused
from dtx.auth.permissions import Patterns
from dtx.auth.users import Snapshot, User
from dtx.client import pika_methods
from dtx.manager import BranchManager, Limits, Requester
from dtx.server.client_session import ClientSession
from dtx.server.limits import ConnectionLimits
from dtx.server.standalone.client import Parts
from dtx.server.standalone.connection import StandaloneConnection
from dtx.server.standalone.writes import Writes
from dtx.store.postgres.store import PostgresStore
from dtx.telemetry import Metrics
from dtx.wire.amqp09 import handshake, methods, tables
from dtx.wire.amqp09.frames import FrameSplitter
from tests.support import preview
from tests.support.memory_log import MemoryLog

FRAME_MAX: Final = 65_536
_GUEST: Final = methods.ConnectionStartOk(
    client_properties=b"", mechanism=handshake.PLAIN, response=handshake.plain(b"guest", b"guest"), locale=b"en_US"
)
START_OK: Final = _GUEST.frame(0)
"""The first frame of a client."""
AMQPLAIN: Final = replace(
    _GUEST,
    mechanism=handshake.AMQPLAIN,
    response=tables.entry(b"LOGIN", b"S", b"guest") + tables.entry(b"PASSWORD", b"S", b"guest"),
)
"""The same with the other mechanism."""
TUNE_OK: Final = methods.ConnectionTuneOk(channel_max=100, frame_max=FRAME_MAX, heartbeat=0).frame(0)
OPEN: Final = methods.ConnectionOpen(b"/").frame(0)
ENTER: Final = TUNE_OK + OPEN
"""The frames that complete the handshake."""
_TURNS: Final = 6
"""Turns of the event loop until all effects of one read have ended, since the log is in memory."""
TWO_CHANNELS: Final = b"".join(methods.ChannelOpen().frame(number) for number in (1, 2))
pika_methods.register()
preview.register()
_EVERYTHING: Final = Patterns(configure=".*", write=".*", read=".*")


Saying = Callable[[random.Random, bytes], list[bytes]]
"""Makes frames of a client that uses a queue."""


class Known(Accounts):
    """Accounts with one user, whose password is verified immediately."""

    def __init__(self) -> None:
        self.users = Snapshot(
            vhosts=frozenset({"/"}),
            users={"guest": User(name="guest", password_hash="", tags=frozenset(), grants={"/": _EVERYTHING})},
        )

    async def authenticate(self, user: bytes, password: bytes, *, loopback: bool, peer: str = "") -> Account:
        """Accept guest."""
        if (user, password) != (b"guest", b"guest"):
            raise LoginRefused("unknown user or wrong password")
        return Account(self, "guest")


class Wire:
    """The client's socket."""

    is_local = True
    peer = "127.0.0.1"
    certificate_name: str | None = None
    unsent = 0

    def __init__(self) -> None:
        self.sent = bytearray()
        self.reads = True
        self.open = True

    def opened(self, who: Requester) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.open = False

    abort = close


class Complaint(AssertionError):
    """dtx logged an unexpected error."""


def _complain(_logger: object, method: str, event: Any) -> Any:
    """Raise for an event that reports an internal error of dtx."""
    if method in ("error", "exception", "critical") or event.get("exc_info"):
        error = event.get("exc_info")
        raise Complaint(str(dict(event))) from (error if isinstance(error, BaseException) else None)
    raise structlog.DropEvent


def be_strict() -> None:
    """Check all log events in this process from now on."""
    structlog.configure(processors=[_complain], cache_logger_on_first_use=False)


async def converse(
    reads: Iterable[bytes], *, enter: bool = True, look: Callable[[Metrics], None] = lambda _: None
) -> bytes:
    """Run one client's conversation with a new server.

    Args:
        reads: the result of each read of the socket.
        enter: begin with a successful handshake; otherwise *reads* are the whole input.
        look: gets the server's metrics before the client disconnects.

    Returns:
        The bytes that the client received.

    Raises:
        Complaint: an unexpected error was logged.
        AssertionError: the server kept state of the client.
    """
    async with whole() as (parts, store):
        wire = Wire()
        connection = StandaloneConnection(parts, wire)
        try:
            await connection.connect()
            for data in ([START_OK, ENTER] if enter else []) + list(reads):
                await hear(connection, wire, data)
            sent = bytes(wire.sent)
            look(parts.metrics)
            await leave(connection, parts.manager, lambda: getattr(connection, "writes", None))
            check(sent)
            check_nothing_is_left(connection, parts.manager, store)
            return sent
        finally:
            connection.client_disconnected()


@asynccontextmanager
async def whole() -> AsyncIterator[tuple[Parts, PostgresStore]]:
    """Start a server; yield the shared parts of its connections, and its store."""
    log = MemoryLog()
    await log.open()
    store = PostgresStore(log)
    await store.open()
    metrics = Metrics()
    limits = Limits(branch_bytes=1 << 20, branch_messages=200, held_bytes=4 << 20)
    manager = BranchManager(log, store, limits, metrics)
    await manager.start()
    store.begin()
    bounds = ConnectionLimits(max_channels=100, frame_max=FRAME_MAX, max_message_bytes=1 << 20, handshake_timeout=60)
    try:
        yield Parts(manager=manager, broker=store, accounts=Known(), metrics=metrics, limits=bounds), store
    finally:
        await manager.close()
        await store.close()
        await log.close()


async def hear(connection: ClientSession, wire: Wire, data: bytes) -> None:
    """Let the server read *data*, and wait for the effects."""
    if wire.open:
        connection.client_data(data)
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def leave(connection: ClientSession, manager: BranchManager, find_writes: Callable[[], Writes | None]) -> None:
    """Disconnect, and return when no task or write is left. Before the handshake there are no writes."""
    connection.client_disconnected()
    async with asyncio.timeout(10):
        await connection.ended
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            writes = find_writes()
            if not manager._tasks and (writes is None or writes.idle):
                return


def check(sent: bytes) -> None:
    """Check that the client received complete frames that it can decode."""
    splitter = FrameSplitter()
    splitter.max_frame = FRAME_MAX
    buffer, frames = splitter.feed(sent)
    assert splitter.pending == 0, "half a frame was sent"
    for _, _, start, end in frames:
        consumed, decoded = pika_frame.decode_frame(buffer[start:end])
        assert consumed == end - start
        assert decoded is not None


def check_nothing_is_left(connection: ClientSession, manager: BranchManager, store: PostgresStore) -> None:
    """Check that the client's state is gone, except for branches that it has ended."""
    assert not connection.channels
    assert manager.metrics.channels._value.get() == 0
    assert manager.metrics.selected_channels._value.get() == 0
    held = sum(entry.work._charged for entry in manager.entries() if entry.work is not None)
    assert manager.budget.used == held, "memory of ended branches is still counted"
    branches = sum(len(entry.work.items) for entry in manager.entries() if entry.work is not None)
    branches += sum(len(entry.outcomes) for entry in manager.entries())
    records = [entry.record for entry in manager.entries() if entry.record is not None]
    branches += sum(len(record.consumed or ()) for record in records)
    host = store.virtual_host("/")
    for queue in host.queues.values():
        assert queue.owner is None, f"{queue} is exclusive to an ended connection"
        assert not queue.index.consumers, f"{queue} has consumers of ended channels"
        assert queue.index.unacked <= branches, f"{queue} has {queue.index.unacked} deliveries without a channel"

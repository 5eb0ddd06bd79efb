"""A whole dtx without a broker in this process, for clients that say anything: no sockets, no database, nothing left.

Everything is the service's own but for the ends: the log is its in-memory twin, the socket is a list, and passwords
are not worth milliseconds. What must hold whatever a client has said is checked after each conversation.
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
from dtx.manager import Limits, TransactionManager, Who
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
"""What a client says first."""
AMQPLAIN: Final = replace(
    _GUEST,
    mechanism=handshake.AMQPLAIN,
    response=tables.entry(b"LOGIN", b"S", b"guest") + tables.entry(b"PASSWORD", b"S", b"guest"),
)
"""The same by the other mechanism."""
TUNE_OK: Final = methods.ConnectionTuneOk(channel_max=100, frame_max=FRAME_MAX, heartbeat=0).frame(0)
OPEN: Final = methods.ConnectionOpen(b"/").frame(0)
ENTER: Final = TUNE_OK + OPEN
"""What it says when it may come in."""
_TURNS: Final = 6
"""Turns of the event loop in which everything that one read has begun comes to its end: the log is memory."""
TWO_CHANNELS: Final = b"".join(methods.ChannelOpen().frame(number) for number in (1, 2))
pika_methods.register()
preview.register()
_EVERYTHING: Final = Patterns(configure=".*", write=".*", read=".*")


Saying = Callable[[random.Random, bytes], list[bytes]]
"""Frames of a client that uses a queue."""


class Known(Accounts):
    """One user, whose password takes no time to verify."""

    def __init__(self) -> None:
        self.users = Snapshot(
            vhosts=frozenset({"/"}),
            users={"guest": User(name="guest", password_hash="", tags=frozenset(), grants={"/": _EVERYTHING})},
        )

    async def authenticate(self, user: bytes, password: bytes, *, loopback: bool, peer: str = "") -> Account:
        """Let guest in."""
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

    def opened(self, who: Who) -> bool:
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
    """dtx has met something that nobody had foreseen."""


def _complain(_logger: object, method: str, event: Any) -> Any:
    """An event that tells of a fault of dtx's own."""
    if method in ("error", "exception", "critical") or event.get("exc_info"):
        error = event.get("exc_info")
        raise Complaint(str(dict(event))) from (error if isinstance(error, BaseException) else None)
    raise structlog.DropEvent


def be_strict() -> None:
    """Have everything that is logged judged, in this process from now on."""
    structlog.configure(processors=[_complain], cache_logger_on_first_use=False)


async def converse(
    reads: Iterable[bytes], *, enter: bool = True, look: Callable[[Metrics], None] = lambda _: None
) -> bytes:
    """One client's conversation with a server that is made for it.

    Args:
        reads: what its socket returns, read by read.
        enter: begin with a handshake that succeeds; else *reads* are all that the client says.
        look: is shown the server's numbers before the client goes.

    Returns:
        What the client was sent.

    Raises:
        Complaint: an error that nobody foresaw was logged, or something is left when the client is gone.
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
            connection.client_gone()


@asynccontextmanager
async def whole() -> AsyncIterator[tuple[Parts, PostgresStore]]:
    """A server: what its connections share, and where its messages are."""
    log = MemoryLog()
    await log.open()
    store = PostgresStore(log)
    await store.open()
    metrics = Metrics()
    limits = Limits(branch_bytes=1 << 20, branch_messages=200, held_bytes=4 << 20)
    manager = TransactionManager(log, store, limits, metrics)
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
    """Let the server read *data*, and do what comes of it."""
    if wire.open:
        connection.client_data(data)
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def leave(
    connection: ClientSession, manager: TransactionManager, find_writes: Callable[[], Writes | None]
) -> None:
    """The client goes; return when nothing is under way any more. There are no writes before it has come in."""
    connection.client_gone()
    async with asyncio.timeout(10):
        await connection.ended
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            writes = find_writes()
            if not manager._tasks and (writes is None or writes.idle):
                return


def check(sent: bytes) -> None:
    """What the client was sent are whole frames that a client understands."""
    splitter = FrameSplitter()
    splitter.max_frame = FRAME_MAX
    buffer, frames = splitter.feed(sent)
    assert splitter.pending == 0, "half a frame was sent"
    for _, _, start, end in frames:
        consumed, decoded = pika_frame.decode_frame(buffer[start:end])
        assert consumed == end - start
        assert decoded is not None


def check_nothing_is_left(connection: ClientSession, manager: TransactionManager, store: PostgresStore) -> None:
    """The client is gone, and with it all that was its own; a branch that it has ended goes on."""
    assert not connection.channels
    assert manager.metrics.channels._value.get() == 0
    assert manager.metrics.selected_channels._value.get() == 0
    held = sum(entry.work._charged for entry in manager.entries() if entry.work is not None)
    assert manager.budget.used == held, "memory that nobody has is counted"
    branches = sum(len(entry.work.items) for entry in manager.entries() if entry.work is not None)
    branches += sum(len(entry.outcomes) for entry in manager.entries())
    records = [entry.record for entry in manager.entries() if entry.record is not None]
    branches += sum(len(record.consumed or ()) for record in records)
    host = store.virtual_host("/")
    for queue in host.queues.values():
        assert queue.owner is None, f"{queue} is exclusive to nobody"
        assert not queue.index.consumers, f"{queue} has consumers that are gone"
        assert queue.index.unacked <= branches, f"{queue} has {queue.index.unacked} deliveries to nobody"

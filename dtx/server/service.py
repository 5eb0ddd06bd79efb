"""The service: puts the parts together, says READY, and stops when it is told to.

Order matters. The lease is taken before the log is loaded; the log is loaded before anybody can connect. On the way
down: no new branches, phase two under way is finished, clients are told, and the lease is given up last.
"""

import asyncio
import math
import os
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeAlias

from dtx import failpoint
from dtx.config import Settings, redact
from dtx.db import migrate
from dtx.embedded.postgres import EmbeddedPostgres
from dtx.failpoint import Point
from dtx.log.lease import Keep
from dtx.log.postgres import TransactionLog
from dtx.manager import Limits, TransactionManager
from dtx.server import memory
from dtx.server.listener import Listener, NewSession
from dtx.telemetry import LaneNumbers, Metrics, get_logger
from dtx.telemetry.traces import open_traces
from dtx.wire.amqp09 import closes
from dtx.wire.amqp09.errors import HardCode

if TYPE_CHECKING:
    from dtx.server.operator_service import OperatorService

_log = get_logger(part="service")
OK: Final = 0
FAILED: Final = 1
LEASE_LOST: Final = 5
_DAY: Final = 86_400.0
_GOODBYE: Final = 5.0
"""Seconds that clients have to say goodbye on a graceful stop."""
_Opened: TypeAlias = tuple[TransactionManager, NewSession, Callable[[], Mapping[str, LaneNumbers]]]
"""The manager, what makes the connection of a client, and what tells the lanes."""
_OpenMode: TypeAlias = Callable[[str, TransactionLog], Awaitable[_Opened]]
"""Opens a mode, given the database's URL and the log under its lease."""


async def serve(settings: Settings) -> int:
    """Run dtx until a signal stops it.

    Args:
        settings: with a broker, or without: then dtx is the broker.

    Returns:
        The exit code: 0 after a graceful stop, 1 when the log has failed, 5 when another dtx took over.

    Raises:
        BrokerUnusable, LogError, EmbeddedPostgresError, OSError: it cannot start; each says why in one sentence.
    """
    _raise_open_files(settings)
    for name, sentence in settings.unencrypted().items():
        _log.warning(sentence, setting=name)
    memory.give_back_large_blocks()
    stop = _Stop()
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(_start(settings, stack, stop))
        stopping = asyncio.ensure_future(stop.asked.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return stop.code
        service = await starting
        await stop.asked.wait()
        stopping.cancel()
        _notify("STOPPING=1")
        # Without the lease nothing can be finished, and the successor waits for our connections to end.
        await service.stop(settings.drain_timeout if stop.code == OK else 0.0)
        return stop.code


class _Stop:
    """Signals, and the loss of the lease."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.code = OK
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            _log.warning("second signal, exiting at once")
            os._exit(128 + number)  # what is not in the log never promised anything
        _log.info("stopping", signal=number.name)
        self.asked.set()

    def lease_lost(self) -> None:
        """Another dtx has taken over: everything here is fenced already, so there is nothing to finish."""
        _log.error("the lease is lost, another dtx is the active one")
        self.code = LEASE_LOST
        self.asked.set()

    def log_failed(self) -> None:
        """The log can write no more, by a fault of dtx's own: another one shall take over."""
        _log.error("the log has failed, dtx ends so that another one can take over")
        self.code = FAILED
        self.asked.set()


class _Service:
    """What runs, once everything has started."""

    def __init__(self, manager: TransactionManager, listener: Listener) -> None:
        self._manager = manager
        self._listener = listener

    async def stop(self, drain: float) -> None:
        """No new branches; finish what is under way; say goodbye."""
        self._listener.stop_accepting()
        if not await self._manager.drain(drain):
            _log.warning("operations are still under way, they go on after the next start", seconds=drain)
        failpoint.at(Point.STOP_DRAINED)
        goodbye = closes.connection_close(
            HardCode.CONNECTION_FORCED, closes.describe(HardCode.CONNECTION_FORCED, "dtx is shutting down")
        )
        await self._listener.close(goodbye, _GOODBYE)


async def _start(settings: Settings, stack: AsyncExitStack, stop: _Stop) -> _Service:
    metrics = Metrics()
    if settings.traces:
        metrics.traces = open_traces("dtx")
        stack.push_async_callback(asyncio.to_thread, metrics.traces.close)
    listener = Listener(
        max_connections=settings.max_connections,
        max_handshakes=settings.max_handshakes,
        coordinators=frozenset(settings.coordinator),
        header_timeout=settings.header_timeout,
        metrics=metrics,
    )
    tls = _server_tls(settings)
    addresses = [await listener.bind(address.host, address.port, tls) for address in settings.listen]
    stack.callback(listener.stop_accepting)
    operating = _operating(settings, metrics, stack)
    broker, open_mode = await _mode(settings, metrics, stack)
    url = await _database(settings, stack)
    await _migrate(url)
    if operating is not None:
        operating.begin(url)  # a standby answers, too: that it is one
    log = await _open_log(settings, url, stack, stop, metrics)
    with memory.loading():
        manager, new_session, lanes = await open_mode(url, log)
    await listener.accept(new_session)
    if operating is not None:
        operating.activate(manager, listener, lanes, log)
    failpoint.at(Point.READY_BEFORE)
    _say_ready(addresses, None if operating is None else operating.url)
    failpoint.at(Point.READY_AFTER)
    listen = [f"{host}:{port}" for host, port in addresses]
    _log.info("serving", listen=listen, broker=broker, rm=settings.rm)
    return _Service(manager, listener)


async def _database(settings: Settings, stack: AsyncExitStack) -> str:
    """The URL of the database; the embedded one is started."""
    if settings.database is not None:
        return settings.database.get_secret_value()
    embedded = EmbeddedPostgres(settings.data_dir)
    stack.push_async_callback(asyncio.to_thread, embedded.stop)
    url = await asyncio.to_thread(embedded.start)
    _log.info("embedded PostgreSQL is running", data_dir=str(settings.data_dir))
    return url


async def _migrate(url: str) -> None:
    failpoint.at(Point.MIGRATION_BEFORE)
    revision = await asyncio.to_thread(migrate.upgrade, url)
    failpoint.at(Point.MIGRATION_AFTER)
    _log.info("the tables are there", database=redact(url), revision=revision)


def _operating(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> "OperatorService | None":
    """The operators' part, listening; ``None`` where nobody wants it: then it is not even loaded."""
    if settings.no_admin and not settings.policy and not settings.alert_after:
        return None
    from dtx.server.operator_service import OperatorService

    return OperatorService(settings, metrics, stack)


async def _mode(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> tuple[str, _OpenMode]:
    """What is said of the broker, and what opens the mode.

    That mode alone is loaded, and before the lease is waited for: a takeover is quick, and nothing keeps the loop from
    renewing.

    Raises:
        BrokerUnusable: there should be a broker.
    """
    if settings.broker is None:
        from dtx.server.standalone.mode import open_standalone

        async def standalone(url: str, log: TransactionLog) -> _Opened:
            opened = await open_standalone(settings, url, log, _limits(settings), metrics, stack)
            return *opened, dict

        return "none", standalone
    from dtx.server.alongside.mode import broker_of, open_alongside, require_broker, vhost_of

    broker = broker_of(settings)
    await require_broker(broker, vhost_of(settings))

    async def alongside(_: str, log: TransactionLog) -> _Opened:
        return await open_alongside(settings, broker, log, _limits(settings), metrics, stack)

    return str(broker), alongside


def _days(seconds: float) -> int | None:
    """Whole days, a part of one counts as one; 0 is for ever."""
    return math.ceil(seconds / _DAY) or None


async def _open_log(
    settings: Settings, url: str, stack: AsyncExitStack, stop: _Stop, metrics: Metrics
) -> TransactionLog:
    log = TransactionLog(
        url,
        settings.rm,
        lease_ttl=settings.lease_ttl,
        keep=Keep(
            journal=max(1, round(settings.journal_retention / _DAY)),
            archive=_days(settings.archive_retention),
            audit=_days(settings.audit_retention),
        ),
        unsafe=settings.unsafe,
        observe=metrics.log_committed,
        on_lines=metrics.lines_written,
        on_lease_lost=stop.lease_lost,
        on_failed=stop.log_failed,
    )
    _log.info("taking the lease", rm=settings.rm, database=redact(url))
    await log.open(on_standby=_say_standing_by)
    stack.push_async_callback(log.close)
    return log


def _limits(settings: Settings) -> Limits:
    return Limits(
        default_timeout=settings.default_timeout,
        max_timeout=settings.max_timeout,
        tombstone_ttl=settings.tombstone_ttl,
        branch_bytes=settings.max_branch_bytes,
        branch_messages=settings.max_branch_messages,
        branches=settings.max_branches,
        held_bytes=settings.max_held_bytes,
        cache_bytes=settings.work_cache_bytes,
        patience=settings.unit_deadline,
        coordinators=frozenset(settings.coordinator),
        quotas=settings.quota,
        disk=settings.data_dir if settings.database is None else None,
        disk_free=settings.disk_free_bytes,
    )


def _server_tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    if settings.tls_ca is not None:
        context.load_verify_locations(settings.tls_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _raise_open_files(settings: Settings) -> None:
    """Two sockets for each client, those of operators, and some for dtx itself: take what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.max_connections + 768
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < wanted:
            _log.warning("few open files are allowed", allowed=limit, wanted=wanted)


def _say_ready(addresses: Sequence[tuple[str, int]], admin: str | None) -> None:
    """Print the line with ``READY`` that scripts wait for, and notify systemd.

    Args:
        addresses: where clients connect.
        admin: where the operators' API is.
    """
    listen = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)
    api = "" if admin is None else f" admin={admin}"
    print(f"READY listen={listen}{api} pid={os.getpid()}", flush=True)  # noqa: T201 - this is the interface
    _notify(f"READY=1\nSTATUS=serving at {listen}")


def _say_standing_by(holder: str) -> None:
    """Notify systemd that all is well here, and that another dtx serves: whoever waits for a start must not kill it."""
    _notify(f"READY=1\nSTATUS=standing by, {holder} is active")


def _notify(state: str) -> None:
    """sd_notify: one datagram to ``$NOTIFY_SOCKET``, if there is one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            channel.sendall(state.encode())
    except OSError:
        return  # who asked to be told is not there any more

"""The service: starts the parts, prints READY, and stops on a signal.

dtx takes the lease before it loads the log, and loads the log before clients can connect. On a stop it refuses new
branches, finishes phase two, closes the connections of clients, and releases the lease last.
"""

import asyncio
import math
import os
import resource
import signal
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import urlsplit

from dtx import failpoint
from dtx.config import Settings, redact
from dtx.db import migrate
from dtx.embedded.postgres import EmbeddedPostgres
from dtx.failpoint import Point
from dtx.log.lease import Keep
from dtx.log.postgres import PostgresTransactionLog
from dtx.manager import BranchManager, Limits
from dtx.server import memory
from dtx.server.listener import Listener, NewSession
from dtx.server.processes import MemberProcess
from dtx.server.readiness import announce_ready, announce_standby, announce_standby_to_supervisor, notify
from dtx.telemetry import Metrics, get_logger
from dtx.telemetry.traces import open_traces
from dtx.wire.amqp09 import closes
from dtx.wire.amqp09.errors import HardCode

if TYPE_CHECKING:
    from dtx.admin.api_context import OperatedBroker
    from dtx.server.operator_service import OperatorService
    from dtx.server.standalone.operator_requests import OperatorBroker

_log = get_logger(part="service")
OK: Final = 0
FAILED: Final = 1
LEASE_LOST: Final = 5
_DAY: Final = 86_400.0
_LAG_PERIOD: Final = 0.25
"""Seconds between two measurements of the event loop."""
_CLOSE_SECONDS: Final = 5.0
"""Seconds that clients have to confirm connection.close on a stop."""
_Opened: TypeAlias = "tuple[BranchManager, NewSession, OperatedBroker | None, OperatorBroker | None]"
"""The manager, the factory of client sessions, and what operators may do with the broker, or with dtx as the broker."""
_OpenMode: TypeAlias = Callable[[str, PostgresTransactionLog], Awaitable[_Opened]]
"""Opens a mode with the URL of the database and the log, which holds the lease."""


async def serve(settings: Settings, process: MemberProcess | None = None) -> int:
    """Run dtx until a signal stops it.

    Args:
        settings: of the service; without a broker, it is the standalone mode.
        process: which of several processes of one supervisor it is; ``None`` without them.

    Returns:
        The exit code: 0 after a signal, 1 if the log has failed, 5 if another dtx took over.

    Raises:
        BrokerUnusable, ConfigError, LogError, EmbeddedPostgresError, OSError: dtx cannot start; the message says why.
    """
    _raise_open_files(settings)
    for name, sentence in (*settings.deprecated().items(), *settings.unencrypted().items()):
        _log.warning(sentence, setting=name)
    memory.give_back_large_blocks()
    stop = _Stop()
    async with AsyncExitStack() as stack:
        starting = asyncio.ensure_future(_start(settings, process, stack, stop))
        stopping = asyncio.ensure_future(stop.asked.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return stop.code
        service = await starting
        await stop.asked.wait()
        stopping.cancel()
        notify("STOPPING=1")
        # Without the lease dtx cannot finish operations, and the successor waits until its connections end.
        await service.stop(settings.drain_timeout if stop.code == OK else 0.0)
        return stop.code


class _Stop:
    """The reasons to stop: signals, a lost lease, a failed log."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.code = OK
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)

    def _signal(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            _log.warning("second signal, exiting at once")
            os._exit(128 + number)  # safe: dtx has answered nothing that is not in the log
        _log.info("stopping", signal=number.name)
        self.asked.set()

    def lease_lost(self) -> None:
        """Stop without a drain: another dtx took over, and this one is fenced."""
        _log.error("the lease is lost, another dtx is the active one")
        self.code = LEASE_LOST
        self.asked.set()

    def log_failed(self) -> None:
        """Stop because of a defect in dtx, after which the log cannot write."""
        _log.error("the log has failed, dtx ends so that another one can take over")
        self.code = FAILED
        self.asked.set()


class _Service:
    """The parts that stop first."""

    def __init__(self, manager: BranchManager, listener: Listener) -> None:
        self._manager = manager
        self._listener = listener

    async def stop(self, drain: float) -> None:
        """Refuse new branches, wait *drain* seconds for running operations, and close the connections of clients."""
        self._listener.stop_accepting()
        if not await self._manager.drain(drain):
            _log.warning("operations are still under way; the next start continues them", seconds=drain)
        failpoint.at(Point.STOP_DRAINED)
        close = closes.connection_close(
            HardCode.CONNECTION_FORCED, closes.describe(HardCode.CONNECTION_FORCED, "dtx is shutting down")
        )
        await self._listener.close(close, _CLOSE_SECONDS)


async def _start(settings: Settings, process: MemberProcess | None, stack: AsyncExitStack, stop: _Stop) -> _Service:
    metrics = Metrics()
    measuring = asyncio.create_task(_measure_lag(metrics), name="dtx-loop-lag")
    stack.callback(measuring.cancel)
    if settings.traces:
        metrics.traces = open_traces("dtx")
        stack.push_async_callback(asyncio.to_thread, metrics.traces.close)
    listener = Listener(
        max_connections=settings.max_connections,
        max_handshakes=settings.max_handshakes,
        coordinators=frozenset(settings.coordinator),
        members=settings.advertise is not None,
        header_timeout=settings.header_timeout,
        metrics=metrics,
    )
    tls = _server_tls(settings)
    shared = process is not None
    addresses = [await listener.bind(address.host, address.port, tls, shared=shared) for address in settings.listen]
    port = addresses[0][1]
    if process is not None:
        _, port = await listener.bind(*process.peers, tls if process.peers_tls else None, only_members=True)
    stack.callback(listener.stop_accepting)
    operating = _operating(settings, metrics, stack)
    broker, open_mode = await _mode(settings, metrics, stack)
    url = await _database(settings, stack)
    await _migrate(url)
    if operating is not None:
        operating.begin(url)  # a standby answers as well, with its state
    on_standby = announce_standby if process is None else announce_standby_to_supervisor
    log = await _open_log(settings, url, _advertised(settings, port), stack, stop, on_standby, metrics)
    with memory.loading():
        manager, new_session, broker_access, own_broker = await open_mode(url, log)
    await listener.accept(new_session)
    if operating is not None:
        operating.activate(manager, listener, broker_access, own_broker, log)
    failpoint.at(Point.READY_BEFORE)
    admin = None if operating is None else operating.url
    announce_ready(addresses, admin)
    failpoint.at(Point.READY_AFTER)
    listen = [f"{host}:{port}" for host, port in addresses]
    _log.info("serving", listen=listen, broker=broker, rm=settings.rm, admin=admin)
    return _Service(manager, listener)


async def _measure_lag(metrics: Metrics) -> None:
    """Measure how late the event loop is, until cancelled."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(_LAG_PERIOD)
        metrics.loop_lagged(max(0.0, time.monotonic() - began - _LAG_PERIOD))


async def _database(settings: Settings, stack: AsyncExitStack) -> str:
    """The URL of the database; starts the embedded PostgreSQL if the settings name none."""
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
    _log.info("database schema is up to date", database=redact(url), revision=revision)


def _operating(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> "OperatorService | None":
    """The operators' part; ``None`` if the settings do not need it: then its modules are not imported."""
    if settings.no_admin and not settings.policy and not settings.alert_after:
        return None
    from dtx.server.operator_service import OperatorService

    return OperatorService(settings, metrics, stack)


async def _mode(settings: Settings, metrics: Metrics, stack: AsyncExitStack) -> tuple[str, _OpenMode]:
    """The broker's name for the log, and the function that opens the mode.

    Only that mode is imported, and before dtx waits for the lease: a takeover is fast, and no import delays renewals.

    Raises:
        BrokerUnusable: the broker does not answer, or refuses dtx.
    """
    if settings.broker is None:
        from dtx.server.standalone.mode import open_standalone

        async def standalone(url: str, log: PostgresTransactionLog) -> _Opened:
            manager, new_session, own = await open_standalone(settings, url, log, _limits(settings), metrics, stack)
            return manager, new_session, None, own

        return "none", standalone
    from dtx.server.alongside.mode import broker_of, open_alongside, require_broker, vhost_of

    broker = broker_of(settings)
    await require_broker(broker, vhost_of(settings))

    async def alongside(_: str, log: PostgresTransactionLog) -> _Opened:
        return *await open_alongside(settings, broker, log, _limits(settings), metrics, stack), None

    return str(broker), alongside


def _days(seconds: float) -> int | None:
    """Whole days, rounded up; ``None`` for 0, which means for ever."""
    return math.ceil(seconds / _DAY) or None


def _advertised(settings: Settings, port: int) -> str | None:
    """The address for other members, with the bound *port* if it has none."""
    if settings.advertise is None or urlsplit(settings.advertise).port is not None:
        return settings.advertise
    return f"{settings.advertise.rstrip('/')}:{port}"


async def _open_log(
    settings: Settings,
    url: str,
    address: str | None,
    stack: AsyncExitStack,
    stop: _Stop,
    on_standby: Callable[[str], None],
    metrics: Metrics,
) -> PostgresTransactionLog:
    log = PostgresTransactionLog(
        url,
        settings.rm,
        address=address,
        on_adopted=metrics.branches_taken,
        lease_ttl=settings.lease_ttl,
        keep=Keep(
            journal=max(1, round(settings.journal_retention / _DAY)),
            archive=_days(settings.archive_retention),
            audit=_days(settings.audit_retention),
            duplicates=_days(settings.duplicate_window),
        ),
        unsafe=settings.unsafe,
        observe=metrics.log_committed,
        on_lines=metrics.lines_written,
        on_lease_lost=stop.lease_lost,
        on_failed=stop.log_failed,
    )
    _log.info("taking the lease", rm=settings.rm, database=redact(url))
    await log.open(on_standby=on_standby)
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
        for authority in filter(None, (settings.tls_ca, settings.member_ca)):
            context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _raise_open_files(settings: Settings) -> None:
    """Raise the limit of open files: each client needs two sockets, and dtx itself needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * settings.max_connections + 768
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < wanted:
            _log.warning("limit of open files is too low", allowed=limit, wanted=wanted)

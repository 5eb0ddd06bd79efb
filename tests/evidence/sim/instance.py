"""A dtx process of the simulation, assembled as in the service, without signals."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final
from uuid import UUID

from dtx.config import Settings
from dtx.log.api import LogError
from dtx.manager import BranchManager, Limits
from dtx.manager.operators import Operators
from dtx.server.alongside.mode import BrokerUnusable, broker_of, open_alongside, require_broker
from dtx.server.listener import Listener
from dtx.server.standalone.mode import open_standalone
from dtx.telemetry import Metrics
from dtx.xa.xid import Xid
from tests.evidence.sim.broker import HOST as BROKER_HOST
from tests.evidence.sim.broker import PORT as BROKER_PORT
from tests.evidence.sim.database import RM, SimDatabase
from tests.evidence.sim.log import SimLog
from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, SimLoop

PORT: Final = 5673
LEASE_TTL: Final = 4.0
DEFAULT_TIMEOUT: Final = 30
MAX_TIMEOUT: Final = 100
"""Seconds, for branches."""
_RESTART: Final = 0.5
"""Seconds until a supervisor restarts the service."""
_DRAIN: Final = 5.0
"""Seconds that a member waits for its branches at an orderly end."""


class Instance:
    """One dtx that is restarted after each end.

    Args:
        loop: the scheduler.
        network: its network.
        database: shared by all instances.
        host: its address and name.
        broker: alongside the broker; otherwise standalone.
        replay: see the setting.
        is_member: other instances are active as well.
    """

    def __init__(
        self, loop: SimLoop, network: Network, database: SimDatabase, host: str, *, broker: bool, replay: str = "auto",
        is_member: bool = False,
    ) -> None:  # fmt: skip
        self.host = host
        self.starts = 0
        self.exits: list[str] = []
        """Reasons of its ends without a kill."""
        self.wanted = False
        self.process: Process | None = None
        self.operators: Operators | None = None
        """Takes orders of operators while dtx serves."""
        self.manager: BranchManager | None = None
        """Has the branches while dtx serves."""
        self.log: SimLog | None = None
        self.stops = 0
        """Number of orderly ends."""
        self._stopping: asyncio.Future[str] | None = None
        self._loop = loop
        self._network = network
        self._database = database
        url = f"amqp://guest:guest@{BROKER_HOST}:{BROKER_PORT}/" if broker else None
        self._address = f"amqp://{host}:{PORT}" if is_member else None
        self._settings = Settings.model_validate({"broker": url, "replay": replay, "commit_channels": 3, "rm": RM})

    def start(self) -> None:
        """Start it; it is restarted after each end."""
        self.wanted = True
        if self.process is None and self.wanted:
            self.starts += 1
            # Each process has its own name, like a pid: the lease distinguishes processes by it.
            self.process = Process(self._loop, self.host)
            self.process.spawn(self._run(self.process))

    def kill(self, *, again: float = _RESTART) -> None:
        """Kill it with kill -9, and restart it after *again* seconds."""
        process, self.process, self.operators, self.manager = self.process, None, None, None
        if process is not None:
            process.kill()
            self._network.died(process)
            self._loop.in_world(again, self.start)

    def stop(self) -> None:
        """Let it end in order, as with SIGTERM, if it serves; it is restarted."""
        stopping, process = self._stopping, self.process
        if process is not None and self.manager is not None and stopping is not None:
            self.stops += 1
            process.call(0, _end, stopping)

    def has(self, xid: Xid) -> UUID | None:
        """The id of this member if it serves, no other one has taken its branches, and *xid* is in its memory."""
        if self.manager is None or self.log is None or self.manager.known("/", xid) is None:
            return None
        instance = self.log.instance
        return instance if instance in self._database.members.rows else None

    async def _run(self, process: Process) -> None:
        try:
            reason = await self._serve()
        except (BrokerUnusable, LogError, OSError) as error:
            reason = str(error)
        self.exits.append(reason)
        if self.process is process:
            self.kill()

    async def _serve(self) -> str:
        """Serve as :func:`dtx.server.service.serve` does; return the reason of the end."""
        settings = self._settings
        stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopping = stopping

        def lost() -> None:
            if not stopping.done():
                stopping.set_result("the lease is lost")

        metrics = Metrics()
        async with AsyncExitStack() as stack:
            listener = Listener(
                max_connections=1000, max_handshakes=1000, members=self._address is not None, header_timeout=10.0,
                metrics=metrics,
            )  # fmt: skip
            await listener.bind(self.host, PORT, None)
            stack.callback(listener.stop_accepting)
            broker = None if settings.broker is None else broker_of(settings)
            if broker is not None:
                await require_broker(broker)
            log = SimLog(self._database, address=self._address, lease_ttl=LEASE_TTL, on_lost=lost)
            await log.open()
            stack.push_async_callback(log.close)
            limits = Limits(patience=5.0, default_timeout=DEFAULT_TIMEOUT, max_timeout=MAX_TIMEOUT, tombstone_ttl=60.0)
            if broker is not None:
                manager, new_session, *_ = await open_alongside(settings, broker, log, limits, metrics, stack)
            else:
                manager, new_session, *_ = await open_standalone(
                    settings, "postgresql://sim@nowhere/sim", log, limits, metrics, stack
                )
            await listener.accept(new_session)
            self.operators, self.manager, self.log = Operators(manager), manager, log
            reason = await stopping
            listener.stop_accepting()
            await manager.drain(0.0 if reason else _DRAIN)
            await listener.close(b"", 1.0)
            return reason


def _end(stopping: "asyncio.Future[str]") -> None:
    if not stopping.done():
        stopping.set_result("")

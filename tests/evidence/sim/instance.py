"""dtx itself, in a process of the simulation: put together as the service does it, without signals."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from dtx.config import Settings
from dtx.log.api import LogError
from dtx.manager import Limits
from dtx.manager.operators import Operators
from dtx.server.alongside.mode import BrokerUnusable, broker_of, open_alongside, require_broker
from dtx.server.listener import Listener
from dtx.server.standalone.mode import open_standalone
from dtx.telemetry import Metrics
from tests.evidence.sim.broker import HOST as BROKER_HOST
from tests.evidence.sim.broker import PORT as BROKER_PORT
from tests.evidence.sim.database import RM, SimDatabase, SimLog
from tests.evidence.sim.network import Network
from tests.evidence.sim.scheduler import Process, SimLoop

PORT: Final = 5673
LEASE_TTL: Final = 4.0
DEFAULT_TIMEOUT: Final = 30
MAX_TIMEOUT: Final = 100
"""Seconds, of a branch."""
_RESTART: Final = 0.5
"""Seconds after which whatever watches over a service starts it again."""


class Instance:
    """One dtx, started again whenever it has ended.

    Args:
        loop: the scheduler.
        network: its network.
        database: shared with the other one.
        host: its address, and its name.
        broker: whether there is one; else dtx is the broker.
        replay: see the setting.
    """

    def __init__(
        self, loop: SimLoop, network: Network, database: SimDatabase, host: str, *, broker: bool, replay: str = "auto"
    ) -> None:
        self.host = host
        self.starts = 0
        self.exits: list[str] = []
        """Why it ended by itself."""
        self.wanted = False
        self.process: Process | None = None
        self.operators: Operators | None = None
        """Takes orders, while it serves."""
        self._loop = loop
        self._network = network
        self._database = database
        url = f"amqp://guest:guest@{BROKER_HOST}:{BROKER_PORT}/" if broker else None
        self._settings = Settings.model_validate({"broker": url, "replay": replay, "lanes": 3, "rm": RM})

    def start(self) -> None:
        """Start it, and again after each end."""
        self.wanted = True
        if self.process is None and self.wanted:
            self.starts += 1
            # A process has a name of its own, as it has a pid: the lease tells processes apart by it.
            self.process = Process(self._loop, self.host)
            self.process.spawn(self._run(self.process))

    def kill(self, *, again: float = _RESTART) -> None:
        """Kill -9; started again after so many seconds."""
        process, self.process, self.operators = self.process, None, None
        if process is not None:
            process.kill()
            self._network.died(process)
            self._loop.in_world(again, self.start)

    async def _run(self, process: Process) -> None:
        try:
            reason = await self._serve()
        except (BrokerUnusable, LogError, OSError) as error:
            reason = str(error)
        self.exits.append(reason)
        if self.process is process:
            self.kill()

    async def _serve(self) -> str:
        """As :func:`dtx.server.service.serve` does it."""
        settings = self._settings
        stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def lost() -> None:
            if not stopping.done():
                stopping.set_result("the lease is lost")

        metrics = Metrics()
        async with AsyncExitStack() as stack:
            listener = Listener(max_connections=1000, max_handshakes=1000, header_timeout=10.0, metrics=metrics)
            await listener.bind(self.host, PORT, None)
            stack.callback(listener.stop_accepting)
            broker = None if settings.broker is None else broker_of(settings)
            if broker is not None:
                await require_broker(broker)
            log = SimLog(self._database, lease_ttl=LEASE_TTL, on_lost=lost)
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
            self.operators = Operators(manager)
            reason = await stopping
            listener.stop_accepting()
            await manager.drain(0.0)
            await listener.close(b"", 1.0)
            return reason

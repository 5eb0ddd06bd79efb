"""The network of the simulation: streams between processes, with delays, splits, losses and partitions.

Written bytes arrive in order, as with TCP, after a random delay and in random pieces. Bytes that a process has sent
arrive after its death. A connection that is broken off loses the bytes on the way. A partition holds everything back
until it is healed, including the ends of connections: bytes may arrive minutes later.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.evidence.sim.scheduler import Process, SimLoop, current

_SPLIT: Final = 0.05
"""Share of writes that arrive in two pieces."""
_SLOW: Final = 0.02
"""Share of delays that are 50 times as long."""


class SimTransport(asyncio.Transport):
    """One end of a stream."""

    def __init__(self, network: "Network", process: Process, peername: tuple[str, int]) -> None:
        super().__init__({"peername": peername})
        self.process = process
        self.other: SimTransport
        self.protocol: Any = None
        self.closed = False
        """Whether this end no longer reads and writes."""
        self._network = network
        self._reading = True
        self._incoming: list[bytes | None] = []
        self._last = 0.0

    def attach(self, protocol: Any) -> None:
        """Connect the protocol, and pass on the bytes that have arrived."""
        self.protocol = protocol
        protocol.connection_made(self)
        self._read()

    # -- asyncio.Transport

    def write(self, data: Any) -> None:
        """Send bytes."""
        if not self.closed:
            self._network.send(self, bytes(data))

    def get_write_buffer_size(self) -> int:
        """Return 0: the network takes everything at once."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Have no effect."""

    def is_closing(self) -> bool:
        """Whether this end is closed."""
        return self.closed

    def pause_reading(self) -> None:
        """Hold incoming bytes back."""
        self._reading = False

    def resume_reading(self) -> None:
        """Continue to read."""
        self._reading = True
        if self._incoming:
            self.process.call(0, self._read)

    def close(self) -> None:
        """Send the end after the written bytes."""
        self._end(None)

    def abort(self) -> None:
        """Do the same as :meth:`close`."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self._network.send(self, None)
            self._network.forget(self)
            if self.process.alive:
                self.process.call(0, self.protocol.connection_lost, error)

    # -- from the network

    def arrive(self, data: bytes | None) -> None:
        """Receive *data*; ``None`` is the end."""
        if not self.closed:
            self._incoming.append(data)
            self._read()

    def _read(self) -> None:
        while self._incoming and self._reading and not self.closed and self.protocol is not None:
            data = self._incoming.pop(0)
            if data is None:
                self._end(None)
            elif isinstance(self.protocol, asyncio.BufferedProtocol):
                _fill(self.protocol, data)
            else:
                self.protocol.data_received(data)


def _fill(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Pass *data* to a protocol with its own buffer."""
    while data:
        room = memoryview(protocol.get_buffer(len(data)))
        size = min(len(room), len(data))
        room[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


class SimServer:
    """A listening socket."""

    def __init__(self, network: "Network", process: Process, factory: Callable[[], Any], address: tuple[str, int]):
        self.sockets = [self]
        self.process = process
        self.factory = factory
        self._network = network
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        """Return its address."""
        return self._address

    async def start_serving(self) -> None:
        """Accept connections from now on."""
        self._network.listeners[self._address] = self

    def close(self) -> None:
        """Stop accepting."""
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]


@dataclass(slots=True)
class _Held:
    transport: SimTransport
    data: bytes | None


@dataclass(slots=True)
class Network:
    """All streams.

    Args:
        loop: the scheduler.
        latency: usual limit of a delay in seconds.
    """

    loop: SimLoop
    latency: float = 0.002
    listeners: dict[tuple[str, int], SimServer] = field(default_factory=dict)
    ends: dict[SimTransport, None] = field(default_factory=dict)
    cut: set[frozenset[str]] = field(default_factory=set)
    """Pairs of partitioned processes, by name."""
    held: list[_Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop.connect = self.connect
        self.loop.listen = self.listen

    def listen(self, factory: Callable[[], Any], host: str, port: int, begin: bool) -> SimServer:
        """Return a listening socket of the current process."""
        process = current()
        server = SimServer(self, process, factory, (host, port))
        process.on_exit.append(server.close)
        if begin:
            self.listeners[host, port] = server
        return server

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[SimTransport, Any]:
        """Connect the current process, and return a stream and its protocol.

        Raises:
            ConnectionRefusedError: no process listens at this address.
        """
        process = current()
        await asyncio.sleep(self.delay())
        server = self.listeners.get((host, port))
        if server is None:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        while self._is_cut(process, server.process):
            await asyncio.sleep(0.5)
        if self.listeners.get((host, port)) is not server:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port} any more")
        near = SimTransport(self, process, (host, port))
        far = SimTransport(self, server.process, ("127.0.0.1", 40_000))
        near.other, far.other = far, near
        for end in (near, far):
            self.ends[end] = None
        server.process.call(self.delay(), lambda: far.attach(server.factory()))
        protocol = factory()
        near.attach(protocol)
        return near, protocol

    def delay(self) -> float:
        """Return a random delay."""
        random = self.loop.random
        return random.random() * self.latency * (50 if random.random() < _SLOW else 1)

    def _is_cut(self, one: Process, other: Process) -> bool:
        return bool(self.cut) and frozenset((one.name, other.name)) in self.cut

    def send(self, sender: SimTransport, data: bytes | None) -> None:
        """Send *data* to the other end of *sender*; ``None`` is the end."""
        random = self.loop.random
        if data is not None and len(data) > 1 and random.random() < _SPLIT:
            middle = random.randrange(1, len(data))
            self._send(sender, data[:middle])
            data = data[middle:]
        self._send(sender, data)

    def _send(self, sender: SimTransport, data: bytes | None) -> None:
        if self._is_cut(sender.process, sender.other.process):
            self.held.append(_Held(sender, data))
            return
        at = max(self.loop.now + self.delay(), sender._last + 1e-7)
        sender._last = at
        receiver = sender.other
        self.loop.call_at(at, self._arrive, receiver, data, context=receiver.process.context)

    def _arrive(self, receiver: SimTransport, data: bytes | None) -> None:
        if self._is_cut(receiver.process, receiver.other.process):
            self.held.append(_Held(receiver.other, data))
        else:
            receiver.arrive(data)

    def forget(self, end: SimTransport) -> None:
        """Remove *end*, which is closed."""
        self.ends.pop(end, None)

    # -- faults

    def of(self, process: Process) -> list[SimTransport]:
        """Return the open ends of *process*."""
        return [end for end in self.ends if end.process is process]

    def died(self, process: Process) -> None:
        """Close the streams of a dead process; sent bytes still arrive."""
        for end in self.of(process):
            end.closed = True
            self.send(end, None)
            self.forget(end)

    def break_off(self, end: SimTransport) -> None:
        """Break a stream at both ends; bytes on the way are lost."""
        for side in (end, end.other):
            if not side.closed and side.process.alive and side.protocol is not None:
                side.closed = True
                self.forget(side)
                side.process.call(self.delay(), side.protocol.connection_lost, ConnectionResetError("cut off"))

    def partition(self, one: str, other: str) -> None:
        """Partition two processes."""
        self.cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """End all partitions; the held bytes arrive after a delay."""
        self.cut.clear()
        held, self.held = self.held, []
        for item in held:
            self._send(item.transport, item.data)

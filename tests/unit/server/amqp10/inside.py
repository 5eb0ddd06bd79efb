"""An AMQP 1.0 client and a whole dtx in one process. Answers are available after some turns of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from dtx.server.amqp10.connection import Amqp10Connection, Amqp10Limits
from dtx.server.amqp10.nodes import Home, Nodes
from dtx.server.standalone.client import Parts
from dtx.server.standalone.nodes import StandaloneNodes
from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER
from dtx.wire.amqp10.connection import Connection as Engine
from dtx.wire.amqp10.endpoint import SASL, Attached, Disposed, EndpointSettings, Event, frame
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    Coordinator,
    Declare,
    Declared,
    DeliveryState,
    Discharge,
    Role,
    SaslInit,
    SenderSettles,
    Source,
    Target,
)
from dtx.wire.amqp10.session import Session
from tests.evidence.fuzz.server import Wire

_LOGIN = frame(SASL, 0, encode(SaslInit(mechanism="PLAIN", initial_response=b"\x00guest\x00guest")))
_LIMITS = Amqp10Limits(
    max_channels=100,
    frame_max=1 << 16,
    max_message_bytes=1 << 20,
    handshake_timeout=60,
    control_errors="lenient",
)
_TURNS = 40
E = TypeVar("E", bound=Event)


class Inside:
    """A client's connection.

    Args:
        parts: parts of the server.
        new_nodes: makes the nodes of the connection, if they are not the server's.
    """

    def __init__(self, parts: Parts, new_nodes: Callable[[Home], Nodes] | None = None) -> None:
        self.wire = Wire()
        self._wire: Any = self.wire
        make = new_nodes or (lambda home: StandaloneNodes(parts, home))
        self.server = Amqp10Connection(parts.manager, _LIMITS, make, self._wire, SASL_HEADER)
        self.engine = Engine(EndpointSettings(container_id="inside"), 0.0, client=True)
        self.events: list[Event] = []
        self._read = 0

    async def open(self) -> "Inside":
        """Log in, and open the connection."""
        self.server.client_data(_LOGIN)
        self.engine.open()
        await self.turn()
        return self

    async def turn(self) -> list[Event]:
        """Exchange data until both sides are quiet, and return the new events."""
        began = len(self.events)
        quiet = 0
        while quiet < 2:
            said = b"".join(self.engine.data_to_send(0.0))
            if said:
                self.server.client_data(said)
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            quiet = 0 if self._hear() or said else quiet + 1
        return self.events[began:]

    def _hear(self) -> bool:
        sent = bytes(self.wire.sent)
        if not self._read:
            self._read = max(0, sent.find(AMQP_HEADER))
        if not self._read or self._read == len(sent):
            return False
        self.events += self.engine.receive(sent[self._read :], 0.0)
        self._read = len(sent)
        return True

    def among(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for event in self.events if isinstance(event, kind)]

    # -- steps

    async def begin(self) -> Session:
        """Begin a session."""
        session = self.engine.new_session()
        session.begin()
        await self.turn()
        return session

    async def control(self, session: Session, name: str = "control") -> Link:
        """Attach a control link, whose source lists no outcomes."""
        return await self._attached(session.new_link(name, Role.SENDER), target=Coordinator())

    async def sender(self, session: Session, queue: str, name: str = "sender") -> Link:
        """Attach a link to a queue."""
        return await self._attached(session.new_link(name, Role.SENDER), target=Target(address=queue))

    async def receiver(self, session: Session, queue: str, name: str = "receiver", *, settled: bool = False) -> Link:
        """Attach a link from a queue, without credit."""
        mode = SenderSettles.SETTLED if settled else SenderSettles.MIXED
        link = session.new_link(name, Role.RECEIVER)
        return await self._attached(link, source=Source(address=queue), target=Target(), sender_settles=mode)

    async def _attached(self, link: Link, **fields: Any) -> Link:
        link.attach(**({"source": Source()} | fields))
        told = await self.turn()
        assert any(isinstance(event, Attached) and event.link == link.handle for event in told), told
        return link

    async def ask(self, session: Session, control: Link, request: Declare | Discharge) -> DeliveryState | None:
        """Send a request to the coordinator. Returns the outcome if there is one by now."""
        number = control.send(b"request", message.value(request))
        await self.turn()
        return self.outcome(session, number)

    async def declare(self, session: Session, control: Link, global_id: bytes | None = None) -> bytes:
        """Declare a transaction, for the branch *global_id* if given. Returns its id."""
        outcome = await self.ask(session, control, Declare(global_id=global_id))
        assert isinstance(outcome, Declared), outcome
        return outcome.txn_id

    def outcome(self, session: Session, number: int | None) -> DeliveryState | None:
        """The last state that the server sent for a delivery to it."""
        found = None
        for event in self.among(Disposed):
            if event.session == session.channel and event.role is Role.SENDER and (number in dict(_by(event))):
                found = event.state
        return found


def _by(event: Disposed) -> list[tuple[int, int]]:
    """Number and link of each delivery."""
    return [(number, link) for link, number in event.deliveries]

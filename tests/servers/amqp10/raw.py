"""A client on the same engine as the server: it sends exactly what a test wants, frame by frame."""

import socket
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from dtx.wire.amqp10 import message
from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER, Connection
from dtx.wire.amqp10.coordination import PROMOTE
from dtx.wire.amqp10.endpoint import (
    SASL,
    Amqp10FrameSplitter,
    Attached,
    Begun,
    Closed,
    Delivered,
    Detached,
    Disposed,
    EndpointSettings,
    Event,
    Flowed,
    Opened,
    frame,
)
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    Coordinator,
    Declare,
    Declared,
    DeliveryState,
    Discharge,
    Error,
    Role,
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    SenderSettles,
    Source,
    Target,
    TransactionalState,
    read_sasl,
)
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described
from tests.support.service import DtxService

SECONDS = 30.0
E = TypeVar("E", bound=Event)


class Raw:
    """A connection. Use as a context manager.

    Args:
        service: the server.
        hostname: the field of open.
        user: the user for PLAIN.
        password: the user's password.
        mechanism: the SASL mechanism.
        response: the initial response of a mechanism other than PLAIN.
        tls: the context, if the server uses TLS.
        settings: of this end.
    """

    def __init__(
        self,
        service: DtxService,
        *,
        hostname: str | None = None,
        user: str = "guest",
        password: str = "guest",
        mechanism: str = "PLAIN",
        response: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        **settings: Any,
    ) -> None:
        self.socket: socket.socket = socket.create_connection((service.host, service.port), SECONDS)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=service.host)
        self.engine = Connection(EndpointSettings(container_id="raw", **settings), 0.0, client=True)
        self.events: list[Event] = []
        if mechanism == "PLAIN":
            response = b"\x00" + user.encode() + b"\x00" + password.encode()
        self.mechanisms: tuple[str, ...] = ()
        self.login = self._log_in(SaslInit(mechanism=mechanism, initial_response=response))
        if self.login is SaslCode.OK:
            self.engine.open(hostname=hostname)
            self.flush()

    def _log_in(self, init: SaslInit) -> SaslCode:
        self.socket.sendall(SASL_HEADER + frame(SASL, 0, encode(init)))
        assert self._exactly(8) == SASL_HEADER
        while True:
            head = self._exactly(8)
            rest = self._exactly(int.from_bytes(head[:4], "big") - 8)
            buffer, frames = Amqp10FrameSplitter(8192).feed(head + rest)
            said = read_sasl(buffer, frames[0][2], frames[0][3])
            if isinstance(said, SaslMechanisms):
                self.mechanisms = said.sasl_server_mechanisms
            elif isinstance(said, SaslChallenge):
                self.socket.sendall(frame(SASL, 0, encode(SaslResponse(response=b""))))
            elif isinstance(said, SaslOutcome):
                return said.code

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            assert more, "the server has closed the connection"
            found += more
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    # -- sending and receiving

    def flush(self) -> None:
        """Send the output of the engine."""
        self.socket.sendall(b"".join(self.engine.data_to_send(0.0)))

    def received(self, data: bytes) -> list[Event]:
        """The events of *data*."""
        events = self.engine.receive(data, 0.0)
        while self.engine.behind:
            events += self.engine.receive(b"", 0.0)
        return events

    def expect(self, kind: type[E], condition: Callable[[E], bool] = lambda _: True) -> E:
        """Wait for an event of this kind. Other events are kept for later calls."""
        self.flush()
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            for number, event in enumerate(self.events):
                if isinstance(event, kind) and condition(event):
                    del self.events[number]
                    return event
                assert not isinstance(event, Closed), event
            data = self.socket.recv(1 << 16)
            assert data, "the server has closed the connection"
            self.events += self.received(data)
            self.flush()
        raise AssertionError(f"no {kind.__name__}")

    def until(self, condition: Callable[[], bool]) -> None:
        """Receive from the server until *condition* holds."""
        self.flush()
        while not condition():
            data = self.socket.recv(1 << 16)
            assert data, "the server has closed the connection"
            self.events += self.received(data)
            self.flush()

    def detach(self, session: Session, link: Link) -> None:
        """Detach a link, and wait for the server's answer."""
        link.detach()
        self.until(lambda: session.link(link.handle) is None)

    def close(self) -> None:
        """Close the connection, and wait for the server's answer."""
        self.engine.close()
        self.until(lambda: self.engine.over)

    # -- steps

    def opened(self) -> "Raw":
        """Wait for the server's open."""
        self.expect(Opened)
        return self

    def begin(self) -> Session:
        """Begin a session."""
        session = self.engine.new_session()
        session.begin()
        self.expect(Begun)
        return session

    def sender(self, session: Session, address: str | None, name: str = "sender") -> Link:
        """A link to a node, with credit."""
        link = session.new_link(name, Role.SENDER)
        link.attach(source=Source(), target=Target(address=address))
        self.expect(Flowed, lambda event: event.link == link.handle)
        return link

    def receiver(
        self, session: Session, address: str | None, credit: int = 1, name: str = "receiver", **options: Any
    ) -> tuple[Link, Source]:
        """A link from a node, and its source as the server has it."""
        link = session.new_link(name, Role.RECEIVER)
        link.attach(source=Source(address=address, **options), target=Target(), sender_settles=SenderSettles.MIXED)
        source = self.expect(Attached, lambda event: event.link == link.handle).attach.source
        assert isinstance(source, Source)
        if credit:
            link.grant(credit)
        return link, source

    def control(self, session: Session, name: str = "control", *, rejects: bool = True) -> Link:
        """A link to the coordinator, with credit; *rejects* adds the outcome rejected to its source."""
        link = session.new_link(name, Role.SENDER)
        outcomes = ("amqp:accepted:list", "amqp:rejected:list") if rejects else ("amqp:accepted:list",)
        link.attach(source=Source(outcomes=outcomes), target=Coordinator(capabilities=("amqp:local-transactions",)))
        self.expect(Flowed, lambda event: event.link == link.handle)
        return link

    def ask(self, session: Session, control: Link, request: Declare | Discharge) -> DeliveryState | None:
        """Send a request to the coordinator, and return the outcome."""
        number = control.send(b"request", message.value(request))
        return self.outcome(session, number)

    def declare(self, session: Session, control: Link, global_id: bytes | None = None) -> bytes:
        """Declare a transaction, and return its id."""
        outcome = self.ask(session, control, Declare(global_id=global_id))
        assert isinstance(outcome, Declared), outcome
        return outcome.txn_id

    def promote(self, session: Session, control: Link, txn_id: bytes, xid: bytes) -> DeliveryState | None:
        """Promote a local transaction to the branch *xid*, and return the outcome."""
        return self.ask(session, control, Declare(global_id=Described(PROMOTE, [txn_id, xid])))

    def discharge(self, session: Session, control: Link, txn_id: bytes, *, fail: bool = False) -> DeliveryState | None:
        """Discharge a transaction, and return the outcome."""
        return self.ask(session, control, Discharge(txn_id=txn_id, fail=fail))

    def post(self, link: Link, body: bytes, txn_id: bytes | None = None, *, settled: bool = False) -> int | None:
        """Send a message, in a transaction or not, and return its delivery id."""
        state = None if txn_id is None else TransactionalState(txn_id=txn_id)
        return link.send(b"post", message.data(body), state=state, settled=settled)

    def outcome(self, session: Session, number: int | None) -> DeliveryState | None:
        """Wait for the server's state of a delivery that was sent."""
        event = self.expect(
            Disposed,
            lambda event: (
                event.session == session.channel
                and event.role is Role.SENDER
                and any(delivery == number for _, delivery in event.deliveries)
            ),
        )
        return event.state

    def take(self) -> Delivered:
        """The next message."""
        return self.expect(Delivered)

    def detached(self, link: Link) -> Error | None:
        """Wait until the server detaches a link, and return its error."""
        return self.expect(Detached, lambda event: event.link == link.handle).error


def body(event: Delivered) -> bytes:
    """The body of a message of data sections."""
    data = message.read(event.payload).data
    assert data is not None
    return b"".join(data)


__all__ = ["AMQP_HEADER", "Raw", "body"]

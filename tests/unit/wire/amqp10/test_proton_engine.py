"""The engine with Qpid Proton's: open, link, transfer, credit, drain, settle, detach, in memory."""

from typing import Any

import pytest

from dtx.wire.amqp09.handshake import Credentials
from dtx.wire.amqp10.connection import Connection
from dtx.wire.amqp10.endpoint import Attached, Delivered, Detached, Disposed, Event, Flowed, LoginAsked, Opened
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.message import data, read, value
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Coordinator,
    Declared,
    Error,
    Role,
    Source,
    Target,
    TransactionalState,
    read_login,
)
from dtx.wire.amqp10.session import Session
from dtx.wire.amqp10.values import Described, Long, ULong
from tests.unit.wire.amqp10.peer import settings
from tests.unit.wire.amqp10.shell import Shell

proton = pytest.importorskip("proton", reason="needs python-qpid-proton, which is built by a C compiler")


class Proton:
    """A Proton client that exchanges bytes with the engine."""

    def __init__(self, mechanism: str = "", **changes: Any) -> None:
        self.connection = proton.Connection()
        self.connection.container = "proton"
        self.connection.hostname = "vhost"
        self.transport = proton.Transport()
        if mechanism:
            self.connection.user, self.connection.password = "user", "password"
            sasl = self.transport.sasl()
            sasl.allow_insecure_mechs = True
            sasl.allowed_mechs(mechanism)
        self.transport.bind(self.connection)
        self.shell = Shell(Connection(settings(**changes), 0.0), credit=10)

    def settle(self) -> "Proton":
        """Exchange data until both are quiet."""
        while True:
            pending = self.transport.pending()
            up = self.transport.peek(pending) if pending > 0 else b""
            if up:
                self.transport.pop(len(up))
            down = self.shell.take(up)
            for at in range(0, len(down), 1024):
                self.transport.push(down[at : at + 1024])
            if not up and not down:
                return self

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.shell.events if isinstance(event, kind)]

    def begin(self) -> tuple[Any, Session]:
        """Begin a session from both ends."""
        self.connection.open()
        session = self.connection.session()
        session.open()
        self.settle()
        ours = self.shell.server.session(0)
        assert ours is not None
        return session, ours


def link_of(session: Session, handle: int = 0) -> Link:
    link = session.link(handle)
    assert link is not None
    return link


def test_proton_opens_and_closes() -> None:
    client = Proton(offered_capabilities=("a",))
    session, _ = client.begin()
    assert client.connection.remote_container == "dtx"
    assert client.told(Opened)[0].open.hostname == "vhost"
    session.close()
    client.connection.close()
    client.settle()
    assert client.shell.server.over
    assert client.connection.state & proton.Endpoint.REMOTE_CLOSED


@pytest.mark.parametrize("mechanism", ["ANONYMOUS", "PLAIN"])
def test_proton_logs_in(mechanism: str) -> None:
    client = Proton(mechanism, mechanisms=("PLAIN", "ANONYMOUS"))
    client.begin()
    (asked,) = client.told(LoginAsked)
    assert asked.mechanism == mechanism
    if mechanism == "PLAIN":
        assert read_login("PLAIN", asked.response) == Credentials(b"user", b"password")
    assert client.connection.remote_container == "dtx"


@pytest.mark.parametrize("size", [0, 100, 200_000])
def test_proton_sends_and_is_notified_of_the_settlement(size: int) -> None:
    client = Proton(max_frame_size=4096)
    session, ours = client.begin()
    sender = session.sender("out")
    sender.target.address = "q"
    sender.open()
    client.settle()
    assert sender.credit == 10
    assert client.told(Attached)[0].attach.target == Target(address="q")
    delivery = sender.delivery("tag")
    message = proton.Message(body=b"x" * size, durable=True, id="id", properties={"a": 1})
    sender.send(message.encode())
    sender.advance()
    client.settle()
    (got,) = client.told(Delivered)
    read_here = read(got.payload)
    assert read_here.header.durable
    assert read_here.properties.message_id == "id"
    assert read_here.application_properties["a"] == Long(1)
    assert read_here.value == b"x" * size
    assert delivery.remote_state == proton.Delivery.ACCEPTED
    assert delivery.settled
    assert link_of(ours).credit == 9


def test_proton_receives_as_far_as_its_credit_and_drains_it() -> None:
    client = Proton()
    session, ours = client.begin()
    receiver = session.receiver("in")
    receiver.source.address = "q"
    receiver.open()
    receiver.flow(3)
    client.settle()
    link = link_of(ours)
    assert (link.role, link.credit) == (Role.SENDER, 3)
    body = data(b"y" * 50_000)
    identity = link.send(b"t", body)
    client.settle()
    delivery = receiver.current
    assert receiver.recv(100_000) == body
    delivery.update(proton.Delivery.ACCEPTED)
    delivery.settle()
    receiver.advance()
    client.settle()
    (disposed,) = client.told(Disposed)
    assert (disposed.deliveries, disposed.state, disposed.settled) == (((0, identity),), ACCEPTED, True)
    receiver.drain(0)
    client.settle()
    assert client.told(Flowed)[-1].flow.drain
    link.drained()
    client.settle()
    assert (receiver.credit, receiver.draining()) == (0, False)


def test_proton_settles_many_at_once_in_both_modes() -> None:
    client = Proton()
    session, ours = client.begin()
    receiver = session.receiver("in")
    receiver.rcv_settle_mode = proton.Link.RCV_SECOND
    receiver.open()
    receiver.flow(10)
    client.settle()
    link = link_of(ours)
    for number in range(10):
        link.send(b"%d" % number, data(b"x"))
    client.settle()
    deliveries = []
    while receiver.current:
        deliveries.append(receiver.current)
        receiver.current.update(proton.Delivery.RELEASED)
        receiver.advance()
    client.settle()
    assert [number for event in client.told(Disposed) for _, number in event.deliveries] == list(range(10))
    assert not client.told(Disposed)[0].settled
    ours.dispose(Role.SENDER, range(10), None, settled=True)
    client.settle()
    assert all(delivery.settled for delivery in deliveries)
    assert ours.outgoing == {}


def test_proton_detaches_with_an_error_and_is_detached_with_one() -> None:
    client = Proton()
    session, ours = client.begin()
    one, other = session.sender("one"), session.sender("other")
    one.open()
    other.open()
    client.settle()
    one.condition = proton.Condition("peer:sorry", "words")
    one.close()
    client.settle()
    (detached,) = client.told(Detached)
    assert (detached.closed, detached.error.condition, detached.error.description) == (True, "peer:sorry", "words")
    link_of(ours, 1).detach(Error(condition="amqp:not-found"))
    client.settle()
    assert other.remote_condition.name == "amqp:not-found"


def test_proton_aborts_a_delivery() -> None:
    client = Proton(max_frame_size=1024)
    session, ours = client.begin()
    sender = session.sender("out")
    sender.open()
    client.settle()
    delivery = sender.delivery("tag")
    sender.stream(b"x" * 5000)
    client.settle()
    assert link_of(ours).partial is not None
    delivery.abort()
    client.settle()
    assert link_of(ours).partial is None
    assert client.told(Delivered) == []


def test_proton_declares_a_transaction_and_sends_in_it() -> None:
    client = Proton()
    session, ours = client.begin()
    control = session.sender("control")
    control.target.type = proton.Terminus.COORDINATOR
    control.target.capabilities.put_symbol("amqp:local-transactions")
    control.open()
    client.settle()
    attach: Attach = client.told(Attached)[0].attach
    assert attach.target == Coordinator(capabilities=("amqp:local-transactions",))
    assert isinstance(attach.source, Source)
    declare = proton.Message(body=proton.Described(proton.ulong(0x31), []))
    declare.inferred = True
    delivery = control.delivery("d")
    control.send(declare.encode())
    control.advance()
    client.settle()
    (got,) = client.told(Delivered)
    assert read(got.payload).value == Described(ULong(0x31), [])
    ours.dispose(Role.RECEIVER, [got.delivery_id], Declared(txn_id=b"txn"), settled=True)
    assert delivery.settled
    sender = session.sender("out")
    sender.open()
    client.settle()
    sent = sender.delivery("t")
    sent.local.data = [b"txn"]
    sent.update(0x34)
    sender.send(value("work"))
    sender.advance()
    client.settle()
    assert client.told(Delivered)[-1].states == (TransactionalState(txn_id=b"txn"),)

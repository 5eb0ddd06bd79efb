"""AMQP 1.0 engines of dtx and Proton with a connection in memory, to measure how fast they decode messages."""

import importlib
from typing import Final

from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, Connection
from dtx.wire.amqp10.endpoint import AMQP, Delivered, EndpointSettings, frame
from dtx.wire.amqp10.message import data
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Begin,
    Open,
    Role,
    Source,
    Target,
    TransactionalState,
    Transfer,
)

_WINDOW: Final = 1 << 30
_STATE: Final = TransactionalState(txn_id=bytes(16))
_ENTER: Final = AMQP_HEADER + b"".join(
    frame(AMQP, 0, encode(said))
    for said in (
        Open(container_id="bench"),
        Begin(remote_channel=None, next_outgoing_id=0, incoming_window=_WINDOW, outgoing_window=_WINDOW),
        Attach(name="l", handle=0, role=Role.SENDER, source=Source(), target=Target(), initial_delivery_count=0),
    )
)


def messages(first: int, count: int, size: int) -> bytes:
    """Return frames of messages in a transaction, each of *size* bytes."""
    body = data(bytes(size))
    return b"".join(
        frame(
            AMQP,
            0,
            encode(Transfer(handle=0, delivery_id=number, delivery_tag=b"%d" % number, message_format=0, state=_STATE))
            + body,
        )
        for number in range(first, first + count)
    )


class Ours:
    """dtx's engine, which accepts and settles all messages."""

    def __init__(self) -> None:
        self.engine = Connection(EndpointSettings(container_id="dtx", window=_WINDOW), 0.0)
        self.engine.receive(_ENTER, 0.0)
        self.engine.open()
        self.session = self.engine.session(0)
        assert self.session is not None
        self.session.begin()
        link = self.session.link(0)
        assert link is not None
        link.attach(source=Source(), target=Target())
        link.grant(_WINDOW)
        self.engine.data_to_send(0.0)

    def take(self, stream: bytes) -> int:
        """Decode messages, settle them together, and return their number."""
        events = [event for event in self.engine.receive(stream, 0.0) if isinstance(event, Delivered)]
        assert self.session is not None
        self.session.dispose(Role.RECEIVER, [event.delivery_id for event in events], ACCEPTED, settled=True)
        assert self.engine.data_to_send(0.0)
        return len(events)


class Theirs:
    """Proton's engine, from Python, which does the same."""

    def __init__(self) -> None:
        self.proton = proton = importlib.import_module("proton")
        self.connection = proton.Connection()
        self.transport = proton.Transport(proton.Transport.SERVER)
        self.transport.bind(self.connection)
        self._push(_ENTER)
        self.connection.open()
        self.session = self.connection.session_head(0)
        self.session.open()
        self.link = self.connection.link_head(0)
        self.link.open()
        self.link.flow(1 << 20)
        self._pop()

    def _push(self, stream: bytes) -> None:
        view = memoryview(stream)
        while view:
            room = min(len(view), max(self.transport.capacity(), 1))
            self.transport.push(bytes(view[:room]))
            view = view[room:]

    def _pop(self) -> None:
        while (pending := self.transport.pending()) > 0:
            self.transport.pop(pending)

    def take(self, stream: bytes) -> int:
        """Decode messages, settle them, and return their number."""
        self._push(stream)
        count = 0
        while (delivery := self.link.current) and not delivery.partial:
            self.link.recv(delivery.pending)
            delivery.update(self.proton.Delivery.ACCEPTED)
            self.link.advance()
            delivery.settle()
            count += 1
        self._pop()
        return count

"""A small shell around the engine. It answers everything, and records the events."""

from typing import assert_never

from dtx.wire.amqp10.connection import Connection
from dtx.wire.amqp10.endpoint import (
    Attached,
    Begun,
    Closed,
    Delivered,
    DeliveryLost,
    Detached,
    Disposed,
    Dropped,
    Ended,
    Event,
    Flowed,
    LoginAsked,
    Opened,
    Writable,
)
from dtx.wire.amqp10.performatives import ACCEPTED, Role


class Shell:
    """A server that accepts everything.

    Args:
        server: the engine.
        credit: credit of each link from the peer.
        greeting: a message for the peer's first link that receives.
    """

    def __init__(self, server: Connection, credit: int = 100, greeting: bytes = b"") -> None:
        self.greeting = greeting
        self.server = server
        self.credit = credit
        self.events: list[Event] = []

    def take(self, data: bytes) -> bytes:
        """Handle bytes of the peer, and return the answer."""
        events = self.server.receive(data, 0.0)
        while events:
            event = events.pop(0)
            self.events.append(event)
            events = self.answer(event) + events
        return b"".join(self.server.data_to_send(0.0))

    def answer(self, event: Event) -> list[Event]:
        match event:
            case LoginAsked():
                return self.server.login()
            case Opened():
                self.server.open()
            case Closed():
                self.server.close()
            case Begun() | Ended():
                session = self.server.session(event.session)
                if session is not None:
                    (session.begin if isinstance(event, Begun) else session.end)()
            case Attached() | Detached() | Delivered() | Flowed():
                self._answer_link(event)
            case Writable() | Dropped() | DeliveryLost() | Disposed():
                pass
            case _:
                assert_never(event)
        return []

    def _answer_link(self, event: Attached | Detached | Delivered | Flowed) -> None:
        session = self.server.session(event.session)
        link = session.link(event.link) if session is not None else None
        if session is None or link is None:
            return
        match event:
            case Attached():
                link.attach(source=event.attach.source, target=event.attach.target)
                if link.role is Role.RECEIVER:
                    link.grant(self.credit)
            case Detached():
                link.detach()
            case Flowed():
                if link.role is Role.SENDER and self.greeting:
                    link.send(b"greeting", self.greeting)
                    self.greeting = b""
            case Delivered():
                if not event.settled:
                    session.dispose(Role.RECEIVER, [event.delivery_id], ACCEPTED, settled=True)

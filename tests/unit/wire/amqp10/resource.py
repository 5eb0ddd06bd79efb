"""A small transactional resource that accepts everything and stores nothing, and pictures of its dialogues."""

import dataclasses
from typing import Any, assert_never

from dtx.wire.amqp10.composite import Composite
from dtx.wire.amqp10.connection import Connection
from dtx.wire.amqp10.coordination import (
    Amqp10Transaction,
    Asked,
    CoordinationEngine,
    CoordinatorAnswer,
    DeclareAsked,
    DischargeAsked,
    PromoteAsked,
    Terminate,
    provisional,
)
from dtx.wire.amqp10.endpoint import Attached, Delivered, Event, Flowed
from dtx.wire.amqp10.message import data
from dtx.wire.amqp10.performatives import ACCEPTED, Coordinator, Role, TransactionCapability
from dtx.wire.amqp10.session import Session
from tests.unit.wire.amqp10.peer import Peer

CAPABILITIES = frozenset((TransactionCapability.LOCAL, TransactionCapability.MULTI_TXNS_PER_SSN))


class Resource:
    """The shell's part of a coordination.

    Args:
        engine: engine of the connection.
    """

    def __init__(self, engine: Connection) -> None:
        self.engine = engine
        self.coordination = CoordinationEngine(CAPABILITIES)
        self.rolled_back: list[bytes] = []
        self._ids = 0

    def handle(self, event: Event) -> None:
        session = self.engine.session(getattr(event, "session", -1))
        match event:
            case Attached() if session is not None:
                self._attached(session, event)
            case Delivered() if session is not None:
                self._delivered(session, event)
            case Flowed() if session is not None:
                self._flowed(session, event)
            case _:
                pass

    def _attached(self, session: Session, event: Attached) -> None:
        link = session.link(event.link)
        assert link is not None
        if isinstance(event.attach.target, Coordinator):
            self.coordination.control_attached((event.session, event.link), event.attach.source)
            target = Coordinator(capabilities=self.coordination.advertised)
            link.attach(source=event.attach.source, target=target)
            link.grant(1)
        else:
            link.attach(source=event.attach.source, target=event.attach.target)

    def _delivered(self, session: Session, event: Delivered) -> None:
        if (event.session, event.link) in self.coordination._rejects:
            self._do(session, self.coordination.asked(event, self.engine.is_partial))
            return
        transaction = self.coordination.posting(event.session, event.states)
        state = ACCEPTED if transaction is None else provisional(transaction, ACCEPTED)
        session.dispose(Role.RECEIVER, [event.delivery_id], state, settled=False)

    def _do(self, session: Session, asked: Asked) -> None:
        match asked:
            case DeclareAsked():
                self._do(session, self.coordination.declared(asked, b"%d" % self._ids))
                self._ids += 1
            case PromoteAsked():
                self._do(session, self.coordination.promoted(asked))
            case DischargeAsked():
                self._do(session, self.coordination.discharged(asked))
            case CoordinatorAnswer():
                session.dispose(Role.RECEIVER, [asked.delivery_id], asked.outcome, settled=True)
            case Terminate():
                link = session.link(asked.control[1])
                assert link is not None
                link.detach(asked.error)
                self.rolled_back += [one.txn_id for one in self.coordination.control_closed(asked.control)]
            case _:
                assert_never(asked)

    def _flowed(self, session: Session, event: Flowed) -> None:
        link = session.link(event.link)
        if link is None or link.role is Role.RECEIVER:
            return
        transaction: Amqp10Transaction | None = self.coordination.transaction_of_acquisition(
            event.session, event.flow.properties
        )
        while link.credit:
            link.send(b"tag", data(b"payload"), state=provisional(transaction) if transaction else None)


class Picture:
    """A dialogue as the specification draws it: the controller's frames on the left, the resource's on the right."""

    def __init__(self) -> None:
        self.peer = Peer().open()
        self.peer.begin()
        self.resource = Resource(self.peer.server)
        self.lines: list[str] = []

    def say(self, said: Composite, payload: bytes = b"", what: str = "") -> None:
        """The controller sends a frame, and the resource answers."""
        self.lines.append(f"{drawn(said)} --->")
        if what:
            self.lines.append(f"  {{ {what} }}")
        for event in self.peer.say(said, payload=payload):
            self.resource.handle(event)
        for one in self.peer.heard():
            self.lines.append(f"        <--- {drawn(one.said)}")
            if one.payload:
                self.lines.append("             { … payload … }")

    def drawn(self) -> str:
        return "\n".join(self.lines) + "\n"


_SHOWN = {
    "attach": ("name", "handle", "role", "target"),
    "flow": ("handle", "link_credit", "drain", "properties"),
    "transfer": ("handle", "delivery_id", "state", "settled", "more"),
    "disposition": ("role", "first", "last", "settled", "state"),
    "detach": ("handle", "closed", "error"),
}


def drawn(said: Any) -> str:
    """A performative with the fields that the pictures show, if they have a value."""
    name = said.layout.name
    shown = ((field, getattr(said, field)) for field in _SHOWN[name])
    words = ", ".join(
        f"{field.replace('_', '-')}={_value(value)}"
        for field, value in shown
        if value is not None and value is not False
    )
    return f"{name.upper()}({words})"


def _value(value: Any) -> str:
    if isinstance(value, Composite):
        fields = {one.name: (getattr(value, one.name), one.default) for one in dataclasses.fields(value)}  # type: ignore[arg-type]
        words = ", ".join(
            f"{name.replace('_', '-')}={_value(found)}" for name, (found, default) in fields.items() if found != default
        )
        return f"{type(value).__name__}({words})"
    if isinstance(value, Role):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_value(found)}" for key, found in value.items()) + "}"
    return str(value)

"""A peer that sends exactly what a test needs to an engine, and decodes the answers."""

from typing import Any, NamedTuple

from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER, Connection
from dtx.wire.amqp10.endpoint import AMQP, Amqp10FrameSplitter, EndpointSettings, Event, frame
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    Attach,
    Begin,
    Flow,
    Open,
    Role,
    Source,
    Target,
    Transfer,
    read_performative,
    read_sasl,
)
from dtx.wire.amqp10.session import Session

BEGIN = Begin(remote_channel=None, next_outgoing_id=0, incoming_window=100, outgoing_window=100)


def settings(**changes: Any) -> EndpointSettings:
    return EndpointSettings(container_id="dtx", **changes)


class Heard(NamedTuple):
    channel: int
    said: Any
    payload: bytes = b""


def flow(handle: int | None = None, **fields: Any) -> Flow:
    """A flow of a peer that has sent and received nothing."""
    fields = {"next_incoming_id": 0, "incoming_window": 100, "next_outgoing_id": 0, "outgoing_window": 100} | fields
    return Flow(handle=handle, **fields)


def attach(name: str, role: Role, handle: int = 0, **fields: Any) -> Attach:
    """An attach. For a sender the delivery-count is 0."""
    if role is Role.SENDER:
        fields = {"initial_delivery_count": 0} | fields
    fields = {"source": Source(address="from"), "target": Target(address="to")} | fields
    return Attach(name=name, handle=handle, role=role, **fields)


def transfer(delivery_id: int | None, handle: int = 0, **fields: Any) -> Transfer:
    """The first transfer of a delivery, or a later one (None)."""
    tag = None if delivery_id is None else b"%d" % delivery_id
    return Transfer(handle=handle, delivery_id=delivery_id, **({"delivery_tag": tag} | fields))


class Peer:
    """The other end of a server's connection."""

    def __init__(self, **changes: Any) -> None:
        self.server = Connection(settings(**changes), 0.0)
        self._splitter = Amqp10FrameSplitter(1 << 30)

    def raw(self, data: bytes, now: float = 0.0) -> list[Event]:
        return self.server.receive(data, now)

    def say(self, *performatives: Composite, channel: int = 0, payload: bytes = b"") -> list[Event]:
        """Send frames in one read, each with the payload."""
        return self.raw(b"".join(frame(AMQP, channel, encode(one) + payload) for one in performatives))

    def octets(self, now: float = 0.0) -> bytes:
        return b"".join(self.server.data_to_send(now))

    def heard(self) -> list[Heard]:
        """What the engine has sent since the last call, without protocol headers."""
        data = self.octets()
        for header in (SASL_HEADER, AMQP_HEADER):
            data = data.removeprefix(header)
        buffer, frames = self._splitter.feed(data)
        found = []
        for kind, channel, start, end in frames:
            if kind != AMQP:
                found.append(Heard(channel, read_sasl(buffer, start, end)))
            elif start == end:
                found.append(Heard(channel, None))
            else:
                said, position = read_performative(buffer, start, end)
                found.append(Heard(channel, said, buffer[position:end]))
        return found

    def said(self) -> list[Any]:
        """Only the performatives."""
        return [one.said for one in self.heard()]

    def open(self, **fields: Any) -> "Peer":
        """Open the connection from both ends."""
        self.raw(AMQP_HEADER)
        self.say(Open(container_id="peer", **fields))
        self.server.open()
        self.heard()
        return self

    def begin(self, channel: int = 0, **fields: Any) -> Session:
        """Begin a session from both ends."""
        given = {"remote_channel": None, "next_outgoing_id": 0, "incoming_window": 100, "outgoing_window": 100}
        (event,) = self.say(Begin(**(given | fields)), channel=channel)
        session = self.server.session(getattr(event, "session", -1))
        assert session is not None
        session.begin()
        self.heard()
        return session

    def attach(self, session: Session, role: Role, handle: int = 0, credit: int = 0, **fields: Any) -> Link:
        """Attach a link from both ends. *role* is the peer's. A sender gets credit."""
        name = fields.pop("name", f"link-{handle}")
        channel = session.remote_channel or 0
        (event,) = self.say(attach(name, role, handle, **fields), channel=channel)
        link = session.link(getattr(event, "link", -1))
        assert link is not None
        link.attach(source=Source(address="from"), target=Target(address="to"))
        if credit:
            link.grant(credit)
        self.heard()
        return link


def sender(credit: int = 10, **changes: Any) -> tuple[Peer, Session, Link]:
    """A peer that sends, and has credit."""
    peer = Peer(**changes).open()
    session = peer.begin()
    return peer, session, peer.attach(session, Role.SENDER, credit=credit)


def receiver(credit: int = 0, *, max_frame_size: int = 512, window: int = 100) -> tuple[Peer, Session, Link]:
    """A peer that receives, and has granted the credit."""
    peer = Peer().open(max_frame_size=max_frame_size)
    session = peer.begin(incoming_window=window)
    link = peer.attach(session, Role.RECEIVER)
    if credit:
        peer.say(flow(0, incoming_window=window, delivery_count=0, link_credit=credit))
    return peer, session, link

"""Conversations of two engines with bytes cut at any place, and with damaged bytes."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10.composite import encode
from dtx.wire.amqp10.connection import AMQP_HEADER, SASL_HEADER, Connection
from dtx.wire.amqp10.endpoint import (
    AMQP,
    SASL,
    Attached,
    Begun,
    Closed,
    Delivered,
    Detached,
    Disposed,
    Ended,
    Event,
    Flowed,
    Opened,
    frame,
)
from dtx.wire.amqp10.errors import AmqpError
from dtx.wire.amqp10.message import data
from dtx.wire.amqp10.performatives import ACCEPTED, Accepted, Detach, Disposition, Open, Role, SaslInit, Source, Target
from tests.unit.wire.amqp10.peer import BEGIN, attach, flow, transfer
from tests.unit.wire.amqp10.peer import settings as said
from tests.unit.wire.amqp10.shell import Shell

LOGIN = SASL_HEADER + frame(SASL, 0, encode(SaslInit(mechanism="ANONYMOUS")))


GREETING = data(b"y" * 300_000)


def server() -> Shell:
    return Shell(Connection(said(max_frame_size=1024), 0.0), greeting=GREETING)


class Talk:
    """A client's engine and a server's. The client's data is recorded."""

    def __init__(self) -> None:
        self.shell = server()
        self.client = Connection(said(), 0.0, client=True)
        self.turns: list[bytes] = []

    def on(self) -> list[Event]:
        """Exchange data until both are quiet, and return the client's events."""
        events = []
        while up := b"".join(self.client.data_to_send(0.0)):
            self.turns.append(up)
            events += self.client.receive(self.shell.take(up), 0.0)
        return events


def converse() -> Talk:
    """Open, begin, two links, messages small and large, settlement, detach, end, close."""
    talk = Talk()
    talk.client.open()
    assert [type(event) for event in talk.on()] == [Opened]
    session = talk.client.new_session()
    session.begin()
    sending, taking = session.new_link("out", Role.SENDER), session.new_link("in", Role.RECEIVER)
    sending.attach(source=Source(), target=Target(address="q"))
    taking.attach(source=Source(address="q"), target=Target())
    taking.grant(2)
    *first, got = talk.on()
    assert [type(event) for event in first] == [Begun, Attached, Flowed, Attached]
    assert isinstance(got, Delivered)
    assert bytes(got.payload) == GREETING
    session.dispose(Role.RECEIVER, [got.delivery_id], ACCEPTED, settled=True)
    for number, body in enumerate((b"", b"small", b"x" * 2000)):
        sending.send(b"%d" % number, data(body))
    assert [type(event) for event in talk.on()] == [Disposed] * 3
    sending.detach()
    assert [type(event) for event in talk.on()] == []
    session.end()
    talk.client.close()
    talk.on()
    return talk


RECORDED = converse()


def test_two_engines_understand_each_other() -> None:
    assert RECORDED.client.over
    assert RECORDED.shell.server.over
    assert [type(event) for event in RECORDED.shell.events] == [
        Opened, Begun, Attached, Attached, Flowed, Disposed, Delivered, Delivered, Delivered, Detached, Ended, Closed,
    ]  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 4000), st.integers(0, 4000))
def test_any_chunking_gives_the_same_events(size: int, first: int) -> None:
    shell = server()
    for turn in RECORDED.turns:
        for chunk in (turn[:first], *(turn[at : at + size] for at in range(first, len(turn), size))):
            shell.take(chunk)
    assert shell.events == RECORDED.shell.events


GOOD = [
    Open(container_id="c"),
    BEGIN,
    attach("in", Role.SENDER, 0),
    attach("out", Role.RECEIVER, 1),
    flow(1, delivery_count=0, link_credit=5, echo=True),
    transfer(0, more=True, state=Accepted()),
    transfer(None),
    Disposition(role=Role.SENDER, first=0, settled=True),
    Detach(handle=0, closed=True),
]
STREAM = b"".join(frame(AMQP, 0, encode(said) + b"payload" * (said in GOOD[5:7])) for said in GOOD)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STREAM) - 1), st.integers(0, 255)), max_size=6), st.data())
def test_a_stream_that_is_damaged_is_refused_at_most(damage: list[tuple[int, int]], chosen: st.DataObject) -> None:
    octets = bytearray(STREAM)
    for place, octet in damage:
        octets[place] = octet
    engine = Connection(said(mechanisms=("ANONYMOUS",)), 0.0)
    shell = Shell(engine, credit=1)
    shell.take(LOGIN + AMQP_HEADER)
    size = chosen.draw(st.integers(1, len(STREAM)))
    for at in range(0, len(octets), size):
        with suppress(AmqpError):  # the shell echoes values that the peer does not accept
            shell.take(bytes(octets[at : at + size]))
    assert engine._splitter.pending <= engine.settings.max_frame_size
    assert sum(isinstance(event, Closed) for event in shell.events) <= 1


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_end_the_stream(octets: bytes) -> None:
    for start in (b"", SASL_HEADER, LOGIN, LOGIN + AMQP_HEADER):
        Shell(Connection(said(mechanisms=("ANONYMOUS",)), 0.0)).take(start + octets)

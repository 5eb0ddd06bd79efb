"""A connection: open and close in any order, channels, idle timeouts, and the errors that end it."""

import pytest

from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import AMQP_HEADER, Connection
from dtx.wire.amqp10.endpoint import AMQP, EMPTY_FRAME, Amqp10State, Begun, Closed, Ended, Event, Opened, frame
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import Begin, Close, End, Error, Open, Role
from tests.unit.wire.amqp10.peer import BEGIN, Heard, Peer, attach, flow, settings, transfer

OPEN = Open(container_id="peer")


def closed_by(peer: Peer, events: list[Event]) -> Condition:
    """The condition with which this end closed the connection because of the peer."""
    closed = events[-1]
    assert isinstance(closed, Closed)
    assert not closed.by_peer
    assert closed.error is not None
    assert peer.said()[-1] == Close(error=closed.error)
    return Condition(closed.error.condition)


def test_open_states_the_limits_and_half_the_idle_timeout() -> None:
    """2.4.5: "the value in idle-time-out SHOULD be half the peer's actual timeout threshold"."""
    peer = Peer(
        idle_seconds=30.0,
        channel_max=7,
        max_frame_size=4096,
        offered_capabilities=("a",),
        properties={"product": "dtx"},
    )
    peer.raw(AMQP_HEADER)
    assert peer.say(Open(container_id="peer", hostname="vhost")) == [
        Opened(open=Open(container_id="peer", hostname="vhost"))
    ]
    peer.server.open()
    assert peer.said() == [
        Open(
            container_id="dtx",
            max_frame_size=4096,
            channel_max=7,
            idle_time_out=15_000,
            offered_capabilities=("a",),
            properties={"product": "dtx"},
        )
    ]


def test_the_peer_closes() -> None:
    peer = Peer().open()
    error = Error(condition="peer:bored")
    assert peer.say(Close(error=error)) == [Closed(error=error, by_peer=True)]
    peer.server.close()
    peer.server.close()
    assert peer.said() == [Close()]
    assert peer.say(Close()) == []
    assert peer.server.over


def test_this_end_closes() -> None:
    peer = Peer().open()
    session = peer.begin()
    link = peer.attach(session, Role.SENDER, credit=1)
    peer.server.close(Error(condition=Condition.CONNECTION_FORCED))
    assert peer.said() == [Close(error=Error(condition="amqp:connection:forced"))]
    assert peer.say(transfer(0), flow(), End(), BEGIN, OPEN) == []
    link.grant(5)
    link.detach()
    session.begin()
    session.end()
    session.dispose(Role.RECEIVER, [0], None, settled=True)
    peer.server.open()
    assert peer.said() == []
    assert peer.say(Close()) == []
    assert peer.server.over
    assert peer.server.session(0) is None


def test_a_client_may_open_and_close_before_it_is_answered() -> None:
    peer = Peer()
    peer.raw(AMQP_HEADER)
    events = peer.say(OPEN, BEGIN, End(), Close())
    assert [type(event) for event in events] == [Opened, Begun, Ended, Closed]
    peer.server.open()
    peer.server.close()
    assert peer.said() == [peer_open(peer), Close()]
    assert peer.server.over


def peer_open(peer: Peer) -> Open:
    """The engine's open, from another engine with the same settings."""
    other = Peer()
    other.raw(AMQP_HEADER)
    other.say(OPEN)
    other.server.open()
    (said,) = other.said()
    assert isinstance(said, Open)
    return said


def test_an_open_is_refused_by_an_open_and_a_close() -> None:
    peer = Peer()
    peer.raw(AMQP_HEADER)
    peer.say(OPEN)
    peer.server.close(Error(condition=Condition.NOT_FOUND))
    assert peer.said() == [peer_open(peer), Close(error=Error(condition="amqp:not-found"))]


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        (BEGIN, Condition.ILLEGAL_STATE),
        (Close(), Condition.ILLEGAL_STATE),
        (Open(container_id="p", max_frame_size=511), Condition.INVALID_FIELD),
        (Open(container_id="p", idle_time_out=99), Condition.NOT_ALLOWED),
    ],
)
def test_a_wrong_first_performative_closes(said: Composite, condition: Condition) -> None:
    peer = Peer()
    peer.raw(AMQP_HEADER)
    assert closed_by(peer, peer.say(said)) is condition


@pytest.mark.parametrize(
    ("said", "channel", "condition"),
    [
        (OPEN, 0, Condition.ILLEGAL_STATE),
        (BEGIN, 256, Condition.FRAMING_ERROR),
        (BEGIN, 0, Condition.FRAMING_ERROR),
        (End(), 1, Condition.FRAMING_ERROR),
        (flow(), 1, Condition.FRAMING_ERROR),
        (transfer(0), 1, Condition.FRAMING_ERROR),
        (attach("l", Role.SENDER, 256), 0, Condition.FRAMING_ERROR),
        (Begin(remote_channel=0, next_outgoing_id=0, incoming_window=0, outgoing_window=0), 1, Condition.NOT_ALLOWED),
        (Begin(remote_channel=5, next_outgoing_id=0, incoming_window=0, outgoing_window=0), 1, Condition.NOT_ALLOWED),
    ],
)
def test_mistakes_that_close_the_connection(said: Composite, channel: int, condition: Condition) -> None:
    peer = Peer().open()
    peer.begin()
    assert closed_by(peer, peer.say(said, channel=channel)) is condition


@pytest.mark.parametrize(
    ("octets", "condition"),
    [
        (b"\x00\x00\x00\x07\x02\x00\x00\x00", Condition.FRAMING_ERROR),
        (b"\xff\xff\xff\xff\x02\x00\x00\x00", Condition.FRAMING_ERROR),
        (frame(AMQP, 0, b"\x40"), Condition.DECODE_ERROR),
        (frame(AMQP, 0, b"\x00\x53\x40\x45"), Condition.DECODE_ERROR),
    ],
)
def test_bytes_that_are_no_frames_close_the_connection(octets: bytes, condition: Condition) -> None:
    peer = Peer().open()
    good = frame(AMQP, 0, encode(BEGIN))
    events = peer.raw(good + octets)
    assert isinstance(events[0], Begun)
    assert closed_by(peer, events) is condition
    assert peer.raw(octets) == []


def test_mistakes_behind_the_peers_own_close_are_ignored() -> None:
    peer = Peer().open()
    peer.say(Close())
    assert peer.say(BEGIN) == []
    peer.server.close()
    assert peer.said() == [Close()]


def test_a_mistake_before_our_open_closes_behind_it() -> None:
    peer = Peer()
    peer.raw(AMQP_HEADER)
    events = peer.say(OPEN, BEGIN, transfer(0))
    assert closed_by(peer, events) is Condition.UNATTACHED_HANDLE


def test_a_peer_too_small_for_our_open_is_closed_silently() -> None:
    peer = Peer(properties={"product": "x" * 600})
    peer.raw(AMQP_HEADER)
    peer.say(Open(container_id="peer", max_frame_size=512))
    with pytest.raises(AmqpError):
        peer.server.open()
    (closed,) = peer.raw(frame(AMQP, 0, b"\x40"))
    assert isinstance(closed, Closed)
    assert peer.server.over
    assert peer.said() == []


def test_empty_frames_on_any_channel_are_ignored() -> None:
    peer = Peer().open()
    assert peer.raw(EMPTY_FRAME + frame(AMQP, 300, b"")) == []


def test_sessions_take_the_lowest_free_channel_and_give_it_back() -> None:
    peer = Peer().open()
    first, second = peer.begin(40), peer.begin(7)
    assert (first.channel, second.channel) == (0, 1)
    peer.say(End(), channel=40)
    first.end()
    assert peer.server.session(0) is None
    assert peer.begin(3).channel == 0
    assert peer.server.session(1) is second
    assert peer.heard() == []


def test_sessions_are_bounded_by_the_peers_channel_max_too() -> None:
    peer = Peer().open(channel_max=0)
    peer.begin()
    assert closed_by(peer, peer.say(BEGIN, channel=1)) is Condition.RESOURCE_LIMIT_EXCEEDED


def test_answers_go_to_the_channel_of_this_end() -> None:
    peer = Peer().open()
    peer.begin(5)
    peer.say(End(), channel=5)
    session = peer.server.session(0)
    assert session is not None
    session.end()
    assert peer.heard() == [Heard(0, End())]


def test_a_performative_too_large_for_the_peer_is_not_sent() -> None:
    peer = Peer().open(max_frame_size=512)
    session = peer.begin()
    with pytest.raises(AmqpError) as caught:
        session.end(Error(condition="x", description="x" * 500))
    assert caught.value.condition is Condition.FRAME_SIZE_TOO_SMALL
    session.end(Error(condition="x"))
    assert peer.said() == [End(error=Error(condition="x"))]


def test_only_a_silent_peer_is_closed() -> None:
    peer = Peer(idle_seconds=10.0).open()
    assert peer.server.tick(9.0) == (10.0, [])
    peer.raw(EMPTY_FRAME, now=9.5)
    assert peer.server.tick(10.0) == (19.5, [])
    deadline, events = peer.server.tick(19.5)
    assert deadline is None
    assert closed_by(peer, events) is Condition.RESOURCE_LIMIT_EXCEEDED
    assert peer.server.tick(40.0) == (None, [])


def test_a_peer_that_is_not_read_may_be_silent() -> None:
    peer = Peer(idle_seconds=10.0).open()
    peer.server.note_received(9.0)
    assert peer.server.tick(18.0) == (19.0, [])
    _, events = peer.server.tick(19.0)
    assert closed_by(peer, events) is Condition.RESOURCE_LIMIT_EXCEEDED


def test_a_peer_that_never_sends_a_frame_is_closed() -> None:
    peer = Peer(idle_seconds=10.0)
    _, (closed,) = peer.server.tick(10.0)
    assert isinstance(closed, Closed)
    assert peer.server.over
    assert peer.octets() == b""


def test_empty_frames_are_sent_at_half_the_peers_timeout() -> None:
    peer = Peer(idle_seconds=None).open(idle_time_out=4000)
    assert peer.server.tick(1.9) == (2.0, [])
    assert peer.octets(1.9) == b""
    assert peer.server.tick(2.0) == (4.0, [])
    assert peer.octets(2.0) == EMPTY_FRAME
    assert peer.server.tick(2.5) == (4.0, [])
    peer.say(BEGIN)
    session = peer.server.session(0)
    assert session is not None
    session.begin()
    peer.octets(3.0)
    assert peer.server.tick(4.0) == (5.0, [])


def test_a_time_out_of_zero_is_none() -> None:
    peer = Peer(idle_seconds=None).open(idle_time_out=0)
    assert peer.server.tick(1e9) == (None, [])


def test_a_client_is_the_same_engine_from_the_other_side() -> None:
    client, server = Connection(settings(), 0.0, client=True), Connection(settings(), 0.0)
    client.open(hostname="vhost")

    def talk() -> list[Event]:
        events: list[Event] = []
        while True:
            up, down = b"".join(client.data_to_send(0.0)), b"".join(server.data_to_send(0.0))
            if not up and not down:
                return events
            events += server.receive(up, 0.0) + client.receive(down, 0.0)

    talk()
    server.open()
    session = client.new_session()
    session.begin()
    session.end()
    client.close()
    assert session.state is Amqp10State.PIPELINED
    talk()
    server.close()
    talk()
    assert client.over
    assert server.over


def test_a_client_gives_up_when_the_answer_is_no_header() -> None:
    client = Connection(settings(), 0.0, client=True)
    assert client.data_to_send(0.0) == [AMQP_HEADER]
    (closed,) = client.receive(b"AMQP\x00\x00\x09\x01", 0.0)
    assert isinstance(closed, Closed)
    assert client.data_to_send(0.0) == []

"""What the AMQP 0-9 engine delays and keeps for later turns. The other tests of the engine are dialogues."""

from collections.abc import Iterator

import pytest

from dtx.wire.amqp09 import content, methods, settings, tables
from dtx.wire.amqp09.channel import ChannelEngine, Passing
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.endpoint import TRANSITIONS, EndpointState, EndpointStep
from dtx.wire.amqp09.events import (
    ConnectionClosing,
    ConnectionFailed,
    ContentReceived,
    EngineEvent,
    FramePassed,
    FramesPassed,
    MethodReceived,
    SecureReceived,
)
from dtx.wire.amqp09.frames import BODY, HEADER, FrameSplitter, Protocol
from dtx.wire.amqp09.settings import MAX_BACKLOG, MAX_EFFORT, MOST_AT_ONCE, EngineSettings, PeerEnd, Unbounded
from tests.support.raw import body_frames
from tests.unit.wire.amqp09.dialogue import Few

QOS = methods.BasicQos(0, 1).frame(1)
DECLARE = methods.QueueDeclare(b"q", arguments=bytes(1000)).frame(1)
BEAT = b"\x08\0\0\0\0\0\0\xce"
LOGIN = methods.ConnectionStartOk(b"", b"PLAIN", b"secret", b"en_US")


@pytest.fixture
def engine() -> ConnectionEngine:
    """A server's end with channel 1."""
    made = ConnectionEngine(EngineSettings(), PeerEnd.SERVER)
    greet(made)
    enter(made)
    all_of(made.receive(methods.ChannelOpen().frame(1)))
    made.channel(1).open_ok()
    made.data_to_send()
    return made


def greet(engine: ConnectionEngine) -> None:
    all_of(engine.receive(Protocol.AMQP_0_9_1.value))
    engine.greet(methods.ConnectionStart(0, 9, b"", b"PLAIN", b"en_US"))


def enter(engine: ConnectionEngine) -> None:
    all_of(engine.receive(LOGIN.frame(0)))
    engine.tune(methods.ConnectionTune(10, 131_072, 0))
    all_of(engine.receive(methods.ConnectionTuneOk(10, 131_072, 0).frame(0) + methods.ConnectionOpen(b"/").frame(0)))
    engine.open_ok()


def all_of(events: Iterator[EngineEvent]) -> list[EngineEvent]:
    return list(events)


def first_channel(engine: ConnectionEngine) -> ChannelEngine:
    return engine.channel(1)


# -- turns -------------------------------------------------------------------------------------------------------------


def test_many_frames_are_handled_in_several_turns(engine: ConnectionEngine) -> None:
    assert not all_of(engine.receive(BEAT * MAX_EFFORT + QOS))
    assert engine.behind
    assert len(all_of(engine.receive(b""))) == 1
    assert not engine.behind


def test_frames_the_shell_does_not_take_are_kept(engine: ConnectionEngine) -> None:
    """The shell stops to give other clients a turn. Data read in the meantime comes after the rest."""
    events = engine.receive(QOS + QOS)
    assert isinstance(next(events), MethodReceived)
    assert engine.behind
    engine.receive(DECLARE)
    told = [event.method.NAME for event in engine.receive(b"") if isinstance(event, MethodReceived)]
    assert told == ["basic.qos", "queue.declare"]


def test_a_bad_frame_stops_reading(engine: ConnectionEngine) -> None:
    next(engine.receive(QOS + QOS + bytes(8)))
    engine.receive(QOS)
    told = all_of(engine.receive(b""))
    assert isinstance(told[-1], ConnectionFailed)
    assert len(told) == 2
    assert not engine.behind


@pytest.mark.parametrize("spare", range(4))
def test_a_close_is_reported_however_many_frames_waited(engine: ConnectionEngine, spare: int) -> None:
    """Even if the last look of a turn finds an empty queue."""
    channel = first_channel(engine)
    parts = MAX_EFFORT - spare - 2
    header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + (MAX_EFFORT).to_bytes(8, "big") + b"\0\0\xce"
    channel.hold()
    said = methods.BasicPublish(b"", b"q").frame(1) + header + body_frames(1, b"x", 0)[0] * parts
    all_of(engine.receive(said))
    all_of(engine.receive(methods.ConnectionClose(200, b"").frame(0)))
    channel.release()
    told = all_of(engine.events())
    while engine.behind:
        told += all_of(engine.receive(b""))
    assert len(told) == 1
    assert isinstance(told[0], ConnectionClosing)


# -- channels that wait ------------------------------------------------------------------------------------------------


def test_many_pending_frames_pause_the_peer_until_half_remain(engine: ConnectionEngine) -> None:
    channel = first_channel(engine)
    channel.hold()
    frames = MAX_BACKLOG // len(DECLARE) + 1
    paused = []
    for count in (frames - 1, 1):
        all_of(engine.receive(DECLARE * count))
        paused.append(engine.wants_pause)
    assert paused == [False, True]
    assert channel.backlog_size == frames * len(DECLARE)
    channel.release()
    assert engine.behind
    handled = 0
    for _ in engine.events():
        handled += 1
        if not engine.wants_pause:
            break
    assert handled == frames - MAX_BACKLOG // 2 // len(DECLARE)
    assert len(all_of(engine.events())) == frames - handled


def test_a_channel_that_goes_wants_no_pause(engine: ConnectionEngine) -> None:
    first_channel(engine).hold()
    all_of(engine.receive(DECLARE * (MAX_BACKLOG // len(DECLARE) + 1)))
    engine.close(b"")
    assert not engine.wants_pause


def test_a_channel_is_held_again_before_its_next_frame(engine: ConnectionEngine) -> None:
    channel = first_channel(engine)
    channel.hold()
    all_of(engine.receive(QOS + QOS))
    channel.release()
    channel.hold()
    assert not all_of(engine.events())
    assert channel.waits


# -- frames that pass --------------------------------------------------------------------------------------------------


def test_frames_in_a_row_are_one_event_without_a_copy(engine: ConnectionEngine) -> None:
    first_channel(engine).pass_frames(Passing.JOINED)
    data = QOS + BEAT + QOS + QOS + DECLARE
    _, event, declare = engine.receive(data)
    assert isinstance(event, FramesPassed)
    assert event.buffer is data
    assert (event.start, event.end) == (len(QOS + BEAT), len(data) - len(DECLARE))
    assert [frame[2] - event.start for frame in event.frames] == [0, len(QOS)]
    assert isinstance(declare, FramePassed)


def test_the_frame_behind_a_batch_is_kept_for_others(engine: ConnectionEngine) -> None:
    first_channel(engine).pass_frames(Passing.JOINED)
    assert isinstance(next(engine.receive(QOS + DECLARE)), FramesPassed)
    engine.receive(QOS)
    told = all_of(engine.receive(b""))
    assert [type(event) for event in told] == [FramePassed, FramesPassed]


def test_frames_of_a_lost_channels_successor_are_held(engine: ConnectionEngine) -> None:
    channel = first_channel(engine)
    channel.pass_frames(Passing.JOINED)
    channel.hold()
    channel.end()
    all_of(engine.receive(methods.ChannelOpen().frame(1)))
    channel.release()
    channel.end()
    assert isinstance(next(engine.receive(QOS)), MethodReceived)


def test_a_very_long_row_is_cut(engine: ConnectionEngine) -> None:
    """The number of frames in one event is limited."""
    first_channel(engine).pass_frames(Passing.JOINED)
    told = all_of(engine.receive(QOS * (2 * MOST_AT_ONCE + 1)))
    assert [len(event.frames) for event in told if isinstance(event, FramesPassed)] == [MOST_AT_ONCE, MOST_AT_ONCE, 1]
    assert not engine.behind


@pytest.mark.parametrize("good", range(MAX_EFFORT - 8, MAX_EFFORT + 2))
def test_frames_behind_a_bad_one_are_read_until_close_ok(engine: ConnectionEngine, good: int) -> None:
    """The close-ok of the failed connection can be read while earlier frames are handled."""
    events = engine.receive(methods.BasicAck(1).frame(1) * good + b"\x09 is no kind of a frame")
    next(events)
    engine.receive(methods.ConnectionCloseOk().frame(0))
    told = all_of(events)
    while engine.behind:
        told += all_of(engine.receive(b""))
    assert len([event for event in told if isinstance(event, ConnectionFailed)]) == 1
    assert engine.state is EndpointState.CLOSED


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_a_large_body_is_cut_into_frames(engine: ConnectionEngine) -> None:
    body = bytes(range(256)) * 1200
    first_channel(engine).send_content(methods.BasicDeliver(b"c", 1, False, b"", b"q").frame(1), b"\0\0", body)
    splitter = FrameSplitter(131_072)
    buffer, frames = splitter.feed(b"".join(engine.data_to_send()))
    assert b"".join(buffer[start + 7 : end - 1] for key, _, start, end in frames if key == BODY) == body
    assert len(frames) == 5


def test_publishes_are_counted_from_one(engine: ConnectionEngine) -> None:
    """RabbitMQ, confirm.select: "message counting starts at 1 on the first confirm.select"."""
    header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + bytes(10) + b"\xce"
    said = methods.BasicPublish(b"", b"q").frame(1) + header
    numbers = [event.number for event in engine.receive(said * 2) if isinstance(event, ContentReceived)]
    first_channel(engine).become(ChannelMode.CONFIRM)
    numbers += [event.number for event in engine.receive(said * 3) if isinstance(event, ContentReceived)]
    assert numbers == [0, 0, 1, 2, 3]


def test_a_client_numbers_its_publishes() -> None:
    client = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
    channel = client.open_channel(3)
    publish = methods.BasicPublish(b"", b"q").frame(3)
    assert channel.send_content(publish, b"\0\0", b"") == 0
    channel.become(ChannelMode.CONFIRM)
    assert [channel.send_content(publish, b"\0\0", b"") for _ in range(2)] == [1, 2]


def test_a_returned_message_is_no_publish() -> None:
    client = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT)
    channel = client.open_channel(3)
    channel.become(ChannelMode.CONFIRM)
    publish = methods.BasicPublish(b"", b"q").frame(3)
    returned = methods.BasicReturn(312, b"NO_ROUTE", b"", b"q").frame(3)
    all_of(client.receive(methods.ChannelOpenOk().frame(3)))
    assert channel.send_content(publish, b"\0\0", b"") == 1
    (event,) = client.receive(content.message(returned, 3, b"\0\0", b"one", 0))
    assert isinstance(event, ContentReceived)
    assert (event.number, channel.send_content(publish, b"\0\0", b"")) == (0, 2)


def test_a_failing_channel_sends_its_confirms_first(engine: ConnectionEngine) -> None:
    channel = first_channel(engine)
    channel.become(ChannelMode.CONFIRM)
    header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + bytes(10) + b"\xce"
    all_of(engine.receive(methods.BasicPublish(b"", b"q").frame(1) + header))
    channel.confirm(1, safe=True)
    channel.close_ok()
    engine.close_ok()  # the peer closed nothing
    all_of(engine.receive(methods.ChannelClose(200, b"", 0).frame(1)))
    assert not engine.data_to_send(), "the peer gets no confirms after its close"


def test_a_content_comes_behind_the_confirms_that_are_due(engine: ConnectionEngine) -> None:
    channel = first_channel(engine)
    channel.become(ChannelMode.CONFIRM)
    channel.confirm(1, safe=True)
    assert engine.wants_to_send
    channel.send_content(methods.BasicReturn(312, b"NO_ROUTE", b"", b"q").frame(1), b"\0\0", b"")
    keys = [key for key, *_ in FrameSplitter(0).feed(b"".join(engine.data_to_send()))[1]]
    assert keys == [methods.BasicAck.KEY, methods.BasicReturn.KEY, HEADER]
    assert not engine.wants_to_send


def test_a_peer_that_is_gone_leaves_nothing(engine: ConnectionEngine) -> None:
    """Frames that were not handled and partial contents are dropped."""
    memory = Few()
    engine.memory = memory
    header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + (50).to_bytes(8, "big") + b"\0\0\xce"
    all_of(engine.receive(methods.BasicPublish(b"", b"q").frame(1) + header + body_frames(1, bytes(20), 0)[0]))
    assert memory.used == 20
    events = engine.receive(BEAT + methods.ChannelOpen().frame(2) + QOS)
    next(events)
    engine.end()
    assert not all_of(events)
    assert not engine.behind
    assert memory.used == 0
    assert engine.tick(0) == (None, [])


# -- the handshake -----------------------------------------------------------------------------------------------------


def test_a_capable_client_is_notified_of_its_failed_login() -> None:
    claims = ((b"authentication_failure_close", b"\x01"), (b"connection.blocked", b"\x00"))
    able = b"".join(tables.entry(name, b"t", value) for name, value in claims)
    able = tables.entry(b"product", b"S", b"x") + tables.entry(b"capabilities", b"F", able)
    engine = ConnectionEngine(EngineSettings(), PeerEnd.SERVER)
    greet(engine)
    all_of(engine.receive(methods.ConnectionStartOk(able, b"PLAIN", b"", b"en_US").frame(0)))
    assert engine.capabilities == {b"authentication_failure_close"}
    engine.data_to_send()
    assert engine.refuse_login("wrong password")
    close = methods.ConnectionClose.decode(b"".join(engine.data_to_send())[7:-1])
    assert (close.reply_code, close.reply_text) == (403, b"ACCESS_REFUSED - wrong password")
    assert close.failed == methods.ConnectionStartOk.KEY


def test_no_secret_is_in_the_repr_of_an_event() -> None:
    engine = ConnectionEngine(EngineSettings(), PeerEnd.SERVER)
    greet(engine)
    assert "secret" not in repr(all_of(engine.receive(LOGIN.frame(0))))
    assert "secret" not in repr(SecureReceived(b"secret"))


def test_bodies_need_a_limit_only_where_the_shell_has_one(engine: ConnectionEngine) -> None:
    assert isinstance(engine.memory, Unbounded)
    assert engine.memory.has_room(1 << 60)
    assert engine.memory.excess(1) == ""
    header = b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0" + (5).to_bytes(8, "big") + b"\0\0\xce"
    said = methods.BasicPublish(b"", b"q").frame(1) + header
    parts = b"".join(body_frames(1, part, 0)[0] for part in (b"ab", b"cde"))
    empty = b"\x03\0\x01\0\0\0\0\xce"
    (event,) = all_of(engine.receive(said + empty + parts))
    assert isinstance(event, ContentReceived)
    assert (event.body, event.number) == (b"abcde", 0)


def test_without_heartbeats_nothing_is_ever_due(engine: ConnectionEngine) -> None:
    assert engine.tick(0) == (None, [])


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", EndpointState)
@pytest.mark.parametrize("step", EndpointStep)
def test_nothing_leads_back(state: EndpointState, step: EndpointStep) -> None:
    order = [EndpointState.OPENING, EndpointState.OPEN, EndpointState.CLOSE_RECEIVED, EndpointState.CLOSE_SENT]
    order.append(EndpointState.CLOSED)
    following = TRANSITIONS.get((state, step))
    assert following is None or order.index(following) >= order.index(state)
    assert state is not EndpointState.CLOSED or following is None


def test_limits_are_as_documented() -> None:
    assert (settings.MAX_BACKLOG, settings.MAX_EFFORT) == (1 << 20, 5000)

"""A session: windows in both directions, dispositions by range, and the errors that end it."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dtx.wire.amqp10.composite import Composite, encode
from dtx.wire.amqp10.connection import Connection
from dtx.wire.amqp10.endpoint import (
    AMQP,
    DISPOSED_AT_ONCE,
    FRAME_EFFORT,
    MAX_EFFORT,
    SERIAL_MASK,
    Begun,
    Closed,
    Delivered,
    Disposed,
    Ended,
    Event,
    Writable,
    frame,
)
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    RELEASED,
    Begin,
    Close,
    DeliveryState,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Modified,
    Rejected,
    Role,
    TransactionalState,
    Transfer,
)
from dtx.wire.amqp10.values import Described, Symbol
from tests.unit.wire.amqp10.peer import BEGIN, Peer, attach, flow, receiver, sender, settings, transfer


def ended_by(peer: Peer, events: list[Event]) -> Condition:
    """The condition with which this end ended the session because of the peer."""
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert not ended.by_peer
    assert ended.error is not None
    assert peer.said()[-1] == End(error=ended.error)
    return Condition(ended.error.condition)


def test_a_session_is_begun_and_ended_by_the_peer() -> None:
    peer = Peer(handle_max=3, window=50).open()
    assert peer.say(BEGIN, channel=9) == [Begun(session=0, begin=BEGIN, answer=False)]
    session = peer.server.session(0)
    assert session is not None
    session.begin()
    (begin,) = peer.said()
    assert begin == Begin(
        remote_channel=9, next_outgoing_id=0, incoming_window=50, outgoing_window=(1 << 31) - 1, handle_max=3
    )
    assert peer.say(End(), channel=9) == [Ended(session=0, error=None, by_peer=True)]
    session.end()
    session.end()
    assert peer.said() == [End()]


def test_a_session_may_be_ended_before_it_is_begun_here() -> None:
    peer = Peer().open()
    peer.say(BEGIN, End())
    session = peer.server.session(0)
    assert session is not None
    session.end()
    assert [type(said) for said in peer.said()] == [Begin, End]


def test_a_session_is_refused_by_a_begin_and_an_end() -> None:
    peer = Peer().open()
    peer.say(BEGIN)
    session = peer.server.session(0)
    assert session is not None
    session.end(Error(condition="x"))
    assert [type(said) for said in peer.said()] == [Begin, End]
    assert peer.say(attach("l", Role.SENDER), flow(), transfer(0)) == []
    assert peer.say(End()) == []
    assert peer.server.session(0) is None


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        (transfer(0, 5), Condition.UNATTACHED_HANDLE),
        (flow(5), Condition.UNATTACHED_HANDLE),
        (Detach(handle=5), Condition.UNATTACHED_HANDLE),
        (attach("other", Role.SENDER, 0), Condition.HANDLE_IN_USE),
        (attach("x" * 1025, Role.SENDER, 1), Condition.INVALID_FIELD),
        (Disposition(role=Role.SENDER, first=5, last=4), Condition.INVALID_FIELD),
    ],
)
def test_mistakes_that_end_the_session(said: Composite, condition: Condition) -> None:
    peer, _, _ = sender()
    other = peer.begin(1)
    assert ended_by(peer, peer.say(said)) is condition
    other.end()  # the other session is not affected
    assert peer.said() == [End()]


def test_links_are_bounded_by_the_peers_handle_max_too() -> None:
    peer = Peer().open()
    session = peer.begin(handle_max=0)
    peer.attach(session, Role.SENDER)
    assert ended_by(peer, peer.say(attach("b", Role.SENDER, 1))) is Condition.RESOURCE_LIMIT_EXCEEDED


def test_a_peer_that_overruns_the_window_loses_the_session() -> None:
    """2.8.17, window-violation; the peer cannot know a larger window while it sends the frames of one read."""
    peer = Peer(window=4).open()
    session = peer.begin()
    peer.attach(session, Role.SENDER, credit=1000)
    events = peer.say(*[transfer(number) for number in range(5)])
    assert [type(event) for event in events[:4]] == [Delivered] * 4
    assert ended_by(peer, events) is Condition.WINDOW_VIOLATION


def test_the_window_opens_again_at_its_half() -> None:
    peer = Peer(window=4).open()
    session = peer.begin()
    peer.attach(session, Role.SENDER, credit=1000)
    peer.say(transfer(0))
    assert peer.said() == []
    peer.say(transfer(1))
    (said,) = peer.said()
    assert (said.next_incoming_id, said.incoming_window, said.handle) == (2, 4, None)
    for number in range(2, 20):
        (event,) = peer.say(transfer(number))
        assert isinstance(event, Delivered)
    assert len(peer.said()) == 9


def test_transfer_ids_go_round_the_corner() -> None:
    peer = Peer(window=2).open()
    session = peer.begin(next_outgoing_id=SERIAL_MASK)
    peer.attach(session, Role.SENDER, credit=5)
    peer.say(transfer(SERIAL_MASK))
    assert peer.said()[-1].next_incoming_id == 0
    peer.say(transfer(0))
    assert peer.said()[-1].next_incoming_id == 1
    assert list(session.incoming) == [SERIAL_MASK, 0]
    (disposed,) = peer.say(Disposition(role=Role.SENDER, first=SERIAL_MASK, last=0, settled=True))
    assert isinstance(disposed, Disposed)
    assert disposed.deliveries == ((0, SERIAL_MASK), (0, 0))
    assert session.incoming == {}


def test_transfers_beyond_the_peers_window_wait() -> None:
    peer, session, link = receiver(10, window=2)
    for number in range(4):
        link.send(b"%d" % number, b"x" * 10, settled=True)
    assert [said.delivery_id for said in peer.said()] == [0, 1]
    assert (session.connection.backlog, link.queued, link.delivery_count, link.credit) == (20, 2, 2, 6)
    assert len(peer.say(flow(next_incoming_id=2, incoming_window=1))) == 0
    assert [said.delivery_id for said in peer.said()] == [2]
    assert peer.say(flow(next_incoming_id=2, incoming_window=2)) == [Writable(session=0)]
    assert [said.delivery_id for said in peer.said()] == [3]
    assert session.connection.backlog == 0


def test_a_flow_before_the_last_transfers_counts_them() -> None:
    peer, _, link = receiver(10, window=5)
    for number in range(3):
        link.send(b"%d" % number, b"", settled=True)
    peer.said()
    peer.say(flow(next_incoming_id=1, incoming_window=3))  # the peer has seen one of the three
    for number in range(3):
        link.send(b"%d" % number, b"", settled=True)
    assert [said.delivery_id for said in peer.said()] == [3]
    peer.say(flow(next_incoming_id=4, incoming_window=0))
    assert peer.said() == []


def test_before_our_begin_a_peer_counts_from_the_first_transfer() -> None:
    peer, _, link = receiver(10, window=0)
    link.send(b"", b"", settled=True)
    peer.say(flow(next_incoming_id=None, incoming_window=1))
    assert len(peer.said()) == 1


def test_echo_is_answered_with_the_windows() -> None:
    peer, _, _ = sender()
    peer.say(flow(echo=True))
    (said,) = peer.said()
    assert said == Flow(next_incoming_id=0, incoming_window=2048, next_outgoing_id=0, outgoing_window=(1 << 31) - 1)


def test_dispositions_of_neighbours_share_a_frame() -> None:
    peer, session, _ = sender()
    peer.say(*[transfer(number) for number in range(8)])
    session.dispose(Role.RECEIVER, [0, 1, 2, 4, 6, 7], ACCEPTED, settled=True, batchable=True)
    assert peer.said() == [
        Disposition(role=Role.RECEIVER, first=0, last=2, settled=True, state=ACCEPTED, batchable=True),
        Disposition(role=Role.RECEIVER, first=4, settled=True, state=ACCEPTED, batchable=True),
        Disposition(role=Role.RECEIVER, first=6, last=7, settled=True, state=ACCEPTED, batchable=True),
    ]
    assert list(session.incoming) == [3, 5]
    session.dispose(Role.RECEIVER, [3], RELEASED, settled=False)
    assert list(session.incoming) == [3, 5]
    session.dispose(Role.RECEIVER, [], ACCEPTED, settled=True)
    assert peer.said() == [Disposition(role=Role.RECEIVER, first=3, state=RELEASED)]


def test_an_endless_range_costs_only_existing_deliveries() -> None:
    peer, session, _ = sender()
    peer.say(transfer(1), transfer(2), transfer(5))
    (disposed,) = peer.say(Disposition(role=Role.SENDER, first=2, last=(1 << 31) + 1))
    assert isinstance(disposed, Disposed)
    assert (disposed.deliveries, disposed.settled, disposed.state) == (((0, 2), (0, 5)), False, None)
    assert list(session.incoming) == [1, 2, 5]
    assert peer.say(Disposition(role=Role.SENDER, first=7, settled=True)) == []


def test_dispositions_of_much_leave_others_their_turn() -> None:
    """A frame of thirty bytes can name all unsettled deliveries, and one read can hold thousands of such frames."""
    peer, session, _ = sender(credit=1000)
    peer.say(*[transfer(number) for number in range(1000)])
    everything = Disposition(role=Role.SENDER, first=0, last=0x7FFF_FFFF, state=ACCEPTED)
    frames = [frame(AMQP, 0, encode(everything))] * 200
    told = [len(peer.raw(b"".join(frames)))]
    assert told[0] < 100  # so that several turns are needed
    last = frame(AMQP, 0, encode(Disposition(role=Role.SENDER, first=0, last=999, settled=True)))
    told.append(len(peer.raw(last + b"no frame")))
    peer.server.note_received(1.0)  # which is said at any time, and takes nothing of what waits
    while peer.server.behind:
        told.append(len(peer.raw(b"")))
    assert max(told) <= MAX_EFFORT // 1000 + 2
    assert sum(told) == 200 + 1 + 1  # the last one is the end of the connection
    assert session.incoming == {}
    assert isinstance(peer.said()[-1], Close)


def test_thousands_of_small_frames_leave_others_their_turn() -> None:
    """Each frame asks for an answer. Without turns, the renewal of the lease would be late."""
    peer, _, _ = sender()
    asked = Flow(next_incoming_id=0, incoming_window=10, next_outgoing_id=0, outgoing_window=10, echo=True)
    peer.raw(frame(AMQP, 0, encode(asked)) * 4000)
    turns = 1
    while peer.server.behind:
        peer.raw(b"")
        turns += 1
    assert turns >= 4000 * FRAME_EFFORT // MAX_EFFORT
    assert sum(isinstance(said, Flow) for said in peer.said()) >= 4000  # each echo is answered


def test_a_mistake_waits_for_the_frames_before_it() -> None:
    peer, _, _ = sender(credit=1000)
    peer.say(*[transfer(number) for number in range(1000)])
    everything = Disposition(role=Role.SENDER, first=0, last=999)
    events = peer.raw(frame(AMQP, 0, encode(everything)) * 60 + b"no frame")
    assert all(isinstance(event, Disposed) for event in events)
    *disposed, closed = peer.raw(b"")
    assert len(events) + len(disposed) == 60
    assert isinstance(closed, Closed)
    assert not peer.server.behind


def test_links_of_all_sessions_are_bounded_together() -> None:
    peer = Peer(max_links=3).open()
    for channel in (0, 1):
        peer.begin(channel)
    peer.say(attach("a", Role.SENDER, 0), attach("b", Role.RECEIVER, 1))
    peer.heard()
    *_, ended = peer.say(attach("c", Role.SENDER, 0), attach("d", Role.SENDER, 1), channel=1)
    assert isinstance(ended, Ended)
    assert ended.session == 1
    assert ended.error is not None
    assert ended.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert set(peer.server.names) == {("a", Role.RECEIVER), ("b", Role.SENDER)}


def test_sent_deliveries_are_disposed_by_their_receiver() -> None:
    peer, session, link = receiver(10)
    for number in range(3):
        link.send(b"%d" % number, b"", settled=False)
    state = TransactionalState(txn_id=b"t", outcome=ACCEPTED)
    assert peer.say(Disposition(role=Role.RECEIVER, first=0, last=1, state=state, settled=True)) == [
        Disposed(session=0, role=Role.SENDER, deliveries=((0, 0), (0, 1)), state=state, settled=True)
    ]
    assert list(session.outgoing) == [2]
    peer.said()
    session.dispose(Role.SENDER, [2], ACCEPTED, settled=True)
    assert session.outgoing == {}
    assert peer.said() == [Disposition(role=Role.SENDER, first=2, settled=True, state=ACCEPTED)]


@hypothesis_settings(deadline=None)
@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(0, 40))
def test_a_range_is_all_that_lies_in_it(ids: set[int], first: int, width: int) -> None:
    peer, session, _ = sender(credit=100)
    peer.say(*[transfer(number) for number in sorted(ids)])
    events = peer.say(Disposition(role=Role.SENDER, first=first, last=first + width, settled=True))
    found = {number for event in events if isinstance(event, Disposed) for _, number in event.deliveries}
    assert found == {number for number in ids if first <= number <= first + width}
    assert set(session.incoming) == ids - found


def test_a_session_of_this_end_is_answered() -> None:
    client = Connection(settings(), 0.0, client=True)
    session = client.new_session()
    session.begin()
    assert len(client.data_to_send(0.0)) == 1  # nothing before open
    assert session.link(0) is None


LONG = "z" * 600
ANNOTATED = Modified(delivery_failed=True, message_annotations={"x-opt-why": LONG})
REFUSED = Rejected(error=Error(condition=LONG))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (ANNOTATED, Modified(delivery_failed=True)),
        (REFUSED, Rejected()),
        (TransactionalState(txn_id=b"t", outcome=REFUSED), TransactionalState(txn_id=b"t", outcome=Rejected())),
        (
            TransactionalState(txn_id=b"t", outcome=ANNOTATED),
            TransactionalState(txn_id=b"t", outcome=Modified(delivery_failed=True)),
        ),
    ],
)
def test_an_outcome_too_large_for_a_frame_is_shortened(state: DeliveryState, told: DeliveryState) -> None:
    """The peer sent these fields itself, so a peer with small frames loses no information."""
    for size, expected in ((512, told), (4096, state)):
        peer, session, _ = receiver(max_frame_size=size)
        session.dispose(Role.SENDER, [7, 8], state, settled=True)
        said = Disposition(role=Role.SENDER, first=7, last=8, settled=True, state=expected)
        assert peer.said() == [said]


def test_an_unknown_state_too_large_for_a_frame_is_dropped() -> None:
    peer, session, _ = receiver(max_frame_size=512)
    with pytest.raises(AmqpError) as caught:
        session.dispose(Role.SENDER, [7], Described(Symbol("x:state:list"), [LONG]), settled=True)
    assert caught.value.condition is Condition.FRAME_SIZE_TOO_SMALL
    assert peer.said() == []


def test_delivery_ids_have_no_gaps_when_waiting_messages_go() -> None:
    """Peers such as Proton and rhea end the session when a delivery-id is not the one that follows the last."""
    peer, session, first = receiver(5, window=1)
    second = peer.attach(session, Role.RECEIVER, 1)
    peer.say(flow(1, incoming_window=1, delivery_count=0, link_credit=5))
    for link in (first, first, second, second, second):
        link.send(b"t", b"x")
    session.abort(3)
    peer.say(Detach(handle=0, closed=True))
    first.detach()
    assert [said.delivery_id for said in peer.said() if isinstance(said, Transfer)] == [0]
    peer.say(flow(next_incoming_id=1, incoming_window=9))
    assert [(said.handle, said.delivery_id) for said in peer.said()] == [(1, 1), (1, 2)]
    (disposed,) = peer.say(Disposition(role=Role.RECEIVER, first=1, last=2, state=ACCEPTED, settled=True))
    assert disposed == Disposed(session=0, role=Role.SENDER, deliveries=((1, 2), (1, 4)), state=ACCEPTED, settled=True)


def test_a_message_that_was_not_sent_is_settled_in_silence() -> None:
    peer, _, link = receiver(2, window=0)
    number = link.send(b"t", b"x")
    assert number is not None
    peer.said()
    link.dispose((number, 7), ACCEPTED)
    assert peer.said() == []
    peer.say(flow(next_incoming_id=0, incoming_window=1))
    for _ in range(2):
        link.dispose((number,), ACCEPTED)
    assert peer.said()[1:] == [Disposition(role=Role.SENDER, first=0, settled=True, state=ACCEPTED)]
    assert link.unsettled == {}


@pytest.mark.parametrize("last", [2 * DISPOSED_AT_ONCE, 0x7FFF_FFFF])
def test_a_disposition_of_very_many_deliveries_is_split(last: int) -> None:
    """The shell has work for each of them, and other clients get turns in between."""
    count = 2 * DISPOSED_AT_ONCE + 1
    peer, session, link = receiver(count, window=count)
    for _ in range(count):
        link.send(b"t", b"")
    everything = Disposition(role=Role.RECEIVER, first=0, last=last, state=ACCEPTED, settled=True)
    behind = flow(0, incoming_window=1, next_incoming_id=count, echo=True)
    peer.said()
    events = peer.say(everything, behind)
    while peer.server.behind:
        assert peer.said() == []
        events += peer.raw(b"")
    sizes = [len(event.deliveries) for event in events if isinstance(event, Disposed)]
    assert sizes == [DISPOSED_AT_ONCE, DISPOSED_AT_ONCE, 1]
    assert (session.outgoing, link.unsettled) == ({}, {})
    assert isinstance(peer.said()[0], Flow)


def test_an_ended_session_gets_no_more_deliveries() -> None:
    count = DISPOSED_AT_ONCE + 1
    peer, session, link = receiver(count, window=count)
    for _ in range(count):
        link.send(b"t", b"")
    peer.say(Disposition(role=Role.RECEIVER, first=0, last=count, state=ACCEPTED, settled=True))
    session.end()
    assert peer.raw(b"") == []
    assert not peer.server.behind

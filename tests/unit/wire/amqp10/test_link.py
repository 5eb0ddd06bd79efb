"""A link: attach and detach, credit, drain, fragments in both directions, limits, and the errors that end it."""

from typing import Any, NoReturn

import pytest

from dtx.wire.amqp10.composite import Composite
from dtx.wire.amqp10.endpoint import Attached, Delivered, Detached, Dropped, Ended, Event, Flowed, Writable
from dtx.wire.amqp10.errors import AmqpError, Condition
from dtx.wire.amqp10.link import Link
from dtx.wire.amqp10.performatives import (
    ACCEPTED,
    Attach,
    Begin,
    Close,
    Coordinator,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Received,
    ReceiverSettles,
    Role,
    SenderSettles,
    Source,
    Target,
    TransactionalState,
    Transfer,
    peer_error,
)
from tests.unit.wire.amqp10.peer import Peer, attach, flow, receiver, sender, transfer


def detached_by(peer: Peer, events: list[Event]) -> Condition:
    """The condition with which this end closed the link because of the peer."""
    detached = events[-1]
    assert isinstance(detached, Detached)
    assert not detached.by_peer
    assert detached.error is not None
    assert peer.said()[-1] == Detach(handle=detached.link, closed=True, error=detached.error)
    return Condition(detached.error.condition)


def payloads(events: list[Event]) -> list[bytes]:
    return [bytes(event.payload) for event in events if isinstance(event, Delivered)]


def test_a_link_is_attached_as_it_really_is() -> None:
    peer = Peer(max_message_size=1000).open()
    session = peer.begin()
    asked = attach("ctl", Role.SENDER, 7, target=Coordinator(capabilities=("amqp:local-transactions",)))
    assert peer.say(asked) == [Attached(session=0, link=0, attach=asked, answer=False)]
    link = session.link(0)
    assert link is not None
    link.attach(
        source=asked.source,
        target=Coordinator(capabilities=("a", "b")),
        sender_settles=SenderSettles.UNSETTLED,
        receiver_settles=ReceiverSettles.SECOND,
        offered_capabilities=("c",),
        properties={"p": True},
    )
    assert peer.said() == [
        Attach(
            name="ctl",
            handle=0,
            role=Role.RECEIVER,
            snd_settle_mode=SenderSettles.UNSETTLED,
            rcv_settle_mode=ReceiverSettles.SECOND,
            source=asked.source,
            target=Coordinator(capabilities=("a", "b")),
            max_message_size=1000,
            offered_capabilities=("c",),
            properties={"p": True},
        )
    ]
    peer.say(attach("from", Role.RECEIVER, 9))
    other = session.link(1)
    assert other is not None
    other.attach(source=Source(), target=Target())
    (said,) = peer.said()
    assert (said.role, said.initial_delivery_count, said.max_message_size) == (Role.SENDER, 0, None)


def test_a_refused_link_gets_an_empty_attach_and_a_detach() -> None:
    peer = Peer().open()
    session = peer.begin()
    peer.say(attach("l", Role.SENDER))
    link = session.link(0)
    assert link is not None
    link.refuse(Error(condition=Condition.NOT_FOUND))
    attached, detach = peer.said()
    assert (attached.source, attached.target) == (None, None)
    assert detach == Detach(handle=0, closed=True, error=Error(condition="amqp:not-found"))
    assert peer.say(transfer(0), flow(0)) == []  # sent before the peer knew of the refusal
    link.attach(source=None, target=None)
    link.grant(5)
    link.detach()
    assert peer.said() == []
    assert peer.say(Detach(handle=0, closed=True)) == []
    assert session.link(0) is None


def test_an_attach_too_large_for_the_peer_is_refused() -> None:
    peer = Peer().open(max_frame_size=512)
    session = peer.begin()
    peer.say(attach("l", Role.SENDER))
    link = session.link(0)
    assert link is not None
    with pytest.raises(AmqpError) as caught:
        link.attach(source=Source(address="x" * 600), target=Target())
    assert caught.value.condition is Condition.FRAME_SIZE_TOO_SMALL
    assert peer.said() == []
    link.refuse(peer_error(caught.value))
    assert [type(said) for said in peer.said()] == [Attach, Detach]


def test_a_link_with_a_too_long_name_ends_the_session() -> None:
    peer = Peer().open(max_frame_size=512)
    session = peer.begin()
    peer.say(attach("x" * 600, Role.SENDER))
    link = session.link(0)
    assert link is not None
    link.refuse(Error(condition="x"))
    (end,) = peer.said()
    assert isinstance(end, End)
    assert end.error is not None
    assert end.error.condition == Condition.FRAME_SIZE_TOO_SMALL
    assert peer.server.tick(0.0)[1] == [Ended(session=0, error=end.error, by_peer=False)]


@pytest.mark.parametrize("closed", [True, False])
def test_the_peer_detaches_and_is_answered_alike(closed: bool) -> None:
    peer, session, link = sender()
    error = Error(condition="x")
    assert peer.say(transfer(0), Detach(handle=0, closed=closed, error=error))[1:] == [
        Detached(session=0, link=0, error=error, closed=closed, by_peer=True)
    ]
    assert session.incoming == {}
    link.detach()
    assert peer.said() == [Detach(handle=0, closed=closed)]
    assert session.link(0) is None
    peer.attach(session, Role.SENDER)


def test_a_link_may_be_detached_before_it_is_attached_here() -> None:
    peer = Peer().open()
    session = peer.begin()
    events = peer.say(attach("l", Role.SENDER), Detach(handle=0, closed=True))
    assert [type(event) for event in events] == [Attached, Detached]
    link = session.link(0)
    assert link is not None
    link.detach()
    assert [type(said) for said in peer.said()] == [Attach, Detach]
    assert session.link(0) is None


def test_a_name_that_is_attached_once_more_is_stolen() -> None:
    """2.6.1: the former endpoint is detached with amqp:link:stolen."""
    peer, session, _ = sender()
    other = peer.begin(1)
    stolen, attached = peer.say(attach("link-0", Role.SENDER), channel=1)
    assert isinstance(stolen, Detached)
    assert stolen.error is not None
    assert stolen.error.condition == Condition.STOLEN
    assert isinstance(attached, Attached)
    peer.say(Detach(handle=0, closed=True))
    assert session.link(0) is None
    link = other.link(0)
    assert link is not None
    peer.say(attach("link-0", Role.RECEIVER, 1), channel=1)  # a link of the other direction is a different link
    assert other.link(1) is not None
    link.attach(source=None, target=None)
    assert peer.server.names["link-0", Role.RECEIVER] is link


def test_a_sender_states_its_initial_count() -> None:
    peer = Peer().open()
    session = peer.begin()
    events = peer.say(attach("l", Role.SENDER, initial_delivery_count=None))
    assert detached_by(peer, events) is Condition.INVALID_FIELD
    assert session.link(0) is not None
    link = peer.attach(session, Role.SENDER, 1, initial_delivery_count=0xFFFFFFFF, credit=2)
    peer.say(transfer(0, 1))
    assert link.delivery_count == 0


def test_deliveries_take_credit() -> None:
    peer, session, link = sender(credit=2)
    (first,) = peer.say(transfer(0, message_format=5), payload=b"one")
    assert first == Delivered(
        session=0,
        link=0,
        delivery_id=0,
        tag=b"0",
        message_format=5,
        payload=memoryview(b"one"),
        settled=False,
        states=(),
    )
    (second,) = peer.say(transfer(1, settled=True), payload=b"two")
    assert isinstance(second, Delivered)
    assert second.settled
    assert session.incoming == {0: 0}
    assert (link.credit, link.delivery_count) == (0, 2)
    assert detached_by(peer, peer.say(transfer(2))) is Condition.TRANSFER_LIMIT_EXCEEDED
    assert peer.say(transfer(3), transfer(4)) == []


def test_a_payload_in_one_frame_is_not_copied() -> None:
    peer, _, _ = sender()
    (event,) = peer.say(transfer(0), payload=b"x" * 1000)
    assert isinstance(event, Delivered)
    assert len(event.payload.obj) > 1000  # type: ignore[arg-type]


def test_an_error_on_an_unbegun_session_ends_it() -> None:
    peer = Peer().open()
    events = peer.say(Begin(remote_channel=None, next_outgoing_id=0, incoming_window=1, outgoing_window=1))
    session = peer.server.session(0)
    assert session is not None
    events = peer.say(attach("l", Role.SENDER), transfer(0))
    assert [type(said) for said in peer.said()] == [Begin, End]
    assert type(events[-1]).__name__ == "Ended"


def test_an_error_on_an_unattached_link_refuses_it() -> None:
    peer = Peer().open()
    peer.begin()
    events = peer.say(attach("l", Role.SENDER), transfer(0))
    assert isinstance(events[-1], Detached)
    assert [type(said) for said in peer.said()] == [Attach, Detach]


@pytest.mark.parametrize(
    "bad",
    [
        transfer(None),
        Transfer(handle=0, delivery_id=5),
        transfer(5, delivery_tag=bytes(33)),
        transfer(0),
    ],
)
def test_a_delivery_needs_a_new_id_and_a_tag(bad: Transfer) -> None:
    peer, _, _ = sender()
    peer.say(transfer(0))
    assert detached_by(peer, peer.say(bad)) is Condition.INVALID_FIELD


def test_a_message_may_come_in_pieces() -> None:
    peer, session, link = sender(credit=3)
    state = TransactionalState(txn_id=b"t")
    assert peer.say(transfer(0, more=True, state=state), payload=b"a") == []
    assert peer.server.is_partial(b"t")
    assert not peer.server.is_partial(b"u")
    assert peer.say(transfer(None, more=True), payload=b"") == []
    assert peer.say(transfer(0, more=True, state=state, settled=True), payload=b"b") == []
    (event,) = peer.say(transfer(None), payload=b"c")
    assert isinstance(event, Delivered)
    assert (bytes(event.payload), event.settled, event.states) == (b"abc", True, (state,))
    assert not peer.server.is_partial(b"t")
    assert link.credit == 2
    assert session.incoming == {}


def test_a_delivery_is_partial_for_each_transaction_it_names() -> None:
    peer = Peer().open()
    session = peer.begin()
    for handle in (0, 1):
        peer.attach(session, Role.SENDER, handle, credit=5)
    first, second = TransactionalState(txn_id=b"t"), TransactionalState(txn_id=b"u")
    peer.say(transfer(0, 0, more=True, state=first), transfer(None, 0, more=True, state=second))
    peer.say(transfer(1, 1, more=True, state=first))
    assert [peer.server.is_partial(txn_id) for txn_id in (b"t", b"u", b"v")] == [True, True, False]
    peer.say(transfer(None, 0))
    assert [peer.server.is_partial(txn_id) for txn_id in (b"t", b"u")] == [True, False]
    peer.say(transfer(None, 1))
    assert not peer.server.is_partial(b"t")


@pytest.mark.parametrize("end", [transfer(None, aborted=True), Detach(handle=0, closed=True), End(), Close()])
def test_an_aborted_delivery_is_no_longer_partial(end: Composite) -> None:
    peer, _, _ = sender()
    peer.say(transfer(0, more=True, state=TransactionalState(txn_id=b"t")))
    assert peer.server.is_partial(b"t")
    peer.say(end)
    assert not peer.server.is_partial(b"t")


@pytest.mark.parametrize("mistake", [transfer(7, more=True), transfer(None, more=True, delivery_tag=b"other")])
def test_a_delivery_ended_by_an_error_is_not_partial(mistake: Transfer) -> None:
    peer, _, _ = sender()
    peer.say(transfer(0, more=True, state=TransactionalState(txn_id=b"t")))
    peer.say(mistake)
    assert not peer.server.is_partial(b"t")


def test_partial_deliveries_are_found_without_scanning_links() -> None:
    """The check runs at each discharge. Connections can have thousands of links, and other clients wait meanwhile."""

    class Links(dict[int, Link]):
        def values(self) -> NoReturn:
            raise AssertionError("all links were looked at")

    peer, session, _ = sender()
    peer.say(transfer(0, more=True, state=TransactionalState(txn_id=b"t")))
    session._links = Links(session._links)
    assert (peer.server.is_partial(b"u"), peer.server.is_partial(b"t")) == (False, True)


def test_contradictory_states_are_reported() -> None:
    peer, _, _ = sender()
    first, second = TransactionalState(txn_id=b"t"), TransactionalState(txn_id=b"u")
    peer.say(transfer(0, more=True, state=first), transfer(None, more=True, state=second))
    (event,) = peer.say(transfer(None, state=Received(section_number=0, section_offset=0)))
    assert isinstance(event, Delivered)
    assert event.states == (first, second)


def test_deliveries_of_two_links_may_be_interleaved() -> None:
    peer = Peer().open()
    session = peer.begin()
    for handle in (0, 1):
        peer.attach(session, Role.SENDER, handle, credit=5)
    peer.say(transfer(0, 0, more=True), payload=b"a")
    peer.say(transfer(1, 1, more=True), payload=b"b")
    assert payloads(peer.say(transfer(None, 0), transfer(None, 1), payload=b"!")) == [b"a!", b"b!"]
    peer.say(transfer(2, 0, more=True))
    assert detached_by(peer, peer.say(transfer(3, 0))) is Condition.NOT_ALLOWED
    peer.say(transfer(4, 1, more=True))
    assert detached_by(peer, peer.say(transfer(4, 1, delivery_tag=b"other"))) is Condition.NOT_ALLOWED


@pytest.mark.parametrize("aborted", [transfer(None, aborted=True), transfer(0, aborted=True, more=True)])
def test_an_aborted_delivery_has_no_effect(aborted: Transfer) -> None:
    peer, session, link = sender(credit=2, max_partial=10)
    for _ in range(2):
        peer.say(transfer(0, more=True), payload=b"x" * 10)
        assert peer.say(aborted, payload=b"ignored") == [Dropped(session=0, link=0, delivery_id=0)]
    assert (session.incoming, link.credit) == ({}, 0)


def test_a_resumed_delivery_is_ignored() -> None:
    """2.7.5: "the receiver MUST ignore resumed deliveries that are not in its local unsettled map"."""
    peer, session, _ = sender()
    assert peer.say(transfer(0, resume=True), payload=b"x") == [Dropped(session=0, link=0, delivery_id=0)]
    assert session.incoming == {}


def test_a_message_may_be_so_large_and_no_larger() -> None:
    peer, _, _ = sender(max_message_size=10)
    assert payloads(peer.say(transfer(0), payload=b"x" * 10)) == [b"x" * 10]
    peer.say(transfer(1, more=True), payload=b"x" * 10)
    assert payloads(peer.say(transfer(None), payload=b"")) == [b"x" * 10]
    peer.say(transfer(2, more=True), payload=b"x" * 10)
    assert detached_by(peer, peer.say(transfer(None, more=True), payload=b"x")) is Condition.MESSAGE_SIZE_EXCEEDED


def test_unfinished_messages_of_all_links_are_bounded_together() -> None:
    peer = Peer(max_partial=25).open()
    session = peer.begin()
    events: list[Event] = []
    for handle in range(3):
        peer.attach(session, Role.SENDER, handle, credit=1)
        events = peer.say(transfer(handle, handle, more=True), payload=b"x" * 10)
    assert detached_by(peer, events) is Condition.RESOURCE_LIMIT_EXCEEDED
    assert payloads(peer.say(transfer(None, 0), payload=b"")) == [b"x" * 10]
    peer.say(Detach(handle=1, closed=True))
    assert peer.server.unfinished == 0


def test_endless_fragments_cost_nothing() -> None:
    peer, session, link = sender(credit=1)
    peer.say(transfer(0, more=True))
    for _ in range(50):
        peer.say(*[transfer(None, more=True)] * 100)
    assert link.partial is not None
    assert len(link.partial.octets) == 0
    peer.say(End())
    assert peer.server.unfinished == 0
    assert session.link(0) is None


def test_transfers_do_not_go_to_a_sender() -> None:
    peer, _, _ = receiver(1)
    assert detached_by(peer, peer.say(transfer(0))) is Condition.NOT_ALLOWED


def test_credit_is_granted_and_drained() -> None:
    peer, _, link = sender(credit=0)
    link.grant(10, drain=True, properties={"p": True})
    (said,) = peer.said()
    assert (said.link_credit, said.delivery_count, said.drain, said.properties) == (10, 0, True, {"p": True})
    peer.say(transfer(0))
    events = peer.say(flow(0, delivery_count=10, link_credit=0, drain=True, available=0))
    assert [type(event) for event in events] == [Flowed]
    assert (link.credit, link.delivery_count) == (0, 10)


@pytest.mark.parametrize("count", [11, 0xFFFFFFFF])
def test_a_sender_cannot_send_more_than_its_credit(count: int) -> None:
    peer, _, _ = sender(credit=10)
    assert detached_by(peer, peer.say(flow(0, delivery_count=count))) is Condition.NOT_ALLOWED


def test_a_flow_of_the_sender_may_omit_its_count() -> None:
    peer, _, link = sender(credit=10)
    (event,) = peer.say(flow(0, available=7))
    assert isinstance(event, Flowed)
    assert event.flow.available == 7
    assert link.credit == 10


def test_the_peers_credit_counts_from_its_last_known_delivery() -> None:
    peer, _, link = receiver(3)
    assert link.credit == 3
    link.send(b"a", b"")
    peer.say(flow(0, delivery_count=0, link_credit=5))  # the peer has not seen the message yet
    assert link.credit == 4
    peer.say(flow(0, delivery_count=1, link_credit=1, drain=True, properties={"txn-id": b"t"}))
    assert (link.credit, link.drain) == (1, True)
    peer.say(flow(0, delivery_count=1, link_credit=0))
    assert (link.credit, link.drain) == (0, False)
    with pytest.raises(AmqpError) as caught:
        link.send(b"b", b"")
    assert caught.value.condition is Condition.TRANSFER_LIMIT_EXCEEDED
    peer.say(flow(0))
    assert link.credit == 0


def test_echo_is_answered_with_the_state_of_the_link() -> None:
    peer, _, link = receiver(3)
    peer.say(flow(0, delivery_count=0, link_credit=4, echo=True))
    (said,) = peer.said()
    assert (said.handle, said.delivery_count, said.link_credit, said.echo) == (0, 0, 4, False)
    link.flow(available=9, echo=True, properties={"txn-id": b"t"})
    (said,) = peer.said()
    assert (said.available, said.echo, said.properties) == (9, True, {"txn-id": b"t"})


def test_the_flows_of_a_sender_have_its_properties() -> None:
    """4.4: "in the case of the flow frame traveling from resource to controller, the txn-id … indicates with which
    transaction future transfers from that link will be performed".
    """
    peer, _, link = receiver(3)
    peer.say(flow(0, delivery_count=0, link_credit=4, echo=True, properties={"txn-id": b"t"}))
    assert peer.said() == []  # the shell answers it, or ends the link
    link.properties = {"txn-id": b"t"}
    link.flow()
    peer.say(flow(0, delivery_count=0, link_credit=4, echo=True))
    link.drained()
    assert [said.properties for said in peer.said()] == [{"txn-id": b"t"}] * 3


def test_echo_before_our_attach_is_answered_behind_it() -> None:
    peer = Peer().open()
    session = peer.begin()
    peer.say(attach("l", Role.RECEIVER), flow(0, link_credit=3, echo=True))
    link = session.link(0)
    assert link is not None
    assert link.credit == 3
    assert peer.said() == []
    link.attach(source=Source(), target=Target())
    assert [type(said) for said in peer.said()] == [Attach, Flow]


def test_remaining_credit_is_returned() -> None:
    peer, _, link = receiver(5)
    link.send(b"a", b"")
    peer.said()
    link.drained()
    (said,) = peer.said()
    assert (said.delivery_count, said.link_credit, said.available) == (5, 0, 0)
    assert link.credit == 0
    link.drained()
    assert peer.said() == []  # already answered: the next answer is for the next drain
    peer.say(flow(0, delivery_count=5, link_credit=2, drain=True))
    link.drained()
    (said,) = peer.said()
    assert (said.delivery_count, said.link_credit, said.available) == (7, 0, 0)


def test_nothing_is_given_back_while_messages_wait() -> None:
    peer, _, link = receiver(5, window=0)
    link.send(b"a", b"")
    link.drained()
    assert peer.said() == []
    assert (link.credit, link.queued) == (4, 1)
    link.flow()
    (said,) = peer.said()
    assert (said.delivery_count, said.link_credit) == (0, 5)
    peer.say(flow(0, incoming_window=0, delivery_count=0, link_credit=7))
    assert link.credit == 6  # the waiting message uses one
    assert Writable(session=0) in peer.say(flow(0, delivery_count=0, link_credit=5, drain=True))
    assert (link.credit, link.queued) == (4, 0)
    link.drained()
    assert (link.credit, link.delivery_count) == (0, 5)


def test_each_frame_of_a_split_message_names_the_transaction() -> None:
    peer, _, link = receiver(5, max_frame_size=512)
    state = TransactionalState(txn_id=b"t" * 32)
    body = bytes(range(256)) * 6
    assert link.send(b"tag", body, state=state, message_format=3) == 0
    heard = peer.heard()
    first, *others = [one.said for one in heard]
    assert b"".join(one.payload for one in heard) == body
    assert (first.delivery_id, first.delivery_tag, first.message_format, first.settled) == (0, b"tag", 3, False)
    assert [one.more for one in (first, *others)] == [True] * len(others) + [False]
    assert {one.state for one in (first, *others)} == {state}
    assert {one.delivery_id for one in others} == {None}
    assert link.send(b"small", b"", settled=True) == 1
    (said,) = peer.said()
    assert said.settled


def test_a_message_that_just_fits_is_one_frame() -> None:
    peer, _, link = receiver(50, max_frame_size=512)
    for size in range(470, 512):
        link.send(b"t", bytes(size))
        assert sum(len(one.payload) for one in peer.heard()) == size


def test_a_message_beyond_the_peers_limit_is_not_sent() -> None:
    peer = Peer().open()
    session = peer.begin()
    link = peer.attach(session, Role.RECEIVER, max_message_size=10)
    peer.say(flow(0, delivery_count=0, link_credit=5))
    with pytest.raises(AmqpError) as caught:
        link.send(b"", bytes(11))
    assert caught.value.condition is Condition.MESSAGE_SIZE_EXCEEDED
    assert link.credit == 5
    assert link.send(b"", bytes(10)) == 0


def test_a_begun_message_is_aborted_and_an_unsent_one_dropped() -> None:
    peer, session, link = receiver(5, max_frame_size=512, window=1)
    link.send(b"a", bytes(2000))
    link.send(b"b", bytes(2000))
    assert [said.delivery_id for said in peer.said()] == [0]
    session.abort(1)
    session.abort(1)
    session.abort(0)
    assert (session.connection.backlog, session.outgoing) == (0, {})
    assert (link.queued, link.credit, link.delivery_count) == (0, 4, 1)
    assert peer.say(flow(next_incoming_id=1, incoming_window=5)) == [Writable(session=0)]
    (said,) = peer.heard()
    assert said.said == Transfer(handle=0, aborted=True)
    assert said.payload == b""
    assert link.send(b"c", b"") == 2


def test_waiting_transfers_end_with_their_link() -> None:
    peer, session, link = receiver(5, window=0)
    link.send(b"a", b"abc")
    assert session.connection.backlog == 3
    peer.say(Detach(handle=0, closed=True))
    assert (session.connection.backlog, session.outgoing) == (0, {})
    link.detach()
    assert link.send(b"b", b"") is None


def test_a_client_attaches_links_and_knows_the_answer() -> None:
    events: list[Any] = []
    peer, session, _ = sender()
    link = session.new_link("mine", Role.SENDER)
    link.attach(source=Source(), target=Target(address="q"))
    link.flow()
    assert [type(said) for said in peer.said()] == [Attach, Flow]
    events = peer.say(attach("mine", Role.RECEIVER, 5))
    assert isinstance(events[0], Attached)
    assert events[0].answer
    assert events[0].link == link.handle
    taker = session.new_link("other", Role.RECEIVER)
    taker.attach(source=Source(), target=Target())
    taker.grant(3)
    (_, said) = peer.said()
    assert (said.delivery_count, said.link_credit) == (None, 3)
    taker.detach()
    peer.say(attach("other", Role.SENDER, 6), Detach(handle=6, closed=True))
    assert session.link(taker.handle) is None


def test_receivers_settle_second_when_the_sender_has() -> None:
    """2.8.3, second: the receiver settles after it knows that the sender has settled."""
    peer, session, _ = sender()
    peer.say(transfer(0, rcv_settle_mode=ReceiverSettles.SECOND))
    session.dispose(Role.RECEIVER, [0], ACCEPTED, settled=False)
    assert peer.said() == [Disposition(role=Role.RECEIVER, first=0, state=ACCEPTED)]
    assert list(session.incoming) == [0]
    peer.say(Disposition(role=Role.SENDER, first=0, settled=True))
    assert session.incoming == {}

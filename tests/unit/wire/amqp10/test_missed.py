"""Transfers that this end drops: the transaction that they name is notified."""

import pytest

from dtx.wire.amqp10.endpoint import DeliveryLost, Event
from dtx.wire.amqp10.performatives import ACCEPTED, Detach, Error, TransactionalState, Transfer
from tests.unit.wire.amqp10.peer import sender, transfer

STATE = TransactionalState(txn_id=b"t")
MISSED = DeliveryLost(session=0, txn_id=b"t")
ERROR = Error(condition="x")


def missed(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, DeliveryLost)]


def test_a_transfer_that_ends_its_link_is_missed() -> None:
    peer, _, _ = sender()
    bad, behind = transfer(1, delivery_tag=bytes(33), state=STATE), transfer(2, state=STATE)
    assert missed(peer.say(bad, behind)) == [MISSED, MISSED]


def test_a_transfer_that_ends_its_session_is_missed() -> None:
    peer, _, _ = sender()
    nowhere, behind = transfer(1, 9, state=STATE), transfer(1, state=STATE)
    assert missed(peer.say(nowhere, behind)) == [MISSED, MISSED]


@pytest.mark.parametrize("whole", ["link", "session"])
def test_a_partial_delivery_is_missed_with_link_or_session(whole: str) -> None:
    peer, session, link = sender()
    assert missed(peer.say(transfer(1, more=True, state=STATE))) == []
    if whole == "link":
        link.detach(ERROR)
    else:
        session.end(ERROR)
    rest = Transfer(handle=0)
    assert missed(peer.say(rest)) == [MISSED]


def test_transfers_outside_transactions_are_not_missed() -> None:
    peer, _, link = sender()
    peer.say(transfer(1, more=True, state=ACCEPTED))
    link.detach(ERROR)
    assert missed(peer.say(Transfer(handle=0), transfer(2))) == []


def test_deliveries_aborted_by_the_peer_are_not_missed() -> None:
    peer, _, link = sender()
    peer.say(transfer(1, more=True, state=STATE))
    events = peer.say(Detach(handle=0, closed=True))
    link.detach()
    assert missed(events + peer.say()) == []

"""Delivery tags: which deliveries a settlement means."""

import pytest

from dtx.server.standalone.tags import Unsettled
from dtx.wire.amqp09.methods import BasicAck
from dtx.xa.codes import ReplyCode, XaError


def one(tag: int) -> BasicAck:
    return BasicAck(tag)


def up_to(tag: int) -> BasicAck:
    return BasicAck(tag, multiple=True)


@pytest.fixture
def unsettled() -> Unsettled[str]:
    deliveries: Unsettled[str] = Unsettled()
    assert [deliveries.add(name) for name in "abcd"] == [1, 2, 3, 4]
    return deliveries


def test_one_delivery_is_settled(unsettled: Unsettled[str]) -> None:
    assert unsettled.take(one(3)) == {3: "c"}
    assert len(unsettled) == 3


def test_multiple_means_all_up_to_the_tag(unsettled: Unsettled[str]) -> None:
    """basic.ack: "If set to 1, the delivery tag is treated as "up to and including"."""
    unsettled.take(one(1))
    assert unsettled.take(up_to(3)) == {2: "b", 3: "c"}
    assert unsettled.take_all() == {4: "d"}


def test_tag_zero_with_multiple_means_all(unsettled: Unsettled[str]) -> None:
    """basic.ack: "If the multiple field is 1, and the delivery tag is zero, this indicates … all outstanding"."""
    assert list(unsettled.take(up_to(0))) == [1, 2, 3, 4]
    assert unsettled.take(up_to(0)) == {}


@pytest.mark.parametrize("settle", [one(5), one(0), up_to(5)])
def test_a_tag_that_is_not_outstanding_is_refused(unsettled: Unsettled[str], settle: BasicAck) -> None:
    """basic.ack: "The server MUST validate that a non-zero delivery-tag refers to a delivered message"."""
    with pytest.raises(XaError, match="unknown delivery tag") as caught:
        unsettled.take(settle)
    assert caught.value.code is ReplyCode.PRECONDITION_FAILED
    assert len(unsettled) == 4


def test_a_tag_is_settled_once(unsettled: Unsettled[str]) -> None:
    unsettled.take(one(2))
    with pytest.raises(XaError, match="unknown delivery tag 2"):
        unsettled.take(one(2))


def test_tags_count_what_needs_no_acknowledgement_too(unsettled: Unsettled[str]) -> None:
    assert unsettled.next_tag() == 5
    assert unsettled.add("f") == 6


def test_what_is_restored_is_in_its_old_place(unsettled: Unsettled[str]) -> None:
    """After tx.rollback acknowledgements can be made again, ``multiple`` among them."""
    taken = unsettled.take(up_to(2))
    unsettled.restore(reversed(taken.items()))
    assert unsettled.take(up_to(3)) == {1: "a", 2: "b", 3: "c"}

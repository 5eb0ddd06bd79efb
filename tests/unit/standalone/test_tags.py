"""Delivery tags: the deliveries that a settlement covers."""

import pytest

from dtx.server.standalone.channel_consumers import Unsettled
from dtx.xa.codes import ReplyCode, XaError


@pytest.fixture
def unsettled() -> Unsettled[str]:
    deliveries: Unsettled[str] = Unsettled()
    assert [deliveries.add(name) for name in "abcd"] == [1, 2, 3, 4]
    return deliveries


def test_one_delivery_is_settled(unsettled: Unsettled[str]) -> None:
    assert unsettled.take(3, multiple=False) == {3: "c"}
    assert len(unsettled) == 3


def test_multiple_means_all_up_to_the_tag(unsettled: Unsettled[str]) -> None:
    """basic.ack: "If set to 1, the delivery tag is treated as "up to and including"."""
    unsettled.take(1, multiple=False)
    assert unsettled.take(3, multiple=True) == {2: "b", 3: "c"}
    assert unsettled.take_all() == {4: "d"}


def test_tag_zero_with_multiple_means_all(unsettled: Unsettled[str]) -> None:
    """basic.ack: "If the multiple field is 1, and the delivery tag is zero, this indicates … all outstanding"."""
    assert list(unsettled.take(0, multiple=True)) == [1, 2, 3, 4]
    assert unsettled.take(0, multiple=True) == {}


@pytest.mark.parametrize(("tag", "multiple"), [(5, False), (0, False), (5, True)])
def test_a_tag_that_is_not_outstanding_is_refused(unsettled: Unsettled[str], tag: int, multiple: bool) -> None:
    """basic.ack: "The server MUST validate that a non-zero delivery-tag refers to a delivered message"."""
    with pytest.raises(XaError, match="unknown delivery tag") as caught:
        unsettled.take(tag, multiple=multiple)
    assert caught.value.code is ReplyCode.PRECONDITION_FAILED
    assert len(unsettled) == 4


def test_a_tag_is_settled_once(unsettled: Unsettled[str]) -> None:
    unsettled.take(2, multiple=False)
    with pytest.raises(XaError, match="unknown delivery tag 2"):
        unsettled.take(2, multiple=False)


def test_tags_count_deliveries_without_acknowledgement_too(unsettled: Unsettled[str]) -> None:
    assert unsettled.next_tag() == 5
    assert unsettled.add("f") == 6


def test_a_restored_delivery_has_its_old_place(unsettled: Unsettled[str]) -> None:
    """After tx.rollback acknowledgements can be made again, also with ``multiple``."""
    taken = unsettled.take(2, multiple=True)
    unsettled.restore(reversed(taken.items()))
    assert unsettled.take(3, multiple=True) == {1: "a", 2: "b", 3: "c"}

"""Publisher confirms: in order, with as few frames as possible, and none for unknown results."""

import random

from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec

from dtx.wire.amqp09.confirms import Confirms
from dtx.wire.amqp09.methods import BasicAck


def said(frames: list[bytes]) -> list[tuple[str, int, bool]]:
    octets = b"".join(frames)
    found = []
    while octets:
        consumed, read = frame.decode_frame(octets)
        kind = "ack" if isinstance(read.method, spec.Basic.Ack) else "nack"
        found.append((kind, read.method.delivery_tag, read.method.multiple))
        octets = octets[consumed:]
    return found


def test_one_message_is_confirmed_by_itself() -> None:
    confirms = Confirms(7)
    confirms.settle(1, safe=True)
    assert confirms.take() == [BasicAck(1).frame(7)]
    assert confirms.take() == []


def test_several_messages_are_confirmed_by_one_frame() -> None:
    confirms = Confirms(1)
    for number in range(1, 6):
        confirms.settle(number, safe=True)
    assert said(confirms.take()) == [("ack", 5, True)]


def test_an_unknown_outcome_holds_later_confirms_back() -> None:
    confirms = Confirms(1)
    confirms.settle(2, safe=True)
    assert confirms.take() == []
    confirms.settle(1, safe=True)
    assert said(confirms.take()) == [("ack", 2, True)]


def test_a_refused_message_gets_a_separate_nack() -> None:
    confirms = Confirms(1)
    for number in range(1, 6):
        confirms.settle(number, safe=number != 3)
    assert said(confirms.take()) == [("ack", 2, True), ("nack", 3, False), ("ack", 5, True)]


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 1 << 32))
def test_every_publish_is_confirmed_once_in_any_order(fates: list[bool], seed: int) -> None:
    confirms = Confirms(1)
    numbers = list(range(1, len(fates) + 1))
    random.Random(seed).shuffle(numbers)
    outcome: dict[int, bool] = {}
    confirmed = 0
    for number in numbers:
        confirms.settle(number, safe=fates[number - 1])
        for kind, tag, multiple in said(confirms.take()):
            assert multiple or tag == confirmed + 1
            outcome.update(dict.fromkeys(range(confirmed + 1, tag + 1), kind == "ack"))
            confirmed = tag
    assert outcome == dict(enumerate(fates, 1))

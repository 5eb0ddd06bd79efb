"""Whole conversations with mutated frames, against a whole dtx in this process: see :mod:`.server`."""

import asyncio
import random
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import frame as pika_frame

from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.frames import FrameSplitter, method_frame
from dtx.wire.amqp09.methods import DtxForget, DtxSelect
from dtx.xa.xid import Xid
from tests.evidence.fuzz import server
from tests.evidence.fuzz.conversations import MUTATIONS, broker_of_its_own, conversation

SELECT = DtxSelect().frame(1)
DECLARED = methods.QueueDeclare(b"q", durable=True).frame(1)


@pytest.fixture(autouse=True, scope="module")
def _strict() -> Iterator[None]:
    before = structlog.get_config()
    server.be_strict()
    yield
    structlog.configure(**before)


def keys_of(sent: bytes) -> list[int]:
    """What the server has sent, as class << 16 | method or the frame's type."""
    return [key for key, *_ in FrameSplitter(0).feed(sent)[1]]


def reads(dice: random.Random, data: bytes) -> Iterator[bytes]:
    """*data* in pieces."""
    while data:
        size = dice.choice((1, 7, 100, 4096, len(data))) if len(data) < 2000 else dice.choice((100, 4096, len(data)))
        yield data[:size]
        data = data[size:]


def talk(*said: bytes, enter: bool = True) -> bytes:
    return asyncio.run(server.converse(said, enter=enter))


@pytest.mark.parametrize("say", [conversation, broker_of_its_own])
def test_a_conversation_without_faults_is_answered_to_its_end(say: server.Saying) -> None:
    """The conversations that are mutated below get far without mutations."""
    found = keys_of(talk(server.TWO_CHANNELS, DECLARED, *say(random.Random(1), b"q")))
    assert methods.ConnectionClose.KEY not in found
    assert len(found) > 20


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), strokes=st.integers(1, 3))
def test_a_mutated_conversation_leaves_no_trace(seed: int, strokes: int) -> None:
    dice = random.Random(seed)
    frames = dice.choice((conversation, broker_of_its_own))(dice, b"q")
    for _ in range(strokes):
        mutate = dice.choice(MUTATIONS)
        frames = mutate(dice, frames) if len(frames) > 1 else frames
    talk(server.TWO_CHANNELS, DECLARED, *reads(dice, b"".join(frames)))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), amqplain=st.booleans())
def test_a_mutated_login_is_refused_or_is_guest(seed: int, amqplain: bool) -> None:
    dice = random.Random(seed)
    start_ok = server.AMQPLAIN.frame(0) if amqplain else server.START_OK
    frames = [start_ok, server.TUNE_OK, server.OPEN, server.TWO_CHANNELS]
    mutated = dice.choice(MUTATIONS)(dice, frames)
    found = keys_of(talk(*reads(dice, b"".join(mutated)), enter=False))
    if methods.ConnectionOpenOk.KEY in found:  # only after all steps of the login
        assert methods.ConnectionTune.KEY in found


@pytest.mark.parametrize("amqplain", [False, True])
def test_both_mechanisms_let_guest_in(amqplain: bool) -> None:
    start_ok = server.AMQPLAIN.frame(0) if amqplain else server.START_OK
    assert methods.ConnectionOpenOk.KEY in keys_of(talk(start_ok, server.TUNE_OK, server.OPEN, enter=False))


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ([], 0),
        ([SELECT], 1),
        ([SELECT, SELECT], 1),
        ([SELECT, DtxForget(xid=Xid(1, b"unknown")).frame(1)], 0),  # 404: the channel is closed
        ([SELECT, methods.ChannelClose(200, b"").frame(1)], 0),
        ([SELECT, method_frame(2, SELECT[7:-1])], 2),
    ],
)
def test_channels_that_have_selected_are_counted_while_they_are_there(said: list[bytes], counted: int) -> None:
    seen: list[float] = []
    reads = [server.TWO_CHANNELS, *said]
    asyncio.run(server.converse(reads, look=lambda metrics: seen.append(metrics.selected_channels._value.get())))
    assert seen == [counted]


def test_an_unexpected_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of these tests detect an internal error of dtx."""

    def fail(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("dtx.server.standalone.connection.StandaloneChannel", fail)
    with pytest.raises(server.Complaint, match="connection failed"):
        talk(server.TWO_CHANNELS)


def test_half_a_frame_to_the_client_is_noticed() -> None:
    with pytest.raises(AssertionError, match="half a frame"):
        server.check(DECLARED[:-1])
    with pytest.raises((AssertionError, KeyError, pika_frame.exceptions.InvalidFrameError)):
        server.check(method_frame(1, b"\x12\x34\x56\x78"))

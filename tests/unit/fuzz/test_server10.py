"""Whole conversations of AMQP 1.0 clients with mutated frames, against a whole dtx in this process."""

import asyncio
import random
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10.performatives import Accepted, Attach, Close, Declared, Disposition, Transfer
from tests.evidence.fuzz import server, server10


@pytest.fixture(autouse=True, scope="module")
def _strict() -> Iterator[None]:
    before = structlog.get_config()
    server.be_strict()
    yield
    structlog.configure(**before)


def talk(reads: list[bytes]) -> bytes:
    return asyncio.run(server10.converse([*server10.ENTER, *reads]))


def test_a_conversation_without_faults_is_answered_to_its_end() -> None:
    """Without mutations, the conversation below declares, works and discharges."""
    said = server10.check(talk(server10.conversation(random.Random(1))))
    states = [one.state for one in said if isinstance(one, Disposition)]
    assert sum(isinstance(state, Declared) for state in states) == 3
    assert sum(isinstance(state, Accepted) for state in states) >= 2
    assert sum(isinstance(one, Attach) for one in said) == 7
    assert any(isinstance(one, Transfer) for one in said)
    assert not any(isinstance(one, Close) and one.error is not None for one in said)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), strokes=st.integers(1, 3), whole=st.booleans())
def test_a_mutated_conversation_leaves_no_trace(seed: int, strokes: int, whole: bool) -> None:
    dice = random.Random(seed)
    frames = server10.conversation(dice)
    for _ in range(strokes):
        mutate = dice.choice(server10.MUTATIONS)
        frames = mutate(dice, frames) if len(frames) > 1 else frames
    talk([b"".join(frames)] if whole else frames)


def test_an_unexpected_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of these tests detect an internal error of dtx."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dtx.server.amqp10.links.Incoming.delivered", fail)
    with pytest.raises(server.Complaint, match="connection failed"):
        talk(server10.conversation(random.Random(1)))


def test_half_a_frame_to_the_client_is_noticed() -> None:
    with pytest.raises(AssertionError, match="half a frame"):
        server10.check(server10.conversation(random.Random(1))[0][:-1])

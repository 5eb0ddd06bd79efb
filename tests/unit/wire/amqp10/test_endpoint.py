"""The states of an endpoint: every state with every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtx.wire.amqp10.endpoint import (
    SERIAL_MASK,
    TRANSITIONS,
    Amqp10State,
    Amqp10Step,
    serial_add,
    serial_distance,
    step,
)
from dtx.wire.amqp10.errors import AmqpError, Condition


@pytest.mark.parametrize("made", Amqp10Step)
@pytest.mark.parametrize("state", Amqp10State)
def test_a_step_leads_on_or_is_illegal(state: Amqp10State, made: Amqp10Step) -> None:
    if (state, made) in TRANSITIONS:
        assert step(state, made, "it") is TRANSITIONS[state, made]
    else:
        with pytest.raises(AmqpError, match=f"is illegal for it in state {state.name.lower()}") as caught:
            step(state, made, "it")
        assert caught.value.condition is Condition.ILLEGAL_STATE


@settings(deadline=None)
@given(st.permutations(list(Amqp10Step)))
def test_four_legal_steps_in_any_order_end_closed(order: list[Amqp10Step]) -> None:
    """Each end opens before it closes. The interleaving of the two ends does not matter."""
    ordered = all(order.index(first) < order.index(then) for first, then in (
        (Amqp10Step.SEND_OPEN, Amqp10Step.SEND_CLOSE), (Amqp10Step.RECEIVE_OPEN, Amqp10Step.RECEIVE_CLOSE),
    ))  # fmt: skip
    state = Amqp10State.UNUSED
    try:
        for made in order:
            state = step(state, made, "it")
    except AmqpError:
        state = Amqp10State.UNUSED
    assert (state is Amqp10State.CLOSED) is ordered


@settings(deadline=None)
@given(st.integers(0, SERIAL_MASK), st.integers(-(2**31) + 1, 2**31 - 1))
def test_serial_numbers_go_round_the_corner(start: int, ahead: int) -> None:
    assert serial_distance(start, serial_add(start, ahead)) == ahead

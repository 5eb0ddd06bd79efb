"""One table for the life of a connection, a session and a link (AMQP 1.0, 2.4.6, 2.5.5, 2.6.3 to 2.6.6).

All three are opened and closed by a pair of performatives (open and close, begin and end, attach and detach), of which
each peer sends its own, in any order; the second pair of a closing may come before the first is answered. An endpoint
that has sent its close looks at nothing more than the peer's.
"""

from enum import Enum, auto
from typing import Final

from dtx.wire.amqp10.errors import AmqpError, Condition


class State(Enum):
    """Of one endpoint."""

    UNUSED = auto()
    OPEN_SENT = auto()
    OPEN_RECEIVED = auto()
    OPEN = auto()
    PIPELINED = auto()
    """Opened and closed from here, neither answered."""
    UNANSWERED = auto()
    """Opened and closed by the peer, neither answered."""
    CLOSE_SENT = auto()
    CLOSE_RECEIVED = auto()
    CLOSED = auto()


class Step(Enum):
    """What is sent or received."""

    SEND_OPEN = auto()
    RECEIVE_OPEN = auto()
    SEND_CLOSE = auto()
    RECEIVE_CLOSE = auto()


TRANSITIONS: Final[dict[tuple[State, Step], State]] = {
    (State.UNUSED, Step.SEND_OPEN): State.OPEN_SENT,
    (State.UNUSED, Step.RECEIVE_OPEN): State.OPEN_RECEIVED,
    (State.OPEN_SENT, Step.RECEIVE_OPEN): State.OPEN,
    (State.OPEN_SENT, Step.SEND_CLOSE): State.PIPELINED,
    (State.OPEN_RECEIVED, Step.SEND_OPEN): State.OPEN,
    (State.OPEN_RECEIVED, Step.RECEIVE_CLOSE): State.UNANSWERED,
    (State.PIPELINED, Step.RECEIVE_OPEN): State.CLOSE_SENT,
    (State.UNANSWERED, Step.SEND_OPEN): State.CLOSE_RECEIVED,
    (State.OPEN, Step.SEND_CLOSE): State.CLOSE_SENT,
    (State.OPEN, Step.RECEIVE_CLOSE): State.CLOSE_RECEIVED,
    (State.CLOSE_SENT, Step.RECEIVE_CLOSE): State.CLOSED,
    (State.CLOSE_RECEIVED, Step.SEND_CLOSE): State.CLOSED,
}
"""What is absent is illegal."""

SENDING: Final = frozenset((State.OPEN_SENT, State.OPEN))
"""Where more than a close may be sent."""
DEAF: Final = frozenset((State.PIPELINED, State.CLOSE_SENT, State.CLOSED))
"""Where nothing but the peer's open and close is looked at."""


def step(state: State, made: Step, what: str) -> State:
    """The state behind a step.

    Args:
        state: the one before.
        made: the step.
        what: whose it is, for the error.

    Raises:
        AmqpError: illegal-state.
    """
    following = TRANSITIONS.get((state, made))
    if following is None:
        words = made.name.lower().replace("_", " ")
        raise AmqpError(Condition.ILLEGAL_STATE, f"{words} is illegal for {what} in state {state.name.lower()}")
    return following

"""One transition table for the states of connections and channels (AMQP 0-9-1, 1.4.2.9, 1.5.2.5).

Both are closed by close and close-ok. If both peers close at once, each confirms the other's close. After its own
close, an end ignores all but the peer's close and close-ok.
"""

from enum import Enum, auto
from typing import Final


class EndpointState(Enum):
    """The state of a connection or of a channel."""

    OPENING = auto()
    OPEN = auto()
    CLOSE_SENT = auto()
    CLOSE_RECEIVED = auto()
    """The close-ok promises that everything sent before it is done, so it may be sent later."""
    CLOSED = auto()


class EndpointStep(Enum):
    """A method that is sent or received."""

    OPEN = auto()
    """The open-ok is sent or received."""
    SEND_CLOSE = auto()
    RECEIVE_CLOSE = auto()
    SEND_CLOSE_OK = auto()
    RECEIVE_CLOSE_OK = auto()


TRANSITIONS: Final[dict[tuple[EndpointState, EndpointStep], EndpointState]] = {
    (EndpointState.OPENING, EndpointStep.OPEN): EndpointState.OPEN,
    (EndpointState.OPENING, EndpointStep.SEND_CLOSE): EndpointState.CLOSE_SENT,
    (EndpointState.OPENING, EndpointStep.RECEIVE_CLOSE): EndpointState.CLOSE_RECEIVED,
    (EndpointState.OPEN, EndpointStep.SEND_CLOSE): EndpointState.CLOSE_SENT,
    (EndpointState.OPEN, EndpointStep.RECEIVE_CLOSE): EndpointState.CLOSE_RECEIVED,
    (EndpointState.CLOSE_SENT, EndpointStep.RECEIVE_CLOSE): EndpointState.CLOSE_SENT,
    (EndpointState.CLOSE_SENT, EndpointStep.SEND_CLOSE_OK): EndpointState.CLOSE_SENT,
    (EndpointState.CLOSE_SENT, EndpointStep.RECEIVE_CLOSE_OK): EndpointState.CLOSED,
    (EndpointState.CLOSE_RECEIVED, EndpointStep.SEND_CLOSE): EndpointState.CLOSE_SENT,
    (EndpointState.CLOSE_RECEIVED, EndpointStep.SEND_CLOSE_OK): EndpointState.CLOSED,
}
"""A missing step does nothing: a received method is ignored, and a method to send is not sent."""

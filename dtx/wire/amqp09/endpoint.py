"""One table for the life of a connection and of a channel (AMQP 0-9-1, 1.4.2.9, 1.5.2.5).

Both are closed by close and close-ok, and both peers may close at once: then each confirms the other's close. Behind
its own close, an end looks at nothing but the peer's close and close-ok.
"""

from enum import Enum, auto
from typing import Final


class EndpointState(Enum):
    """Of one endpoint."""

    OPENING = auto()
    OPEN = auto()
    CLOSE_SENT = auto()
    CLOSE_RECEIVED = auto()
    """The close-ok promises that everything sent before is done, so it may take a while."""
    GONE = auto()


class EndpointStep(Enum):
    """What is sent or received."""

    OPEN = auto()
    """The open-ok, whichever end sends it."""
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
    (EndpointState.CLOSE_SENT, EndpointStep.RECEIVE_CLOSE_OK): EndpointState.GONE,
    (EndpointState.CLOSE_RECEIVED, EndpointStep.SEND_CLOSE): EndpointState.CLOSE_SENT,
    (EndpointState.CLOSE_RECEIVED, EndpointStep.SEND_CLOSE_OK): EndpointState.GONE,
}
"""What is absent does nothing: it is ignored when it is received, and not sent."""

"""The errors of AMQP 1.0: the conditions, and the exceptions that contain them."""

from enum import StrEnum
from typing import Final

MAX_DESCRIPTION: Final = 200
"""The maximum size of an error description in bytes: close and detach must fit the smallest frame, 512 bytes."""


class Condition(StrEnum):
    """Error conditions: 2.8.15 to 2.8.18 of the transport, 4.5.8 of the transactions."""

    INTERNAL_ERROR = "amqp:internal-error"
    NOT_FOUND = "amqp:not-found"
    UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
    DECODE_ERROR = "amqp:decode-error"
    RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
    NOT_ALLOWED = "amqp:not-allowed"
    INVALID_FIELD = "amqp:invalid-field"
    NOT_IMPLEMENTED = "amqp:not-implemented"
    RESOURCE_LOCKED = "amqp:resource-locked"
    PRECONDITION_FAILED = "amqp:precondition-failed"
    RESOURCE_DELETED = "amqp:resource-deleted"
    ILLEGAL_STATE = "amqp:illegal-state"
    FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
    CONNECTION_FORCED = "amqp:connection:forced"
    FRAMING_ERROR = "amqp:connection:framing-error"
    CONNECTION_REDIRECT = "amqp:connection:redirect"
    WINDOW_VIOLATION = "amqp:session:window-violation"
    ERRANT_LINK = "amqp:session:errant-link"
    HANDLE_IN_USE = "amqp:session:handle-in-use"
    UNATTACHED_HANDLE = "amqp:session:unattached-handle"
    DETACH_FORCED = "amqp:link:detach-forced"
    TRANSFER_LIMIT_EXCEEDED = "amqp:link:transfer-limit-exceeded"
    MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
    LINK_REDIRECT = "amqp:link:redirect"
    STOLEN = "amqp:link:stolen"
    UNKNOWN_ID = "amqp:transaction:unknown-id"
    ROLLBACK = "amqp:transaction:rollback"
    TIMEOUT = "amqp:transaction:timeout"


class AmqpError(Exception):
    """The peer violated the protocol, exceeded a limit, or requested something that is impossible.

    Args:
        condition: the condition for the peer.
        reason: lower case, no full stop; it never contains a secret or a body.
    """

    def __init__(self, condition: Condition, reason: str) -> None:
        super().__init__(condition, reason)
        self.condition = condition
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.condition}: {self.reason}"


class Amqp10FrameError(AmqpError):
    """A frame is malformed or not allowed: framing-error. It ends the connection.

    Args:
        reason: what is wrong.
        buffer: the buffer with *frames*.
        frames: the complete frames before the bad one, in the form of ``Amqp10FrameSplitter.feed``. They must be
            handled first.
    """

    def __init__(self, reason: str, buffer: bytes = b"", frames: list[tuple[int, int, int, int]] | None = None) -> None:
        super().__init__(Condition.FRAMING_ERROR, reason)
        self.buffer = buffer
        self.frames = frames or []


def malformed(reason: str) -> AmqpError:
    """Return the error for malformed bytes: decode-error."""
    return AmqpError(Condition.DECODE_ERROR, reason)

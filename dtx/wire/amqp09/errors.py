"""Protocol errors of a peer. :mod:`~dtx.wire.amqp09.closes` makes the close frames for them."""

from enum import IntEnum


class HardCode(IntEnum):
    """Reply codes of AMQP 0-9-1 that close the connection."""

    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


class WireError(Exception):
    """The peer violated the protocol; the connection must close.

    Args:
        code: the AMQP reply code for the peer.
        reason: lower case, no full stop; it never contains a secret or a body.
    """

    def __init__(self, code: HardCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code.value}: {self.reason}"


class FrameError(WireError):
    """A frame is malformed.

    Args:
        code: 501, or 502 for a method frame without a method.
        reason: what is wrong with it.
        buffer: the buffer with *frames*.
        frames: the complete frames before the bad one, in the form of ``FrameSplitter.feed``. They were sent first, so
            they must be handled first.
    """

    def __init__(
        self, code: HardCode, reason: str, buffer: bytes = b"", frames: list[tuple[int, int, int, int]] | None = None
    ) -> None:
        super().__init__(code, reason)
        self.buffer = buffer
        self.frames = frames or []


def syntax_error(reason: str) -> WireError:
    """Return the error for a malformed field: 502, "illegal values for one or more fields"."""
    return WireError(HardCode.SYNTAX_ERROR, reason)

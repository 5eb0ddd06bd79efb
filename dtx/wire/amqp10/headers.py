"""The headers of the protocol and of its SASL layer (AMQP 1.0, 2.2, 5.3)."""

from typing import Final

from dtx.wire.amqp09.frames import Protocol

AMQP_HEADER: Final = Protocol.AMQP_1_0.value
SASL_HEADER: Final = Protocol.AMQP_1_0_SASL.value


def matches(data: bytes, wanted: bytes) -> bool | None:
    """Whether *data* begins with the header *wanted*; ``None`` while it is too short to tell."""
    start = data[: len(wanted)]
    if not wanted.startswith(start):
        return False
    return True if len(start) == len(wanted) else None

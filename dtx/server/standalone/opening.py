"""The handshake, from connection.start to connection.open: what the client says is read and judged, without I/O."""

from enum import Enum
from typing import Final

import dtx
from dtx.server.limits import HEARTBEAT, MAX_FRAME, ConnectionLimits
from dtx.wire.amqp09 import handshake, methods
from dtx.wire.amqp09.errors import HardCode, WireError
from dtx.wire.amqp09.frames import MIN_FRAME, OPENING_FRAME

_CAPABILITIES: Final = (
    b"publisher_confirms",
    b"exchange_exchange_bindings",
    b"basic.nack",
    b"consumer_cancel_notify",
    b"connection.blocked",
    b"consumer_priorities",
    b"authentication_failure_close",
    b"per_consumer_qos",
    b"direct_reply_to",
    handshake.CAPABILITY,
)
_GREETING: Final = methods.ConnectionStart(
    version_major=0,
    version_minor=9,
    server_properties=handshake.server_properties(
        {
            b"product": b"dtx",
            b"version": dtx.__version__.encode(),
            b"platform": b"Python",
            b"information": b"Licensed under the Apache License 2.0",
        },
        _CAPABILITIES,
    ),
    mechanisms=b" ".join(handshake.PASSED),
    locales=b"en_US",
).frame(0)


class Step(Enum):
    """What the client says next."""

    START_OK = methods.ConnectionStartOk.KEY
    TUNE_OK = methods.ConnectionTuneOk.KEY
    OPEN = methods.ConnectionOpen.KEY
    NOTHING = 0
    """It is the server's turn."""


def _not_within(what: str, wanted: int, bound: str, limit: int) -> WireError:
    return WireError(HardCode.NOT_ALLOWED, f"negotiated {what} = {wanted} is {bound} ({limit})")


class Opening:
    """What was learnt and agreed in the handshake.

    Args:
        limits: what the client is offered.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._offer = methods.ConnectionTune(
            channel_max=limits.max_channels, frame_max=limits.frame_max or MAX_FRAME, heartbeat=HEARTBEAT
        )
        self._step = Step.START_OK
        self.agreed = methods.ConnectionTuneOk(channel_max=0, frame_max=MIN_FRAME, heartbeat=0)
        self.hears_of_failed_login = False
        """Capability authentication_failure_close: without it a refused client is just cut off."""
        self.hears_of_cancelled_consumers = False
        """Capability consumer_cancel_notify."""
        self.hears_of_blocking = False
        """Capability connection.blocked."""

    @property
    def max_frame(self) -> int:
        """Octets of a frame before tune-ok."""
        return min(self._offer.frame_max, OPENING_FRAME)

    @staticmethod
    def greeting() -> bytes:
        """connection.start."""
        return _GREETING

    def expect(self, key: int) -> None:
        """The client says *key*.

        Raises:
            WireError: 503, it is not the next step.
        """
        if key != self._step.value:
            raise WireError(HardCode.COMMAND_INVALID, "method is not the next step of the handshake")
        self._step = Step.NOTHING

    def start_ok(self, payload: bytes) -> handshake.Credentials | None:
        """Read connection.start-ok: who the client says it is; ``None`` when it does not say.

        Raises:
            WireError: it is malformed.
            NotOffered: it names a mechanism that was not offered.
        """
        said = methods.ConnectionStartOk.decode(payload)
        properties = said.client_properties
        self.hears_of_failed_login = handshake.has_capability(properties, b"authentication_failure_close")
        self.hears_of_cancelled_consumers = handshake.has_capability(properties, b"consumer_cancel_notify")
        self.hears_of_blocking = handshake.has_capability(properties, b"connection.blocked")
        return handshake.credentials(said.mechanism, said.response)

    def tune(self) -> bytes:
        """connection.tune, for somebody who may come in."""
        self._step = Step.TUNE_OK
        return self._offer.frame(0)

    def tune_ok(self, payload: bytes) -> None:
        """Read connection.tune-ok.

        Raises:
            WireError: it is malformed, or asks for more than was offered ("the server MUST close the connection", 0
                being no limit at all) or for frames that a handshake would not fit in.
        """
        wanted = methods.ConnectionTuneOk.decode(payload)
        offer = self._offer
        if not 0 < wanted.channel_max <= offer.channel_max:
            raise _not_within("channel_max", wanted.channel_max, "higher than the maximum allowed", offer.channel_max)
        if not 0 < wanted.frame_max <= offer.frame_max:
            raise _not_within("frame_max", wanted.frame_max, "higher than the maximum allowed", offer.frame_max)
        if wanted.frame_max < MIN_FRAME:
            raise _not_within("frame_max", wanted.frame_max, "lower than the minimum allowed", MIN_FRAME)
        self.agreed = wanted
        self._step = Step.OPEN

    @staticmethod
    def open(payload: bytes) -> str:
        """Read connection.open: the vhost.

        Raises:
            WireError: it is malformed, or its name is no UTF-8.
        """
        try:
            return methods.ConnectionOpen.decode(payload).virtual_host.decode()
        except UnicodeDecodeError:
            raise WireError(HardCode.NOT_ALLOWED, "the vhost's name is no UTF-8") from None

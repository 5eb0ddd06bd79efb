"""What dtx offers a client in the name of the broker."""

from typing import Any

import pytest

from dtx.server.alongside.broker_handshake import BrokerHandshake
from dtx.server.limits import SessionLimits
from dtx.wire.amqp09 import methods, tables


class Engine:
    """Notes what the client is offered."""

    offered: methods.ConnectionTune

    def greet(self, start: methods.ConnectionStart) -> None:
        """Accept the start."""

    def tune(self, tune: methods.ConnectionTune) -> None:
        """Note the offer."""
        self.offered = tune


@pytest.mark.parametrize(("version", "offered"), [(b"4.0.5", 4096), (b"4.1.0", 8192), (b"4.3.5", 8192)])
def test_no_smaller_frame_is_offered_than_the_broker_takes(version: bytes, offered: int) -> None:
    """RabbitMQ refuses a frame-max below 8192 since 4.1: with the setting 4KiB no client could log in."""
    engine: Any = Engine()
    broker: Any = None
    limits = SessionLimits(
        frame_max=4096, max_channels=16, max_message_bytes=1 << 20, handshake_timeout=10, max_kept_bytes=1 << 20
    )
    handshake = BrokerHandshake(engine, broker, limits)
    start = methods.ConnectionStart(0, 9, tables.entry(b"version", b"S", version), b"PLAIN", b"en_US")
    handshake.from_broker(start.KEY, start.encode())
    tune = methods.ConnectionTune(2047, 131072, 60)
    handshake.from_broker(tune.KEY, tune.encode())
    assert engine.offered.frame_max == offered

"""dtx and the broker close a channel at the same time."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtx.server.alongside.channel import ClosingChannel, ProxyChannel
from dtx.store.rabbitmq.confirm_channel import ConfirmChannel
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.upstream import OwnChannel, Upstream
from dtx.store.work import Budget
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.frames import FrameSplitter
from dtx.wire.amqp09.methods import ChannelClose, ChannelCloseOk
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd

CLOSE = ChannelClose(404, b"NOT_FOUND - no queue", methods.QueueDeclare.KEY)


class Rig:
    """A connection to the broker that records what is written to it, and a channel on it."""

    def __init__(self) -> None:
        self.written = b""
        self.upstream = Upstream()
        self.upstream.engine.adopt(methods.ConnectionTuneOk(100, 4096, 0))
        transport: Any = SimpleNamespace(set_write_buffer_limits=lambda **_: None, write=self._write)
        self.upstream.connection_made(transport)
        self.number = self.upstream.allocate()

    def _write(self, data: bytes) -> None:
        self.written += data

    def forget(self) -> None:
        """Drop what was written so far."""
        self.upstream.flush()
        self.written = b""

    @property
    def keys(self) -> list[int]:
        """The methods that the broker received."""
        return [key for key, _, _, _ in FrameSplitter(0).feed(self.written)[1]]

    def broker(self, method: ChannelClose | ChannelCloseOk) -> None:
        """The broker sends a method."""
        frame = method.frame(self.number)
        self.upstream.handlers[self.number].frame(method.KEY, frame, 0, len(frame))


def nothing(*_: object) -> None:
    """A callback that does nothing."""


def selected(rig: Rig) -> None:
    keeper: Any = SimpleNamespace(consume_channel_ended=nothing, release_client=nothing)
    ConsumeChannel(rig.upstream, rig.number, 1000, Budget(1000), ConsumedQueues(rig.upstream.exclusive), keeper).close()


def drained(rig: Rig) -> None:
    ClosingChannel(cast("Any", SimpleNamespace(upstream=rig.upstream, drained=nothing)), rig.number)


def passed_through(rig: Rig) -> None:
    session = SimpleNamespace(
        upstream=rig.upstream, speaks_0_9=False, handle_waiting=nothing, forget=nothing, forward_to_client=nothing
    )
    engine = ConnectionEngine(EngineSettings(), PeerEnd.CLIENT).open_channel(1)
    channel = ProxyChannel(cast("Any", session), engine, rig.number)
    rig.upstream.handlers[rig.number] = channel
    channel.close(ChannelClose(200, b"bye").encode())


def confirming(rig: Rig) -> None:
    channel = rig.upstream.engine.open_channel(rig.number)
    rig.forget()
    ConfirmChannel(rig.upstream, channel, b"", cast("Any", None)).close(nothing)


def of_dtx_itself(rig: Rig) -> None:
    rig.upstream.free(rig.number)  # the channel takes the same number
    channel = OwnChannel(rig.upstream)
    rig.forget()
    closing = asyncio.ensure_future(channel.close())
    closing.add_done_callback(lambda _: closing.exception())


@pytest.mark.parametrize("begin", [selected, drained, passed_through, confirming, of_dtx_itself])
async def test_the_brokers_close_is_confirmed_after_its_close_ok(begin: Callable[[Rig], None]) -> None:
    """RabbitMQ ends a channel at close-ok, and then drops a close-ok that it has not written yet."""
    rig = Rig()
    begin(rig)
    await asyncio.sleep(0)
    assert rig.keys == [ChannelClose.KEY]
    rig.broker(CLOSE)
    assert rig.keys == [ChannelClose.KEY]
    assert rig.number in rig.upstream.used
    rig.broker(ChannelCloseOk())
    assert rig.keys == [ChannelClose.KEY, ChannelCloseOk.KEY]
    assert rig.number not in rig.upstream.used

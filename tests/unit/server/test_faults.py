"""An internal error of dtx ends only its own connection, and tells the client only "internal error"."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dtx.manager import Requester
from dtx.manager.limits import Quotas
from dtx.server.alongside.session import ProxySession
from dtx.server.limits import SessionLimits
from dtx.server.standalone.connection import StandaloneConnection
from dtx.store.rabbitmq.copies import CopyRegister
from dtx.store.work import Budget
from dtx.telemetry import Metrics
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.channel import Passing
from dtx.wire.amqp09.codec import ChannelMode
from dtx.wire.amqp09.endpoint import EndpointState
from dtx.wire.amqp09.events import FramePassed
from dtx.wire.amqp09.frames import Protocol
from dtx.wire.amqp09.methods import DtxSelect
from tests.evidence.fuzz.server import ENTER, START_OK, TWO_CHANNELS, Wire, hear, whole

pytestmark = pytest.mark.usefixtures("one_slice")

SELECT = DtxSelect().frame(2)


class Socket:
    """A transport that records the bytes for the client."""

    is_local = True
    peer = "127.0.0.1"
    certificate_name: str | None = None
    unsent = 0

    def __init__(self) -> None:
        self.sent = b""

    def opened(self, who: Requester) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> None:
        self.sent += data

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def running(socket: Socket) -> ProxySession:
    """A session that has no broker behind it."""
    budget = Budget(0)
    copies = CopyRegister.disabled()
    log = SimpleNamespace(member=None)
    nothing: Any = SimpleNamespace(
        broker=None, budget=budget, quotas=Quotas((), budget), copies=copies, spawn=None, log=log
    )
    limits = SessionLimits(
        max_channels=9, frame_max=131_072, max_message_bytes=1, max_kept_bytes=1, handshake_timeout=60
    )
    session = ProxySession(nothing, nothing, Metrics(), limits, socket, Protocol.AMQP_0_9_1.value)
    session.engine.adopt(methods.ConnectionTuneOk(9, 131_072, 0))
    return session


def breaks() -> None:
    """Raise an unforeseen error."""
    raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("waited", [False, True], ids=["at once", "behind a call"])
async def test_an_unexpected_error_is_logged_and_sent_as_internal(
    capsys: pytest.CaptureFixture[str], waited: bool
) -> None:
    """The frame before it is handled. The text of the error is only in the log."""
    socket = Socket()
    session = running(socket)
    came = []

    def fail(event: FramePassed) -> None:
        came.append(event.key)
        if event.key == methods.BasicGet.KEY:
            raise RuntimeError("a secret of ours")

    broken: Any = SimpleNamespace(
        receive=fail,
        shut_down=lambda: None,
        end_associations=lambda: None,
        mode=ChannelMode.PLAIN,
        tally=None,
        number=1,
    )
    list(session.engine.receive(methods.ChannelOpen().frame(1)))
    channel = session.engine.channel(1)
    channel.pass_frames(Passing.SINGLY)
    session.channels[1] = broken
    if waited:
        channel.hold()
    session.client_data(methods.BasicQos(0, 1).frame(1) + methods.BasicGet(b"queue").frame(1))
    if waited:
        assert not came
        channel.release()
        session.handle_waiting()
    assert came == [methods.BasicQos.KEY, methods.BasicGet.KEY]
    said = methods.ConnectionClose.decode(socket.sent[7:-1])
    assert (said.reply_code, said.reply_text) == (541, b"INTERNAL_ERROR - internal error")
    assert "a secret of ours" in capsys.readouterr().out


async def test_a_channel_that_fails_at_the_end_blocks_no_other() -> None:
    session = running(Socket())
    gone: list[int] = []
    for number, shut_down in ((1, breaks), (2, lambda: gone.append(2)), (3, breaks), (4, lambda: gone.append(4))):
        channel: Any = SimpleNamespace(
            end_deliveries=lambda: None,
            shut_down=shut_down,
            end_associations=shut_down,
            mode=ChannelMode.PLAIN,
            tally=None,
            number=number,
        )
        session.channels[number] = channel
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        session.client_disconnected()
    assert gone[:2] == [2, 4]
    for _ in range(10):
        await asyncio.sleep(0)
    assert gone == [2, 4, 2, 4]
    assert not session.channels


async def test_a_failing_standalone_channel_blocks_no_other() -> None:
    async with whole() as (parts, _):
        wire = Wire()
        connection = StandaloneConnection(parts, wire)
        await connection.connect()
        for data in (START_OK, ENTER, TWO_CHANNELS):
            await hear(connection, wire, data)
        first, second = connection.channels.values()
        await hear(connection, wire, SELECT)
        first.shut_down = breaks  # type: ignore[method-assign]
        connection.client_disconnected()
        await connection.ended
        assert second.engine.state is EndpointState.CLOSED
        assert parts.metrics.selected_channels._value.get() == 0, "it was let go"
        assert not connection.channels


async def test_no_two_connections_have_the_same_number() -> None:
    """An operator closes a connection by its number. With a broker, AMQP 0-9 and 1.0 share the numbers."""
    async with whole() as (parts, _):
        numbers = [running(Socket()).id, StandaloneConnection(parts, Wire()).id, running(Socket()).id]
    assert numbers == sorted(set(numbers))

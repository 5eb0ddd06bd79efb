"""What comes on a channel behind a delivery about which the other members are asked."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtx.log.records import LogWrite
from dtx.server.alongside.pass_through import ProxyUpstream
from dtx.server.alongside.session import ProxySession
from dtx.store.rabbitmq.copies import CopyRegister, OtherCopies
from dtx.wire.amqp09 import content, methods
from dtx.wire.amqp09.codec import Method
from dtx.wire.amqp09.frames import FrameSplitter
from dtx.wire.amqp09.properties import EMPTY
from dtx.xa.xid import Xid
from tests.support.copies import BODY, BRANCH, REPLAY, marked
from tests.unit.server.test_faults import Socket, running

pytestmark = pytest.mark.usefixtures("one_slice")


def keys_of(data: bytes) -> list[int]:
    return [key for key, _, _, _ in FrameSplitter(0).feed(data)[1]]


async def nothing(*_: object) -> None:
    """Do nothing."""


class Rig:
    """A session with a consumer on channel 1; the other members answer when :attr:`answered` is set."""

    def __init__(self) -> None:
        self.socket, self.answered = Socket(), asyncio.Event()
        self.session: ProxySession = running(self.socket)
        self.sent = b""
        """Bytes to the broker."""
        self.register = CopyRegister(self._log, lambda: True)
        members: Any = SimpleNamespace(ask=self._ask, announce=nothing, ended=lambda _: None, has_ended=lambda _: False)
        self.register.members = members
        self.session.consuming.register = self.register
        upstream = self.session.upstream
        upstream.engine.adopt(methods.ConnectionTuneOk(100, 131_072, 0))
        transport: Any = SimpleNamespace(
            set_write_buffer_limits=lambda **_: None, write=self._write, pause_reading=str, resume_reading=str
        )
        upstream.connection_made(transport)
        self.client(methods.ChannelOpen(), methods.BasicConsume(b"q", b"c", no_wait=True))

    async def _log(self, _: LogWrite) -> None: ...

    async def _ask(self, _: object, *, redelivered: bool) -> OtherCopies:
        await self.answered.wait()
        return OtherCopies(in_doubt=redelivered)

    def _write(self, data: bytes) -> None:
        self.sent += data

    def client(self, *said: Method) -> None:
        self.session.client_data(b"".join(method.frame(1) for method in said))

    def broker(self, data: bytes) -> None:
        """One read from the broker."""
        upstream = cast("ProxyUpstream", self.session.upstream)
        room = upstream.get_buffer(-1)
        room[: len(data)] = data
        del room
        upstream.buffer_updated(len(data))


@pytest.fixture
async def rig() -> Rig:
    rig = Rig()
    await rig.register.replay(BRANCH, [REPLAY])
    return rig


def delivery(tag: int, raw: bytes) -> bytes:
    """A message of ``q`` in many frames."""
    deliver = methods.BasicDeliver(b"c", tag, False, b"e", b"key").frame(1)
    return content.message(deliver, 1, raw, BODY, 1000)


@pytest.mark.parametrize("cut", [10, 30, 200, 1500, 4900])
async def test_a_read_that_ends_inside_a_message_keeps_the_order(rig: Rig, cut: int) -> None:
    """The rest of a message, and what follows it, come after the frames that were held."""
    first, second = delivery(1, marked(2)), delivery(2, EMPTY)
    data = first + second + delivery(3, EMPTY)
    rig.broker(data[: len(first) + cut])
    assert not rig.socket.sent
    rig.answered.set()
    await asyncio.sleep(0.01)
    rig.broker(data[len(first) + cut :])
    await asyncio.sleep(0)
    assert rig.socket.sent == data


async def test_a_held_close_is_no_second_close_for_the_client(rig: Rig) -> None:
    """The broker's close waits behind a delivery while dtx refuses the channel."""
    rig.broker(delivery(1, marked(2)) + methods.ChannelClose(406, b"PRECONDITION_FAILED").frame(1))
    rig.sent = b""
    rig.client(methods.DtxStart(Xid(1, b"g", b"b")))
    assert keys_of(rig.socket.sent) == [methods.ChannelClose.KEY]
    rig.session.upstream.flush()
    assert keys_of(rig.sent) == [methods.ChannelClose.KEY]
    rig.broker(methods.ChannelCloseOk().frame(1))
    rig.session.upstream.flush()
    assert keys_of(rig.sent) == [methods.ChannelClose.KEY, methods.ChannelCloseOk.KEY]
    rig.client(methods.ChannelCloseOk())
    assert 1 not in rig.session.channels
    assert 1 not in rig.session.upstream.used
    rig.answered.set()


async def test_a_slow_client_costs_other_connections_nothing() -> None:
    """It may have got half a message for a long time."""
    rig, other = Rig(), Rig()
    other.session.consuming.register = rig.register
    other.client(methods.BasicConsume(b"q", b"d", no_wait=True))
    data = delivery(1, marked())
    rig.broker(data[:1500])
    buffer, frames = FrameSplitter(0).feed(delivery(2, EMPTY))
    assert rig.session.consuming.concerns(buffer, frames)
    assert not other.session.consuming.concerns(buffer, frames)
    rig.broker(data[1500:])
    assert not rig.session.consuming.concerns(buffer, frames)
    assert rig.socket.sent == data


async def test_the_answer_to_basic_get_comes_before_its_message() -> None:
    """No message was sent again, so nothing is held for long."""
    rig = Rig()
    rig.client(methods.BasicGet(b"q"))
    data = content.message(methods.BasicGetOk(1, False, b"e", b"key", 0).frame(1), 1, EMPTY, BODY, 1000)
    rig.broker(data)
    assert rig.socket.sent == data

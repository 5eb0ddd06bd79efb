"""A selected channel whose channel at the broker ends, without a broker behind it."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtx.server.alongside.channel import ProxyChannel
from dtx.server.alongside.selected_channel import SelectedChannel
from dtx.store.rabbitmq.consume_channel import ConsumeChannel
from dtx.store.rabbitmq.consumed_queues import ConsumedQueues
from dtx.store.rabbitmq.upstream import ExclusiveQueues
from dtx.store.work import Budget, HeldWork
from dtx.wire.amqp09 import methods
from dtx.wire.amqp09.connection import ConnectionEngine
from dtx.wire.amqp09.events import EngineEvent
from dtx.wire.amqp09.frames import BODY, HEADER, FrameSplitter, Protocol, header_frame, method_frame
from dtx.wire.amqp09.methods import DtxPrepare, DtxPrepareOk
from dtx.wire.amqp09.settings import EngineSettings, PeerEnd
from dtx.xa.codes import XaFlag
from dtx.xa.model import State
from dtx.xa.xid import Xid
from tests.support.raw import body_frames

CLOSE = methods.ChannelClose(403, b"ACCESS_REFUSED - no", methods.BasicPublish.KEY).encode()
ANSWER = DtxPrepareOk(XaFlag.RBROLLBACK).frame(1)
P = 9
"""The number of the broker channel that publishes."""


def key_of(frame: bytes) -> int:
    return int.from_bytes(frame[7:11], "big")


class Rig:
    """A channel with the number 1 on both sides, and the objects that it uses."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        """Bytes to the client."""
        self.finish: Any = None
        """Answers the running call."""
        nothing = lambda *_: None  # noqa: E731
        self.sent: list[bytes] = []
        """Bytes to the broker."""
        upstream: Any = SimpleNamespace(
            handlers={}, is_lost=False, lock="", write=self.sent.append, exclusive=ExclusiveQueues()
        )
        upstream.free = lambda number: upstream.handlers.pop(number, None)
        self.upstream = upstream
        spawn = lambda work: asyncio.get_running_loop().create_task(work)  # noqa: E731
        manager = SimpleNamespace(budget=Budget(1000), channel_lost=nothing, spawn=spawn)
        self.session: Any = SimpleNamespace(
            upstream=upstream,
            manager=manager,
            metrics=SimpleNamespace(),
            channels={},
            id=1,
            who=None,
            frame_max=4096,
            speaks_0_9=False,
            forget=nothing,
            drained=nothing,
            handle_waiting=self._handle_waiting,
            release_client=nothing,
            to_client=self._to_client,
            forward_to_client=self._to_client,
            flush=self._flush,
        )
        self.engine = ConnectionEngine(EngineSettings(), PeerEnd.SERVER)
        for data in (Protocol.AMQP_0_9_1.value, methods.ChannelOpen().frame(1)):
            list(self.engine.receive(data))
            self.engine.adopt(methods.ConnectionTuneOk(9, 4096, 0))
        before = ProxyChannel(cast("Any", self.session), self.engine.channel(1), 1)
        keeper: Any = SimpleNamespace(consume_channel_ended=nothing, release_client=nothing, held_lost=nothing)
        taking = ConsumeChannel(upstream, 1, 1000, manager.budget, ConsumedQueues(upstream.exclusive), keeper)
        self.channel = SelectedChannel(before, taking, P, cast("Any", None))
        self.session.channels[1] = self.channel
        self.channel.coordination = SimpleNamespace(run=self._run)  # type: ignore[assignment]

    def _run(self, _call: object, _who: object, _frame_max: int, finish: object) -> None:
        self.finish = finish

    def _handle_waiting(self) -> None:
        self._handle(self.engine.events())

    def _handle(self, events: Iterator[EngineEvent]) -> None:
        for event in events:
            self.channel.receive(cast("Any", event))
        self._flush()

    def _to_client(self, data: bytes) -> None:
        self.engine.send_raw(data)
        self._flush()

    def _flush(self) -> None:
        self.said += [bytes(data) for data in self.engine.data_to_send()]

    def client(self, payload: bytes) -> None:
        """The client sends a method."""
        self._handle(self.engine.receive(method_frame(1, payload)))

    def client_frames(self, *frames: bytes) -> None:
        """The client sends whole frames."""
        self._handle(self.engine.receive(b"".join(frames)))

    def sent_to(self, number: int) -> list[int]:
        """The methods that the broker received on a channel."""
        return [key for key, on, _, _ in FrameSplitter(0).feed(b"".join(self.sent))[1] if on == number]

    def broker(self, number: int, payload: bytes) -> None:
        """The broker sends a method."""
        frame = method_frame(number, payload)
        self.broker_frame(number, key_of(frame), frame)

    def broker_frame(self, number: int, key: int, frame: bytes) -> None:
        """The broker sends a frame."""
        self.upstream.handlers[number].frame(key, frame, 0, len(frame))

    @property
    def keys(self) -> list[int]:
        """The methods that the client received."""
        return [key for data in self.said for key, _, _, _ in FrameSplitter(0).feed(data)[1]]


@pytest.fixture
def rig() -> Rig:
    """A channel with a prepare in progress."""
    rig = Rig()
    rig.client(DtxPrepare(xid=Xid(1, b"g", b"b")).encode())
    return rig


@pytest.mark.parametrize("number", [1, P], ids=["that consumes", "that publishes"])
def test_an_answer_comes_before_the_end_of_its_channel(rig: Rig, number: int) -> None:
    """The client receives the result of a prepare, even if the broker has closed the channel by then."""
    rig.broker(number, CLOSE)
    assert rig.said == []
    rig.finish(ANSWER)
    assert rig.said == [ANSWER, method_frame(1, CLOSE)]


def test_a_lost_channel_can_be_closed_before_its_answer(rig: Rig) -> None:
    """The client waits for no answer, and only the publishing channel is left to close."""
    rig.broker(1, CLOSE)
    rig.client(methods.ChannelClose(200, b"never mind").encode())
    rig.broker(P, methods.ChannelCloseOk().encode())
    rig.finish(ANSWER)
    assert rig.keys == [methods.ChannelCloseOk.KEY]


SETTLEMENTS = {
    "ack": methods.BasicAck(7).encode(),
    "ack up to": methods.BasicAck(7, multiple=True).encode(),
    "ack all": methods.BasicAck(0, multiple=True).encode(),
    "nack": methods.BasicNack(7).encode(),
    "reject": methods.BasicReject(7).encode(),
    "recover": methods.BasicRecover.HEAD + b"\x01",
}


@pytest.fixture
def getting() -> Rig:
    """A channel whose client has received the method of delivery 7, but not its content."""
    rig = Rig()
    rig.client(methods.BasicGet(b"queue").encode())
    rig.broker(1, methods.BasicGetOk.HEAD + (7).to_bytes(8, "big") + bytes(7))
    rig.sent.clear()
    return rig


@pytest.mark.parametrize("settlement", SETTLEMENTS.values(), ids=SETTLEMENTS)
async def test_a_settlement_waits_until_its_delivery_is_whole(getting: Rig, settlement: bytes) -> None:
    """RabbitMQ accepts it as soon as it has sent the method."""
    getting.client(settlement)
    getting.client(methods.BasicQos(0, 1).encode())
    getting.broker_frame(1, HEADER, header_frame(1, 60, 2, b"\x00\x00"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not getting.sent
    (body,) = body_frames(1, b"ab", 4096)
    getting.broker_frame(1, BODY, body)
    for _ in range(3):
        await asyncio.sleep(0)
    sent = [key for data in getting.sent for key, _, _, _ in FrameSplitter(0).feed(data)[1]]
    assert sent[0] in (methods.BasicAck.KEY, methods.BasicNack.KEY, methods.BasicReject.KEY)
    assert sent[1] == methods.TxCommit.KEY
    assert methods.ChannelClose.KEY not in getting.keys


@pytest.mark.parametrize("name", ["ack all", "recover"])
async def test_a_settlement_waits_for_none_that_begins_meanwhile(getting: Rig, name: str) -> None:
    """Otherwise a queue that is never empty would hold it for ever."""
    getting.client(methods.BasicGet(b"queue").encode())
    getting.client(SETTLEMENTS[name])
    getting.broker_frame(1, HEADER, header_frame(1, 60, 2, b"\x00\x00"))
    (body,) = body_frames(1, b"ab", 4096)
    getting.broker_frame(1, BODY, body)
    getting.broker(1, methods.BasicGetOk.HEAD + (8).to_bytes(8, "big") + bytes(7))
    getting.sent.clear()
    for _ in range(3):
        await asyncio.sleep(0)
    sent = [key for data in getting.sent for key, _, _, _ in FrameSplitter(0).feed(data)[1]]
    assert sent == [methods.BasicAck.KEY if name == "ack all" else methods.BasicNack.KEY, methods.TxCommit.KEY]
    getting.client(SETTLEMENTS[name])
    assert getting.channel.engine.held, "the next settlement waits for the second delivery"


async def test_a_settlement_of_another_delivery_does_not_wait(getting: Rig) -> None:
    getting.client(methods.BasicAck(8).encode())
    assert getting.keys[-1] == methods.ChannelClose.KEY


async def test_no_call_waits_for_deliveries_of_an_ended_channel(getting: Rig) -> None:
    getting.client(methods.BasicAck(7).encode())
    getting.broker(1, CLOSE)
    for _ in range(3):
        await asyncio.sleep(0)
    assert getting.keys[-1] == methods.ChannelClose.KEY


@pytest.mark.parametrize(
    ("settle", "committed", "sent"),
    [
        (methods.BasicReject(7, requeue=True), True, methods.BasicReject(7, requeue=True)),
        (methods.BasicReject(7, requeue=False), True, methods.BasicReject(7, requeue=False)),
        (methods.BasicNack(7, requeue=True), True, methods.BasicNack(7, requeue=True)),
        (methods.BasicReject(7, requeue=True), False, methods.BasicNack(7, requeue=True)),
        (methods.BasicReject(7, requeue=False), False, methods.BasicNack(7, requeue=True)),
    ],
)
async def test_a_committed_branch_rejects_as_its_client_did(
    getting: Rig,
    settle: methods.BasicReject | methods.BasicNack,
    committed: bool,
    sent: methods.BasicReject | methods.BasicNack,
) -> None:
    """RabbitMQ 4.3 counts basic.reject for the delivery limit, and not basic.nack: a rollback must not count."""
    getting.broker_frame(1, HEADER, header_frame(1, 60, 0, b"\x00\x00"))
    work = HeldWork(1000, 10, Budget(1000))
    entry: Any = SimpleNamespace(work=work, branch=SimpleNamespace(state=State.ACTIVE))
    getting.channel._demarcation = SimpleNamespace(branch=entry)  # type: ignore[assignment]
    getting.client(settle.encode())
    getting.sent.clear()
    (decide,) = work.outcomes
    decide(committed)
    assert sent.frame(1) in b"".join(getting.sent)


@pytest.fixture
async def closing(getting: Rig) -> Rig:
    """A channel with messages in a branch and a call in progress, which its client closes."""
    getting.broker_frame(1, HEADER, header_frame(1, 60, 0, b"\x00\x00"))
    taking = getting.channel._taking
    taking.hold(taking.select(methods.BasicAck(7)), "a branch")
    getting.client(methods.QueueDeclare(b"queue").encode())
    getting.said.clear()
    getting.sent.clear()
    getting.client(methods.ChannelClose(200, b"bye").encode())
    await asyncio.sleep(0)
    assert not getting.said
    return getting


async def test_a_close_waits_for_calls_on_the_remaining_channel(closing: Rig) -> None:
    closing.broker(1, methods.QueueDeclareOk(b"queue", 0, 0).encode())
    closing.broker(1, methods.ChannelFlowOk(active=True).encode())
    for _ in range(3):
        await asyncio.sleep(0)
    assert key_of(closing.sent[-1]) == methods.ChannelClose.KEY
    closing.broker(P, methods.ChannelCloseOk().encode())
    assert closing.keys == [methods.QueueDeclareOk.KEY, methods.ChannelCloseOk.KEY]


async def test_a_waiting_close_is_confirmed_when_the_broker_closes_first(closing: Rig) -> None:
    closing.broker(1, CLOSE)
    for _ in range(3):
        await asyncio.sleep(0)
    assert closing.keys == [methods.ChannelCloseOk.KEY]


@pytest.fixture
def publishing() -> Rig:
    """A channel whose client publishes outside a branch, and has sent half of the body."""
    rig = Rig()
    start = methods.BasicPublish(b"", b"queue").frame(1) + header_frame(1, 60, 4, b"\x00\x00")
    rig.client_frames(start, *body_frames(1, b"ab", 4096))
    rig.sent.clear()
    return rig


def test_a_content_is_complete_before_its_requested_close(publishing: Rig) -> None:
    """RabbitMQ drops the content, and ends the connection (505) if another frame comes first."""
    publishing.broker(P, CLOSE)
    assert publishing.said == [method_frame(1, CLOSE)]
    assert not publishing.sent_to(P)
    publishing.client_frames(*body_frames(1, b"cd", 4096), methods.ChannelCloseOk().frame(1))
    assert publishing.sent_to(P) == [BODY, methods.ChannelCloseOk.KEY]
    assert P not in publishing.upstream.handlers


def test_a_content_is_complete_before_the_other_channel_closes(publishing: Rig) -> None:
    publishing.broker(1, CLOSE)
    assert not publishing.sent_to(P)
    publishing.client_frames(*body_frames(1, b"cd", 4096), methods.ChannelCloseOk().frame(1))
    assert publishing.sent_to(P) == [BODY, methods.ChannelClose.KEY]


def test_a_content_that_will_never_be_whole_keeps_its_channel(publishing: Rig) -> None:
    """Its connection stays open if a branch needs messages that it has consumed."""
    publishing.engine.end()
    publishing.channel.shut_down()
    assert not publishing.sent_to(P)


def test_an_empty_content_is_whole_at_once(publishing: Rig) -> None:
    publishing.client_frames(
        *body_frames(1, b"cd", 4096),
        methods.BasicPublish(b"", b"queue").frame(1) + header_frame(1, 60, 0, b"\x00\x00"),
    )
    publishing.sent.clear()
    publishing.broker(1, CLOSE)
    assert publishing.sent_to(P) == [methods.ChannelClose.KEY]
